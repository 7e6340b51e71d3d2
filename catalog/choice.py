"""Which of several verified rows of one problem on one device is the best: by intervals, ties settled alike everywhere.

Ranks rows that were measured; whether a kernel may serve a call is the loader's question. Rows of different devices never meet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from catalog.errors import QueryError

Row = Mapping[str, Any]

#: Columns that a choice reads.
COLUMNS = (
    "row_id", "run_id", "sequence", "status", "device_key", "spec_hash", "family_hash", "shape_bucket",
    "program_hash", "binary_hash", "p50_s", "p20_s", "p80_s", "ci_low_s", "ci_high_s", "throttle_flags", "plausible",
    "revoked_at",
)  # fmt: skip
#: Medians further apart than this are no tie, however wide their intervals.
TIE = 0.03


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen row, the rows it tied with (itself left out), and one sentence on what decided."""

    row: Row
    ties: tuple[Row, ...]
    why: str


def unrankable(row: Row) -> str | None:
    """Why a row takes no part in a ranking; None when it does."""
    if row["status"] != "ok":
        return "not verified"
    if row["revoked_at"] is not None:
        return "revoked"
    if not row["p50_s"] or not math.isfinite(row["p50_s"]):
        return "not measured"
    if row["plausible"] is False:
        return "faster than the device can be"
    return "measured while the device was throttled" if row["throttle_flags"] else None


def interval(row: Row) -> tuple[float, float]:
    """The median's confidence interval, else the quantiles around it, else the median, in seconds."""
    for low, high in (("ci_low_s", "ci_high_s"), ("p20_s", "p80_s")):
        if row[low] is not None and row[high] is not None:
            return row[low], row[high]
    return row["p50_s"], row["p50_s"]


def choose(rows: Iterable[Row], incumbent: str | None = None) -> Choice | None:
    """The best of rows of one problem on one device; None where none can be ranked.

    The fastest median leads. Rows whose interval reaches the leader's, and whose median is within TIE of it, tie. Of these the
    incumbent (a row id) stays; else the row of the earliest run, so that a later sweep does not change a choice without a reason;
    else the smallest hash of program and binary, so that two sweeps of one plan choose alike. Raises QueryError for rows
    of several devices or problems.
    """
    ranked = [row for row in rows if unrankable(row) is None]
    if not ranked:
        return None
    if len({(row["device_key"], row["spec_hash"]) for row in ranked}) > 1:
        raise QueryError("best: rows of several devices or problems cannot be ranked against each other")
    leader = min(ranked, key=lambda row: (row["p50_s"], _content(row)))
    reach = interval(leader)[1]
    tied = [r for r in ranked if r is leader or (interval(r)[0] <= reach and r["p50_s"] <= leader["p50_s"] * (1 + TIE))]
    runs = _ages_of_runs(tied)
    chosen = min(tied, key=lambda row: (row["row_id"] != incumbent, runs[row["run_id"]], _content(row)))
    why = "the fastest" if len(tied) == 1 else _what_decided(chosen, tied, incumbent)
    return Choice(chosen, tuple(row for row in tied if row is not chosen), why)


def contenders(table: pa.Table) -> pa.Table:
    """The rows that could be chosen or tie, of a table with COLUMNS: of a million rows, the few that matter."""
    flags = pc.fill_null(pc.list_value_length(table["throttle_flags"]), 0)
    sound = pc.and_(pc.is_null(table["revoked_at"]), pc.and_(pc.equal(flags, 0), pc.fill_null(table["plausible"], True)))
    measured = pc.and_(pc.is_finite(table["p50_s"]), pc.greater(table["p50_s"], 0))
    table = table.filter(pc.and_(pc.equal(table["status"], "ok"), pc.and_(sound, pc.fill_null(measured, False))))
    pair = ["device_key", "spec_hash"]
    fastest = table.group_by(pair).aggregate([("p50_s", "min")])
    numbered = table.select([*pair, "p50_s"]).append_column("at", pa.array(range(table.num_rows), pa.int64()))
    joined = numbered.join(fastest, pair)
    near = joined.filter(pc.less_equal(joined["p50_s"], pc.multiply(joined["p50_s_min"], 1 + TIE)))
    return table.take(near["at"].combine_chunks().sort())


def _content(row: Row) -> tuple[str, str, str]:
    return row["program_hash"] or "", row["binary_hash"] or "", row["row_id"]


def _ages_of_runs(rows: Sequence[Row]) -> dict[str, int]:
    ages: dict[str, int] = {}
    for row in rows:
        ages[row["run_id"]] = min(row["sequence"], ages.get(row["run_id"], row["sequence"]))
    return ages


def _what_decided(chosen: Row, tied: Sequence[Row], incumbent: str | None) -> str:
    if chosen["row_id"] == incumbent:
        return f"the incumbent of {len(tied)} that tie"
    if len({row["run_id"] for row in tied}) > 1:
        return f"of the earliest run among {len(tied)} that tie"
    return f"first by content hash among {len(tied)} that tie"


def choose_each(table: pa.Table, incumbents: Mapping[tuple[str, str], str] | None = None) -> dict[tuple[str, str], Choice]:
    """The choice of every (device key, spec hash) that has one, in sorted order. incumbents: row ids by the same pairs."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in contenders(table).to_pylist():
        groups.setdefault((row["device_key"], row["spec_hash"]), []).append(row)
    made = {pair: choose(group, (incumbents or {}).get(pair)) for pair, group in sorted(groups.items())}
    return {pair: choice for pair, choice in made.items() if choice is not None}
