"""Prefect only: the retraining and promotion flows, and the supervision of step processes. No machine learning here."""

from pathlib import Path

from flows import env

env.prepare(Path.cwd())
