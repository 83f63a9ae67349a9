"""The target's hidden states and probabilities over a data set, computed once and kept on disk.

Layout of cache/features/<key>/: per shard `aux-NNNNN.npy` (bf16 bit patterns as uint16 [tokens, A*Ht]),
`index-NNNNN.npy` (int32 [tokens, k] target ids), `prob-NNNNN.npy` (float16 [tokens, k]) and `own-NNNNN.npy` (float32
[tokens, 1], log-probability of the token that follows in the row); `tokens.npy` (int32), `mask.npy` (bool); `features.json`
with the rows. A shard appears by rename when it is complete, the folder when all
are, so a killed run goes on with the next shard.

The probabilities are those of the full vocabulary at temperature 1, for the k likeliest tokens, not renormalised. They
and the log-probabilities are computed only at positions that predict an answer's token (and at a row's last position,
which has no next token: log-probability 0 there); elsewhere they are 0.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from eagle import manifest
from eagle.config import TargetConfig
from eagle.dataset.read import Row, load_rows
from eagle.errors import BusyError, ConfigError, DataError, PreflightError
from eagle.progress import Track, say
from eagle.target.load import load_target, target_dims
from eagle.target.resolve import target_fingerprint
from eagle.target.taps import HiddenTaps

FORMAT = 2
SHARD_TOKENS = 65536
KEEP = 2  # stores kept in the cache: the one in use and the one before
_SLAB_BYTES = 8 << 20
_GROUP = 64
_KINDS: dict[str, str] = {"aux": "uint16", "index": "int32", "prob": "float16", "own": "float32"}


@dataclass(frozen=True)
class StoredRow:
    """One conversation in the store. `start` is its first token within its shard, `offset` within all tokens."""

    id: str
    split: str
    source: str
    kind: str
    temperature: float
    prompt_length: int
    finish: str
    shard: int
    start: int
    offset: int
    length: int


class FeatureStore:
    """Memory-mapped features of a data set: what `ensure_features` returns. Rows are numbered from 0."""

    def __init__(self, folder: Path) -> None:
        content = manifest.read_json(folder / "features.json")
        self.folder = folder
        self.aux_layers: tuple[int, ...] = tuple(content["aux_layers"])
        self.top_k: int = content["top_k"]
        self.vocab_size: int = content["vocab_size"]
        self.dropped: int = content["dropped"]
        self.rows = [StoredRow(**row) for row in content["rows"]]
        self._tokens: NDArray[np.int32] = np.load(folder / "tokens.npy")
        self._mask: NDArray[np.bool_] = np.load(folder / "mask.npy")
        self._maps: dict[tuple[str, int], NDArray[Any]] = {}

    def select(self, split: str) -> list[int]:
        """Return the numbers of the rows of 'train' or 'heldout', in data-set order."""
        return [i for i, row in enumerate(self.rows) if row.split == split]

    def tokens(self, row: int) -> NDArray[np.int32]:
        """Token ids [T] of a row, prompt and answer."""
        found = self.rows[row]
        return self._tokens[found.offset : found.offset + found.length]

    def loss_mask(self, row: int) -> NDArray[np.bool_]:
        """[T]: True at the answer's tokens."""
        found = self.rows[row]
        return self._mask[found.offset : found.offset + found.length]

    def aux(self, row: int) -> Tensor:
        """Tapped states [T, A*Ht] bf16, ascending layer id."""
        return torch.from_numpy(self._slice("aux", row)).view(torch.bfloat16)

    def targets(self, row: int) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
        """(ids, probabilities) [T, k] of the token that follows each position, likeliest first."""
        return self._slice("index", row), self._slice("prob", row)

    def own_log_probs(self, row: int) -> NDArray[np.float32]:
        """[T]: the target's log-probability, nats at temperature 1, of the row's token after each position."""
        return self._slice("own", row)[:, 0]

    def _slice(self, kind: str, row: int) -> NDArray[Any]:
        found = self.rows[row]
        key = (kind, found.shard)
        if key not in self._maps:  # copy-on-write mapping: torch refuses read-only arrays
            self._maps[key] = np.load(self.folder / f"{kind}-{found.shard:05d}.npy", mmap_mode="c")
        return self._maps[key][found.start : found.start + found.length]


