"""What a sweep tries for one problem: the author's program, its holes searched by successive halving. Runs no attempt itself."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from catalog.keys import attempt_key
from farm.jobs import Job, Row
from farm.plan import Plan, Tuning
from generator.authors.rules import RuleAuthor
from generator.canonical import digest_text
from generator.spec import AttentionSpec, SpecError
from generator.targets import find_target
from generator.tl.fill import fill
from generator.tl.ir import Program
from generator.tl.printer import print_program
from generator.tuning import ordered_choices

Attempt = Callable[[Job], Awaitable[Row]]
Holes = dict[str, int]


@dataclass(frozen=True, slots=True)
class Versions:
    """What makes an attempt another one although spec and program are the same. The device does so too: see `farm.places`."""

    translator: str
    harness: str

    def key(self, spec: AttentionSpec, target: str, program: str, rung: int, rivals: tuple[str, ...] | None = None) -> str:
        """rung: of a search; a later one measures for longer. rivals: those that a plan names: they are part of the answer."""
        tuning = ({"rung": rung} if rung else {}) | ({"rivals": list(rivals)} if rivals is not None else {})
        return attempt_key(
            spec_hash=spec.hash,
            target=target,
            translator_version=self.translator,
            harness_version=self.harness,
            program_hash=digest_text(program),
            tuning=tuning or None,
        )

    def key_without_program(self, spec: AttentionSpec, target: str, author: str) -> str:
        return attempt_key(
            spec_hash=spec.hash,
            target=target,
            translator_version=self.translator,
            harness_version=self.harness,
            author=author,
        )


@dataclass(slots=True)
class RuleSearch:
    """Searches by the rule author for one sweep. What won for a family of specs is tried first at its next shape."""

    plan: Plan
    versions: Versions
    author: RuleAuthor = field(default_factory=RuleAuthor)
    _winners: dict[tuple[str, str], Holes] = field(default_factory=dict)

    #: As many problems are open as the executor can work on.
    width: ClassVar[int] = 0

    def line(self) -> str:
        """Rules cost nothing that is worth a line."""
        return ""

    async def solve(self, spec: AttentionSpec, target: str, attempt: Attempt) -> None:
        try:
            sketch = self.author.sketch(spec, target)
            code = self.author.code(spec, target, sketch)
        except SpecError as error:
            await attempt(self._job_without_program(spec, target, str(error)))
            return
        tuning = self.plan.tuning
        promising = ordered_choices(code, find_target(target), {})
        choices = order_choices(promising, self._winners.get((spec.family_hash, target), promising[0]))
        texts = {"sketch": print_program(sketch), "code": print_program(code)}

        def job(holes: Holes, rung: int) -> Job:
            return self._job(spec, target, code, holes, rung, texts)

        survivors = await _first_rung(choices, tuning, lambda holes: attempt(job(holes, 0)))
        rung = 0
        while len(survivors) > 1:
            rung += 1
            survivors = survivors[: max(1, math.floor(len(survivors) * tuning.keep))]
            rows = await asyncio.gather(*(attempt(job(holes, rung)) for holes in survivors))
            survivors = fastest_first(list(zip(survivors, rows, strict=True)))
        if survivors:
            self._winners[spec.family_hash, target] = survivors[0]

    def _job(self, spec: AttentionSpec, target: str, code: Program, holes: Holes, rung: int, texts: dict[str, str]) -> Job:
        program = print_program(fill(code, holes))
        return Job(
            key=self.versions.key(spec, target, program, rung, self.plan.rivals),
            spec=spec,
            target=target,
            program=program,
            measure_s=self.plan.tuning.measure_s * 2**rung,
            rivals=self.plan.rivals,
            texts=texts,
            columns={"author": self.author.name, "author_mode": "rules", "tuning": holes, "generation": rung},
        )

    def _job_without_program(self, spec: AttentionSpec, target: str, message: str) -> Job:
        return Job(
            key=self.versions.key_without_program(spec, target, self.author.name),
            spec=spec,
            target=target,
            program="",
            trouble=("author_failed", message),
            columns={"author": self.author.name, "author_mode": "rules"},
        )


async def _first_rung(choices: list[Holes], tuning: Tuning, attempt: Callable[[Holes], Awaitable[Row]]) -> list[Holes]:
    """Measures `candidates` choices and gives them fastest first. A choice that does not fit the target is replaced."""
    open_choices: Iterator[Holes] = iter(choices)
    measured: list[tuple[Holes, Row]] = []
    replaced = 0
    while wanted := tuning.candidates - len(measured):
        batch = [holes for holes, _ in zip(open_choices, range(wanted), strict=False)]
        if not batch:
            break
        rows = await asyncio.gather(*(attempt(holes) for holes in batch))
        pairs = list(zip(batch, rows, strict=True))
        unfit = [row for row in rows if row["reason_code"] == "does_not_fit"]
        measured += [pair for pair in pairs if pair[1]["reason_code"] != "does_not_fit"]
        replaced += len(unfit)
        if replaced > 2 * tuning.candidates:
            break
    return fastest_first(measured)


def fastest_first(measured: list[tuple[Holes, Row]]) -> list[Holes]:
    """The choices whose rows are verified and timed, fastest first.

    By the ratio to the rival of the same run where all have one: a busy machine slows both. Ties go to the earlier choice.
    """
    right = [(holes, row) for holes, row in measured if row["reason_code"] == "ok" and row.get("p50_s")]
    if all(row.get("ratio_p50") for _, row in right) and len({row.get("baseline_name") for _, row in right}) == 1:
        return [holes for holes, _ in sorted(right, key=lambda pair: -pair[1]["ratio_p50"])]
    return [holes for holes, _ in sorted(right, key=lambda pair: pair[1]["p50_s"])]


def order_choices(choices: list[Holes], first: Holes | None = None) -> list[Holes]:
    """Choices so that any beginning of the list is spread over all of them: each next is the one farthest from those before.

    Distance is counted in steps of each hole, on a scale of 0 to 1. `first` leads when it is one of the choices; else the one
    in the middle does.
    """
    if len(choices) < 2:
        return list(choices)
    scale = {name: sorted({c[name] for c in choices}) for name in choices[0]}

    def place(holes: Holes) -> tuple[float, ...]:
        return tuple(v.index(holes[n]) / (len(v) - 1) if len(v) > 1 else 0.0 for n, v in scale.items())

    places = [place(c) for c in choices]
    start = (
        choices.index(first)
        if first in choices
        else min(range(len(choices)), key=lambda i: sum((x - 0.5) ** 2 for x in places[i]))
    )
    order, nearest = [start], [math.dist(places[start], p) for p in places]
    while len(order) < len(choices):
        nxt = max((i for i in range(len(choices)) if i not in order), key=lambda i: nearest[i])
        order.append(nxt)
        nearest = [min(d, math.dist(places[nxt], p)) for d, p in zip(nearest, places, strict=True)]
    return [choices[i] for i in order]
