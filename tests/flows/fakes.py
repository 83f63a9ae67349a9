"""A project whose six expensive steps are replaced by instant ones; the runner, the registry and the flow are the real ones.

`python -m tests.flows.fakes retrain ...` is `python -m flows.retrain ...` with those steps;
`python -m tests.flows.fakes eagle ...` and `... schedule ...` likewise. EAGLE_FAKE (JSON), or fake.json in the project's
folder, changes what a step does:
{"distill": {"exit": 3}}, {"bench": {"sleep": 60}}, {"bundle": {"kill_once": "/path/of/marker"}}, {"bundle": {"acceptance": 1.1}};
{"clock": {"minutes": 90}} puts on the clock that a scheduled run reads to tell whether it is late.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

from eagle import manifest, steps
from eagle.errors import EagleError
from eagle.progress import say
from eagle.steps import StepContext


class Refused(EagleError):
    exit_code = 6


def make_project(folder: Path, **sections: Any) -> Path:
    """A project folder with params.yaml and a target that only has a config.json."""
    target = folder / "target model"
    target.mkdir(parents=True)
    (target / "config.json").write_text('{"model_type": "llama"}')
    params: dict[str, Any] = {
        "target": {"model": str(target)},
        "bundle": {"validate_in_vllm": False},
        "flow": {"min_free_gib": 0.0, "retries": 1, "retry_delay_s": 0.1},
    }
    for name, values in sections.items():
        params.setdefault(name, {}).update(values)
    (folder / "params.yaml").write_text(yaml.safe_dump(params))
    return folder


def asked_of(name: str, root: Path) -> dict[str, Any]:
    """Return what fake.json in `root`, else EAGLE_FAKE, asks of `name`."""
    written = root / "fake.json"
    text = written.read_text() if written.is_file() else os.environ.get("EAGLE_FAKE", "{}")
    found: dict[str, Any] = json.loads(text).get(name, {})
    return found


def fake(name: str) -> Any:
    """Return a step function that writes what the next steps and the registry read."""

    def run(context: StepContext) -> dict[str, Any]:
        said = asked_of(name, context.root)
        say(f"{name}: at work")
        if "spawn" in said:  # a grandchild in its own session that ignores SIGTERM
            code = "import signal,sys,time; signal.signal(15, signal.SIG_IGN); open(sys.argv[1],'w').write('up'); time.sleep(600)"
            child = subprocess.Popen([sys.executable, "-c", code, said["spawn"] + ".up"], start_new_session=True)
            Path(said["spawn"]).write_text(f"{os.getpid()} {child.pid}")
        time.sleep(said.get("sleep", 0))
        if "kill_once" in said and not Path(said["kill_once"]).exists():
            Path(said["kill_once"]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if "exit" in said:
            raise Refused(f"{name}: the data is no good")
        return write_output(name, context.out, said)

    return run


def write_output(name: str, out: Path, said: dict[str, Any] | None = None) -> dict[str, Any]:
    """Fill a step's folder with small real-looking files and return its metrics."""
    said = said or {}
    acceptance = said.get("acceptance", 1.6)
    if name == "dataset":
        (out / "train-00000.parquet").write_bytes(b"train")
        (out / "heldout-00000.parquet").write_bytes(said.get("heldout", "held out").encode())
        return {"rows": 10}
    if name in ("distill", "policy"):
        (out / "draft").mkdir()
        (out / "draft" / "config.json").write_text("{}")
        manifest.write_json(out / "curves.json", {"train": [{"step": s, "loss": 4.0 / s} for s in range(1, 6)]})
        return {"acceptance_length": acceptance, "by_position": [0.5, 0.3]}
    if name == "bench":
        manifest.write_json(out / "bench.json", {"rows": []})
        (out / "table.txt").write_text("batch  tokens/s\n    1      61.0\n")
        return {
            "acceptance_length": acceptance, "speedup_b1": 1.1, "equal_tokens": 1.0, "memory_overhead": 0.2, "cost_ratio": 0.1,
        }
    if name == "bundle":
        folder = out / "bundle"
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "llama"}')
        (folder / "model.safetensors").write_bytes(bytes(range(256)) * 64)
        (folder / "README.md").write_text("# A draft\n")
        (folder / "serve.sh").write_text("#!/bin/sh\nset -e\nvllm serve TARGET \\\n  --speculative-config '{}'\n")
        validated = said.get("validated", True)
        validation: dict[str, Any] = {"validated": validated}
        if validated:
            figures = {"acceptance_length": acceptance, "equal_tokens": 1.0, "draft_tokens": 3, "max_new_tokens": 64}
            validation |= figures | {"prompt_ids": [said.get("prompts", "a")], "vllm_version": "0.0-fake"}
        manifest.write_json(out / "validation.json", validation)
        return {"acceptance_length": acceptance, "validated": validated}
    return {"ok": True}


def run_scheduled(flow: Any, due: datetime) -> Any:
    """Run a flow once in this process as the scheduler's run that was due then; returns its final state."""
    from prefect import get_client
    from prefect.flow_engine import run_flow
    from prefect.states import Scheduled

    with get_client(sync_client=True) as client:
        run = client.create_flow_run(flow, parameters={}, state=Scheduled(scheduled_time=due))
    return run_flow(flow, flow_run=run, return_type="state")


def present_run() -> Any:
    """Return the flow run that this code runs in, as if the scheduler had made it; None outside one."""
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    return context.flow_run if context else None


def install() -> None:
    """Put the instant steps into the table, keys and all else unchanged."""
    for name, step in list(steps.STEPS.items()):
        if name != "register":
            replacement = type("FakeStep", (type(step),), {"load": lambda self: fake(self.name)})
            steps.STEPS[name] = replacement(**{f: getattr(step, f) for f in step.__dataclass_fields__})


def main() -> int:
    """Run the command named by the first argument with the instant steps."""
    install()
    which, arguments = sys.argv[1], sys.argv[2:]
    if which == "eagle":
        from eagle import cli

        sys.argv = ["eagle", *arguments]
        cli.main()
        return 0
    pass_on()
    if which == "schedule":
        from flows import schedule

        return schedule.main(arguments)
    from flows import command

    return command.main(arguments)


def pass_on() -> None:
    """Make the flow of this process start its steps through this module."""
    from flows import launch

    real = launch.Launch.command
    root = str(Path(__file__).resolve().parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])

    def with_fakes(self: launch.Launch, step: str) -> list[str]:
        python, m, _, *rest = real(self, step)
        return [python, m, "tests.flows.fakes", "eagle", *rest]

    launch.Launch.command = with_fakes  # type: ignore[method-assign]


def shift_clock() -> None:
    """Make a scheduled run in this process read its clock as asked. Imports Prefect, so its settings must stand already."""
    from flows import ticks

    now = ticks.clock
    ticks.clock = lambda: now() + timedelta(minutes=asked_of("clock", Path.cwd()).get("minutes", 0))


if __name__ == "__mp_main__":  # the process of a served run imports the main module again
    install()
    pass_on()
    shift_clock()

if __name__ == "__main__":
    sys.exit(main())
