"""The explicit Arrow schema of a catalog row with its version, and `make_row`, which checks one row. Stores nothing."""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import pyarrow as pa

from catalog.columns import GROUPED_COLUMNS, Column
from catalog.keys import ShapeBucket, row_id
from generator.canonical import canonical_json, digest_text
from generator.spec import AttentionSpec, spec_from_plain
from verifier.records import REASONS

#: Raised with every change of the columns; UPGRADES in catalog/upgrade.py says how to read older parts.
SCHEMA_VERSION = 3

#: What a row says in one word. `failed`: the candidate is at fault. `not_run`: nobody is, and nothing was judged.
STATUSES = ("ok", "failed", "unverified", "not_run")

_NOT_RUN = {"lost_node", "missing_device", "budget_stopped", "not_run"}


class RowError(ValueError):
    """A row that the schema does not take: names the column, what was found and what is allowed."""


#: Name -> Column, in the order of the schema.
COLUMNS: dict[str, Column] = {column.name: column for _, column in GROUPED_COLUMNS}
#: Group -> names of its columns.
GROUPS: dict[str, tuple[str, ...]] = {
    group: tuple(column.name for g, column in GROUPED_COLUMNS if g == group)
    for group in dict.fromkeys(g for g, _ in GROUPED_COLUMNS)
}
SCHEMA = pa.schema(
    [pa.field(c.name, c.type) for c in COLUMNS.values()], metadata={b"kernel_farm_schema_version": str(SCHEMA_VERSION).encode()}
)
#: Columns whose value is the name of an artifact.
ARTIFACT_COLUMNS = tuple(c.name for c in COLUMNS.values() if c.about.startswith("artifact:"))

#: Columns of times.
TIME_COLUMNS = tuple(c.name for c in COLUMNS.values() if pa.types.is_timestamp(c.type))

#: Columns that every row has; the rest of them is filled in by `make_row` or by the writer.
REQUIRED = ("attempt_key", "reason_code", "spec", "target", "translator_version", "harness_version")
#: Columns without which a verified kernel could not be served.
REQUIRED_OK = ("device_key", "source_hash", "binary_hash", "launch", "rule_id", "verified_shapes")
#: Columns that only the writer, or a revocation, fills.
WRITER_COLUMNS = ("row_id", "run_id", "writer_id", "sequence", "schema_version", "revoked_at", "revoked_reason")

_HASH = re.compile(r"[0-9a-f]{64}")


def status_of(reason_code: str) -> str:
    """The status that follows from a reason of the closed list."""
    if reason_code in ("ok", "compiled_unverified"):
        return "ok" if reason_code == "ok" else "unverified"
    return "not_run" if reason_code in _NOT_RUN else "failed"


def spec_columns(spec: AttentionSpec) -> dict[str, Any]:
    """The specification columns of a spec, `spec` itself as canonical JSON."""
    flat = (
        "phase",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "head_dim_v",
        "head_layout",
        "batch",
        "seqlen_q",
        "seqlen_k",
        "dtype",
        "layout",
    )
    text = spec.to_json()
    return {
        "spec": text,
        "spec_hash": digest_text(text),  # as spec.hash
        "family_hash": spec.family_hash,
        "spec_name": spec.name,
        "op": "attention",
        "direction": "forward",
        "masks": " & ".join(map(str, spec.masks)),
        "scores": " | ".join(map(str, spec.scores)),
        "causal": any(rule.name.startswith("causal") for rule in spec.masks),
        "softmax_scale": spec.scale,
        "masked_row_rule": "output 0, lse -inf",
        "shape_bucket": str(ShapeBucket.of_spec(spec)),
        **{name: getattr(spec, name) for name in flat},
    }


def make_row(**columns: Any) -> dict[str, Any]:
    """One row with every column of the schema, checked; what is not known is None.

    `spec` may be an AttentionSpec or its JSON, and fills the specification columns. JSON columns take records and plain values as
    well as text. Columns of WRITER_COLUMNS are left to the writer. Raises RowError that names every wrong column at once.
    """
    given = {name: value for name, value in columns.items() if value is not None}
    problems = [_unknown(name) for name in columns if name not in COLUMNS]
    problems += [f"{name}: is filled in by the writer; leave it out" for name in given if name in WRITER_COLUMNS]
    problems += _fill_specification(given)
    problems += _fill_outcome(given)
    needed = REQUIRED + (REQUIRED_OK if given.get("reason_code") == "ok" else ())
    problems += [
        f"{name}: missing; a row with reason_code {given.get('reason_code')!r} needs it" for name in needed if name not in given
    ]
    given.setdefault("created_at", dt.datetime.now(dt.UTC))
    given.setdefault("attempt_no", 1)
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    for name in (n for n in given if n in COLUMNS):
        try:
            row[name] = _checked(COLUMNS[name], given[name])
        except RowError as error:
            problems.append(str(error))
    if problems:
        raise RowError("; ".join(problems))
    return row


def seal_row(row: Mapping[str, Any], *, run_id: str, writer_id: str, sequence: int) -> dict[str, Any]:
    """A checked row with the columns that its writer fills."""
    return {
        **row,
        "row_id": row_id(row["attempt_key"], row["attempt_no"], run_id),
        "run_id": run_id,
        "writer_id": writer_id,
        "sequence": sequence,
        "schema_version": SCHEMA_VERSION,
    }


