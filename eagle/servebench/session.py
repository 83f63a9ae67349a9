"""One call of `eagle bench --engine vllm`: checks, prompts, the measurement, and the folder that it leaves.

Output, under RUN/served-<suite>/: served.json, served.csv, table.txt and suite.json; for the suite `load` load.json, load.txt.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

from eagle import manifest
from eagle.bench.compare import LOAD, about, render_load, short_name
from eagle.bench.outputs import ABOUT, replacing, result_folder
from eagle.bench.suites import load_suite
from eagle.bundle.record import read_record
from eagle.config import Config
from eagle.errors import StepFailed
from eagle.progress import say
from eagle.serve.launch import want
from eagle.servebench import report
from eagle.servebench.arms import METHODS, can_be_served, parse_methods
from eagle.servebench.run import ServedSession, run_closed, run_load
from eagle.target.load import load_tokenizer
from eagle.target.template import render_prompt


def bench_served(
    config: Config, root: Path, base: Path, suite: str, prompts: int | None, out: Path | None, methods: str | None
) -> Path:
    """Measure `methods` (comma-separated; None: all) through vLLM with the bundle of the run folder `base`; returns the results.

    `suite`: see `eagle.bench.suites`, or 'load'. Raises StepFailed for a run without a bundle or a server that fails,
    PreflightError without vLLM, ConfigError and DataError as `load_suite` does, BusyError when the folder is being written.
    """
    bundle = base / "bundle" / "bundle"
    if not bundle.is_dir():
        raise StepFailed(f"bench: no bundle in {base}; run: make run, or eagle step bundle --dir {base}")
    record = read_record(bundle)
    asked = parse_methods(",".join(METHODS) if methods is None else methods)
    measured = can_be_served(asked, record)
    for method in (method for method in asked if method not in measured):
        say(f"bench: {method} left out: the bundle recommends a draft length at no batch size")
    wanted = want(bundle, config, root)
    final = result_folder(out or base / f"served-{short_name(suite, root)}")
    tokenizer = load_tokenizer(wanted.target, trust_remote_code=config.target.trust_remote_code)
    chosen = load_suite(
        "default" if suite == LOAD else suite, root=root, render=partial(render_prompt, tokenizer),
        max_prompt_tokens=config.dataset.max_prompt_tokens, count=prompts, dataset=base / "dataset",
    )  # fmt: skip
    with replacing(final) as fresh, tempfile.TemporaryDirectory(prefix="eagle-served-") as work:
        session = ServedSession(config, wanted, record, measured, chosen)
        if suite == LOAD:
            found = run_load(session)
            text = render_load(found)
            manifest.write_json(fresh / "load.json", found)
            manifest.write_text(fresh / "load.txt", text)
        else:
            found = {**run_closed(session, Path(work)), "suite": suite}
            text = report.render(found)
            manifest.write_json(fresh / "served.json", found)
            manifest.write_text(fresh / "served.csv", report.to_csv(found))
            manifest.write_text(fresh / "table.txt", text)
        manifest.write_json(fresh / ABOUT, about(chosen, suite))
        say("\n" + text)
    return final