def ensure_features(
    dataset: Path, target: Path, aux_layers: Sequence[int], top_k: int, cache: Path, dtype: str, *,
    device: str = "cpu", batch_tokens: int = 4096, trust_remote_code: bool = False,
) -> FeatureStore:
    """Return the features of the data set in `dataset` under the target in `target`, computing what is not cached yet.

    `dtype` is the target's ('float32' | 'bfloat16'), `batch_tokens` the tokens of one forward pass, padding included.
    A row whose states are not finite is left out and counted in `dropped`.
    Raises PreflightError when the disk has no room, DataError when the data set has no rows or ids that the target does
    not know, ConfigError for a target whose logits are not its head's output, BusyError when another process is at it.
    """
    base = cache / "features"
    base.mkdir(parents=True, exist_ok=True)
    key = features_key(dataset, target, aux_layers, top_k, cache, dtype)
    folder = base / key
    try:
        with FileLock(base / f"{key}.lock", timeout=0):
            if not (folder / "features.json").is_file():
                _build(dataset, target, tuple(aux_layers), top_k, dtype, folder, _Run(device, batch_tokens, trust_remote_code))
            (folder / "features.json").touch()
            _forget_old(base, folder)
    except Timeout:
        raise BusyError(f"target features {key} are being computed by another process; wait for it or stop it") from None
    return FeatureStore(folder)


def features_key(dataset: Path, target: Path, aux_layers: Sequence[int], top_k: int, cache: Path, dtype: str) -> str:
    """Return the name of the store: a hash of the rows' files, the target's files, the layers, k and the dtype."""
    shards = [[p.name, manifest.hash_file(p)] for p in sorted(dataset.glob("*.parquet"))]
    fingerprint = target_fingerprint(TargetConfig(model=str(target.resolve())), target, cache)
    return manifest.hash_json([FORMAT, shards, fingerprint, list(aux_layers), top_k, dtype])[:20]


@dataclass(frozen=True)
class _Run:
    device: str
    batch_tokens: int
    trust_remote_code: bool


def _forget_old(base: Path, current: Path) -> None:
    """Remove all but the KEEP most recently used stores. A store in use stays readable until its process closes it."""
    stores = [p for p in base.iterdir() if (p / "features.json").is_file() and p != current]
    stores.sort(key=lambda p: (p / "features.json").stat().st_mtime, reverse=True)
    for old in stores[KEEP - 1 :]:
        say(f"features: removing {old.name}, not used by the last {KEEP} data sets")
        shutil.rmtree(old)
    for orphan in base.glob("*.partial"):  # an interrupted run of a data set that is no longer asked for
        try:
            with FileLock(base / f"{orphan.stem}.lock", timeout=0):
                shutil.rmtree(orphan, ignore_errors=True)
        except Timeout:
            continue


def _build(dataset: Path, target: Path, aux_layers: tuple[int, ...], top_k: int, dtype: str, folder: Path, run: _Run) -> None:
    dims = target_dims(target)
    rows = [(split, row) for split in ("train", "heldout") for row in load_rows(dataset, split)]  # type: ignore[arg-type]
    if not rows:
        raise DataError(f"{dataset}: no rows in train-*.parquet or heldout-*.parquet; run the dataset step again")
    for split, row in rows:
        if len(row.input_ids) == 0 or max(row.input_ids) >= dims.vocab_size or min(row.input_ids) < 0:
            raise DataError(
                f"{dataset}: {split} row {row.id}: token ids outside 0..{dims.vocab_size - 1}; was it made with this target?"
            )
    k = min(top_k, dims.vocab_size)
    width = len(aux_layers) * dims.hidden_size
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir(exist_ok=True)
    shards = _shards([len(row.input_ids) for _, row in rows])
    _check_disk(partial, sum(len(row.input_ids) for _, row in rows), width, k)
    model: PreTrainedModel | None = None
    bad: set[int] = set()
    total = sum(len(row.input_ids) for _, row in rows)
    with Track("features", total, "tokens") as track:
        for number, (first, last) in enumerate(shards):
            part = [row for _, row in rows[first:last]]
            done = partial / f"shard-{number:05d}.json"
            if not done.is_file():
                model = model or _load(target, dtype, run)
                lost = _compute_shard(model, part, aux_layers, k, partial, number, run.batch_tokens, track)
                manifest.write_json(done, {"bad": lost})
            else:
                track.advance(sum(len(row.input_ids) for row in part), "from the interrupted run")
            bad |= {first + i for i in manifest.read_json(done)["bad"]}
    about = {"aux_layers": list(aux_layers), "top_k": k, "vocab_size": dims.vocab_size, "dtype": dtype}
    _finish(partial, folder, rows, shards, bad, about)


