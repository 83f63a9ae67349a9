"""What MLflow imports to load a registered draft: text in, the target's own text out, decoded with the draft.

`mlflow.pyfunc.load_model("models:/NAME@champion")` calls `_load_pyfunc`. Runs in any process that has this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from mlflow.models import Model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eagle import manifest
from eagle.bundle.validate import check_bundle
from eagle.decode.engine import Engine
from eagle.draft.io import load_draft
from eagle.draft.model import DraftModel
from eagle.errors import BundleError, ConfigError
from eagle.registry.mlmodel import DRAFT_TOKENS, FILE, HASHES, MAX_NEW_TOKENS, TARGET
from eagle.target.load import load_target, load_tokenizer, target_dims
from eagle.target.template import render_prompt

BATCH = 8


class DraftedText:
    """A target with its draft behind MLflow's `predict`."""

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DraftModel,
        tokenizer: PreTrainedTokenizerBase,
        stop: frozenset[int],
        draft_tokens: int,
    ) -> None:
        self._target, self._draft, self._tokenizer, self._stop = target, draft, tokenizer, stop
        self._draft_tokens = draft_tokens

    def predict(self, data: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Answer each prompt of the first column, as one user turn of the chat template. Returns a frame with the column `text`.

        params: max_new_tokens, temperature (0 = greedy), seed. Raises DataError for a prompt that the template refuses.
        """
        said = {"max_new_tokens": MAX_NEW_TOKENS, "temperature": 0.0, "seed": 0, **(params or {})}
        prompts = [render_prompt(self._tokenizer, [{"role": "user", "content": str(text)}]) for text in data.iloc[:, 0]]
        if not prompts:
            return pd.DataFrame({"text": []}, dtype=str)
        new = int(said["max_new_tokens"])
        engine = Engine(self._target, self._draft, max_length=max(map(len, prompts)) + new, batch=min(len(prompts), BATCH))
        answers = engine.generate(
            prompts, max_new_tokens=new, draft_tokens=self._draft_tokens, temperature=float(said["temperature"]),
            seed=int(said["seed"]), stop=self._stop,
        ).tokens  # fmt: skip
        return pd.DataFrame({"text": [str(self._tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in answers]})


def _load_pyfunc(path: str, model_config: Mapping[str, Any] | None = None) -> DraftedText:
    """MLflow's entry point. `model_config`: target (folder), draft_tokens; MLmodel's own where not given.

    Raises BundleError when a file is not the registered one or the bundle is unsound, ConfigError when the target is
    not at hand or not the draft's.
    """
    folder, said = Path(path), model_config or {}
    _require_registered_files(folder)
    target = Path(str(said.get(TARGET, "")))
    if not (target / "config.json").is_file():
        raise ConfigError(f"pyfunc: no target folder at {target}; give it: load_model(..., model_config={{'{TARGET}': FOLDER}})")
    report = check_bundle(folder, target)
    model = load_target(target, report.dtype)
    draft = load_draft(folder, target, dtype=report.dtype).eval()
    stop = frozenset(target_dims(target).eos_token_ids)
    return DraftedText(model, draft, load_tokenizer(target), stop, int(said.get(DRAFT_TOKENS, 0)))


def _require_registered_files(folder: Path) -> None:
    metadata: dict[str, Any] = Model.load(str(folder / FILE)).metadata or {}
    for name, wanted in metadata.get(HASHES, {}).items():
        if not (folder / name).is_file() or manifest.hash_file(folder / name) != wanted:
            raise BundleError(f"pyfunc: {folder / name} is not the registered file; fetch it again: eagle registry pull")
    if not metadata.get(HASHES):
        raise BundleError(f"pyfunc: {folder / FILE} holds no hashes; it was not registered by this product")
