"""What came of one start of a sweep: counts, and the best row of each problem as the closing table has it. Prints nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from farm.progress import Shown, Tally
from farm.scheduler import Counts


@dataclass(frozen=True, slots=True)
class Summary:
    """What came of one start. stopped: by who or what is around it (`Sweep.stop`), not by its budget or for want of an author."""

    catalog: str
    run_id: str
    counts: Counts
    tally: Tally
    wall_s: float
    stop_reason: str
    stopped: bool = False
    author: str = ""  # what a language model has cost

    @property
    def stopped_by_signal(self) -> bool:
        return self.stop_reason.startswith("stopped by")

    @property
    def broken_off(self) -> bool:
        """By what is around it, and not by its user: the same command goes on once that is mended."""
        return self.stopped and not self.stopped_by_signal

    @property
    def any_verified(self) -> bool:
        return any(shown.is_verified for shown in self.tally.best.values())

    def plain(self) -> dict[str, Any]:
        """The summary for scripts. planned = the sum of by_reason, always; known ended in an earlier start."""
        return {
            "catalog": self.catalog,
            "run_id": self.run_id,
            "planned": self.counts.planned,
            "known": self.counts.known,
            "by_reason": dict(sorted(self.counts.by_reason.items())),
            "wall_s": round(self.wall_s, 3),
            "stop_reason": self.stop_reason,
            "author": self.author,
            "best": [table_row(shown) for shown in sorted(self.tally.best.values(), key=_in_table)],
        }


def _in_table(shown: Shown) -> tuple[str, str, int, int, str]:
    spec = shown.spec
    return spec.name, spec.dtype, spec.seqlen_k, spec.seqlen_q, shown.target


def table_row(shown: Shown) -> dict[str, Any]:
    """One problem of the closing table as plain values; times in milliseconds."""
    spec, row, ok = shown.spec, shown.row, shown.is_verified

    def ms(name: str) -> float | None:
        return round(1e3 * row[name], 4) if ok and row.get(name) else None

    return {
        "model": spec.name or "spec",
        "shape": f"{spec.batch} x {spec.num_heads}/{spec.num_kv_heads} x {spec.seqlen_q}x{spec.seqlen_k} d{spec.head_dim}"
        + ("" if spec.head_dim == spec.head_dim_v else f"/{spec.head_dim_v}"),
        "dtype": spec.dtype,
        "target": shown.target,
        "ours_ms": ms("p50_s"),
        "rival": row.get("baseline_name") if ok else None,
        "rival_ms": ms("baseline_p50_s"),
        "ratio": round(row["ratio_p50"], 3) if ok and row.get("ratio_p50") else None,
        "verdict": "verified" if ok else row["reason_code"],
        "row_id": row.get("row_id"),
    }
