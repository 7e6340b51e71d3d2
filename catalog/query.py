"""Questions beyond a plain selection: the best row of a problem, what a rerun need not do again, SQL. Writes nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from catalog import choice
from catalog.errors import CatalogError, QueryError
from catalog.keys import ShapeBucket
from catalog.schema import COLUMNS
from generator.spec import AttentionSpec
from verifier.records import REASONS


class Rows(Protocol):
    """What is asked here: something that gives rows as `catalog.store.Catalog.rows` does."""

    def rows(self, columns: Iterable[str] | None = None, filters: Any = None, *, history: bool = False) -> pa.Table: ...


def best(
    catalog: Rows, spec: AttentionSpec | str, *, device_key: str | None = None, incumbent: str | None = None
) -> dict[str, Any] | None:
    """The whole row of the best kernel for a problem on one device; None where there is none.

    spec: an AttentionSpec, or the hash of a spec or family. Rows of the very spec come first; for an AttentionSpec without any,
    rows of its family and shape bucket are looked at, and the best of the largest problem among them is given. device_key: may be
    left out where only one device has rows. incumbent: id of the row that wins ties. Raises QueryError.
    """
    where: dict[str, Any] = {"status": "ok"} if device_key is None else {"status": "ok", "device_key": device_key}
    rankable = [row for row in _rows_for(catalog, spec, where) if choice.unrankable(row) is None]
    if len(devices := {row["device_key"] for row in rankable}) > 1:
        some = ", ".join(sorted(key[:12] for key in devices))
        raise QueryError(f"device_key: {len(devices)} devices have such rows; name one of {some}")
    if not rankable:
        return None
    largest = max(rankable, key=lambda r: (r["batch"] * r["num_heads"] * r["seqlen_q"] * r["seqlen_k"], r["spec_hash"]))
    made = choice.choose([row for row in rankable if row["spec_hash"] == largest["spec_hash"]], incumbent)
    assert made is not None
    whole = {name: made.row[name] for name in ("row_id", "sequence", "device_key", "family_hash")}  # all but the first prune
    row: dict[str, Any] = catalog.rows(None, whole).to_pylist()[0]
    return row


def _rows_for(catalog: Rows, spec: AttentionSpec | str, where: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the very spec, else of its family (for an AttentionSpec: in its shape bucket)."""
    columns = (*choice.COLUMNS, "num_heads", "batch", "seqlen_q", "seqlen_k")
    if isinstance(spec, str):
        table = catalog.rows(columns, {**where, "spec_hash": spec})
        table = table if table.num_rows else catalog.rows(columns, {**where, "family_hash": spec})
    else:
        family = catalog.rows(columns, {**where, "family_hash": spec.family_hash})
        table = family.filter(pc.equal(family["spec_hash"], spec.hash))
        table = table if table.num_rows else family.filter(pc.equal(family["shape_bucket"], str(ShapeBucket.of_spec(spec))))
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def best_of_each(catalog: Rows, filters: Any = None, columns: Iterable[str] = ()) -> list[choice.Choice]:
    """The choice of every device and problem among the rows that satisfy the filters."""
    needed = list(dict.fromkeys([*choice.COLUMNS, *columns]))
    return list(choice.choose_each(catalog.rows(needed, filters)).values())