def _shards(lengths: list[int]) -> list[tuple[int, int]]:
    """Cut the rows into runs [first, last) of about SHARD_TOKENS tokens."""
    cuts, first, tokens = [], 0, 0
    for i, length in enumerate(lengths):
        if tokens and tokens + length > SHARD_TOKENS:
            cuts.append((first, i))
            first, tokens = i, 0
        tokens += length
    return [*cuts, (first, len(lengths))]


def _check_disk(folder: Path, tokens: int, width: int, k: int) -> None:
    need = tokens * (2 * width + 6 * k + 9)
    have = shutil.disk_usage(folder).free + sum(p.stat().st_size for p in folder.glob("*.npy"))
    if have < need + (64 << 20):
        raise PreflightError(
            f"target features need {need / 2**30:.1f} GiB in {folder.parent}, {have / 2**30:.1f} GiB are free; "
            "free some, set paths.cache to another disk, or ask for fewer prompts"
        )


def _load(target: Path, dtype: str, run: _Run) -> PreTrainedModel:
    model = load_target(target, dtype, run.device, trust_remote_code=run.trust_remote_code)
    with torch.inference_mode():
        probe = torch.tensor([[0, 1]], device=run.device) % model.config.get_text_config().vocab_size
        hidden = model.get_decoder()(input_ids=probe, use_cache=False).last_hidden_state
        logits = model(input_ids=probe, use_cache=False).logits
        same = torch.allclose(model.get_output_embeddings()(hidden).float(), logits.float(), rtol=1e-2, atol=1e-2)
    if not same:
        raise ConfigError(f"target.model: {type(model).__name__} scales or caps its head's logits; such targets are not supported")
    return model


def _compute_shard(
    model: PreTrainedModel, rows: list[Row], aux_layers: tuple[int, ...], k: int, folder: Path, number: int, batch_tokens: int,
    track: Track,
) -> list[int]:
    """Write one shard's four arrays. Returns the rows (numbered within the shard) whose states are not finite."""
    lengths = [len(row.input_ids) for row in rows]
    starts = [0, *np.cumsum(lengths).tolist()]
    hidden = int(model.config.get_text_config().hidden_size)
    arrays = _ShardArrays(folder, number, starts[-1], {"aux": len(aux_layers) * hidden, "index": k, "prob": k, "own": 1})
    bad = []
    with HiddenTaps(model, aux_layers) as taps, torch.inference_mode():
        for batch in _by_length(lengths, batch_tokens):
            tokens = torch.zeros(len(batch), max(lengths[i] for i in batch), dtype=torch.int64)
            for at, i in enumerate(batch):
                tokens[at, : lengths[i]] = torch.as_tensor(rows[i].input_ids)
            # right padding and causal attention: no mask is needed, padded positions are never read
            last = model.get_decoder()(input_ids=tokens.to(model.device), use_cache=False).last_hidden_state
            states = taps.concat()
            for at, i in enumerate(batch):
                row_states, row_last = states[at, : lengths[i]], last[at, : lengths[i]]
                if not bool(torch.isfinite(row_states).all()) or not bool(torch.isfinite(row_last).all()):
                    bad.append(i)
                    continue
                wanted = predicting(np.asarray(rows[i].loss_mask, dtype=bool))
                judged = row_last[torch.from_numpy(wanted).to(last.device)]
                following = tokens[at, (torch.from_numpy(wanted) + 1).clamp_max(lengths[i] - 1)].to(last.device)
                index, prob, own = top_probabilities(judged, model.get_output_embeddings(), k, following)
                if wanted[-1] == lengths[i] - 1:
                    own[-1] = 0.0
                arrays.put("aux", slice(starts[i], starts[i + 1]), row_states.to(torch.bfloat16).view(torch.uint16))
                arrays.put("index", starts[i] + wanted, index)
                arrays.put("prob", starts[i] + wanted, prob)
                arrays.put("own", starts[i] + wanted, own[:, None])
            track.advance(sum(lengths[i] for i in batch))
    arrays.finish()
    return sorted(bad)


