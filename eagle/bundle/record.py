"""serving.json of a bundle: what the server must know of the draft and the weights do not say. vLLM does not read it.

`tokenizer`: hash of the target's vocabulary (token to id). `recommended`: the draft length measured as fastest at each batch
size, 0 = none. `costs`: seconds of rounds (`CostTable`), if the bench measured any. `acceptance`: length (bonus token
included) and by position, as the validation counted it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from transformers import PreTrainedTokenizerBase

from eagle import manifest
from eagle.decode.cost import CostTable
from eagle.errors import BundleError
from eagle.target.identity import tokenizer_hash

RECORD = "serving.json"
_COSTS_OF = "eagle31-pid"


class Recommended(BaseModel):
    """The fixed draft length to serve with at a batch size; 0 = no speculation."""

    model_config = ConfigDict(frozen=True)

    batch: int = Field(ge=1)
    draft_tokens: int = Field(ge=0, le=64)


class BundleRecord(BaseModel):
    """The content of serving.json; every field may be missing in a bundle that was made elsewhere."""

    model_config = ConfigDict(frozen=True)

    tokenizer: str | None = None
    recommended: tuple[Recommended, ...] = ()
    costs: dict[str, Any] | None = None
    acceptance: dict[str, Any] | None = None

    @field_validator("recommended")
    @classmethod
    def _each_batch_once(cls, rows: tuple[Recommended, ...]) -> tuple[Recommended, ...]:
        batches = [row.batch for row in rows]
        if len(set(batches)) < len(batches):
            raise ValueError("a batch size stands twice")
        return rows

    @field_validator("costs")
    @classmethod
    def _a_cost_table(cls, table: dict[str, Any] | None) -> dict[str, Any] | None:
        if table is not None:
            CostTable.from_json(json.dumps(table))
        return table

    @property
    def off(self) -> bool:
        """Whether speculation was measured, and won at no batch size."""
        return bool(self.recommended) and all(row.draft_tokens == 0 for row in self.recommended)


def make_record(tokenizer: PreTrainedTokenizerBase, bench: dict[str, Any], validation: dict[str, Any]) -> BundleRecord:
    """Gather the record from the target's tokenizer, bench.json and validation.json."""
    tables = [table for name, table in bench.get("costs", {}).items() if name.startswith(_COSTS_OF)]
    counted = ("acceptance_length", "acceptance_by_position", "drafts", "draft_tokens", "temperature", "vllm_version")
    return BundleRecord(
        tokenizer=tokenizer_hash(tokenizer),
        recommended=tuple(Recommended.model_validate(row) for row in bench.get("recommended", [])),
        costs=max(tables, key=_largest_batch, default=None),
        acceptance={name: validation[name] for name in counted} if validation["validated"] else None,
    )


def _largest_batch(table: dict[str, Any]) -> int:
    return max(int(row[0]) for row in table["target"])


def write_record(folder: Path, record: BundleRecord) -> None:
    """Write serving.json into a bundle."""
    manifest.write_json(folder / RECORD, record.model_dump(mode="json"))


def read_record(folder: Path) -> BundleRecord:
    """Return a bundle's record, an empty one when there is none. Raises BundleError for one that cannot be used."""
    path = folder / RECORD
    if not path.is_file():
        return BundleRecord()
    try:
        return BundleRecord.model_validate(manifest.read_json(path))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "file"
        raise BundleError(f"{path}: {place}: {first['msg']}; export the bundle again") from None
    except (OSError, ValueError) as error:
        raise BundleError(f"{path}: cannot be read ({error}); export the bundle again") from None
