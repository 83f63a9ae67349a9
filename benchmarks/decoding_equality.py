"""F3.1: greedy float32 text of every method and option of the engine against transformers' own generate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.decoding_run import K_MAX, Run, join
from benchmarks.figures import Measured
from eagle.bench.costs import Turns
from eagle.bench.measure import common_prefix, logit_gap
from eagle.bench.methods import Lab
from eagle.bench.workload import Workload
from eagle.config import Method
from eagle.decode.chooser import Chooser
from eagle.decode.control import LengthPolicy, PidController
from eagle.decode.cost import CostTable
from eagle.decode.engine import DecodeResult
from eagle.progress import Track

GAP = 1e-4  # two highest logits closer than this: rounding decides between them
TRAINED: tuple[Method, ...] = ("medusa", "eagle2", "eagle31-distilled")
# Seconds that make every K and chunk worth a try, so that the controllers move: the text must not depend on what they decide.
LIVELY = CostTable({(1, 1): 1.0, (1, 9): 1.3, (32, 1): 1.2, (32, 9): 3.0}, {(1, 1): 0.05, (1, 8): 0.3, (32, 1): 0.1, (32, 8): 0.5})


@dataclass(frozen=True)
class Option:
    """A way to decode: `variant` says how it differs from its method's usual form ('' for that one itself)."""

    method: Method
    variant: str
    policy: Callable[[Lab], int | LengthPolicy]
    chunk: int = 0
    carry: bool = False


def options(run: Run) -> list[Option]:
    """All methods that the run has drafts for, and all options of the engine: K, chunks in both forms, controllers."""
    def pid(lab: Lab) -> LengthPolicy:
        return PidController(LIVELY, lab.control)

    def chooser(carry: bool) -> Callable[[Lab], LengthPolicy]:
        return lambda lab: Chooser(LIVELY, lab.control, carry_over=carry)

    usual: dict[Method, Callable[[Lab], int | LengthPolicy]] = {"eagle31-pid": pid, "eagle31-chunks": chooser(False)}
    found = [Option(m, "", usual.get(m, lambda lab, m=m: max(lab.lengths(m)))) for m in run.methods]  # type: ignore[misc]
    found += [Option("eagle31", f"K={k}", lambda _, k=k: k) for k in (1, K_MAX)]  # type: ignore[misc]
    found += [
        Option("eagle31", "K in turns 0..8", lambda _: Turns((3, 0, 8, 1, 5, 2))),
        Option("eagle31", "K=8, chunks of 3", lambda _: K_MAX, chunk=3),
        Option("eagle31", "K=8, chunks of 3, carried over", lambda _: K_MAX, chunk=3, carry=True),
        Option("eagle31-chunks", "carried over", chooser(True), carry=True),
    ]
    return found


def greedy_equality(run: Run) -> Measured:
    """F3.1: greedy float32 text of every method and option against transformers' generate; % of equal tokens, the worst arm.

    A first difference in an answer where the target's two highest logits are closer than GAP counts as equal and is listed.
    """
    effort, batch = run.effort, max(run.effort.batches)
    shipped = run.suite("default", effort.equality_prompts)
    rest = effort.equality_prompts - len(shipped.prompts)
    work = join([shipped, run.suite("heldout", rest)]) if rest > 0 else shipped
    lab = run.lab(work, batch=batch, new_tokens=effort.equality_tokens, dtype="float32")
    target = run.transformers(lab)
    wanted = [_generated(target, prompt, effort.equality_tokens, run.stops) for prompt in work.prompts]
    about = {"prompts": len(work.prompts), "kinds": dict(Counter(work.kinds)), "new_tokens": effort.equality_tokens}
    runs: list[Any] = [run.setting(lab, **about)]
    arms = [(option, size) for option in options(run) for size in (1, batch)]
    differences: list[dict[str, Any]] = []
    with Track("F3.1", len(arms), "arms") as track:
        for option, size in arms:
            count = _answers(run, option, size, len(work.prompts))
            result = lab.engine(option.method).generate(
                work.prompts[:count], max_new_tokens=effort.equality_tokens, draft_tokens=option.policy(lab), stop=run.stops,
                batch=size, chunk=option.chunk, carry=option.carry,
            )  # fmt: skip
            row, found = _compared(target, work, wanted[:count], result)
            arm = {"method": option.method, "variant": option.variant, "batch": size}
            runs.append({**arm, **row})
            differences += [{**arm, **one} for one in found]
            track.advance()
    runs.append({"differences": differences})
    value = 100.0 * min(row["equal_tokens"] / row["tokens"] for row in runs[1:-1])
    gone = [m for m in TRAINED if m not in run.methods]
    few = len(work.prompts) < effort.equality_prompts
    return run.measured(
        value, runs,
        f"{len(work.prompts)} prompts for all methods at batch {batch} and eagle31 at batch 1, {effort.option_prompts} for "
        f"variants of a method at batch {batch}, {effort.single_prompts} else at batch 1; {effort.equality_tokens} tokens each",
        f"{len(work.prompts)} prompts: the run has no more held-out ones" if few else None,
        f"no draft in this run for: {', '.join(gone)}" if gone else None,
    )  # fmt: skip


def _answers(run: Run, option: Option, size: int, everything: int) -> int:
    """How many prompts an arm answers: all where it is cheap enough, see `Effort`."""
    main = option.method == "eagle31" and not option.variant
    if size == 1:
        return everything if main else min(run.effort.single_prompts, everything)
    return min(run.effort.option_prompts, everything) if option.variant else everything


def _generated(target: PreTrainedModel, prompt: list[int], count: int, stops: frozenset[int]) -> list[int]:
    ids = torch.tensor([prompt], device=target.device)
    generate: Any = target.generate  # transformers types it as a module attribute
    made: Tensor = generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=sorted(stops), pad_token_id=0
    )
    found: list[int] = made[0, len(prompt) :].tolist()
    return found


def _compared(
    target: PreTrainedModel, work: Workload, wanted: list[list[int]], result: DecodeResult
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return an arm's row and its differences."""
    equal, differences = 0, []
    for index, (ours, theirs) in enumerate(zip(result.tokens, wanted, strict=True)):
        same = common_prefix(theirs, ours)
        if same == max(len(theirs), len(ours)):
            equal += same
            continue
        gap = logit_gap(target, work.prompts[index] + theirs[:same])
        equal += max(len(theirs), len(ours)) if gap < GAP else same
        place = {"prompt": work.ids[index], "position": same, "top_2_logit_gap": gap, "counts_as_equal": gap < GAP}
        differences.append({**place, "wanted": theirs[same : same + 1], "got": ours[same : same + 1]})
    stats = result.stats
    return {
        "prompts": len(wanted),
        "tokens": sum(max(len(x), len(y)) for x, y in zip(wanted, result.tokens, strict=True)),
        "equal_tokens": equal,
        "differences": len(differences),
        "acceptance_length": round(stats.acceptance_length, 4),
        "lengths": {str(k): n for k, n in sorted(stats.lengths.items())},
    }, differences
