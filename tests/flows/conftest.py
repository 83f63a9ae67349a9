"""Prefect must not write into the project's own state while tests import flows: its home is a temporary folder."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

import pytest

_HOME = tempfile.mkdtemp(prefix="eagle-prefect-")
os.environ["PREFECT_HOME"] = _HOME
atexit.register(shutil.rmtree, _HOME, ignore_errors=True)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One API server for the tests that do not test the command's own; ended at exit."""
    from flows import server

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_HOME", str(tmp_path_factory.mktemp("prefect")))
        patch.setenv("PREFECT_API_URL", "")
        server.start_temporary_api(tmp_path_factory.mktemp("log") / "server.log")()
        return os.environ["PREFECT_API_URL"]
