"""The closing table of a sweep, on a terminal or in a pipe. Computes nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farm.summary import Summary

COLUMNS = {
    "model": "model", "shape": "batch x heads x seqlen, head dim", "dtype": "dtype", "target": "target", "ours_ms": "ours, ms",
    "rival_ms": "rival, ms", "rival": "rival", "ratio": "ratio", "verdict": "verdict",
}  # fmt: skip


def print_summary(summary: Summary) -> None:
    """Table, counts, and the line of Python that loads the result."""
    rows = summary.plain()["best"]
    if rows:
        print_table([COLUMNS[c] for c in COLUMNS], [[_cell(c, row[c]) for c in COLUMNS] for row in rows])
    counts = summary.counts
    reasons = ", ".join(f"{n} {reason}" for reason, n in counts.by_reason.most_common()) or "nothing new"
    before = f"; {counts.known} had ended before" if counts.known else ""
    attempts = "1 attempt" if counts.planned == 1 else f"{counts.planned} attempts"
    print(f"\n{attempts} in {summary.wall_s:.0f} s: {reasons}{before}.")
    if summary.author:
        print(f"{summary.author}.")
    if summary.stop_reason:
        print(f"Not finished: {summary.stop_reason}. The same command goes on from here.")
    if summary.any_verified:
        print(f'\nLoad the result in Python:\n\n    import catalog; catalog.configure(catalog="{summary.catalog}")')
        print("    out = catalog.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)")


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if column == "ratio":
        return f"{value:.2f}x"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


#: Characters of a terminal for each column, lines between them included: with fewer, words fall to pieces.
NARROWEST = 8


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table with lines on a terminal, and one that greps well elsewhere. Numbers stand to the right. A terminal that is too
    narrow for a table gets a line for each cell.
    """
    right = [all(_is_number(row[i]) for row in rows) for i in range(len(titles))]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        console = Console()
        if console.width < NARROWEST * len(titles):
            for row in rows:
                print("\n".join(f"{title}: {cell}" for title, cell in zip(titles, row, strict=True)), end="\n\n")
            return
        table = Table(show_lines=False)
        for title, to_right in zip(titles, right, strict=True):
            table.add_column(title, justify="right" if to_right else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    widths = [max(len(titles[i]), *(len(row[i]) for row in rows)) for i in range(len(titles))]
    for row in (titles, *rows):
        cells = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        print("  ".join(cells).rstrip())


def _is_number(text: str) -> bool:
    return text.rstrip("x%").replace(".", "", 1).replace("-", "", 1).isdigit() or text == "-"
