"""Prefect must not write into the project's own state while tests import flows: its home is a temporary folder."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

_HOME = tempfile.mkdtemp(prefix="eagle-prefect-")
os.environ["PREFECT_HOME"] = _HOME
atexit.register(shutil.rmtree, _HOME, ignore_errors=True)
