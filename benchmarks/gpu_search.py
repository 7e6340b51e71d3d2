"""The search of the GPU benchmarks: tile sizes by measured halving, then hints; what was found is kept. Times no rival.

A finding stands for one kind of call on one kind of device with one set of software, and for the very texts that took part: it
is used again while the same texts come out for the same device, driver and compiler, and searched again otherwise.
"""

from __future__ import annotations

import json
import math
import multiprocessing as mp
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import gpu_cases as cases
from gpu_cases import Build
from gpu_cells import LONG, SHORT, Cell, Job
from gpu_kernels import Kernel, compile_one, log
from gpu_timing import in_turns, input_sets, streamed

from generator.authors.rules import RuleAuthor
from generator.canonical import canonical_json
from generator.spec import AttentionSpec
from generator.targets import TARGETS
from generator.translate.records import Translated
from generator.tuning import TUNED_HINTS, ordered_choices
from verifier.records import Binary

Built = tuple[str, Translated, Binary]
T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """What a search of one job came to.

    place: device and software. call: what decided. tiles, hints: names -> source hashes of who took part in the two halves
    ("" where there is none). first, winner: names of the fastest of the first half, and of both.
    """

    place: str
    call: str
    tiles: dict[str, str]
    first: str
    hints: dict[str, str] = field(default_factory=dict)
    winner: str = ""


def candidates(kind: tuple[str, AttentionSpec], count: int) -> list[Build]:
    target, s = kind
    choices = ordered_choices(RuleAuthor().code(s, target), TARGETS[target], {})
    return [Build(s, target, tuple(sorted(c.items()))) for c in choices[:count]]


def with_hints(b: Build, count: int) -> list[Build]:
    """A build with one hint more each, the first ones of those that a tuner would try."""
    return [replace(b, hints=(*b.hints, hint)) for hint in TUNED_HINTS.get(b.target, ())[:count]]


def _in_parallel(work: Callable[[Build], T], builds: Iterable[Build]) -> list[T]:
    with ProcessPoolExecutor(max(2, (os.cpu_count() or 4) - 2), mp_context=mp.get_context("fork")) as pool:
        return list(pool.map(work, builds))


def text_of(b: Build) -> str:
    """The hash of a build's source, "" where there is none."""
    try:
        translated = b.translated()
    except ValueError:  # compiling says why
        return ""
    return translated.hash if isinstance(translated, Translated) else ""


def texts_of(builds: Sequence[Build]) -> dict[Build, str]:
    return dict(zip(builds, _in_parallel(text_of, builds), strict=True))


def compile_every(builds: Sequence[Build]) -> dict[Build, Built]:
    """On all cores; what does not build is left out, with a line that says why."""
    out = {}
    for b, row, translated, binary in _in_parallel(compile_one, builds):
        if translated is None or binary is None:
            log("  build", b.name, row["error"])
            continue
        if row.get("spill_bytes"):
            log("  build", b.name, "spills", row["spill_bytes"])
        out[b] = (b.name, translated, binary)
    return out


