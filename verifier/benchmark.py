"""Times a binary beside its rivals: one child, calls alternating, this process's clock. Right answers are checked in timed calls.

Each round gives every contestant the same fresh values in the same buffers, in a random order. A batch is one call on each of
some sets of buffers, so that no two calls of a batch have the same inputs or outputs, and a call that is skipped leaves the
poison. The candidate is mapped into the child only after its rivals were timed without it. Judging correctness in full is
`verifier.judge`'s; what the samples say is `verifier.figures`'s.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from generator.binding import bind
from generator.spec import AttentionSpec
from generator.translate.records import Launch
from verifier.environment import environment, worker_threads
from verifier.figures import compared, disturbed, implausible, near, stable, timing_of
from verifier.idleness import wait_for_quiet
from verifier.judge import default_device, read_binary
from verifier.patience import Patience, Progress, quiet_wait_s, settled
from verifier.physics import floor_s, work_of
from verifier.records import Binary, Failed, Measurement
from verifier.timing import OURS, TimingSandbox, Workload

METHOD = "alternating-1: supervisor's clock, one process, fresh values, warm caches"


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


@dataclass(frozen=True, slots=True)
class _Job:
    data: bytes
    launch: Launch
    spec: AttentionSpec
    num_threads: int
    patience: Patience
    say: Progress
    rivals: Sequence[str] | None


def _measure_once(job: _Job, seed: int | None) -> Measurement | Failed:
    before = environment()
    job.say("rivals alone")
    compiles = "flex-attention" in (job.rivals or ())
    with TimingSandbox(job.data, job.launch, job.spec, job.num_threads, compiles) as sandbox:
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
    return compared(
        METHOD,
        timings,
        samples,
        unsupported=unsupported,
        floor_s=floor,
        wall_vs_device=workload.wall_vs_device(),
        num_threads=job.num_threads,
        environment=facts,
    )


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
