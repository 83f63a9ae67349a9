"""The MLmodel file beside a registered draft, which makes `mlflow.pyfunc.load_model("models:/NAME@champion")` work.

It names code (`eagle.registry.pyfunc`), never a pickle, and holds the hash of every file that this code will read.
"""

from __future__ import annotations

import platform
from pathlib import Path

from mlflow.models import Model, ModelSignature
from mlflow.pyfunc import FLAVOR_NAME
from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema

FILE = "MLmodel"
LOADER = "eagle.registry.pyfunc"
HASHES, TARGET, DRAFT_TOKENS = "eagle.files", "target", "draft_tokens"
MAX_NEW_TOKENS = 64


def write_mlmodel(folder: Path, files: dict[str, str], target: str, draft_tokens: int) -> Path:
    """Write `folder`/MLmodel and return its path.

    files: {path below the bundle: sha256}, checked at loading. target: the folder that the draft was made for (a hub name
    where there is none), replaced at loading by `model_config={"target": FOLDER}`. draft_tokens: K of each round.
    """
    signature = ModelSignature(
        Schema([ColSpec(DataType.string)]),  # without a name: lists of texts and frames with any column name
        Schema([ColSpec(DataType.string, "text")]),
        ParamSchema(
            [
                ParamSpec("max_new_tokens", DataType.long, MAX_NEW_TOKENS),
                ParamSpec("temperature", DataType.double, 0.0),
                ParamSpec("seed", DataType.long, 0),
            ]
        ),
    )
    model = Model(signature=signature, metadata={HASHES: files})
    model.add_flavor(
        FLAVOR_NAME, loader_module=LOADER, python_version=platform.python_version(),
        config={TARGET: target, DRAFT_TOKENS: draft_tokens},
    )  # fmt: skip
    path = folder / FILE
    model.save(str(path))
    return path
