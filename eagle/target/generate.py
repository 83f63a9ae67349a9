"""Generation with the target: through vLLM's own process, or through transformers in this one.

Requests carry token ids, so both backends see the same prompt. A run is cut into waves of a fixed number of requests
in the order given; a wave is finished before the next starts and is kept on disk when a folder for that is given. So
a killed run loses at most one wave, and what a request's neighbours are (which decides the last bits of a matrix
product, and with them a token now and then) never depends on when a run was interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from eagle import manifest
from eagle.config import Config
from eagle.progress import Track
from eagle.target.load import load_target, pick_device, setup_torch
from eagle.target.vllm import VllmAnswer, VllmJob, find_vllm, require_vllm, run_vllm

WAVE = 512  # requests a wave, at least: a minute or two of work on two cores
BATCH = 32  # sequences decoded together by the transformers backend


@dataclass(frozen=True)
class Request:
    """One prompt to continue: `prompt` ids, at most `max_tokens` new ones, sampled at `temperature` (0 = greedy)."""

    prompt: list[int]
    max_tokens: int
    temperature: float
    seed: int
    stop: tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """New token ids; `finish` is 'stop' when the last one is a stop id, 'length' when max_tokens was reached."""

    tokens: list[int]
    finish: Literal["stop", "length"]


def choose_backend(config: Config, root: Path) -> Literal["vllm", "transformers"]:
    """Return the backend that `dataset.backend` means here.

    Raises PreflightError with the install line when vLLM is asked for and not found.
    """
    wanted = config.dataset.backend
    if wanted == "transformers":
        return "transformers"
    if find_vllm(config.vllm, root) is not None:
        return "vllm"
    if wanted == "vllm":
        require_vllm(config.vllm, root)
    return "transformers"


def generate(
    requests: Sequence[Request], target: Path, config: Config, root: Path, *, title: str, resume: Path | None = None
) -> list[Completion]:
    """Continue every request with the target at `target`; completions come in the order of the requests.

    The same requests give the same tokens on the same machine: sampling is seeded per request and the waves are fixed.
    `resume` is a folder for finished waves; a later call with the same requests continues after them.
    Raises PreflightError when vLLM is asked for and missing, StepFailed when its process fails.
    """
    if not requests:
        return []
    backend = choose_backend(config, root)
    size = max(WAVE, 4 * config.vllm.max_num_seqs) if backend == "vllm" else WAVE  # so that the tail of a wave is little of it
    waves = [list(requests[first : first + size]) for first in range(0, len(requests), size)]
    store = _WaveStore(resume, {"backend": backend, "target": str(target), "dtype": config.target.dtype}, waves)
    missing = [index for index in range(len(waves)) if index not in store.finished]
    if missing:
        if backend == "vllm":
            _run_vllm(waves, missing, store, target, config, root, title, resume)
        else:
            _run_transformers(waves, missing, store, target, config, title)
    return [completion for index in range(len(waves)) for completion in store.finished[index]]


class _WaveStore:
    """Finished waves, in memory and (with a folder) on disk: wave-00000.json, keyed by the hash of its requests."""

    def __init__(self, folder: Path | None, setting: dict[str, Any], waves: list[list[Request]]) -> None:
        self._folder = folder
        self._keys = [manifest.hash_json([setting, [asdict(r) for r in wave]]) for wave in waves]
        self.finished: dict[int, list[Completion]] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for index in range(len(waves)):
                self._load(index)

    def put(self, index: int, completions: list[Completion]) -> None:
        """Keep a finished wave."""
        self.finished[index] = completions
        if self._folder is not None:
            content = {"key": self._keys[index], "completions": [asdict(c) for c in completions]}
            manifest.write_json(self._path(index), content)

    def _load(self, index: int) -> None:
        if not self._path(index).is_file():
            return
        content = manifest.read_json(self._path(index))  # written atomically: it is whole
        if content["key"] == self._keys[index]:
            self.finished[index] = [Completion(c["tokens"], c["finish"]) for c in content["completions"]]

    def _path(self, index: int) -> Path:
        return Path(self._folder or ".") / f"wave-{index:05d}.json"


def _run_vllm(
    waves: list[list[Request]], missing: list[int], store: _WaveStore, target: Path, config: Config, root: Path, title: str,
    work: Path | None,
) -> None:  # fmt: skip
    """Run the missing waves in one vLLM process (its start costs half a minute), each kept as it ends."""
    longest = max(len(request.prompt) + request.max_tokens for wave in waves for request in wave)
    job = VllmJob(
        model=target,
        requests=[request for index in missing for request in waves[index]],
        dtype=config.target.dtype,
        max_model_len=longest,  # over all waves: what is left after a crash must be run like the whole
        wave=len(waves[0]),
        trust_remote_code=config.target.trust_remote_code,
    )

    def keep(number: int, answers: list[VllmAnswer]) -> None:
        store.put(missing[number], [Completion(answer.tokens, answer.finish) for answer in answers])

    run_vllm(job, config, root, title=title, work=work, on_wave=keep)


def _run_transformers(
    waves: list[list[Request]], missing: list[int], store: _WaveStore, target: Path, config: Config, title: str
) -> None:
    setup_torch(config.runtime.threads, config.runtime.seed)
    device = pick_device(config.runtime.device)
    model = load_target(target, config.target.dtype, device, trust_remote_code=config.target.trust_remote_code)
    total = sum(len(wave) for wave in waves)
    done = total - sum(len(waves[index]) for index in missing)
    tokens = 0
    with Track(title, total, "answers", done=done) as track:
        for index in missing:
            wave = waves[index]
            completions: list[Completion | None] = [None] * len(wave)
            # Neighbours of like length waste little padding; the order is stable, so batches are the same every time.
            order = sorted(range(len(wave)), key=lambda i: (len(wave[i].prompt), i))
            for first in range(0, len(order), BATCH):
                chosen = order[first : first + BATCH]
                for at, completion in zip(chosen, generate_batch(model, [wave[i] for i in chosen]), strict=True):
                    completions[at] = completion
                    tokens += len(completion.tokens)
                track.advance(len(chosen), f"{tokens} tokens")
            store.put(index, [c for c in completions if c is not None])


@torch.inference_mode()
def generate_batch(model: PreTrainedModel, requests: Sequence[Request]) -> list[Completion]:
    """Continue a batch of requests with `model`, left-padded, with a KV cache; finished rows leave the batch.

    Every request draws from its own generator (one uniform number a token, inverse of the cumulative distribution in
    fp32), so its samples do not depend on its neighbours beyond the rounding of batched matrix products.
    """
    device = model.device
    width = max(len(r.prompt) for r in requests)
    tokens = torch.zeros(len(requests), width, dtype=torch.long)
    mask = torch.zeros(len(requests), width, dtype=torch.long)
    for row, request in enumerate(requests):
        tokens[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
        mask[row, width - len(request.prompt) :] = 1
    tokens, mask = tokens.to(device), mask.to(device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    generators = [torch.Generator().manual_seed(r.seed) for r in requests]
    produced: list[list[int]] = [[] for _ in requests]
    alive = list(range(len(requests)))
    cache = DynamicCache(config=model.config)
    while alive:
        output = model(
            input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        chosen = _sample(output.logits[:, -1], [requests[i] for i in alive], [generators[i] for i in alive])
        for row, token in zip(alive, chosen, strict=True):
            produced[row].append(token)
        keep = [at for at, row in enumerate(alive) if not _is_finished(produced[row], requests[row])]
        if len(keep) < len(alive):
            index = torch.tensor(keep, device=device, dtype=torch.long)
            if keep:
                cache.batch_select_indices(index)
            mask, positions = mask[index], positions[index]
            alive = [alive[at] for at in keep]
        tokens = torch.tensor([[produced[row][-1]] for row in alive], device=device, dtype=torch.long)
        mask = torch.cat([mask, mask.new_ones(len(alive), 1)], dim=-1)
        positions = positions[:, -1:] + 1
    return [
        Completion(ids, "stop" if ids and ids[-1] in request.stop else "length")
        for ids, request in zip(produced, requests, strict=True)
    ]


def _is_finished(ids: list[int], request: Request) -> bool:
    return ids[-1] in request.stop or len(ids) >= request.max_tokens


def _sample(logits: Tensor, requests: Sequence[Request], generators: Sequence[torch.Generator]) -> list[int]:
    """Choose one token a row from logits [B, V]: argmax at temperature 0, else by inverse transform sampling."""
    chosen = logits.argmax(-1).tolist()
    hot = [row for row, request in enumerate(requests) if request.temperature > 0]
    if hot:
        temperature = torch.tensor([[requests[row].temperature] for row in hot], device=logits.device)
        cumulative = (logits[hot].float() / temperature).softmax(-1).cumsum(-1)
        uniform = torch.cat([torch.rand(1, 1, generator=generators[row]) for row in hot]).to(logits.device)
        # Scaled by the last entry, which rounding leaves a little off 1, so that the drawn index is always inside.
        drawn = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).clamp(max=logits.shape[-1] - 1)
        for row, token in zip(hot, drawn[:, 0].tolist(), strict=True):
            chosen[row] = token
    return [int(token) for token in chosen]
