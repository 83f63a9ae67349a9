"""robustness.json as Markdown."""

from __future__ import annotations

from typing import Any

_TITLES = {"run": "this run", "compared": "compared with"}


def render(result: dict[str, Any]) -> str:
    """Return the report: what was measured, one table of all conditions, what was left out and why."""
    drafts = result["drafts"]
    lines = [
        "# Robustness of the draft",
        "",
        f"Acceptance length, the bonus token counted, of greedy decoding with K={result['draft_tokens']}, {result['dtype']}, at "
        f"most {result['max_new_tokens']} tokens an answer. Loss: against the condition named, with the 95 % interval of a "
        "bootstrap over prompts; negative means gained.",
        "",
        *(f"- {_TITLES[name]}: {_settings(about)}" for name, about in drafts.items()),
        "",
        _head(drafts),
        "|" + "---|" * _head(drafts).count("|", 1),
    ]
    measured = [row for row in result["conditions"] if not row["skipped"]]
    lines += [_row(row, list(drafts)) for row in measured]
    if result["worst"]:
        lines += ["", *(_worst(group, found) for group, found in result["worst"].items())]
    skipped = [row for row in result["conditions"] if row["skipped"]]
    if skipped:
        lines += ["", "Left out:", "", *(f"- {row['name']}: {row['skipped']}" for row in skipped)]
    return "\n".join(lines) + "\n"


def _settings(about: dict[str, Any]) -> str:
    flags = f"fc_norm {str(about['fc_norm']).lower()}, norm_output {str(about['norm_output']).lower()}"
    return f"{about['layers']} layers, width {about['hidden_size']}, {about['draft_vocab_size']} draft tokens, {flags}"


def _head(drafts: dict[str, Any]) -> str:
    cells = ["condition", "against", "prompts", "tokens"]
    for name in drafts:
        suffix = "" if name == "run" else ", compared"
        cells += [f"acceptance length{suffix}", f"by position{suffix}", f"loss{suffix}"]
    if len(drafts) > 1:
        cells.append("the compared draft accepts less by")
    return f"| {' | '.join(cells)} |"


def _row(row: dict[str, Any], names: list[str]) -> str:
    against = "" if row["against"] is None else row["against"] + ("" if row["paired"] else " (other prompts)")
    cells = [row["name"], against, str(row["prompts"]), f"{row['mean_prompt_tokens']:.0f}"]
    for name in names:
        found = row["measured"][name]
        positions = " ".join(f"{share:.2f}" for share in found["acceptance_by_position"])
        cells += [f"{found['acceptance_length']:.3f}", positions, _interval(found["loss"])]
    if len(names) > 1:
        cells.append(_interval(row["compared"]))
    return f"| {' | '.join(cells)} |"


def _interval(found: dict[str, float] | None) -> str:
    if found is None:
        return ""
    return f"{100 * found['value']:.1f} % [{100 * found['low']:.1f}, {100 * found['high']:.1f}]"


def _worst(group: str, found: dict[str, Any]) -> str:
    return f"- worst of {group}: {found['name']}, {_interval(found['loss'])}"
