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


#: Words are told whole up to this length: longer ones, such as a mask with its parameters, may be broken.
WHOLE_WORD = 16


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on a terminal, and one that greps well elsewhere. Numbers stand to the right."""
    right = [all(_is_number(row[i]) for row in rows) for i in range(len(titles))]
    if sys.stdout.isatty():
        _print_on_terminal(titles, rows, right)
        return
    widths = [max(len(titles[i]), *(len(row[i]) for row in rows)) for i in range(len(titles))]
    for row in (titles, *rows):
        cells = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        print("  ".join(cells).rstrip())


def _print_on_terminal(titles: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> None:
    """With lines where that leaves every word whole, else with spaces, else a line for each cell."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    columns = [[title, *(row[i] for row in rows)] for i, title in enumerate(titles)]
    lines, spaces = console.width - 3 * len(columns) - 1, console.width - len(columns) + 1
    if widths := _widths(columns, lines):
        table = Table()
    elif widths := _widths(columns, spaces):
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    else:
        for row in rows:
            print("\n".join(f"{title}: {cell}" for title, cell in zip(titles, row, strict=True)), end="\n\n")
        return
    for title, to_right, width in zip(titles, right, widths, strict=True):
        table.add_column(title, justify="right" if to_right else "left", overflow="fold", width=width)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _widths(columns: Sequence[Sequence[str]], room: int) -> list[int]:
    """Characters of each column (its title first), together at most `room`; none where words do not fit. What is left goes to the
    column that lacks most for telling its cells on one line.
    """
    found = [max((min(len(word), WHOLE_WORD) for text in column for word in text.split()), default=1) for column in columns]
    if sum(found) > room:
        return []
    lacks = [max(0, *(len(cell) - width for cell in column[1:])) for column, width in zip(columns, found, strict=True)]
    for _ in range(min(room - sum(found), sum(lacks))):
        most = lacks.index(max(lacks))
        lacks[most] -= 1
        found[most] += 1
    return found


def _is_number(text: str) -> bool:
    return text.rstrip("x%").replace(".", "", 1).replace("-", "", 1).isdigit() or text == "-"
