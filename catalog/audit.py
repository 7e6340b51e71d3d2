"""Checking a catalog from end to end: every byte of every part and artifact, sums of rows, leftovers. Mends nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from catalog import journal, marks
from catalog.compaction import leftovers
from catalog.errors import CatalogError
from catalog.housekeeping import referenced_artifacts
from catalog.part_files import Part
from catalog.parts import PartName
from catalog.snapshot import ROWS, Snapshot

if TYPE_CHECKING:
    from catalog.store import Catalog


@dataclass(frozen=True, slots=True)
class Audit:
    """errors: damage, and sums that are wrong. notes: what is worth knowing. counts: what was looked at."""

    errors: tuple[str, ...]
    notes: tuple[str, ...]
    counts: dict[str, int]

    @property
    def is_clean(self) -> bool:
        return not self.errors


def verify(catalog: Catalog, *, artifacts: bool = True) -> Audit:
    """Reads everything once. artifacts: hash those too, not just the rows' parts."""
    errors: list[str] = []
    try:
        taken = catalog.snapshot()
    except CatalogError as error:
        return Audit((str(error),), (), {})
    counts = {"parts": 0, "rows": 0, "journals": len(taken.journals), "artifacts": 0}
    sound = _check_parts(catalog, taken, errors, counts)
    _check_journals(taken, errors)
    if not sound:
        return Audit(tuple(errors), ("sums and artifacts were not checked: rows are missing",), counts)
    notes = _check_rows(catalog, errors, counts)
    if artifacts:
        _check_artifacts(catalog, errors, counts)
    if left := leftovers(catalog.location, taken):
        notes.append(f"{len(left)} files under {ROWS}/ were left by a killed compaction; `farm catalog gc` deletes them")
    return Audit(tuple(errors), tuple(notes), counts)


def _check_parts(catalog: Catalog, taken: Snapshot, errors: list[str], counts: dict[str, int]) -> bool:
    sound = True
    for name, size in (*taken.loose, *taken.compacted, *taken.history):
        try:
            Part(catalog.location, f"{ROWS}/{name}", name, size).check()
            counts["parts"] += 1
        except CatalogError as error:
            errors.append(str(error))
            sound = False
        except FileNotFoundError:
            continue  # compacted meanwhile
    for entry in catalog.location.files(ROWS):
        if entry.name.endswith(".parquet") and PartName.parse(entry.name) is None:
            errors.append(f"{catalog.location.at(ROWS)}/{entry.name}: no part of ours, by its name; move it elsewhere")
    return sound


def _check_journals(taken: Snapshot, errors: list[str]) -> None:
    for path, _ in taken.journals:
        try:
            held = journal.read(path)
        except FileNotFoundError:
            continue  # sealed meanwhile
        except CatalogError as error:
            errors.append(str(error))
            continue
        if held.damaged:
            errors.append(f"{path}: {held.damaged} lines are not what was written; the other {len(held.rows)} rows are whole")
    for folder in {path.parent for path, _ in taken.journals}:
        errors.extend(
            f"{path}: what could not be read of a damaged journal; look at it, then delete it"
            for path in folder.glob("*.damaged")
        )


def _check_rows(catalog: Catalog, errors: list[str], counts: dict[str, int]) -> list[str]:
    """Every planned attempt has one terminal row; no key counts twice."""
    view = catalog.strict_view()
    columns = ["attempt_key", "row_id", "run_id", "reason_code"]
    current, everything = view.rows(columns), view.rows(columns, history=True)
    counts["rows"] = current.num_rows
    if (doubled := current.num_rows - pc.count_distinct(current["attempt_key"]).as_py()) > 0:
        errors.append(f"{doubled} attempts have more than one row that counts")
    reasons = current.group_by("reason_code").aggregate([([], "count_all")]).sort_by("reason_code").to_pylist()
    notes = [f"{row['reason_code']}: {row['count_all']}" for row in reasons]
    if superseded := everything.num_rows - current.num_rows:
        notes.append(f"{superseded} superseded attempts are kept as history")
    if fenced := view.resolved.fenced:
        notes.append(f"{fenced} rows of superseded runs are dropped")
    ended = everything.group_by("run_id").aggregate([("row_id", "count_distinct")]).to_pylist()  # each try is a row
    rows_of = {row["run_id"]: row["row_id_count_distinct"] for row in ended}
    fenced_runs = {fence.run_id for fence in view.snapshot.fences}  # of these, readers drop rows on purpose
    try:
        runs = marks.read_all(catalog.location, marks.RUNS, marks.RunRecord)
    except CatalogError as error:
        errors.append(f"{error} (the sums of no run were checked)")
        runs = ()
    for run in runs:
        if run.run_id in fenced_runs:
            continue
        if (found := rows_of.get(run.run_id, 0)) != run.planned - run.cached:
            expected = f"{run.planned} planned - {run.cached} known before = {run.planned - run.cached}"
            errors.append(f"run {run.run_id}: {found} tries ended, expected {expected}")
    return notes


def _check_artifacts(catalog: Catalog, errors: list[str], counts: dict[str, int]) -> None:
    held = {entry.name for entry in catalog.artifacts.entries()}
    for name in sorted(held):
        try:
            catalog.artifacts.get(name)
            counts["artifacts"] += 1
        except CatalogError as error:
            errors.append(str(error))
    missing = sorted(referenced_artifacts(catalog) - held)
    if missing:
        errors.append(f"{len(missing)} artifacts that rows name are missing, the first of them {missing[0]}")


def stale_rows(catalog: Catalog, *, translator_version: str, harness_version: str, filters: Any = None) -> list[dict[str, Any]]:
    """Verified rows that an older translator, harness or tolerance rule accepted: what `verify --again` has to run once more.

    Each has its id, attempt key and number, spec, target, device key, program and both versions.
    """
    columns = [
        "row_id",
        "attempt_key",
        "attempt_no",
        "target",
        "device_key",
        "spec",
        "program_hash",
        "translator_version",
        "harness_version",
    ]
    rows = catalog.rows([*columns, "status", "revoked_at"], filters).to_pylist()
    current = (translator_version, harness_version)
    return [
        {name: row[name] for name in columns}
        for row in rows
        if row["status"] == "ok" and row["revoked_at"] is None and (row["translator_version"], row["harness_version"]) != current
    ]