RESUME_COLUMNS = ("attempt_key", "attempt_no", "reason_code")


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt ended so far: the number of its last try, the reason, and whether trying again could end otherwise."""

    attempt_no: int
    reason_code: str

    @property
    def is_final(self) -> bool:
        return REASONS[self.reason_code] == "final"


class Resume:
    """All attempts that ended, as of one moment: 22 bytes each, so that a million fit, and a plan can be streamed past it.

    table: RESUME_COLUMNS of the rows that count.
    """

    def __init__(self, table: pa.Table) -> None:
        keys = _digests(table["attempt_key"])
        order = np.argsort(keys[:, 0], kind="stable")
        self._high, self._low = keys[order, 0].copy(), keys[order, 1].copy()
        self._attempt_no = table["attempt_no"].to_numpy()[order].astype(np.int32)
        encoded = table["reason_code"].combine_chunks().dictionary_encode()
        self._reasons = encoded.dictionary.to_pylist()
        self._reason = encoded.indices.to_numpy()[order].astype(np.int16)

    def __len__(self) -> int:
        return len(self._high)

    def get(self, attempt_key: str) -> Ended | None:
        """How this attempt ended; None when it has no row."""
        high, low = int(attempt_key[:16], 16), int(attempt_key[16:32], 16)
        at = int(np.searchsorted(self._high, np.uint64(high)))
        while at < len(self._high) and self._high[at] == high:
            if self._low[at] == low:
                return Ended(int(self._attempt_no[at]), self._reasons[self._reason[at]])
            at += 1
        return None

    def finished(self, attempt_keys: Iterable[str], max_attempts: int = 3) -> dict[str, Ended]:
        """Those that need no more work: final endings, and transient ones that were tried `max_attempts` times."""
        ended = ((key, self.get(key)) for key in attempt_keys)
        return {key: e for key, e in ended if e is not None and (e.is_final or e.attempt_no >= max_attempts)}


def _digests(keys: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    """Hashes as rows of four 64-bit numbers."""
    data = bytes.fromhex("".join(keys.to_pylist()))
    return np.frombuffer(data, dtype=">u8").reshape(-1, 4).astype(np.uint64)


_TABLES = {"rows": False, "attempts": True}
_COLUMNS_TOLD = "; docs/catalog.md tells the columns (tables show spec_name as model, p50_s as ms)"
#: An answer is held in memory.
MOST_ROWS = 10_000_000


def sql(catalog: Rows, text: str) -> pa.Table:
    """The answer to a query in DuckDB's SQL over the tables `rows` (the latest attempt of each key) and `attempts` (all of them).

    Only columns that the text mentions are read. Needs the extra `sql`. It reads this catalog and no file. Raises QueryError.
    """
    try:
        import duckdb
    except ImportError:
        raise CatalogError("farm catalog sql: needs DuckDB; pip install 'kernel-farm[sql]'") from None
    columns = _columns_in(text)
    try:
        try:
            return _run_sql(duckdb, catalog, text, columns)
        except duckdb.BinderException:  # it may name a column in a way that we did not see
            return _run_sql(duckdb, catalog, text, list(COLUMNS))
    except duckdb.Error as error:
        said = [line for line in str(error).splitlines() if line.strip()]
        near = [line for line in said[1:] if line.startswith("Candidate bindings")]
        raise QueryError(f"sql: {' '.join(said[:1] + near)}{_COLUMNS_TOLD if near else ''}") from None


def _columns_in(text: str) -> list[str]:
    words = set(re.findall(r"\w+", text.lower()))
    counted = re.sub(r"count\s*\(\s*\*\s*\)", "", text.lower())
    if "*" in counted or "columns" in words or "select" not in words:
        return list(COLUMNS)
    return [name for name in COLUMNS if name in words] or ["row_id"]


def _run_sql(duckdb: Any, catalog: Rows, text: str, columns: list[str]) -> pa.Table:
    connection = duckdb.connect(config={"enable_external_access": "false"})
    try:
        for name, history in _TABLES.items():
            if re.search(rf"\b{name}\b", text, re.IGNORECASE):
                connection.register(name, catalog.rows(columns, history=history))
        result = connection.sql(text)
        if result is None:
            raise QueryError("sql: expected a query that gives rows")
        table = result.limit(MOST_ROWS + 1).to_arrow_table()
        if table.num_rows > MOST_ROWS:
            raise QueryError(
                f"sql: expected an answer of at most {MOST_ROWS} rows, found more; add a limit, or count them in SQL"
            )
        return table
    finally:
        connection.close()