class _ShardArrays:
    """The arrays of a shard while they are written; they get their names when they are complete."""

    def __init__(self, folder: Path, number: int, tokens: int, widths: dict[str, int]) -> None:
        self._names = {kind: folder / f"{kind}-{number:05d}.npy" for kind in _KINDS}
        self._arrays = {
            kind: np.lib.format.open_memmap(
                name.with_suffix(".tmp"), mode="w+", dtype=np.dtype(_KINDS[kind]), shape=(tokens, widths[kind])
            )
            for kind, name in self._names.items()
        }

    def put(self, kind: str, where: slice | NDArray[np.int64], values: Tensor) -> None:
        self._arrays[kind][where] = values.cpu().numpy()

    def finish(self) -> None:
        for kind, array in self._arrays.items():
            array.flush()
            self._names[kind].with_suffix(".tmp").replace(self._names[kind])


def predicting(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the positions whose next token is an answer's token, and the last position, of a loss mask [T]."""
    after = np.append(mask[1:], True)
    return np.flatnonzero(after)


def _by_length(lengths: list[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield batches of rows of similar length, at most `batch_tokens` with padding (a longer row comes alone)."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batch and (len(batch) + 1) * lengths[batch[0]] > batch_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def top_probabilities(
    hidden: Tensor, head: Callable[[Tensor], Tensor], k: int, following: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (ids int32, probabilities float16) [N, k] of softmax(head(hidden)), likeliest first, and log p [N] float32 of
    the tokens `following` [N] int64; hidden [N, H].

    The normaliser is the log-sum-exp over the whole vocabulary in fp32. Logits are made for a few rows at a time.
    The k largest are found among the k groups of 64 ids with the largest maxima, which hold them: several times faster
    than torch.topk over the vocabulary on CPU.
    """
    vocab = int(head(hidden[:1]).shape[-1]) if len(hidden) else k
    rows = max(1, _SLAB_BYTES // (4 * vocab))
    index = torch.empty(len(hidden), k, dtype=torch.int32, device=hidden.device)
    prob = torch.empty(len(hidden), k, dtype=torch.float16, device=hidden.device)
    own = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    groups = -(-vocab // _GROUP)
    for at in range(0, len(hidden), rows):
        logits = head(hidden[at : at + rows]).float()
        norm = logits.logsumexp(-1, keepdim=True)
        own[at : at + rows] = (logits.gather(1, following[at : at + rows, None]) - norm).squeeze(1)
        if groups > 2 * k:
            padded = torch.nn.functional.pad(logits, (0, groups * _GROUP - vocab), value=float("-inf"))
            grouped = padded.unflatten(-1, (groups, _GROUP))
            best = grouped.amax(-1).topk(k, dim=-1).indices.sort(-1).values  # ascending, so that ties go to the lower id
            few = grouped.gather(1, best.unsqueeze(-1).expand(-1, -1, _GROUP)).flatten(1)
            value, place = few.topk(k, dim=-1)
            ids = best.gather(1, place // _GROUP) * _GROUP + place % _GROUP
        else:
            value, ids = logits.topk(k, dim=-1)
        index[at : at + rows] = ids.to(torch.int32)
        prob[at : at + rows] = (value - norm).exp().to(torch.float16)
    return index, prob, own


def _finish(
    partial: Path, folder: Path, rows: list[tuple[str, Row]], shards: list[tuple[int, int]], bad: set[int], about: dict[str, Any]
) -> None:
    stored, offset = [], 0
    for number, (first, last) in enumerate(shards):
        start = 0
        for i in range(first, last):
            split, row = rows[i]
            length = len(row.input_ids)
            if i not in bad:
                told = (row.id, split, row.source, row.kind, float(row.temperature), int(row.prompt_length), row.finish)
                stored.append(StoredRow(*told, number, start, offset, length))
            start += length
            offset += length
    np.save(partial / "tokens.npy", np.concatenate([np.asarray(row.input_ids, dtype=np.int32) for _, row in rows]))
    np.save(partial / "mask.npy", np.concatenate([np.asarray(row.loss_mask, dtype=np.bool_) for _, row in rows]))
    if bad:
        say(f"features: {len(bad)} rows left out, the target's states are not finite there")
    manifest.write_json(partial / "features.json", {**about, "dropped": len(bad), "rows": [asdict(row) for row in stored]})
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
