"""Times a cubin beside its rivals on a GPU: one context, one stream, calls alternating, the cache flushed before every batch.

Each round gives every contestant the same fresh values in the same buffers, in a random order; device events take the time.
Clocks, power, temperature and what slows the device down are looked at all along; nothing on the device is set. Judging
correctness in full is `verifier.judge`'s, and what samples say is `verifier.figures`'s.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from generator.binding import bind
from generator.gpus import card_named
from generator.spec import AttentionSpec
from generator.translate.records import Launch
from verifier.cuda_rivals import EAGER, GROUPS, MASKED, NAMES, OUT_OF_MEMORY
from verifier.cuda_timing import CudaTimingSandbox, CudaWorkload, Known, Started
from verifier.environment import environment
from verifier.figures import compared, disturbed, implausible, near, stable, timing_of
from verifier.flex_rival import FLEX
from verifier.gpu import HARD_REASONS, Conditions, conditions_of, use_of, uuid_of
from verifier.judge import read_binary
from verifier.patience import Patience, Progress, settled
from verifier.physics import Work, gpu_floor_s, sampled_work
from verifier.records import Binary, Failed, Measurement, Timing, Witness
from verifier.timing import OURS

METHOD = "alternating-gpu-1: device events, one stream, fresh values, cold L2"
#: Above what a matrix product of torch's reaches here: measured again.
ABOVE_MATMUL = 1.1
#: This process's clock over the device's, over calls back to back: above, work was hidden or the machine was busy.
LONGEST_WALL = 3.0
#: Before a disturbed measurement is made again: a warm device cools down, and what disturbed it may be over.
PAUSE_S = 2.0
#: Rivals that a hurried measurement leaves out. FlexAttention, which compiles for long, stays where SDPA has no answer.
SLOW_RIVALS = (EAGER, MASKED)


@dataclass(slots=True)
class Watch:
    """The device's conditions over a measurement."""

    device: str
    before: Conditions
    now: Conditions
    reasons: set[str] = field(default_factory=set)
    slowest_mhz: int = 1 << 30

    @staticmethod
    def start(device: str) -> Watch:
        first = conditions_of(device)
        return Watch(device, first, first)

    def look(self) -> None:
        self.now = conditions_of(self.device)
        self.reasons |= set(self.now.reasons) - {"idle"}
        self.slowest_mhz = min(self.slowest_mhz, self.now.sm_mhz)

    @property
    def throttled(self) -> tuple[str, ...]:
        return tuple(sorted(self.reasons & HARD_REASONS))

    def plain(self) -> dict[str, Any]:
        return {
            "before": asdict(self.before), "after": asdict(self.now), "reasons": sorted(self.reasons),
            "slowest_sm_mhz": self.slowest_mhz, "clock_lock": "not locked: the device is measured as it is found",
        }  # fmt: skip


@dataclass(slots=True)
class Laps:
    """Where a measurement's seconds go: name -> seconds since the lap before."""

    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.monotonic)

    def end(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name], self._last = round(now - self._last, 4), now


#: (UUID, spec, rivals, near) -> what is known of the rivals there.
_KNOWN: OrderedDict[tuple[str, str, tuple[str, ...], float], Known] = OrderedDict()
KEPT_KNOWN = 64


def known_of(device: str, spec: AttentionSpec, rivals: tuple[str, ...], most: float) -> Known:
    """What earlier measurements of this process found there."""
    key = (uuid_of(device), spec.hash, rivals, most)
    _KNOWN[key] = found = _KNOWN.pop(key, None) or Known()
    while len(_KNOWN) > KEPT_KNOWN:
        _KNOWN.popitem(last=False)
    return found


@dataclass(frozen=True, slots=True)
class _Job:
    data: bytes
    launch: Launch
    spec: AttentionSpec
    device: str
    patience: Patience
    rivals: tuple[str, ...]
    say: Progress


def rivals_for(spec: AttentionSpec, hurried: bool) -> tuple[str, ...]:
    """The contestants for a spec. hurried: none that is sure to lose, and no compiling where SDPA has an answer."""
    if not hurried:
        return NAMES
    plain = not spec.scores and all(rule.name == "causal" for rule in spec.masks)
    return tuple(name for name in NAMES if name not in SLOW_RIVALS and not (name == FLEX and plain))


def named_rivals(groups: Sequence[str] | None) -> tuple[str, ...] | None:
    """The contestants of some of `records.RIVAL_GROUPS`; None stays None."""
    return None if groups is None else tuple(name for group in groups for name in GROUPS[group])


def measure_cuda(
    binary: Binary,
    launch: Launch,
    spec: AttentionSpec,
    *,
    device: str = "cuda:0",
    patience: Patience | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
    rivals: tuple[str, ...] | None = None,
) -> Measurement | Failed:
    """Time the cubin at the spec's own shape. rivals: names of `verifier.cuda_rivals.NAMES`; None: all that may be the best.

    A wrong answer in a timed call, a time below physics, a throttled or disturbed sample is a Failed. Raises NoDevice.
    """
    patience, say = patience or Patience(), progress or (lambda phase: None)
    bind(launch, spec)
    names = rivals_for(spec, patience.near != float("inf")) if rivals is None else rivals
    job = _Job(read_binary(binary), launch, spec, device, patience, names, say)
    return settled(lambda: _measure_once(job, seed), say, lambda: time.sleep(PAUSE_S))


