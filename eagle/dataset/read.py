"""The rows of a finished dataset folder, and how they are kept in Parquet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from eagle.errors import DataError

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("temperature", pa.float32(), nullable=False),
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.int8()), nullable=False),
        pa.field("prompt_length", pa.int32(), nullable=False),
        pa.field("finish", pa.string(), nullable=False),
    ],
    metadata={"format": "eagle-dataset", "version": "1"},
)


@dataclass(frozen=True)
class Row:
    """One answered prompt.

    `id` is the sha256 of the prompt's text. `input_ids` are the rendered prompt and then the answer, which ends with
    the stop id when `finish` is 'stop' and was cut when it is 'length'. `loss_mask` has the length of `input_ids` and
    is 1 where the target wrote the token (from `prompt_length` on). `temperature` is the answer's.
    """

    id: str
    source: str
    kind: str
    temperature: float
    input_ids: list[int]
    loss_mask: list[int]
    prompt_length: int
    finish: str

    @property
    def prompt(self) -> list[int]:
        """The prompt's ids, up to where the answer starts."""
        return self.input_ids[: self.prompt_length]

    @property
    def answer(self) -> list[int]:
        """The answer's ids."""
        return self.input_ids[self.prompt_length :]


def load_rows(folder: Path, split: Literal["train", "heldout"]) -> list[Row]:
    """Return all rows of one split, in shard order (by id: an order without meaning, the same at every run).

    Raises DataError when the folder has no shard of that split.
    """
    return list(iter_rows(folder, split))


def iter_rows(folder: Path, split: Literal["train", "heldout"]) -> Iterator[Row]:
    """Yield the rows of one split, shard by shard, without holding them all. Raises DataError as `load_rows`."""
    shards = sorted(folder.glob(f"{split}-*.parquet"))
    if not shards:
        raise DataError(f"no {split} shards in {folder}; run: eagle step dataset --dir {folder.parent}")
    for shard in shards:
        try:
            table = pq.read_table(shard, schema=SCHEMA)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{shard}: not readable as a dataset shard ({str(error).splitlines()[0]})") from None
        for record in table.to_pylist():
            record["temperature"] = round(record["temperature"], 6)  # 0.8 again, not the float32 nearest to it
            yield Row(**record)


def write_shards(folder: Path, split: Literal["train", "heldout"], rows: Sequence[Row], shard_rows: int) -> list[str]:
    """Write `rows` as <split>-00000.parquet, ... of at most `shard_rows` rows and return the file names.

    A split without rows gets one empty shard, so that a reader can tell it from a missing one. The same rows give the
    same bytes: no time, host or path goes into the file.
    """
    names = []
    columns = [field.name for field in fields(Row)]
    for number, first in enumerate(range(0, max(len(rows), 1), shard_rows)):
        part = rows[first : first + shard_rows]
        table = pa.table({name: [getattr(row, name) for row in part] for name in columns}, schema=SCHEMA)
        name = f"{split}-{number:05d}.parquet"
        pq.write_table(table, folder / name, compression="zstd", write_statistics=False)
        names.append(name)
    return names
