"""The advice as text: a table of networks, then what was measured, what was assumed, the reasons and the next command."""

from __future__ import annotations

from rich.table import Table

from eagle.bench.advise import Advice, Choice
from eagle.bench.text import plain


def render(advice: Advice, width: int = 140) -> str:
    """Return the table and the lines under it as plain text."""
    table = Table(title="predicted speed by network, the best K at each batch size", title_justify="left", show_edge=False)
    for head in ("layers", "width", "MLP", "step takes"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("acceptance")
    for batch in advice.options[0].best:
        table.add_column(f"batch {batch}", justify="right", no_wrap=True)
    for option in advice.options:
        cells = [str(option.layers), str(option.hidden_size), str(option.intermediate_size), f"{100 * option.cost_factor:.0f} %"]
        name = f"{option.acceptance_from}, this run" if option.current else option.acceptance_from
        table.add_row(*cells, name, *(_choice(choice) for choice in option.best.values()))
    lines = plain(table, width)
    for title, entries in (("measured", advice.measured), ("assumed", advice.assumed), ("why", advice.reasons)):
        lines += ["", f"{title}:", *(f"  - {entry}" for entry in entries)]
    return "\n".join([*lines, "", f"next: {advice.command}"]) + "\n"


def _choice(choice: Choice) -> str:
    if not choice.draft_tokens:
        return f"none: {choice.tokens_per_second:.1f} tokens/s"
    return f"K={choice.draft_tokens}: {choice.tokens_per_second:.1f} tokens/s, {choice.speedup:.2f}x"
