"""vLLM proposes exactly what our own network proposes; a bundle that is not what was trained does not pass for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle.bundle.speculators import Verifier, export_speculators
from tests.contract.broken import broken_copy
from tests.contract.cases import DIMENSIONS, TELLING, Case, all_cases, every_pair, pairs
from tests.contract.harness import STEPS, Job, Verdict, has_vllm, make_job, run_jobs

SEEN_THROUGH = ("norm_output flipped", "states swapped", "rope scaling lost")
SPECULATORS = Case(aux=4, rope="yarn", norm_before_residual=True, heads=(4, 1, 64))  # no default of vLLM's fits it

pytestmark = pytest.mark.timeout(1500)  # nine engines: a minute on an idle core, many on a loaded one
needs_vllm = pytest.mark.skipif(not has_vllm(), reason="no vLLM here (make setup)")


def test_every_pair_of_settings_and_every_combination_of_flags_is_tried() -> None:
    cases = all_cases()
    assert every_pair() - set().union(*map(pairs, cases)) == set()
    flags = [(c.depth, c.hidden, c.fc_norm, c.norm_output, c.norm_before_residual) for c in cases[len(TELLING) :]]
    assert len(set(flags)) == len(flags) == 8 * len(DIMENSIONS["depth"]) * len(DIMENSIONS["hidden"])
    assert len({case.name for case in cases}) == len(cases)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    """All jobs in one start of vLLM's interpreter: importing it is half of the time."""
    work = tmp_path_factory.mktemp("contract")
    jobs = [make_job(case, work) for case in TELLING]
    sound = jobs[0]
    for number, how in enumerate(SEEN_THROUGH):
        jobs.append(Job(how, sound.target, broken_copy(sound.bundle, how, work / f"broken-{number}"), sound.ours))
    own = make_job(SPECULATORS, work)
    other = work / "speculators"
    export_speculators(own.ours, other, Verifier.of(own.target), STEPS, "float32")
    jobs.append(Job("speculators", own.target, other, own.ours))
    return {verdict.name: verdict for verdict in run_jobs(jobs, work)}


@needs_vllm
@pytest.mark.parametrize("case", TELLING, ids=lambda case: case.name)
def test_token_for_token(verdicts: dict[str, Verdict], case: Case) -> None:
    verdict = verdicts[case.name]
    assert verdict.error == ""
    assert verdict.differences == []
    assert verdict.proposals >= 50
    assert len(verdict.near_ties) <= verdict.tokens // 100
    if case.looks_through:
        assert verdict.accepted > 0, "no draft was accepted: what follows an accepted draft was not tried"


@needs_vllm
def test_vllm_reads_the_speculators_layout_the_same(verdicts: dict[str, Verdict]) -> None:
    verdict = verdicts["speculators"]
    assert verdict.error == ""
    assert verdict.equal, verdict.differences[:3]


@needs_vllm
@pytest.mark.parametrize("how", SEEN_THROUGH)
def test_a_bundle_that_vllm_reads_otherwise_is_seen(verdicts: dict[str, Verdict], how: str) -> None:
    verdict = verdicts[how]
    assert verdict.error == "", "it is to be loaded without a word"
    assert len(verdict.differences) > verdict.proposals // 10


def test_a_missing_target_says_which(tmp_path: Path) -> None:
    from eagle.errors import ConfigError

    with pytest.raises(ConfigError, match=r"target\.model.*cannot read the architectures"):
        Verifier.of(tmp_path)