def searches(all_cells: Sequence[Cell]) -> dict[Job, AttentionSpec]:
    """What to search for, and the call that decides."""
    jobs: dict[Job, AttentionSpec] = {}
    for cell in all_cells:
        s, (_, is_long) = cell.spec, cell.job
        at = s.seqlen_q if cell.rival == "flex" else LONG if is_long else SHORT
        jobs.setdefault(cell.job, cases.sized(s, max(1, 16384 // at), s.num_heads, s.num_kv_heads, at, at))
    return jobs


def halve(own: Sequence[Built], s: AttentionSpec, heat_s: float) -> list[tuple[str, float]]:
    """Names and milliseconds of the survivors, the fastest first: few rounds for all, then more for the faster half."""
    import torch

    sets, calls = input_sets(torch, s, 1), {}
    for name, translated, binary in own:
        calls[name] = [Kernel(translated, binary).prepared(s, x) for x in sets]
    rounds, ranking, heat_s = 3 if len(own) > 4 else 8, [], heat_s / 2
    while True:
        times = in_turns(torch, calls, rounds, heat_s)
        ranking = sorted(((n, statistics.median(t)) for n, t in times.items()), key=lambda x: x[1])
        if len(ranking) <= 2:
            return ranking
        calls = {n: calls[n] for n, _ in ranking[: math.ceil(len(ranking) / 2)]}
        rounds, heat_s = 2 * rounds, heat_s / 5  # the card is at work already


def search(
    jobs: Mapping[Job, AttentionSpec], built: Mapping[Job, list[Built]], heat_s: float, deadline: float
) -> dict[Job, Built]:
    """The fastest kernel of each job that time was left for and whose search did not fail."""
    winners = {}
    ready = [job for job in jobs if built.get(job)]
    for job, ranking in streamed(lambda job: halve(built[job], jobs[job], heat_s), ready, 30, deadline):
        if isinstance(ranking, str):
            log("  search", job, ranking)
            continue
        winners[job] = next(b for b in built[job] if b[0] == ranking[0][0])
    return winners


@dataclass(frozen=True)
class Effort:
    """How much to search: choices of tile sizes a kind of call, hints tried with the best, seconds of work before timing.

    tiles_by, hints_by: monotonic seconds at which either half ends.
    """

    candidates: int
    hints: int
    heat_s: float
    tiles_by: float
    hints_by: float


def call_of(job: Job, decides: AttentionSpec) -> str:
    return canonical_json([job[0][0], decides])


def winners_of(
    chosen: Sequence[Cell], effort: Effort, place: str, known: Sequence[Finding]
) -> tuple[dict[Job, Built], list[Finding]]:
    """The kernel of each job of the cells, and the findings behind them: known ones where they still hold, else searched now.

    A job that time did not reach, or whose search failed, gets the first kernel that was built, and no finding.
    """
    jobs = searches(chosen)
    by_kind = {kind: candidates(kind, effort.candidates) for kind in dict.fromkeys(kind for kind, _ in jobs)}
    held = still_true(jobs, by_kind, effort, place, known)
    todo = {job: decides for job, decides in jobs.items() if job not in held}
    builds = [b for kind in dict.fromkeys(kind for kind, _ in todo) for b in by_kind[kind]]
    builds += [b for b, _ in held.values()]
    log(f"{len(jobs)} kinds of calls, {len(held)} known from before; {len(set(builds))} kernels")
    done = compile_every(list(dict.fromkeys(builds)))
    winners = {job: done[b] for job, (b, _) in held.items() if b in done}
    findings = [finding for _, finding in held.values()]
    if todo:
        log("searching")
        more, new = _searched(todo, by_kind, done, effort, place)
        winners, findings = winners | more, findings + new
    return winners, findings


def still_true(
    jobs: Mapping[Job, AttentionSpec], by_kind: Mapping[tuple[str, AttentionSpec], list[Build]], effort: Effort, place: str,
    known: Sequence[Finding],
) -> dict[Job, tuple[Build, Finding]]:  # fmt: skip
    """Jobs whose finding was made in this place between the texts that would take part now, with their winner."""
    of_call = {f.call: f for f in known if f.place == place}
    open_jobs = {job: of_call[call] for job, s in jobs.items() if (call := call_of(job, s)) in of_call}
    named = {(kind, b.name): b for kind, builds in by_kind.items() for b in builds}
    tried = {job: with_hints(named[job[0], f.first], effort.hints) for job, f in open_jobs.items() if (job[0], f.first) in named}
    texts = texts_of(
        list(dict.fromkeys([b for kind, _ in tried for b in by_kind[kind]] + [b for own in tried.values() for b in own]))
    )
    out = {}
    for job, own in tried.items():
        finding, tiles = open_jobs[job], by_kind[job[0]]
        winner = next((b for b in [*tiles, *own] if b.name == finding.winner), None)
        same = finding.tiles == {b.name: texts[b] for b in tiles} and finding.hints == {b.name: texts[b] for b in own}
        if winner is not None and same:
            out[job] = winner, finding
    return out


def _searched(
    jobs: Mapping[Job, AttentionSpec], by_kind: Mapping[tuple[str, AttentionSpec], list[Build]], done: Mapping[Build, Built],
    effort: Effort, place: str,
) -> tuple[dict[Job, Built], list[Finding]]:  # fmt: skip
    built = {job: [done[b] for b in by_kind[job[0]] if b in done] for job in jobs}
    first = search(jobs, built, effort.heat_s, effort.tiles_by)
    winners = {job: own[0] for job, own in built.items() if own} | first
    named = {(kind, b.name): b for kind, builds in by_kind.items() for b in builds}
    tried = {job: with_hints(named[job[0], b[0]], effort.hints) for job, b in winners.items()}
    last = first
    if effort.hints:
        more = compile_every(list(dict.fromkeys(b for own in tried.values() for b in own)))
        against = {job: [winners[job], *(more[b] for b in own if b in more)] for job, own in tried.items()}
        last = search(jobs, against, effort.heat_s, effort.hints_by)
    ended = [job for job in jobs if job in first and job in last]
    texts = texts_of(list(dict.fromkeys(b for job in ended for b in [*by_kind[job[0]], *tried[job]])))
    findings = []
    for job in ended:
        tiles, hints = ({b.name: texts[b] for b in own} for own in (by_kind[job[0]], tried[job]))
        findings.append(Finding(place, call_of(job, jobs[job]), tiles, first[job][0], hints, last[job][0]))
    return winners | last, findings


def read_findings(path: Path) -> list[Finding]:
    """What a file of findings holds; a file that is not there holds none. SystemExit where it is something else."""
    if not path.exists():
        return []
    try:
        return [Finding(**plain) for plain in json.loads(path.read_text())]
    except (ValueError, TypeError) as error:
        raise SystemExit(f"{path}: expected findings of an earlier search, found {error}; name another file") from None


def write_findings(path: Path, findings: Sequence[Finding]) -> None:
    """Findings besides those that a file has; newer ones of one place and call take the older ones' place."""
    both = {(f.place, f.call): f for f in (*read_findings(path), *findings)}
    write_whole(path, json.dumps([asdict(f) for f in both.values()], indent=1))


def write_whole(path: Path, text: str) -> None:
    """A file that is there whole or not at all, since a run may be ended at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(text)
    beside.replace(path)
