"""The transformers backend: equal to transformers' own generate, seeded per request, resumable by waves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle.config import Config
from eagle.errors import PreflightError, StepFailed
from eagle.target import generate as module
from eagle.target.generate import Request, generate, generate_batch
from eagle.target.load import load_target
from eagle.target.vllm import VllmAnswer, VllmJob
from tests.toys import tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"), layers=2)


@pytest.fixture(scope="module")
def model(target):
    return load_target(target, "float32")


def _config() -> Config:
    sections = {"dataset": {"backend": "transformers"}, "target": {"dtype": "float32"}, "runtime": {"threads": 1}}
    return Config.model_validate(sections)


def _requests(temperature: float, count: int = 6) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    lengths = [3, 11, 1, 7, 5, 7, 2, 9][:count]
    prompts = [torch.randint(3, 300, (n,), generator=generator).tolist() for n in lengths]
    return [Request(p, 12 + i, temperature, 100 + i, (2,)) for i, p in enumerate(prompts)]


def test_greedy_batch_equals_transformers_generate(model):
    requests = _requests(0.0)
    for request, completion in zip(requests, generate_batch(model, requests), strict=True):
        expected = model.generate(
            torch.tensor([request.prompt]), attention_mask=torch.ones(1, len(request.prompt), dtype=torch.long),
            max_new_tokens=request.max_tokens, do_sample=False, pad_token_id=0,
        )[0, len(request.prompt) :].tolist()
        assert completion.tokens == expected
        assert completion.finish == ("stop" if expected[-1] == 2 else "length")


def test_samples_do_not_depend_on_the_neighbours(model):
    requests = _requests(1.0)
    together = generate_batch(model, requests)
    alone = [generate_batch(model, [request])[0] for request in requests]
    assert together == alone
    again = [Request(r.prompt, r.max_tokens, r.temperature, r.seed + 1, r.stop) for r in requests]
    assert generate_batch(model, again) != together


def test_a_stop_id_ends_the_answer_and_is_part_of_it(model):
    request = _requests(0.0, 1)[0]
    free = generate_batch(model, [Request(request.prompt, 10, 0.0, 0, ())])[0]
    assert (len(free.tokens), free.finish) == (10, "length")
    stop = free.tokens[4]
    stopped = generate_batch(model, [Request(request.prompt, 10, 0.0, 0, (stop,))])[0]
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert stopped.finish == "stop"


def test_samples_follow_the_distribution():
    probabilities = torch.tensor([0.5, 0.3, 0.0, 0.15, 0.05])
    count = 4000
    requests = [Request([1], 1, 2.0, seed, ()) for seed in range(count)]
    logits = (2.0 * probabilities.log()).repeat(count, 1)  # temperature 2 undoes the factor
    drawn = module._sample(logits, requests, [torch.Generator().manual_seed(r.seed) for r in requests])
    observed = torch.bincount(torch.tensor(drawn), minlength=5).float()
    assert observed[2] == 0
    inside = probabilities > 0
    chi2 = ((observed - count * probabilities)[inside] ** 2 / (count * probabilities[inside])).sum()
    assert chi2 < 16.3  # 3 degrees of freedom, p = 0.001; the seeds are fixed


def test_same_requests_same_tokens_and_waves_survive_a_crash(target, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "WAVE", 3)
    requests = _requests(0.8, 8)
    expected = generate(requests, target, _config(), tmp_path, title="t")
    assert [len(c.tokens) <= r.max_tokens for c, r in zip(expected, requests, strict=True)] == [True] * 8

    batches: list[int] = []
    real = generate_batch

    def dying(model, chosen):
        batches.append(len(chosen))
        if len(batches) == 2:
            raise KeyboardInterrupt
        return real(model, chosen)

    monkeypatch.setattr(module, "generate_batch", dying)
    with pytest.raises(KeyboardInterrupt):
        generate(requests, target, _config(), tmp_path, title="t", resume=tmp_path / "waves")
    assert [p.name for p in sorted((tmp_path / "waves").iterdir())] == ["wave-00000.json"]
    assert generate(requests, target, _config(), tmp_path, title="t", resume=tmp_path / "waves") == expected
    assert batches == [3, 3, 3, 2]  # the first wave was not run again

    other = [Request(r.prompt, 2, 0.0, 0, ()) for r in requests]  # other requests: what is kept is not for them
    assert all(len(c.tokens) == 2 for c in generate(other, target, _config(), tmp_path, title="t", resume=tmp_path / "waves"))


def test_nothing_to_do_loads_nothing(tmp_path):
    assert generate([], tmp_path / "no target", _config(), tmp_path, title="t") == []


def test_vllm_that_is_not_there(tmp_path, monkeypatch):
    for name in ("eagle.target.vllm.find_vllm", "eagle.target.generate.find_vllm"):
        monkeypatch.setattr(name, lambda config, root: None)
    assert module.choose_backend(Config(), tmp_path) == "transformers"
    wanted = Config.model_validate({"dataset": {"backend": "vllm"}})
    with pytest.raises(PreflightError, match="vLLM not found"):
        module.choose_backend(wanted, tmp_path)


def test_vllm_gets_whole_waves_and_only_those_that_are_missing(tmp_path, monkeypatch):
    jobs: list[VllmJob] = []

    def fake(job, config, root, *, title, work, on_wave):
        jobs.append(job)
        for number, first in enumerate(range(0, len(job.requests), job.wave)):
            if len(jobs) == 1 and number == 1:
                raise StepFailed("killed")
            on_wave(number, [VllmAnswer([r.seed], "length") for r in job.requests[first : first + job.wave]])

    monkeypatch.setattr(module, "WAVE", 3)
    monkeypatch.setattr(module, "run_vllm", fake)
    monkeypatch.setattr(module, "find_vllm", lambda config, root: tmp_path)
    config = Config.model_validate({"vllm": {"max_num_seqs": 1}})
    requests = [Request([1] * (n + 1), 5, 0.0, n, (2,)) for n in range(10)]  # waves of 4: 4 * max_num_seqs > WAVE
    with pytest.raises(StepFailed):
        generate(requests, tmp_path, config, tmp_path, title="t", resume=tmp_path / "w")
    completions = generate(requests, tmp_path, config, tmp_path, title="t", resume=tmp_path / "w")
    assert [c.tokens for c in completions] == [[n] for n in range(10)]
    assert [(len(job.requests), job.wave, job.max_model_len) for job in jobs] == [(10, 4, 15), (6, 4, 15)]
