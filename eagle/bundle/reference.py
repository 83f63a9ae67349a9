"""The reference that travels with a bundle, `acceptance.json`: how often vLLM accepted the draft when it was packed.

One row per prompt, because rounds of one answer are alike: how sure the mean is follows from the spread between
prompts, not from the number of rounds. The rows are the reference engine's (vLLM counts no prompt apart), the shares
vLLM's own. `eagle watch` compares live traffic with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eagle import manifest
from eagle.errors import BundleError

REFERENCE = "acceptance.json"
Count = Annotated[int, Field(ge=0)]


class PromptCounts(BaseModel):
    """Rounds of one prompt's answer, all of K draft tokens; `by_position[i]`: those whose token i was accepted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    drafts: Count
    by_position: tuple[Count, ...]


class Reference(BaseModel):
    """What acceptance.json holds: K, vLLM's shares by position (cumulative), and each prompt's counts."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: Literal[1] = 1
    draft_tokens: Annotated[int, Field(ge=1, le=64)]
    temperature: Annotated[float, Field(ge=0.0)]
    vllm_version: str
    acceptance_by_position: tuple[Annotated[float, Field(ge=0.0, le=1.0)], ...]
    prompts: tuple[PromptCounts, ...]

    @model_validator(mode="after")
    def _fits(self) -> Reference:
        rows = [self.acceptance_by_position, *(prompt.by_position for prompt in self.prompts)]
        if any(len(row) != self.draft_tokens for row in rows):
            raise ValueError(f"every row must have draft_tokens = {self.draft_tokens} positions")
        if any(b > a for row in rows for a, b in zip(row, row[1:], strict=False)):
            raise ValueError("acceptance must not rise from one position to the next")
        if any(prompt.by_position[0] > prompt.drafts for prompt in self.prompts):
            raise ValueError("more drafts accepted than made")
        return self

    @property
    def acceptance_length(self) -> float:
        """Tokens per round, the bonus token included."""
        return 1.0 + sum(self.acceptance_by_position)


def prompt_counts(kinds: Sequence[str], accepted: Sequence[Sequence[int]], draft_tokens: int) -> list[dict[str, Any]]:
    """Return the rows of the reference as JSON: kinds[i] of prompt i, accepted[i][r] draft tokens that its round r accepted."""
    return [
        PromptCounts(
            kind=kind, drafts=len(rounds), by_position=tuple(sum(n > at for n in rounds) for at in range(draft_tokens))
        ).model_dump(mode="json")
        for kind, rounds in zip(kinds, accepted, strict=True)
    ]


def write_reference(folder: Path, validation: dict[str, Any]) -> None:
    """Write acceptance.json into the bundle from the figures of `acceptance.validate_in_vllm`."""
    k = validation["draft_tokens"]
    shares = [*validation["acceptance_by_position"], *[0.0] * k][:k]
    content = Reference.model_validate(
        {
            "draft_tokens": k,
            "temperature": validation["temperature"],
            "vllm_version": validation["vllm_version"],
            "acceptance_by_position": shares,
            "prompts": validation["reference"]["by_prompt"],
        }
    )
    manifest.write_json(folder / REFERENCE, content.model_dump(mode="json"))


def read_reference(bundle: Path) -> Reference:
    """Return the reference of a bundle folder. BundleError when there is none, or it is not what this project writes."""
    path = bundle / REFERENCE
    try:
        return Reference.model_validate(manifest.read_json(path))
    except FileNotFoundError:
        if not (bundle / "config.json").is_file():
            raise BundleError(f"{bundle} is no bundle; give the folder that holds config.json") from None
        raise BundleError(
            f"{bundle}: no {REFERENCE}: packed without validation in vLLM, or by an older version; run: eagle step bundle"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "file"
        raise BundleError(f"{path}: {place}: {first['msg']}; run: eagle step bundle --force") from None
    except (OSError, ValueError) as error:
        raise BundleError(f"{path}: not readable ({error}); run: eagle step bundle --force") from None
