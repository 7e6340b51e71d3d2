"""What samples of times say: quantiles, ratios with their intervals, and which samples say nothing. Takes no time itself."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from verifier.physics import Work
from verifier.records import Failed, Measurement, Timing, Witness
from verifier.timing import OURS

#: How many times its own pace without the candidate a rival may be slowed down by before the sample counts as disturbed.
DISTURBED = 2.0


def quantile(values: Sequence[float], share: float) -> float:
    """The value that a share (0 to 1) of them lies below, linear between two neighbours. values: at least one."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def ratio_interval(rival: Sequence[float], ours: Sequence[float]) -> tuple[float, float, float]:
    """(low, median, high) of the rival's time over ours, paired by round: above 1, ours is faster. Distribution free.

    Its ends are order statistics that the median lies between with about 95 %.
    """
    ratios = sorted(r / o for r, o in zip(rival, ours, strict=True))
    n = len(ratios)
    reach = 0.98 * n**0.5
    low = max(0, int((n - 1) / 2 - reach))
    high = min(n - 1, int((n - 1) / 2 + reach + 0.999))
    return ratios[low], statistics.median(ratios), ratios[high]


def timing_of(name: str, values: Sequence[float]) -> Timing:
    """values: seconds of a call, one a round."""
    return Timing(name, tuple(values), quantile(values, 0.2), quantile(values, 0.5), quantile(values, 0.8))


def compared(
    method: str,
    timings: Mapping[str, Timing],
    samples: Mapping[str, Sequence[float]],
    *,
    unsupported: dict[str, str],
    floor_s: float,
    wall_vs_device: float,
    num_threads: int,
    environment: dict[str, Any],
) -> Measurement:
    """The candidate's times beside every rival's; the ratio is that of the fastest one, and 0 where there was none."""
    rivals = tuple(t for name, t in timings.items() if name != OURS)
    best = min(rivals, key=lambda t: t.p50_s).name if rivals else ""
    low, middle, high = ratio_interval(samples[best], samples[OURS]) if best else (0.0, 0.0, 0.0)
    return Measurement(
        method, timings[OURS], rivals, unsupported, best, middle, low, high, floor_s, wall_vs_device, num_threads, environment
    )


def near(names: Sequence[str], alone: dict[str, float], most: float, unsupported: dict[str, str]) -> list[str]:
    """The rivals that may be the best: those within `most` times the fastest. alone: seconds of a call of each before the
    candidate was there. `unsupported` is told of the others how slow they are.
    """
    fastest = min(alone.values(), default=0.0)
    for name in names:
        if alone[name] > most * fastest:
            unsupported[name] = f"{alone[name] / fastest:.1f} times as slow as the fastest rival, timed without the candidate"
    return [name for name in names if name not in unsupported]


def stable(samples: dict[str, list[float]], names: Sequence[str], spread: float) -> bool:
    """Whether more rounds would say no more: ten were timed, and the interval of the ratio to the best rival (two first rounds
    left out) is narrower than `spread` of it. Without rivals ten rounds are enough.
    """
    if not names or len(samples[OURS]) < 10:
        return len(samples[OURS]) >= 10 and not names
    best = min(names, key=lambda name: statistics.median(samples[name][2:]))
    low, middle, high = ratio_interval(samples[best][2:], samples[OURS][2:])
    return high - low < spread * middle


def implausible(ours: Timing, floor: float, work: Work) -> Failed:
    message = (
        f"{ours.p50_s:.3g} s a call, but {work.flops:.3g} operations on {work.num_bytes} bytes take at least {floor:.3g} s here"
    )
    return Failed(
        "implausible_time", Witness("time floor", message, expected=f"at least {floor:.3g} s", found=f"{ours.p50_s:.3g} s")
    )


def disturbed(timings: dict[str, Timing], alone: dict[str, float]) -> Failed | None:
    """The fastest rival ran well before the candidate was there and badly beside it: the sample says nothing, whoever's fault."""
    if not alone:
        return None
    name = min(alone, key=lambda n: alone[n])
    if timings[name].p20_s > DISTURBED * alone[name]:
        message = (
            f"{name} took {timings[name].p20_s:.3g} s a call beside the candidate, and {alone[name]:.3g} s before it was loaded"
        )
        return Failed("throttled", Witness("rivals alone", message))
    return None
