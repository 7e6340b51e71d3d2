"""What a catalog knows of choices that earlier attempts made: those of the very problem, and what won nearby. Chooses nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from generator.spec import AttentionSpec
from generator.targets import find_target
from generator.tuning import Choice

COLUMNS = (
    "spec_hash", "tuning", "reason_code", "p50_s", "ratio_p50", "batch", "seqlen_q", "seqlen_k", "generation", "sequence", "isa",
    "translator_version", "harness_version", "device_key",
)  # fmt: skip
_SHAPE = ("batch", "seqlen_q", "seqlen_k")


class Rows(Protocol):
    """What is asked here: something that gives rows as `catalog.store.Catalog.rows` does."""

    def rows(self, columns: Iterable[str] | None = None, filters: Any = None, *, history: bool = False) -> Any: ...


@dataclass(slots=True)
class _Problem:
    """The rows of one spec, in the order written."""

    shape: tuple[int, ...]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def winners(self, device_key: str | None, elsewhere: bool) -> list[Choice]:
        """Choices that were verified and timed, the fastest first: on this device, or on others."""
        timed = [r for r in self.rows if r["reason_code"] == "ok" and r["p50_s"] and (r["device_key"] != device_key) is elsewhere]
        return [r["tuning"] for r in sorted(timed, key=lambda r: (-(r["ratio_p50"] or 0.0), r["p50_s"]))]

    def distance(self, spec: AttentionSpec) -> float:
        """To another shape, in doublings of the lengths and of the batch."""
        return sum(
            abs(math.log2(max(1, getattr(spec, n))) - math.log2(max(1, m))) for n, m in zip(_SHAPE, self.shape, strict=True)
        )


@dataclass(slots=True)
class History:
    """Rows of the rule author by family, read once for each; what this sweep finds is added."""

    rows: Rows | None = None
    _families: dict[tuple[str, str], dict[str, _Problem]] = field(default_factory=dict)

    def tried(self, spec: AttentionSpec, target: str, device_key: str | None, versions: tuple[str, str]) -> list[Choice]:
        """Choices of this very problem that these versions of translator and harness attempted for a device, in that order."""
        problem = self._of(spec, target).get(spec.hash)
        own = [r for r in problem.rows if not r["generation"] and r["device_key"] == device_key] if problem else []
        return list(_once(r["tuning"] for r in own if (r["translator_version"], r["harness_version"]) == versions))

    def promising(self, spec: AttentionSpec, target: str, device_key: str | None, limit: int) -> list[Choice]:
        """The first `limit` choices that were verified and timed for the family: on this device before others, of the nearest
        shape, the fastest first.
        """
        near = sorted(self._of(spec, target).values(), key=lambda problem: problem.distance(spec))
        found = _once(c for elsewhere in (False, True) for problem in near for c in problem.winners(device_key, elsewhere))
        return list(islice(found, limit))

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
        known |= {"translator_version": versions[0], "harness_version": versions[1], "device_key": device_key}
        self._problem(self._of(spec, target), spec.hash, [getattr(spec, n) for n in _SHAPE]).rows.append(
            {**known, "tuning": dict(choice), "generation": 0}
        )

    def _of(self, spec: AttentionSpec, target: str) -> dict[str, _Problem]:
        key = (spec.family_hash, target)
        if key not in self._families:
            self._families[key] = self._read(spec, target) if self.rows is not None else {}
        return self._families[key]

    def _read(self, spec: AttentionSpec, target: str) -> dict[str, _Problem]:
        assert self.rows is not None
        sheet = find_target(target)
        where = {"family_hash": spec.family_hash, "target": sheet.name, "author_mode": "rules"}
        found = [row for row in self.rows.rows(COLUMNS, where).to_pylist() if row["tuning"]]
        if sheet.family == "cpu":  # one name, several instruction sets
            found = [row for row in found if sheet.isa in (row["isa"] or ())]
        problems: dict[str, _Problem] = {}
        for row in sorted(found, key=lambda row: row["sequence"]):
            shape = [row[n] or 1 for n in _SHAPE]
            self._problem(problems, row["spec_hash"], shape).rows.append(row | {"tuning": json.loads(row["tuning"])})
        return problems

    @staticmethod
    def _problem(problems: dict[str, _Problem], spec_hash: str, shape: Iterable[int]) -> _Problem:
        return problems.setdefault(spec_hash, _Problem(tuple(shape)))


def _once(choices: Iterable[Choice]) -> Iterator[Choice]:
    seen = set()
    for choice in choices:
        if (text := json.dumps(choice, sort_keys=True)) not in seen:
            seen.add(text)
            yield choice
