"""What was decided about a call, as plain data: the choice, and every candidate with its reasons. Chooses nothing itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from catalog.reasons import Reason
from generator.canonical import to_plain


@dataclass(frozen=True, slots=True)
class Considered:
    """One candidate for one call. Times are microseconds a call, predicted from the measured time at the enclosing bucket."""

    kernel_id: str
    accepted: bool
    reasons: tuple[Reason, ...]
    predicted_us: float | None = None
    sdpa_us: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What answers a call. `considered` is in order of preference: accepted candidates first, the fastest of them first.

    kernel_id: the choice, None for torch. reasons: why torch answers; empty when a kernel does. Candidates are the
    kernels of the call's dtype and head dimensions.
    """

    call: str
    kernel_id: str | None
    reasons: tuple[Reason, ...]
    considered: tuple[Considered, ...] = ()

    @property
    def all_reasons(self) -> tuple[Reason, ...]:
        """The reasons of the call, then those of each candidate with its id."""
        return self.reasons + tuple(Reason(r.code, f"{c.kernel_id}: {r.message}") for c in self.considered for r in c.reasons)

    def to_plain(self) -> dict[str, Any]:
        """Plain JSON values."""
        plain: dict[str, Any] = to_plain(self)
        return plain

    def __str__(self) -> str:
        lines = [f"{self.call}: {self.kernel_id or 'torch'}"]
        lines += [f"  because {r}" for r in self.reasons]
        for c in self.considered:
            times = "" if c.predicted_us is None else f" {c.predicted_us:.1f} us (torch {c.sdpa_us or 0:.1f} us)"
            lines.append(f"  {'+' if c.accepted else '-'} {c.kernel_id}{times}" + "".join(f"\n      {r}" for r in c.reasons))
        return "\n".join(lines)
