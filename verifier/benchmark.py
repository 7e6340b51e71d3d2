"""Times a binary beside its rivals: one child, calls alternating, this process's clock. Right answers are checked in timed calls.

Each round gives every contestant the same fresh values in the same buffers, in a random order. A batch is one call on each of
some sets of buffers, so that no two calls of a batch have the same inputs or outputs, and a call that is skipped leaves the
poison. The candidate is mapped into the child only after its rivals were timed without it. Judging correctness in full is
`verifier.judge`'s.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from generator.binding import bind
from generator.spec import AttentionSpec
from generator.translate.records import Launch
from verifier.environment import environment, worker_threads
from verifier.idleness import wait_for_quiet
from verifier.judge import default_device, read_binary
from verifier.physics import Work, floor_s, work_of
from verifier.records import Binary, Failed, Measurement, Timing, Witness
from verifier.sandbox import CannotStart
from verifier.timing import OURS, Refused, TimingSandbox, Workload

METHOD = "alternating-1: supervisor's clock, one process, fresh values, warm caches"
#: How many times its own pace without the candidate a rival may be slowed down by before the sample counts as disturbed.
DISTURBED = 2.0
#: Times that a disturbed measurement is made, and seconds to wait for a quieter machine before each but the first.
DISTURBED_TRIES = 3
QUIET_WAIT_S = 20.0  # unless FARM_QUIET_WAIT_S says otherwise

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


def measure(
    binary: Binary,
    launch: Launch,
    spec: AttentionSpec,
    *,
    num_threads: int | None = None,
    patience: Patience | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
    device: str | None = None,
    rivals: Sequence[str] | None = None,
) -> Measurement | Failed:
    """Time the binary at the spec's own shape beside torch. Only for binaries that `judge` passed.

    num_threads: of both sides of a CPU's kernel; by default one for each core given to this process, whatever torch is set to.
    device: as for `judge`. rivals: which of `records.RIVAL_GROUPS` take part; None: whatever may be the fastest.
    progress: told each phase, and what is waited for. A wrong answer in a timed call, a time below physics, or a sample that was
    disturbed each time is a Failed. Raises NoDevice.
    """
    where, say = device or default_device(binary.target), progress or (lambda phase: None)
    if where != "cpu":
        from verifier.cuda_benchmark import measure_cuda, named_rivals

        names = named_rivals(rivals)
        return measure_cuda(binary, launch, spec, device=where, patience=patience, seed=seed, progress=progress, rivals=names)
    bind(launch, spec)
    job = _Job(read_binary(binary), launch, spec, num_threads or worker_threads(), patience or Patience(), say, rivals)
    return settled(lambda: _measure_once(job, seed), say, lambda: wait_for_quiet(quiet_wait_s()))


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


@dataclass(frozen=True, slots=True)
class _Job:
    data: bytes
    launch: Launch
    spec: AttentionSpec
    num_threads: int
    patience: Patience
    say: Progress
    rivals: Sequence[str] | None


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


def _measure_once(job: _Job, seed: int | None) -> Measurement | Failed:
    before = environment()
    job.say("rivals alone")
    with TimingSandbox(job.data, job.launch, job.spec, job.num_threads) as sandbox:
        workload = Workload(sandbox, seed)
        work = work_of(job.spec, workload.captured)
        floor = floor_s(job.spec, work, job.num_threads)
        names, unsupported, matmul_flops = workload.start_rivals(job.rivals, job.patience.near)
        alone = {name: statistics.median(workload.time_batch(name).call_s for _ in range(3)) for name in names}
        names = near(names, alone, job.patience.near, unsupported)
        workload.load_candidate(alone=not names)
        job.say("alternating")
        samples = _rounds(job, workload, names)
        job.say("checking the last answer")
        workload.wear_out(min(2.0, 2 * job.patience.budget_s))
        workload.check_answer()
        if names:
            workload.compare_with(min(names, key=lambda name: alone[name]))
        fences = dict(sandbox.fences)
    timings = {name: timing_of(name, values) for name, values in samples.items()}
    if timings[OURS].p50_s < floor:
        return implausible(timings[OURS], floor, work)
    if (found := disturbed(timings, alone)) is not None:
        return found
    facts = {
        **before,
        "load_average_after": environment()["load_average"],
        "calls_in_batch": workload.batch,
        "handshake_s": workload.handshake_s,
        "matmul_flops": matmul_flops,
        "above_matmul_rate": work.flops / timings[OURS].p50_s > 1.1 * matmul_flops,
        "flops": work.flops,
        "bytes": work.num_bytes,
        "rivals_alone_s": alone,
        "fences": fences,
    }
    return _measurement(job, timings, samples, unsupported, floor, workload.wall_vs_device(), facts)


def near(names: Sequence[str], alone: dict[str, float], most: float, unsupported: dict[str, str]) -> list[str]:
    """The rivals that may be the best; `unsupported` says of the others how slow they are."""
    fastest = min(alone.values(), default=0.0)
    for name in names:
        if alone[name] > most * fastest:
            unsupported[name] = f"{alone[name] / fastest:.1f} times as slow as the fastest rival, timed without the candidate"
    return [name for name in names if name not in unsupported]


def _rounds(job: _Job, workload: Workload, names: Sequence[str]) -> dict[str, list[float]]:
    """Seconds per call of each contestant, round by round; the first two rounds look the same and are left out."""
    contestants, patience = [OURS, *names], job.patience
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    checked = random.SystemRandom().randrange(1, patience.min_rounds)
    deadline = time.monotonic() + patience.budget_s
    for round_number in range(patience.max_rounds):
        workload.fresh_values()
        for name in random.sample(contestants, len(contestants)):
            samples[name].append(workload.time_batch(name).call_s)
            if name == OURS and round_number == checked:
                workload.check_answer()
        enough = round_number + 1 >= patience.min_rounds
        if enough and (time.monotonic() > deadline or stable(samples, names, patience.spread)):
            break
    return {name: values[2:] for name, values in samples.items()}


def stable(samples: dict[str, list[float]], names: Sequence[str], spread: float) -> bool:
    if not names or len(samples[OURS]) < 10:
        return len(samples[OURS]) >= 10 and not names
    best = min(names, key=lambda name: statistics.median(samples[name][2:]))
    low, middle, high = ratio_interval(samples[best][2:], samples[OURS][2:])
    return high - low < spread * middle


# ------------------------------------------------------------------------------------------------------------- figures


def quantile(values: Sequence[float], share: float) -> float:
    """By linear interpolation between order statistics."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def ratio_interval(rival: Sequence[float], ours: Sequence[float]) -> tuple[float, float, float]:
    """(low, median, high) of the rival's time over ours, paired by round; the interval of the median is distribution free.

    Its ends are order statistics that the median lies between with about 95 %.
    """
    ratios = sorted(r / o for r, o in zip(rival, ours, strict=True))
    n = len(ratios)
    reach = 0.98 * n**0.5
    low = max(0, int((n - 1) / 2 - reach))
    high = min(n - 1, int((n - 1) / 2 + reach + 0.999))
    return ratios[low], statistics.median(ratios), ratios[high]


def timing_of(name: str, values: Sequence[float]) -> Timing:
    return Timing(name, tuple(values), quantile(values, 0.2), quantile(values, 0.5), quantile(values, 0.8))


def _measurement(
    job: _Job,
    timings: dict[str, Timing],
    samples: dict[str, list[float]],
    unsupported: dict[str, str],
    floor: float,
    wall_vs_device: float,
    facts: dict[str, object],
) -> Measurement:
    rivals = tuple(t for name, t in timings.items() if name != OURS)
    best = min(rivals, key=lambda t: t.p50_s).name if rivals else ""
    low, middle, high = ratio_interval(samples[best], samples[OURS]) if best else (0.0, 0.0, 0.0)
    return Measurement(
        METHOD, timings[OURS], rivals, unsupported, best, middle, low, high, floor, wall_vs_device, job.num_threads, facts
    )


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
