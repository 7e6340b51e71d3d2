"""How rows, choices and reports of a catalog look on a terminal, in a pipe and as JSON. Asks and decides nothing."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from catalog.schema import ARTIFACT_COLUMNS, GROUPS, STATUSES
from farm.tables import print_table
from generator.spec import spec_from_plain

if TYPE_CHECKING:
    from catalog.audit import Audit
    from catalog.choice import Choice
    from catalog.difference import Change
    from catalog.lockfile import Repinned
    from catalog.store import Catalog

#: What `list` shows.
LISTED = ("row_id", "reason_code", "target", "spec", "author", "p50_s", "baseline_name", "ratio_p50", "created_at")
#: What `best` shows beside what a choice reads.
BEST = ("spec", "spec_name", "device_name", "target", "author", "baseline_name", "ratio_p50", "ratio_low", "ratio_high")
STALE = ("row_id", "target", "spec", "translator_version", "harness_version")
_TITLES = {
    "row_id": "row", "reason_code": "verdict", "spec": "problem", "p50_s": "ms", "baseline_name": "rival", "ratio_p50": "ratio",
    "created_at": "ended (UTC)", "spec_name": "model", "device_name": "device",
}  # fmt: skip
_IDS = 8  # digits of an id or hash that people see


def say(text: str) -> None:
    print(text)


def warn_all(texts: Iterable[str]) -> None:
    for text in texts:
        print(f"farm: {text}", file=sys.stderr)


def as_json_text(value: Any) -> str:
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, dt.datetime):
        return value.isoformat()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)


def print_record(record: Any, sentence: str, as_json: bool) -> None:
    """A report: one sentence for people, all fields for scripts."""
    print(as_json_text(record) if as_json else sentence)


def print_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], as_json: bool) -> None:
    if as_json:
        print(as_json_text(list(rows)))
    elif rows:
        print_table([_TITLES.get(name, name) for name in columns], [[cell(name, row[name]) for name in columns] for row in rows])
    else:
        say("no rows")


def cell(name: str, value: Any) -> str:
    """A value as it stands in a table."""
    match value:
        case None:
            return "-"
        case str() if name == "spec":
            return describe_spec(value)
        case str() if name.endswith(("_hash", "_key")) or name in ("row_id", "parent_row_id"):
            return value[:_IDS]
        case float() if name == "p50_s":
            return f"{value * 1e3:.4f}"
        case float() if name.startswith("ratio"):
            return f"{value:.3f}x"
        case float():
            return f"{value:.6g}"
        case dt.datetime():
            return f"{value:%Y-%m-%d %H:%M:%S}"
        case list():
            return f"[{len(value)}]"
    return " ".join(str(value).split())


def describe_spec(text: str) -> str:
    try:
        return str(spec_from_plain(json.loads(text)))
    except (ValueError, KeyError, TypeError):  # of a later version
        return text


def print_row(held: Catalog, row: dict[str, Any], as_json: bool) -> None:
    """Every column that has a value, group by group; warnings first, artifacts last."""
    warnings, artifacts = warnings_of(held, row), {name: held.artifacts.path(row[name]) for name in artifacts_of(row)}
    if as_json:
        print(as_json_text({**row, "warnings": warnings, "artifacts": artifacts}))
        return
    print(f"row {row['row_id']}: {row['reason_code']}" + (f" ({row['message']})" if row["message"] else ""))
    print(describe_spec(row["spec"]) + (f"  [{row['spec_name']}]" if row["spec_name"] else ""))
    for warning in warnings:
        print(f"warning: {warning}")
    for group, names in GROUPS.items():
        lines = [(name, value) for name in names if (value := _shown(name, row[name])) is not None]
        if lines:
            print(f"\n{group}")
            for name, value in lines:
                print(f"  {name:24} {value}")
    print("\nartifacts")
    for name, path in artifacts.items():
        print(f"  {name.removesuffix('_hash'):24} {path}" + ("" if held.artifacts.exists(row[name]) else "  (missing)"))


def artifacts_of(row: Mapping[str, Any]) -> list[str]:
    """Columns that name an artifact of the row."""
    return [name for name in ARTIFACT_COLUMNS if row[name] is not None]


def _shown(name: str, value: Any) -> str | None:
    """A value in full, but for long lists; None for what is shown elsewhere or is not known."""
    if value is None or value == "" or name in ("row_id", "message", "spec"):
        return None
    match value:
        case dt.datetime():
            return value.isoformat()
        case float():
            return f"{value:.9g}"
        case list() if name == "samples_s" and value:
            return f"{len(value)} samples from {min(value):.6g} to {max(value):.6g}"
        case list() if name == "verified_shapes":
            return ", ".join(f"{s['batch']} x {s['seqlen_q']} x {s['seqlen_k']}" for s in value)
        case list() if name == "cases" and value:
            worst = max(value, key=lambda c: c["rms"] / c["limit_rms"] if c["limit_rms"] else 0.0)
            share = f"{worst['rms']:.3g} of {worst['limit_rms']:.3g} allowed"
            return f"{len(value)} inputs; nearest to its limit: {worst['input_name']}, rms {share}"
        case list():
            return ", ".join(map(str, value))
    return str(value)


def warnings_of(held: Catalog, row: Mapping[str, Any]) -> list[str]:
    """What a reader of this row has to know before relying on it."""
    said = []
    if row["revoked_at"] is not None:
        said.append(f"revoked on {row['revoked_at']:%Y-%m-%d}: {row['revoked_reason']}")
    if not held.count({"row_id": row["row_id"], "sequence": row["sequence"]}):
        said.append("superseded: a later attempt of the same work counts instead")
    assert row["status"] in STATUSES
    if row["status"] == "unverified":
        said.append("compiled for a device that was not there: nobody has verified it")
    said += json.loads(row["resources"] or "{}").get("warnings", ())  # of the compiler's report and the machine code
    if row["throttle_flags"]:
        said.append(f"the device was throttled while it was timed: {', '.join(row['throttle_flags'])}")
    if row["plausible"] is False:
        said.append("its time is below what the device can do")
    if row["log_truncated"]:
        said.append("its log was cut")
    said += [
        f"{name.removesuffix('_hash')}: the artifact is missing"
        for name in artifacts_of(row)
        if not held.artifacts.exists(row[name])
    ]
    return said


def print_choices(choices: Sequence[Choice], as_json: bool) -> None:
    if as_json:
        print(as_json_text([{**c.row, "why": c.why, "ties": [t["row_id"] for t in c.ties]} for c in choices]))
        return
    if not choices:
        say("no verified, measured kernel")
        return
    titles = ("device", "model", "problem", "row", "ms", "rival", "ratio", "why")
    print_table(titles, [_choice_cells(c) for c in choices])


def _choice_cells(choice: Choice) -> list[str]:
    row = choice.row
    device = f"{(row['device_name'] or row['target'])[:32]} {row['device_key'][:_IDS]}"
    names = ("spec", "row_id", "p50_s", "baseline_name", "ratio_p50")
    return [device, row["spec_name"] or "-", *(cell(name, row[name]) for name in names), choice.why]


def print_changes(changes: Sequence[Change], as_json: bool) -> None:
    if as_json:
        finite = [{**dataclasses.asdict(c), "change": c.change if c.after is not None else None} for c in changes]
        print(as_json_text(finite))
        return
    titles = ("verdict", "change", "before, ms", "after, ms", "model", "problem", "device", "before", "after")
    rows = [
        [
            c.verdict,
            f"{c.change:+.1%}" if c.before is not None and c.after is not None else "-",
            cell("p50_s", c.before),
            cell("p50_s", c.after),
            c.spec_name or "-",
            describe_spec(c.spec),
            c.device_key[:_IDS],
            cell("row_id", c.before_row),
            cell("row_id", c.after_row),
        ]
        for c in changes
    ]
    if rows:
        print_table(titles, rows)
    else:
        say("neither catalog has a verified, measured kernel")


def print_repinned(changes: Sequence[Repinned], num_pinned: int, path: Any, as_json: bool) -> None:
    if as_json:
        print(as_json_text({"pinned": num_pinned, "changes": changes, "path": path and str(path)}))
        return
    for change in changes:
        pin = change.after or change.before
        assert pin is not None
        old, new = (p.row_id[:_IDS] if p else "none" for p in (change.before, change.after))
        say(f"{pin.spec_name or pin.spec_hash[:_IDS]} on {pin.device_name or pin.device_key[:_IDS]}: {old} -> {new}")
    say(f"{num_pinned} choices, {len(changes)} changed" + (f"; written to {path}" if path else ""))


def print_audit(report: Audit, as_json: bool) -> None:
    if as_json:
        print(as_json_text({"clean": report.is_clean, **dataclasses.asdict(report)}))
        return
    for note in report.notes:
        say(note)
    for error in report.errors:
        say(f"WRONG: {error}")
    counted = ", ".join(f"{n} {what}" for what, n in report.counts.items())
    say(f"{'clean' if report.is_clean else f'{len(report.errors)} errors'}: {counted}")
