"""What all sections share: their base class and the types that several of them use."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

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

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """`layers: true` is a mistake; pydantic would take it for 1."""
        given = value if isinstance(value, list) else [value]
        kinds = _kinds(cls.model_fields[info.field_name or ""].annotation)
        if any(isinstance(one, bool) for one in given) and bool not in kinds and kinds & {int, float}:
            raise ValueError("must be a number, not true or false")
        return value


def _kinds(annotation: Any) -> set[Any]:
    """Return the types that an annotation is made of."""
    own = {annotation} if isinstance(annotation, type) else set()
    return own.union(*(_kinds(part) for part in get_args(annotation)))
