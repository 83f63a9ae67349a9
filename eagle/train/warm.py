"""Warm start: stage 1 goes on from another draft, whose draft-vocabulary map is kept.

The draft must fit the target that is trained for (sizes, tokenizer) and be the network that the configuration describes.
A target with other weights and the same tokenizer and sizes is no obstacle: that is what a draft is continued for.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle import manifest
from eagle.config import Config
from eagle.draft.io import load_draft, read_spec, target_embedding
from eagle.draft.model import DraftModel
from eagle.draft.spec import DraftSpec
from eagle.errors import ConfigError
from eagle.progress import say
from eagle.steps import StepContext
from eagle.target.identity import IDENTITY, target_identity
from eagle.target.load import TargetDims, target_dims
from eagle.target.resolve import local_target
from eagle.target.taps import resolve_aux_layers
from eagle.train.warm_source import REGISTRY, fetch_source, find_draft

_MEND = "distill.warm_start=null starts a fresh draft"
# Fields of the network and the configuration's keys for them.
_KEYS = {
    "num_layers": "draft.layers", "num_heads": "draft.heads", "num_kv_heads": "draft.kv_heads", "head_dim": "draft.head_dim",
    "hidden_size": "draft.hidden_size", "intermediate_size": "draft.intermediate_size", "fc_norm": "draft.fc_norm",
    "norm_output": "draft.norm_output", "norm_before_residual": "draft.norm_before_residual", "aux_layers": "target.aux_layers",
}  # fmt: skip
_SHARED = ("target_hidden_size", "vocab_size")


def warm_draft(
    context: StepContext, target: Path, dims: TargetDims, aux_layers: tuple[int, ...]
) -> tuple[DraftModel, NDArray[np.int64]]:
    """Return the draft that `distill.warm_start` names (fp32, CPU) and its vocabulary, ascending target ids.

    Writes warm_start.json ({source, weights_sha256}) to `context.out`. Raises ConfigError, one line, when there is no such
    draft or its target, tokenizer, network or draft-vocabulary map is another one; BundleError for a damaged checkpoint.
    """
    config = context.config
    source = str(config.distill.warm_start)
    folder = fetch_source(config, context.root, context.work / "warm_start")
    wanted = DraftSpec.from_config(config.draft, dims, aux_layers)
    _check_fit(source, folder, wanted, target_identity(config.target, target, context.root, context.cache))
    loaded = load_draft(folder, target, dtype="float32")
    ids: NDArray[np.int64] = loaded.draft_ids().cpu().numpy().astype(np.int64)
    lacking = sorted(set(dims.eos_token_ids) - set(ids.tolist()))
    if lacking:
        raise ConfigError(
            f"distill.warm_start: the draft-vocabulary map of {source} lacks token {lacking[0]}, which ends answers; {_MEND}"
        )
    wanted = replace(wanted, draft_vocab_size=len(ids))
    model = DraftModel(wanted, target_embedding(target, wanted), ids)
    model.load_state_dict(loaded.state_dict())
    manifest.write_json(
        context.out / "warm_start.json", {"source": source, "weights_sha256": manifest.hash_file(folder / "model.safetensors")}
    )
    say(f"distill: going on from {source}: its {len(ids)} draft tokens are kept")
    return model, ids


def check_early(config: Config, root: Path, cache: Path) -> None:
    """Refuse a folder's draft that `warm_draft` would refuse, before the data set is made; loads no weights.

    A registered draft, or a target that is not on this disk yet, is left to the step. Raises as `warm_draft` does.
    """
    source, target = config.distill.warm_start, local_target(config.target, root, cache)
    if source is None or source.startswith(REGISTRY) or target is None:
        return
    dims = target_dims(target)
    wanted = DraftSpec.from_config(config.draft, dims, resolve_aux_layers(config.target.aux_layers, dims.num_layers))
    _check_fit(source, find_draft(source, root), wanted, target_identity(config.target, target, root, cache))


def _check_fit(source: str, folder: Path, wanted: DraftSpec, identity: dict[str, Any]) -> None:
    found = read_spec(folder)
    _check_target(source, found, wanted)
    _check_identity(source, folder, identity)
    _check_network(source, found, wanted)
    _check_map_size(source, found, wanted)


def _check_target(source: str, found: DraftSpec, wanted: DraftSpec) -> None:
    for name in _SHARED:
        if getattr(found, name) != getattr(wanted, name):
            raise ConfigError(
                f"distill.warm_start: {source} was made for another target: {name} {getattr(found, name)}, "
                f"this one has {getattr(wanted, name)}; {_MEND}"
            )


def _check_identity(source: str, folder: Path, now: dict[str, Any]) -> None:
    """Compare what was written beside the draft when it was made; a draft without it passes by its sizes, which is said."""
    former = _identity(folder)
    if former is None:
        say(f"distill: {source} does not say which tokenizer it was made with: only its sizes were compared")
        return
    if former.get("tokenizer_sha256") != now["tokenizer_sha256"]:
        raise ConfigError(
            f"distill.warm_start: {source} was made with another tokenizer ({str(former.get('tokenizer_sha256'))[:12]}, "
            f"this target's is {now['tokenizer_sha256'][:12]}): its token ids mean other text; {_MEND}"
        )
    if former.get("num_layers") != now["num_layers"]:
        raise ConfigError(
            f"distill.warm_start: {source} was made for another target: num_layers {former.get('num_layers')}, "
            f"this one has {now['num_layers']}; {_MEND}"
        )
    if former.get("fingerprint") != now["fingerprint"]:
        say(f"distill: the target's files changed since {source} was made; sizes and tokenizer are the same")


def _identity(folder: Path) -> dict[str, Any] | None:
    """Return target.json of a bundle (inside), of a distill step (beside its draft) or of the run of a policy step."""
    for place in (folder, folder.parent, folder.parent.parent / "distill"):
        if (place / IDENTITY).is_file():
            found = manifest.read_json(place / IDENTITY)
            return found if isinstance(found, dict) else None
    return None


def _check_network(source: str, found: DraftSpec, wanted: DraftSpec) -> None:
    for name, key in _KEYS.items():
        has, asked = _plain(getattr(found, name)), _plain(getattr(wanted, name))
        if has != asked:
            raise ConfigError(
                f"distill.warm_start: {source} has {name} {has}, {key} asks for {asked}; set {key} to the draft's, or {_MEND}"
            )
    # What stems from the target: a draft's positions and norms would mean something else.
    same = replace(
        found, draft_vocab_size=wanted.draft_vocab_size, max_position_embeddings=wanted.max_position_embeddings,
        bos_token_id=wanted.bos_token_id, eos_token_id=wanted.eos_token_id,
    )  # fmt: skip
    if same != wanted:
        raise ConfigError(
            f"distill.warm_start: {source} was made for another target: rope {found.rope_parameters}, eps {found.rms_norm_eps}, "
            f"this one has {wanted.rope_parameters}, {wanted.rms_norm_eps}; {_MEND}"
        )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _check_map_size(source: str, found: DraftSpec, wanted: DraftSpec) -> None:
    """A smaller map passes: stage 1 cuts one that the data could not fill, and a larger one would be another map."""
    if found.draft_vocab_size > wanted.draft_vocab_size:
        raise ConfigError(
            f"distill.warm_start: {source} has a draft-vocabulary map of {found.draft_vocab_size} tokens, draft.vocab_size asks "
            f"for {wanted.draft_vocab_size}; a warm start keeps the map: set draft.vocab_size={found.draft_vocab_size}, or {_MEND}"
        )
    if found.draft_vocab_size < wanted.draft_vocab_size:
        say(f"distill: the map of {source}, {found.draft_vocab_size} tokens, is kept (draft.vocab_size {wanted.draft_vocab_size})")
