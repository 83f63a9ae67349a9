"""What all sections share: their base class and the types that several of them use."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

DType = Literal["float32", "bfloat16"]
Method = Literal[
    "none",
    "ngram",
    "lookahead",
    "medusa",
    "eagle2",
    "eagle31-distilled",
    "eagle31",
    "eagle31-tree",
    "eagle31-drawn",
    "eagle31-pid",
    "eagle31-chunks",
]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveInt = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are immutable and numbers are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
