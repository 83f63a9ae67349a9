"""What every test leaves behind is undone here, so that the order of the rooms does not matter."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("steady", deadline=None)  # a loaded machine is no failure
settings.load_profile("steady")


@pytest.fixture(autouse=True)
def _denormals_stay() -> Iterator[None]:
    """Steps flush denormal numbers for the whole process (setup_torch); hypothesis' floats need them."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)
