"""Attempts that ended in earlier starts, as far as a sweep looks at them. Writes nothing, and knows no job."""

from __future__ import annotations

from catalog.store import Catalog
from farm.jobs import Row

#: What is kept in memory of each.
KNOWN_COLUMNS = (
    "row_id", "attempt_key", "attempt_no", "reason_code", "message", "p50_s", "baseline_name", "baseline_p50_s", "ratio_p50",
    "ratio_low", "ratio_high", "generation", "author_mode", "compile_s", "verify_s", "measure_s", "again_s", "spill_bytes",
)  # fmt: skip


class KnownRows:
    """By their key. more: columns besides those that every sweep needs."""

    def __init__(self, opened: Catalog, more: tuple[str, ...] = ()) -> None:
        self._table = opened.rows((*KNOWN_COLUMNS, *more))
        keys = self._table.column("attempt_key").to_pylist()
        self._index = {bytes.fromhex(key): i for i, key in enumerate(keys)}

    def get(self, key: str) -> Row | None:
        index = self._index.get(bytes.fromhex(key))
        return None if index is None else self._table.slice(index, 1).to_pylist()[0]
