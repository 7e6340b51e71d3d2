"""What changed from one catalog to another: the best kernel of each device and problem in both. Reads both, writes neither."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from catalog import query
from catalog.choice import Choice, interval
from catalog.errors import CatalogError

if TYPE_CHECKING:
    from catalog.store import Catalog

Verdict = Literal["faster", "slower", "same", "added", "removed"]
_SHOWN = ("spec", "spec_name", "device_name", "target", "dtype")


@dataclass(frozen=True, slots=True)
class Change:
    """One device and problem. before, after: medians in seconds, None where there is no kernel.

    change: after over before, minus 1; infinite when the kernel is gone. same: the intervals of both touch.
    """

    device_key: str
    spec_hash: str
    device_name: str
    spec: str
    spec_name: str
    before: float | None
    after: float | None
    before_row: str | None
    after_row: str | None
    verdict: Verdict

    @property
    def change(self) -> float:
        if self.before is None or self.after is None:
            return math.inf if self.after is None else -1.0
        return self.after / self.before - 1.0

    def regressed(self, limit: float) -> bool:
        """Whether it is slower by more than `limit` (0.05 is 5 %), beyond its noise, or gone."""
        return self.verdict in ("slower", "removed") and self.change > limit


def compare(before: Catalog, after: Catalog, filters: Any = None) -> list[Change]:
    """Every device and problem that either catalog has a kernel for, the worst change first."""
    a, b = (_by_pair(query.best_of_each(catalog, filters, _SHOWN)) for catalog in (before, after))
    changes = [_change(pair, a.get(pair), b.get(pair)) for pair in sorted(a.keys() | b.keys())]
    return sorted(changes, key=lambda c: (-c.change, c.device_key, c.spec_hash))


def _by_pair(choices: list[Choice]) -> dict[tuple[str, str], Choice]:
    return {(c.row["device_key"], c.row["spec_hash"]): c for c in choices}


def _change(pair: tuple[str, str], before: Choice | None, after: Choice | None) -> Change:
    shown = (after or before).row  # type: ignore[union-attr]
    return Change(
        *pair,
        shown["device_name"] or "",
        shown["spec"],
        shown["spec_name"] or "",
        before.row["p50_s"] if before else None,
        after.row["p50_s"] if after else None,
        before.row["row_id"] if before else None,
        after.row["row_id"] if after else None,
        _verdict(before, after),
    )


def _verdict(before: Choice | None, after: Choice | None) -> Verdict:
    if before is None or after is None:
        return "added" if before is None else "removed"
    (low_a, high_a), (low_b, high_b) = interval(before.row), interval(after.row)
    if low_b > high_a:
        return "slower"
    return "faster" if high_b < low_a else "same"


def parse_share(text: str) -> float:
    """ "5%" or "0.05" as 0.05. Raises CatalogError."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise CatalogError(f"--fail-over: expected a share such as 5% or 0.05, found {text!r}")
    return value
