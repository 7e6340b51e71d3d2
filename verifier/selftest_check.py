"""What the self-tests of the CPU and of a GPU share: their problem, the lines they consist of, their words. Tests nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass

from generator.spec import AttentionSpec, Rule
from verifier.records import Failed, Measurement, Verdict

#: One small problem with grouped heads, a mask, and lengths that no tile divides.
SPEC = AttentionSpec(4, 2, 64, 64, 2, 100, 100, masks=(Rule.make("causal"),), name="self-test")


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the self-test: what was tried, what had to come out, what came out."""

    name: str
    expected: str
    found: str
    ok: bool
    seconds: float


def words(result: Verdict | Measurement | str) -> str:
    match result:
        case str():
            return result
        case Failed(reason=reason, witness=witness):
            return f"{reason} ({witness.check}): {witness.message}"
        case Measurement():
            return "timed"
        case _:
            return "ok"


def since(started: float) -> float:
    return round(time.monotonic() - started, 3)