def _unknown(name: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, COLUMNS, n=1)
    return f"{name}: no such column" + (f"; did you mean {close[0]}?" if close else "; catalog/schema.py lists them")


def _fill_specification(given: dict[str, Any]) -> list[str]:
    spec = given.get("spec")
    if spec is None:
        return []
    if not isinstance(spec, AttentionSpec):
        try:
            spec = spec_from_plain(json.loads(spec))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return [f"spec: expected an AttentionSpec or its JSON ({error})"]
    derived = spec_columns(spec)
    if not derived["spec_name"]:
        derived.pop("spec_name")
    problems = [
        f"{name}: expected {derived[name]!r}, which follows from spec, found {given[name]!r}"
        for name in derived
        if name not in ("spec", "spec_name") and name in given and given[name] != derived[name]
    ]
    given.update({name: value for name, value in derived.items() if name != "spec_name" or name not in given})
    return problems


def _fill_outcome(given: dict[str, Any]) -> list[str]:
    reason = given.get("reason_code")
    if reason is None:
        return []
    if reason not in REASONS:
        return [f"reason_code: expected one of {', '.join(REASONS)}, found {reason!r}"]
    if given.setdefault("status", status_of(reason)) != status_of(reason):
        return [f"status: expected {status_of(reason)!r}, which follows from reason_code {reason!r}, found {given['status']!r}"]
    return []


def _checked(column: Column, value: Any) -> Any:
    """The value as it is stored. Raises RowError."""
    if column.form == "json" and not isinstance(value, str):
        try:
            return canonical_json(value)
        except (TypeError, ValueError) as error:
            raise RowError(f"{column.name}: expected a value with a JSON form ({error})") from None
    simple = _SIMPLE.get(column.name)
    stored = _as_plain(column.name, simple, value) if simple else _as_type(column.name, column.type, value)
    match column.form:
        case "hash" if not _HASH.fullmatch(stored):
            raise RowError(f"{column.name}: expected 64 hex digits (a SHA-256), found {stored!r}")
        case "count" | "amount" if stored < 0:  # NaN is an error that a candidate may have
            raise RowError(f"{column.name}: expected a number of at least 0, found {stored!r}")
        case "json":
            _check_json(column.name, stored)
    return stored


def _check_json(name: str, text: str) -> None:
    try:
        json.loads(text)
    except ValueError as error:
        raise RowError(f"{name}: expected JSON text ({error})") from None


_Plain: TypeAlias = tuple[type, str, Callable[[Any], bool]]
#: Arrow's type -> Python's, the same in words, whether a value fits.
_PLAIN: dict[pa.DataType, _Plain] = {
    pa.string(): (str, "text", lambda v: isinstance(v, str)),
    pa.bool_(): (bool, "True or False", lambda v: isinstance(v, bool)),
    pa.int64(): (
        int,
        "a whole number of 64 bits",
        lambda v: isinstance(v, int) and not isinstance(v, bool) and -(1 << 63) <= v < 1 << 63,
    ),
    pa.float64(): (float, "a number", lambda v: isinstance(v, int | float) and not isinstance(v, bool)),
}
#: The same by a column's name, since Arrow compares its types slowly.
_SIMPLE = {column.name: _PLAIN[column.type] for column in COLUMNS.values() if column.type in _PLAIN}


def _as_plain(name: str, plain: _Plain, value: Any) -> Any:
    kind, words, fits = plain
    if not fits(value):
        raise RowError(f"{name}: expected {words}, found {value!r}")
    return float(value) if kind is float else value


def _as_type(name: str, type_: pa.DataType, value: Any) -> Any:
    """The value as the Arrow type's own Python form. Raises RowError for any other kind of value."""
    if type_ in _PLAIN:
        return _as_plain(name, _PLAIN[type_], value)
    if pa.types.is_timestamp(type_):
        return _utc(name, value)
    if pa.types.is_list(type_):
        if not isinstance(value, list | tuple):
            raise RowError(f"{name}: expected a list, found {value!r}")
        return [_as_type(f"{name}[{i}]", type_.value_type, v) for i, v in enumerate(value)]
    return _as_struct(name, type_, value)


def _utc(name: str, value: Any) -> dt.datetime:
    if not isinstance(value, dt.datetime):
        raise RowError(f"{name}: expected a datetime, found {value!r}")
    if value.utcoffset() is None:
        raise RowError(f"{name}: expected a datetime with a time zone, found {value.isoformat()}; use datetime.now(datetime.UTC)")
    return value.astimezone(dt.UTC)


def _as_struct(name: str, type_: pa.StructType, value: Any) -> dict[str, Any]:
    """A mapping, a record with these fields, or a tuple in their order, as a dict."""
    fields = {type_.field(i).name: type_.field(i).type for i in range(type_.num_fields)}
    if isinstance(value, tuple) and len(value) == len(fields):
        value = dict(zip(fields, value, strict=True))
    if not isinstance(value, Mapping):
        value = {f: getattr(value, f) for f in fields if hasattr(value, f)}
    if set(value) != set(fields):
        raise RowError(f"{name}: expected the fields {', '.join(fields)}, found {', '.join(map(str, value)) or 'none of them'}")
    return {f: _as_type(f"{name}.{f}", t, value[f]) for f, t in fields.items()}
