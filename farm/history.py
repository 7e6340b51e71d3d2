"""What a catalog knows of choices that earlier attempts made: those of the very problem, and what won nearby. Chooses nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from generator.spec import AttentionSpec
from generator.targets import find_target
from generator.tuning import Choice

COLUMNS = (
    "spec_hash", "tuning", "reason_code", "p50_s", "ratio_p50", "batch", "seqlen_q", "seqlen_k", "generation", "sequence", "isa",
    "translator_version", "harness_version", "device_key",
)  # fmt: skip


class Rows(Protocol):
    """What is asked here: something that gives rows as `catalog.store.Catalog.rows` does."""

    def rows(self, columns: Iterable[str] | None = None, filters: Any = None, *, history: bool = False) -> Any: ...


@dataclass(slots=True)
class History:
    """Rows of the rule author by family, asked once for each; what this sweep finds is added."""

    rows: Rows | None = None
    _families: dict[tuple[str, str], list[dict[str, Any]]] = field(default_factory=dict)

    def tried(self, spec: AttentionSpec, target: str, device_key: str | None, versions: tuple[str, str]) -> list[Choice]:
        """Choices of this very problem that these versions of translator and harness attempted for a device, in that order."""
        own = [r for r in self._of(spec, target) if r["spec_hash"] == spec.hash and not r["generation"]]
        own = [r for r in own if r["device_key"] == device_key]
        own = [r for r in own if (r["translator_version"], r["harness_version"]) == versions]
        return _once(r["tuning"] for r in sorted(own, key=lambda r: r["sequence"]))

    def promising(self, spec: AttentionSpec, target: str, device_key: str | None) -> list[Choice]:
        """Choices that were verified and timed for the family: on this device, of the nearest shape, the fastest first."""
        timed = [r for r in self._of(spec, target) if r["reason_code"] == "ok" and r["p50_s"]]

        def rank(row: dict[str, Any]) -> tuple[Any, ...]:
            return row["device_key"] != device_key, _distance(spec, row), -(row["ratio_p50"] or 0.0), row["p50_s"]

        return _once(row["tuning"] for row in sorted(timed, key=rank))

    def add(
        self,
        spec: AttentionSpec,
        target: str,
        device_key: str | None,
        choice: Choice,
        row: dict[str, Any],
        versions: tuple[str, str],
    ) -> None:
        """An attempt of this sweep's first rung."""
        known = {name: row.get(name) for name in ("reason_code", "p50_s", "ratio_p50")}
        shape = {name: getattr(spec, name) for name in ("batch", "seqlen_q", "seqlen_k")}
        own = self._of(spec, target)
        own.append(
            {**known, **shape, "spec_hash": spec.hash, "tuning": dict(choice), "sequence": 1 << 62, "generation": 0,
             "device_key": device_key,
             "translator_version": versions[0], "harness_version": versions[1]}
        )  # fmt: skip

    def _of(self, spec: AttentionSpec, target: str) -> list[dict[str, Any]]:
        key = (spec.family_hash, target)
        if key not in self._families:
            self._families[key] = self._read(spec, target) if self.rows is not None else []
        return self._families[key]

    def _read(self, spec: AttentionSpec, target: str) -> list[dict[str, Any]]:
        assert self.rows is not None
        sheet = find_target(target)
        where = {"family_hash": spec.family_hash, "target": sheet.name, "author_mode": "rules"}
        found = [row for row in self.rows.rows(COLUMNS, where).to_pylist() if row["tuning"]]
        if sheet.family == "cpu":  # one name, several instruction sets
            found = [row for row in found if sheet.isa in (row["isa"] or ())]
        return [row | {"tuning": json.loads(row["tuning"])} for row in found]


def _distance(spec: AttentionSpec, row: dict[str, Any]) -> float:
    """Between two shapes, in doublings of their lengths and of the batch."""
    names = ("batch", "seqlen_q", "seqlen_k")
    return sum(abs(math.log2(max(1, getattr(spec, n))) - math.log2(max(1, row[n] or 1))) for n in names)


def _once(choices: Iterable[Choice]) -> list[Choice]:
    found: dict[str, Choice] = {}
    for choice in choices:
        found.setdefault(json.dumps(choice, sort_keys=True), choice)
    return list(found.values())