def _measure_once(job: _Job, seed: int | None) -> Measurement | Failed:
    before, others, laps = environment(), use_of(job.device).processes, Laps()
    watch, known = Watch.start(job.device), known_of(job.device, job.spec, job.rivals, job.patience.near)
    job.say("rivals alone")
    compiles = FLEX in job.rivals and FLEX not in known.out
    with CudaTimingSandbox(job.data, job.launch, job.spec, job.device, compiles) as sandbox:
        laps.end("child")
        workload = CudaWorkload(sandbox, seed)
        laps.end("buffers")
        start = workload.start_rivals(job.rivals, known)
        alone = {name: statistics.median(workload.time_batch(name) for _ in range(3)) for name in start.seconds}
        unsupported = dict(start.unsupported)
        names = near(list(start.seconds), alone, job.patience.near, unsupported)
        laps.end("rivals")
        loaded = workload.load_candidate()
        fastest = min([float(loaded["seconds"]), *(alone[name] for name in names)])
        without_graph = workload.choose_batch(fastest)
        laps.end("candidate")
        job.say("alternating")
        samples = _rounds(job, workload, names, watch)
        laps.end("rounds")
        job.say("warm caches, and this process's clock")
        warm = {name: workload.steady(name, statistics.median(samples[name])) for name in (OURS, *names)}
        watch.look()
        laps.end("warm")
        facts = {
            **before,
            "device_facts": sandbox.facts,
            "kernel_attributes": loaded["attributes"],
            "fences": dict(sandbox.fences),
            "calls_in_batch": workload.count,
            "graphs": workload.graphs,
            "without_graph": without_graph,
            "sets": workload.sets,
        }
        work = sampled_work(job.spec, workload.captured)
    laps.end("end")
    facts["phases_s"] = laps.seconds
    facts |= _facts(start, watch, work, alone, warm, others, samples)
    result = _result(job, samples, unsupported, work, alone, warm[OURS][1], facts, watch)
    if isinstance(result, Measurement):  # another run may have been disturbed when it called a rival slow
        known.out |= {name: why for name, why in unsupported.items() if why != OUT_OF_MEMORY}
    if facts["above_matmul_rate"]:
        known.rates = None
    return result


def _rounds(job: _Job, workload: CudaWorkload, names: Sequence[str], watch: Watch) -> dict[str, list[float]]:
    """Seconds of a call of each contestant, round by round; the first two rounds look the same and are left out."""
    contestants, patience, generator = [OURS, *names], job.patience, random.SystemRandom()
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    checked = {generator.randrange(1, patience.min_rounds)}
    deadline = time.monotonic() + patience.budget_s
    number = 0
    while number < patience.max_rounds:
        last = number + 1 >= patience.min_rounds and (time.monotonic() > deadline or stable(samples, names, patience.spread))
        check = workload.checked_set() if number in checked or last else None
        workload.fresh_values(keep=check)
        first = check if check is not None else generator.randrange(workload.sets)
        for name in random.sample(contestants, len(contestants)):
            samples[name].append(workload.time_batch(name, first))
        watch.look()
        if check is not None:
            workload.check_answer(check)
        number += 1
        if last:
            break
    return {name: values[2:] for name, values in samples.items()}


def _facts(
    start: Started,
    watch: Watch,
    work: Work,
    alone: dict[str, float],
    warm: dict[str, tuple[float, float]],
    others: Sequence[tuple[int, int]],
    samples: dict[str, list[float]],
) -> dict[str, Any]:
    ours_s = statistics.median(samples[OURS])
    return {
        "gpu": watch.plain(),
        "l2": "cold",
        "warm_s": {name: seconds for name, (seconds, _) in warm.items()},
        "wall_over_device": {name: ratio for name, (_, ratio) in warm.items()},
        "rivals_alone_s": alone,
        "matmul_flops": start.rates.matmul_flops,
        "copy_bytes_per_s": start.rates.copy_bytes_per_s,
        "empty_batch_s": start.rates.empty_s,
        "above_matmul_rate": work.flops / ours_s > ABOVE_MATMUL * start.rates.matmul_flops,
        "flops": work.flops,
        "bytes": work.num_bytes,
        "flops_per_s": work.flops / ours_s,
        "other_processes": len(others),
    }


def _result(
    job: _Job,
    samples: dict[str, list[float]],
    unsupported: dict[str, str],
    work: Work,
    alone: dict[str, float],
    wall_vs_device: float,
    facts: dict[str, Any],
    watch: Watch,
) -> Measurement | Failed:
    timings: dict[str, Timing] = {name: timing_of(name, values) for name, values in samples.items()}
    floor = gpu_floor_s(job.spec, work, card_named(facts["device_facts"]["name"]))
    if timings[OURS].p50_s < floor:
        return implausible(timings[OURS], floor, work)
    if watch.throttled:
        return Failed("throttled", Witness("device", f"the device slowed itself down: {', '.join(watch.throttled)}"))
    if wall_vs_device > LONGEST_WALL:
        message = (
            f"calls back to back took {wall_vs_device:.1f} times as long by the supervisor's clock as by the device's events"
        )
        return Failed("throttled", Witness("two clocks", message))
    if (found := disturbed(timings, alone)) is not None:
        return found
    return compared(
        METHOD,
        timings,
        samples,
        unsupported=unsupported,
        floor_s=floor,
        wall_vs_device=wall_vs_device,
        num_threads=0,
        environment=facts,
    )
