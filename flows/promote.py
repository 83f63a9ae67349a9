"""Moving the alias `champion` by hand, as flows, so that who did it and when stands in the run history too."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from prefect import flow
from prefect.logging import get_run_logger

from eagle.profiles import load_config, project_root
from eagle.registry import promote as aliases
from eagle.registry.client import open_store
from eagle.registry.step import model_name


@flow(name="promote", persist_result=False)
def promote(version: str, why: str = "", force: bool = False, profile: str = "default") -> dict[str, Any]:
    """Make `version` champion and return the move. GateRejected when the gate did not pass it and `force` is off."""
    root = project_root()
    config = load_config(root, profile)
    move = aliases.promote(open_store(config, root), model_name(config), version, why=why, force=force)
    get_run_logger().info("champion: version %s -> %s (%s)", move.previous, move.version, move.kind)
    return asdict(move)


@flow(name="rollback", persist_result=False)
def rollback(why: str = "", profile: str = "default") -> dict[str, Any]:
    """Make the champion before this one champion again and return the move. StepFailed when there is none."""
    root = project_root()
    config = load_config(root, profile)
    move = aliases.rollback(open_store(config, root), model_name(config), why=why)
    get_run_logger().info("champion: version %s -> %s (rollback)", move.previous, move.version)
    return asdict(move)
