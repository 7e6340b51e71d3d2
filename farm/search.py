"""What a sweep tries for one problem: the author's program, its holes searched by successive halving. Runs no attempt itself."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import Any, ClassVar, TypeVar

from catalog.keys import attempt_key
from farm.history import History
from farm.jobs import ASIDE, Job, Row
from farm.places import AttemptsAt
from farm.plan import Plan
from generator.authors.rules import RuleAuthor
from generator.canonical import canonical_json, digest_text
from generator.spec import AttentionSpec, SpecError
from generator.targets import find_target
from generator.tl.ir import Program
from generator.tl.printer import print_program, program_hash
from generator.tuning import Choice, Holes, neighbours, ordered_choices, with_choice

Attempt = Callable[[Job], Awaitable[Row]]
#: A search of so many candidates goes through tile sizes alone.
SMALL_SEARCH = 4
#: Programs of which the order of tile sizes is remembered.
KEPT_ORDERS = 256
#: What the harness of attempts is called besides that are run under the sanitizer too: they are other attempts.
SANITIZED = "+sanitizer"


@dataclass(frozen=True, slots=True)
class Step:
    """Where in a search an attempt stands. prune: it may be put aside unmeasured. again: it was, and is measured after all."""

    rung: int = 0
    prune: bool = False
    again: bool = False


@dataclass(frozen=True, slots=True)
class Versions:
    """What makes an attempt another one although spec and program are the same. The device does so too: see `farm.places`."""

    translator: str
    harness: str

    def key(
        self,
        spec: AttentionSpec,
        target: str,
        program: str,
        rung: int,
        rivals: tuple[str, ...] | None = None,
        again: bool = False,
    ) -> str:
        """rung: of a search; a later one measures for longer. rivals: those that a plan names: they are part of the answer.

        again: of a candidate that was put aside unmeasured before.
        """
        tuning: dict[str, Any] = ({"rung": rung} if rung else {}) | ({"again": 1} if again else {})
        tuning |= {"rivals": list(rivals)} if rivals is not None else {}
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
    """Searches by the rule author for one sweep.

    Half of a larger search goes through tile sizes: what the catalog knows of this problem and its family first, then the most
    promising, then choices spread over all. The other half goes to the neighbours of the fastest two: hints set, tiles a step
    larger or smaller. The best are measured again for longer, half as many each time.
    """

    plan: Plan
    versions: Versions
    author: RuleAuthor = field(default_factory=RuleAuthor)
    history: History = field(default_factory=History)
    _orders: dict[tuple[str, str], list[Holes]] = field(default_factory=dict)

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
        tuning, texts = self.plan.tuning, {"sketch": print_program(sketch), "code": print_program(code)}

        def job(choice: Choice, rung: int, prune: bool = False, again: bool = False) -> Job:
            return self._job(spec, target, code, choice, texts, Step(rung, prune, again))

        first = FirstRung(tuning.candidates, attempt, job)
        await self._explore(first, spec, target, code, attempt.place.device_key if isinstance(attempt, AttemptsAt) else None)
        survivors, rung = fastest_first(first.found), 0
        while len(survivors) > 1:
            rung += 1
            survivors = survivors[: max(1, math.floor(len(survivors) * tuning.keep))]
            rows = await asyncio.gather(*(attempt(job(choice, rung)) for choice in survivors))
            survivors = fastest_first(list(zip(survivors, rows, strict=True)))

    async def _explore(self, first: FirstRung, spec: AttentionSpec, target: str, code: Program, device_key: str | None) -> None:
        """Fills the first rung; what its rows say is added to the history."""
        versions, sheet = (self.versions.translator, self.versions.harness.removesuffix(SANITIZED)), find_target(target)
        tiles = self._ordered(code, target)
        tried = self.history.tried(spec, target, device_key, versions)
        learnt = self.history.promising(spec, target, device_key, max(1, first.wanted // 2))
        led = [c for c in (*tried, *learnt) if {name: c.get(name) for name in tiles[0]} in tiles]
        spread = order_choices(tiles, led[0] if led and led[0] in tiles else tiles[0])
        local = first.wanted // 2 if first.wanted > SMALL_SEARCH else 0
        await first.measure([*led, *spread], max(first.wanted - local, min(first.wanted, len(tried))))
        leaders = fastest_first(first.found)[:2] or [choice for choice, _ in first.found[:1]]
        near = [neighbours(leader, tiles, sheet) for leader in leaders]
        if local:
            await first.measure(in_turn(near), first.wanted)
        await first.measure(spread, first.wanted)
        if not fastest_first(first.found):
            await first.reconsider()
        for choice, row in first.asked:
            self.history.add(spec, target, device_key, choice, row, versions)

    def _ordered(self, code: Program, target: str) -> list[Holes]:
        """Ordering them takes a second of CPU, and the specs of a family share their code, whatever their lengths."""
        name = (program_hash(code), target)
        if name not in self._orders:
            if len(self._orders) >= KEPT_ORDERS:
                self._orders.clear()
            self._orders[name] = ordered_choices(code, find_target(target), {})
        return self._orders[name]

    def _job(self, spec: AttentionSpec, target: str, code: Program, choice: Choice, texts: dict[str, str], step: Step) -> Job:
        program = print_program(with_choice(code, choice))
        return Job(
            key=self.versions.key(spec, target, program, step.rung, self.plan.rivals, step.again),
            spec=spec,
            target=target,
            program=program,
            measure_s=self.plan.tuning.measure_s * 2**step.rung,
            rivals=self.plan.rivals,
            prune=step.prune,
            texts=texts,
            columns={"author": self.author.name, "author_mode": "rules", "tuning": choice, "generation": step.rung},
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


@dataclass(slots=True)
class FirstRung:
    """Candidates that are measured for the first time. One that does not fit the target, or wastes it, is replaced by the next.

    wanted: how many are to be measured. found: (choice, row) of those that were. asked: of all.
    """

    wanted: int
    attempt: Attempt
    job: Callable[..., Job]
    found: list[tuple[Choice, Row]] = field(default_factory=list)
    asked: list[tuple[Choice, Row]] = field(default_factory=list)

    async def measure(self, choices: Iterable[Mapping[str, int | str]], until: int) -> None:
        """Goes through the choices that nobody asked about until `until` candidates are measured."""
        fresh = self._fresh(choices)
        while len(self.found) < until and len(self.asked) - len(self.found) <= 2 * self.wanted:
            batch = list(islice(fresh, until - len(self.found)))
            if not batch:
                return
            rows = await asyncio.gather(*(self.attempt(self.job(choice, 0, prune=True)) for choice in batch))
            pairs = list(zip(batch, rows, strict=True))
            self.asked += pairs
            self.found += [pair for pair in pairs if pair[1]["reason_code"] != "does_not_fit"]

    async def reconsider(self) -> None:
        """Where nothing was verified: those that were only put aside are measured after all, what spills least first."""
        aside = [(c, row) for c, row in self.asked if (row["message"] or "").startswith(ASIDE)]
        aside.sort(key=lambda pair: pair[1].get("spill_bytes") or 0)
        chosen = [choice for choice, _ in aside[: max(1, self.wanted - len(self.found))]]
        rows = await asyncio.gather(*(self.attempt(self.job(choice, 0, again=True)) for choice in chosen))
        self.found += zip(chosen, rows, strict=True)

    def _fresh(self, choices: Iterable[Mapping[str, int | str]]) -> Iterator[Choice]:
        seen = [choice for choice, _ in self.asked]
        for choice in choices:
            if choice not in seen:
                seen.append(dict(choice))
                yield seen[-1]


def in_turn(sources: Sequence[Iterable[Choice]]) -> Iterator[Choice]:
    """The first of each, then the second of each, and so on."""
    return (choice for row in zip_longest(*sources) for choice in row if choice is not None)


#: A choice of holes alone, or of holes and hints.
C = TypeVar("C", Holes, Choice)


def fastest_first(measured: Sequence[tuple[C, Row]]) -> list[C]:
    """The choices whose rows are verified and timed, fastest first.

    By the ratio to the rival of the same run where all have one: a busy machine slows both. Ties go the same way in every start,
    whichever ended first.
    """
    right = [(holes, row) for holes, row in measured if row["reason_code"] == "ok" and row.get("p50_s")]
    right.sort(key=lambda pair: canonical_json(pair[0]))
    if all(row.get("ratio_p50") for _, row in right) and len({row.get("baseline_name") for _, row in right}) == 1:
        return [holes for holes, _ in sorted(right, key=lambda pair: -pair[1]["ratio_p50"])]
    return [holes for holes, _ in sorted(right, key=lambda pair: pair[1]["p50_s"])]


def order_choices(choices: Sequence[Holes], first: Mapping[str, int | str] | None = None) -> list[Holes]:
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
