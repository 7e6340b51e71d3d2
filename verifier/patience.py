"""How long a measurement goes on, and how often it is made again before it is believed. Times nothing itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from verifier.records import Failed, Measurement, Witness
from verifier.sandbox import CannotStart
from verifier.timing import Refused

#: Times that a disturbed measurement is made, and seconds to wait for a quieter machine before each but the first.
DISTURBED_TRIES = 3
QUIET_WAIT_S = 20.0  # unless FARM_QUIET_WAIT_S says otherwise

#: Told each phase of a measurement, and what is waited for.
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Patience:
    """When to stop: after at least min_rounds, once the interval of the ratio is narrower than `spread` (relative), or at
    budget_s or max_rounds. near: rivals that are more than so many times as slow as the fastest one sit the rounds out.
    """

    min_rounds: int = 8
    max_rounds: int = 60
    budget_s: float = 3.0
    spread: float = 0.04
    near: float = float("inf")


def settled(once: Callable[[], Measurement | Failed], say: Progress, wait: Callable[[], object]) -> Measurement | Failed:
    """A measurement that may be believed, as far as measuring again can bring it about.

    A disturbed sample is taken again after `wait`, which returns on a quieter machine or gives up; a result above the machine's
    own matrix product, once more. What the child does wrong is a Failed at once.
    """
    started = last = time.monotonic()
    disturbed_before, too_fast_before = 0, False
    try:
        while True:
            last = time.monotonic()
            match result := once():
                case Failed(reason="throttled") if disturbed_before < DISTURBED_TRIES - 1:
                    disturbed_before += 1
                    say(f"disturbed ({result.witness.message}): measured again once the machine is quieter")
                    wait()
                case Measurement() if result.environment["above_matmul_rate"] and not too_fast_before:
                    too_fast_before = True
                    say("faster than this machine's matrix product: measured again")
                case Measurement():
                    result.environment.update(disturbed_before=disturbed_before, again_s=last - started)
                    return result
                case Failed():
                    return replace(result, again_s=last - started)
    except Refused as refused:
        return Failed(refused.reason, refused.witness, time.monotonic() - started, last - started)
    except CannotStart as error:
        return Failed("crash", Witness("load", str(error)), time.monotonic() - started, last - started)


def quiet_wait_s() -> float:
    """Seconds that a disturbed measurement waits for a quieter machine before it is repeated. Raises ValueError."""
    given = os.environ.get("FARM_QUIET_WAIT_S", "")
    try:
        wanted = float(given) if given else QUIET_WAIT_S
    except ValueError:
        wanted = -1.0
    if not 0 <= wanted <= 3600:
        raise ValueError(f"FARM_QUIET_WAIT_S: expected seconds from 0 to 3600, found {given!r}")
    return wanted
