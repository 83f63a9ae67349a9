"""The tune step: choose by measurement how this machine should run a speculative round.

On every device: the dtype and, where asked for, the compiled draft step. On CPU the number of threads and the reach of direct
calls too. On CUDA the
launches of the Triton kernels. The objective is the time of a round, K draft steps and one verification of K + 1 tokens,
in the reference engine, at each batch size of the configuration. All candidates take turns (A B C A B C ...), the order is
turned from pass to pass, and those clearly slower than the best are left out after a few passes. Every Triton kernel is
also compiled ahead of time for the CUDA targets of the configuration, as a check that needs no GPU.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

import kernels
from eagle import manifest
from eagle.bench.kernel_tuning import tune_device
from eagle.bench.launch_report import Setting, as_json, render, report
from eagle.bench.launches import count
from eagle.bench.measure import busy_percent
from eagle.config import Config
from eagle.decode.engine import Engine
from eagle.draft.io import load_draft
from eagle.errors import StepFailed
from eagle.progress import Track, say
from eagle.steps import StepContext
from eagle.target.layout import lay_out
from eagle.target.load import available_cores, ensure_target, load_target, pick_device, setup_torch
from kernels.tuned import TABLE, device_name

PROMPT_TOKENS = 8  # rounds hardly depend on contexts this short, and a longer prompt's prefill would take most of the time
FIRST_PASSES = 3  # passes before a candidate may be left out
SLOWER = 1.25  # left out when its rounds take this much longer than the best candidate's
TIE = 1.02  # candidates within 2 % are equal: the plainest one is taken
AOT_TIMEOUT = 600.0
MEMORY_SHARE = 0.5  # of the free memory that the targets of all candidate dtypes may take together


@dataclass(frozen=True, order=True)
class Candidate:
    """One way to run. Ordered from plain to involved: fewer threads, eager, float32 first."""

    threads: int
    compiled: bool
    dtype: str

    @property
    def draft_step(self) -> str:
        """'eager' or 'compiled'."""
        return "compiled" if self.compiled else "eager"

    def __str__(self) -> str:
        return f"{self.dtype}, {self.threads} thread{'s' if self.threads > 1 else ''}, {self.draft_step}"


Key = tuple[Candidate, int]  # candidate, batch size
Times = dict[str, float]  # what -> seconds: target_step, verify, draft_step, round


class Samples:
    """Measured seconds by candidate, batch size and what was timed."""

    def __init__(self) -> None:
        self._seconds: dict[Key, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def add(self, candidate: Candidate, batch: int, times: Times) -> None:
        """Keep one measurement."""
        for what, seconds in times.items():
            self._seconds[candidate, batch][what].append(seconds)

    def median(self, candidate: Candidate, batch: int, what: str) -> float:
        """Return the median seconds; ValueError when nothing was measured."""
        return statistics.median(self._seconds[candidate, batch][what])

    def score(self, candidate: Candidate, batches: Iterable[int]) -> float:
        """Return the geometric mean over batch sizes of the median round, in seconds."""
        return statistics.geometric_mean(self.median(candidate, batch, "round") for batch in batches)

    def rows(self) -> list[dict[str, Any]]:
        """Return {what, batch, threads, dtype, draft_step, median_ms, spread, samples}; spread = quartile range / median."""
        found = []
        for (candidate, batch), by_what in sorted(self._seconds.items()):
            for what, seconds in sorted(by_what.items()):
                median = statistics.median(seconds)
                low, _, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else (median,) * 3
                found.append(
                    {
                        "what": what, "batch": batch, "threads": candidate.threads, "dtype": candidate.dtype,
                        "draft_step": candidate.draft_step, "median_ms": round(median * 1e3, 4),
                        "spread": round((high - low) / median, 4), "samples": len(seconds),
                    }
                )  # fmt: skip
        return found


def race(
    candidates: list[Candidate], batches: list[int], measure: Callable[[Candidate, int], Times], *, repeats: int,
    deadline: float, clock: Callable[[], float] = time.monotonic, advance: Callable[[float], None] = lambda passes: None,
) -> tuple[Samples, list[Candidate]]:
    """Measure all candidates in turns, `repeats` passes or until `clock()` passes `deadline`.

    Each pass starts with another candidate, so that none is always measured after the same one. After `FIRST_PASSES`
    passes a candidate whose score is `SLOWER` times the best is measured no more. Returns the samples and the candidates
    that were measured at every batch size: all of them, unless the time was up within the first pass; one at least.
    """
    samples = Samples()
    left, measured = list(candidates), list[Candidate]()
    for index in range(repeats):
        turn = index % len(left)
        for candidate in left[turn:] + left[:turn]:
            if measured and clock() > deadline:
                say(f"tune: the time budget was used up after {index} of {repeats} passes")
                return samples, measured
            for batch in batches:
                samples.add(candidate, batch, measure(candidate, batch))
            if candidate not in measured:
                measured.append(candidate)
        if index + 1 >= FIRST_PASSES:
            best = min(samples.score(candidate, batches) for candidate in left)
            left = [candidate for candidate in left if samples.score(candidate, batches) <= SLOWER * best]
        advance(1.0)
    return samples, measured


def choose(samples: Samples, candidates: Iterable[Candidate], batches: Iterable[int]) -> Candidate:
    """Return the candidate with the shortest round; among those within 2 % of it the plainest."""
    sizes = list(batches)
    scores = {candidate: samples.score(candidate, sizes) for candidate in candidates}
    best = min(scores.values())
    return min(candidate for candidate, score in scores.items() if score <= TIE * best)


def thread_counts(cores: int) -> list[int]:
    """Return the thread counts worth trying: powers of two up to the cores, and the cores."""
    return sorted({cores, *(1 << n for n in range(cores.bit_length()) if 1 << n <= cores)})


def dtypes(config: Config, target: Path, device: str) -> list[str]:
    """Return the dtypes to try: both on CPU when the target fits into memory in both at once, else the configured one."""
    if device != "cpu":
        return [config.target.dtype]
    stored = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    # A stored bfloat16 target doubles in float32; a stored float32 one halves in bfloat16. Three times covers either pair.
    if 3 * stored > MEMORY_SHARE * psutil.virtual_memory().available:
        return [config.target.dtype]
    return ["bfloat16", "float32"]


class Bench:
    """The engines of all candidates, and how one round is timed in them."""

    def __init__(self, config: Config, target: Path, draft: Path, device: str, candidates: Iterable[Candidate]) -> None:
        self.length = config.tune.draft_tokens
        self.device = device
        self.new_tokens = 2 * (self.length + 1) + 1  # the first token, and at least two rounds
        batches, wanted = config.tune.batch_sizes, sorted({(c.dtype, c.compiled) for c in candidates})
        self._engines: dict[tuple[str, bool, int], Engine] = {}
        for dtype in sorted({name for name, _ in wanted}):
            model = lay_out(load_target(target, dtype, device, trust_remote_code=config.target.trust_remote_code))
            network = load_draft(draft, target, device=device, dtype=dtype)
            self.spec = network.spec
            self.hidden, self.vocab = network.spec.hidden_size, model.config.get_text_config().vocab_size
            for compiled, batch in itertools.product((c for name, c in wanted if name == dtype), batches):
                room = PROMPT_TOKENS + self.new_tokens
                self._engines[dtype, compiled, batch] = Engine(model, network, max_length=room, batch=batch, compiled=compiled)
        random = torch.Generator().manual_seed(config.runtime.seed)
        self._prompts = torch.randint(self.vocab, (max(batches), PROMPT_TOKENS), generator=random).tolist()

    def round(self, candidate: Candidate, batch: int) -> Times:
        """Time speculative rounds: mean seconds of a verification, of a draft step, and of a round made of them."""
        stats = self._generate(candidate, batch, self.length)
        verify, step = stats.target_step_seconds, stats.draft_step_seconds
        return {"verify": verify, "draft_step": step, "round": verify + self.length * step}

    def plain(self, candidate: Candidate, batch: int) -> Times:
        """Time plain decoding: mean seconds of a target step of one token a row."""
        return {"target_step": self._generate(candidate, batch, 0).target_step_seconds}

    def _generate(self, candidate: Candidate, batch: int, length: int) -> Any:
        if self.device == "cpu":
            torch.set_num_threads(candidate.threads)
        engine = self._engines[candidate.dtype, candidate.compiled, batch]
        return engine.generate(self._prompts[:batch], max_new_tokens=self.new_tokens, draft_tokens=length, ignore_eos=True).stats


def warm_up(
    bench: Bench, candidates: list[Candidate], batches: list[int], deadline: float
) -> tuple[list[Candidate], list[dict[str, str]]]:
    """Run every candidate once, untimed. Returns those that work, and {candidate, reason} of those that are left out.

    Left out is what torch.compile cannot compile here, and what the time was up for (never the first one).
    """
    usable, skipped = list[Candidate](), []
    for candidate in candidates:
        if usable and time.monotonic() > deadline:
            skipped.append({"candidate": str(candidate), "reason": "the time budget (tune.max_minutes) was used up"})
            continue
        try:
            for batch in batches:
                bench.round(candidate, batch)
        except RuntimeError as error:  # torch.compile without a working C++ compiler, above all
            if not candidate.compiled:
                raise
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
            skipped.append({"candidate": str(candidate), "reason": reason})
        else:
            usable.append(candidate)
    for row in skipped:
        say(f"tune: {row['candidate']}: left out: {row['reason']}")
    return usable, skipped


def compile_kernels(targets: list[int], work: Path) -> tuple[list[dict[str, Any]], str | None]:
    """Compile every Triton kernel ahead of time, in a process of its own. Returns (rows, why there are none).

    Rows are those of `kernels.aot`; a kernel that does not compile has `error`, and is said on stderr.
    """
    out = work / "aot.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "kernels.aot", "--json", str(out), "--target", *map(str, targets)]
    place = Path(kernels.__file__).resolve().parent.parent
    try:
        done = subprocess.run(  # noqa: S603
            command, cwd=place, capture_output=True, text=True, errors="replace", check=False, timeout=AOT_TIMEOUT
        )
    except subprocess.TimeoutExpired:
        raise StepFailed(f"tune: compiling the kernels took over {AOT_TIMEOUT:.0f} s; tune.aot_targets=[] skips it") from None
    lines = [line.removeprefix("error: ") for line in done.stderr.splitlines() if line.startswith("error: ")]
    if not out.is_file():
        if done.returncode == 2 and lines:
            return [], lines[-1]
        raise StepFailed(f"tune: python -m kernels.aot ended with code {done.returncode}: {done.stderr.strip()[-400:]}")
    for line in lines:
        say(f"tune: {line}")
    return json.loads(out.read_text(encoding="utf-8"))["kernels"], None


def run(context: StepContext) -> dict[str, Any]:
    """The step. Writes tuned.json; returns the chosen threads, dtype and draft step, and how the kernels compiled."""
    config, tune = context.config, context.config.tune
    device = pick_device(config.runtime.device)
    cores = config.runtime.threads or available_cores()
    setup_torch(cores, config.runtime.seed)
    compiled_kernels, why_none = compile_kernels(tune.aot_targets, context.work) if tune.aot_targets else ([], "not asked for")
    deadline = time.monotonic() + 60.0 * tune.max_minutes  # of measuring: compiling the kernels has a limit of its own
    target = ensure_target(config.target, context.root, context.cache)
    candidates = [
        Candidate(threads, compiled, dtype)
        for compiled in ((False, True) if tune.try_compile else (False,))
        for threads in (thread_counts(cores)[::-1] if device == "cpu" else [cores])
        for dtype in dtypes(config, target, device)
    ]
    busy = busy_percent("tune")
    bench = Bench(config, target, context.inputs["policy"] / "draft", device, candidates)
    usable, skipped = warm_up(bench, candidates, tune.batch_sizes, deadline)
    deadline = max(deadline, time.monotonic() + 30.0 * tune.max_minutes)  # compiling may have taken all: half is for timing
    with Track("tune", tune.repeats, "passes") as track:
        samples, measured = race(
            usable, tune.batch_sizes, bench.round, repeats=tune.repeats, deadline=deadline, advance=track.advance
        )
    best = choose(samples, measured, tune.batch_sizes)
    for _ in range(FIRST_PASSES):  # for the reader: what a round replaces
        for batch in tune.batch_sizes:
            samples.add(best, batch, bench.plain(best, batch))
    if device == "cpu":
        torch.set_num_threads(best.threads)
    kernels_table = tune_device(
        bench.spec, tune, dtype=best.dtype, threads=torch.get_num_threads(), device=device, folder=context.cache / "kernels"
    )
    manifest.write_json(context.out / TABLE, kernels_table)
    counted = count(bench.spec, batch=min(tune.batch_sizes), context=bench.spec.max_position_embeddings).table()
    say("tune: kernels a draft step would launch on a GPU: " + ", ".join(f"{row['form']} {row['launches']}" for row in counted))
    setting = Setting(best.dtype, min(tune.batch_sizes), tune.draft_tokens, device)
    forms = report(bench.spec, setting, compiled=tune.try_compile)
    say(render(forms, setting))
    torch.set_num_threads(cores)
    say(f"tune: {best}" + "".join(f"; batch {b}: round {samples.median(best, b, 'round') * 1e3:.1f} ms" for b in tune.batch_sizes))
    manifest.write_json(
        context.out / "tuned.json",
        {
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "cpu_model": device_name("cpu"), "cores": cores,
            "busy_percent": busy, "threads": best.threads, "dtype": best.dtype, "draft_step": best.draft_step,
            "draft_tokens": tune.draft_tokens, "rows": samples.rows(), "skipped": skipped, "kernels": compiled_kernels,
            "kernels_skipped": why_none, "step_launches": counted, "report": as_json(forms), "versions": manifest.versions(),
        },
    )  # fmt: skip
    return {**_metrics(best, samples, tune.batch_sizes, compiled_kernels), "kernels_tuned": len(kernels_table["rows"])}


def _metrics(best: Candidate, samples: Samples, batches: list[int], compiled: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    failed = sum(1 for row in compiled if row["error"])
    return {
        "threads": best.threads, "dtype": best.dtype, "draft_step": best.draft_step,
        **{f"round_ms_b{batch}": round(samples.median(best, batch, "round") * 1e3, 3) for batch in batches},
        "kernels_compiled": len(compiled) - failed, "kernels_failed": failed,
    }  # fmt: skip
