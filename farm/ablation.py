"""The paper's ablation on a plan's problems: with a sketch or in one go, translated by us or by the model, or with no TL at all.

Counts what this run's answers came to. Judges nothing itself, and says nothing where no answer was had.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from farm.authors import AuthorOf, author_of
from farm.jobs import Shop
from farm.model_search import ModelSearch
from farm.plan import Plan
from farm.scheduler import Stopped
from farm.search import Attempt, Versions
from generator.authors.endpoint import Endpoint
from generator.authors.ledger import Spent
from generator.authors.llm import Judged, Outcome
from generator.authors.transcripts import TranscriptStore
from generator.spec import AttentionSpec

#: A kernel that was judged right, whether or not its time could be taken undisturbed.
RIGHT = ("ok", "throttled")


@dataclass(frozen=True, slots=True)
class Way:
    """One way of asking. style: of `farm.model_settings`; translator: who writes the code for the TL."""

    name: str
    style: str
    translator: str

    @property
    def key(self) -> str:
        return f"{self.name}/{self.translator}"


#: Every way there is: without TL there is nothing that our translator could translate.
WAYS: tuple[Way, ...] = (
    Way("two-stage", "two_stage", "ours"),
    Way("two-stage", "two_stage", "model"),
    Way("one-pass", "one_pass", "ours"),
    Way("one-pass", "one_pass", "model"),
    Way("vanilla", "direct", "model"),
)


@dataclass(frozen=True, slots=True)
class Problem:
    """What came of one problem in one way. judged, right: samples with a verdict, and those of them whose kernel is right."""

    judged: int
    right: int

    def pass_at(self, k: int) -> float | None:
        """The chance that one of k samples drawn from these is right; None where there are fewer than k."""
        if self.judged < k:
            return None
        return 1.0 - math.comb(self.judged - self.right, k) / math.comb(self.judged, k)


@dataclass
class WayTally:
    """What came of all problems in one way. tokens and model_s: of the answers that its samples went through."""

    way: Way
    problems: list[Problem] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    unjudged: int = 0
    unanswered: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    model_s: float = 0.0
    work_s: float = 0.0

    def add(self, outcome: Outcome, spent: Spent, samples: int, store: TranscriptStore) -> None:
        """One problem's outcome. `spent` is what judging it took."""
        by_sample = {n: [j for j in outcome.judged if j.sample == n] for n in range(samples)}
        verdicts = [_verdict(chain) for chain in by_sample.values() if chain]
        self.unanswered += samples - len(verdicts)
        self.unjudged += verdicts.count(None)
        self.problems.append(Problem(len(verdicts) - verdicts.count(None), verdicts.count(True)))
        self.faults.update(j.feedback.reason for j in outcome.judged if _is_fault(j))
        for name in dict.fromkeys(name for j in outcome.judged for name in j.proposal.transcript):
            if (exchange := store.exchange(name)) is not None:
                self.tokens_in += exchange.answer.tokens_in
                self.tokens_out += exchange.answer.tokens_out
                self.model_s += exchange.answer.seconds
        self.work_s += spent.compile_s + spent.gpu_s

    def pass_at(self, k: int) -> float | None:
        """The mean over the problems that have k judged samples; None where none has."""
        rates = [rate for p in self.problems if (rate := p.pass_at(k)) is not None]
        return sum(rates) / len(rates) if rates else None

    def plain(self, k: int) -> dict[str, Any]:
        return {
            "way": self.way.name,
            "translator": self.way.translator,
            "samples_judged": sum(p.judged for p in self.problems),
            "samples_right": sum(p.right for p in self.problems),
            "pass_at_1": self.pass_at(1),
            "pass_at_k": self.pass_at(k),
            "faults": dict(self.faults.most_common()),
            "not_judged": self.unjudged,
            "unanswered": self.unanswered,
            "tokens_in": self.tokens_in,
            "tokens_out": self.tokens_out,
            "model_s": round(self.model_s, 3),
            "work_s": round(self.work_s, 3),
        }


def _verdict(chain: Sequence[Judged]) -> bool | None:
    """Whether any answer of a sample is a right kernel; None where its last one could not be judged here."""
    if any(j.feedback.reason in RIGHT for j in chain):
        return True
    return None if chain[-1].feedback.kind == "not_judged" else False


def _is_fault(j: Judged) -> bool:
    return j.feedback.reason not in RIGHT and j.feedback.kind not in ("checked", "not_judged")


@dataclass
class Ablation:
    """An author that solves every problem in every way. `search`: the plan's own, whose client and ledger all ways share."""

    search: ModelSearch
    tallies: tuple[WayTally, ...]

    @property
    def width(self) -> int:
        return self.search.width

    def line(self) -> str:
        return self.search.line()

    async def solve(self, spec: AttentionSpec, target: str, attempt: Attempt) -> None:
        """One way after the other; a spent budget ends them all. Raises Stopped."""
        for tally in self.tallies:
            settings = dataclasses.replace(
                self.search.settings,
                style=tally.way.style,
                translator="llm" if tally.way.translator == "model" else "ours",
            )

            def keep(_: AttentionSpec, __: str, outcome: Outcome, spent: Spent, tally: WayTally = tally) -> None:
                tally.add(outcome, spent, self.search.settings.samples, self.search.store)

            try:
                await dataclasses.replace(self.search, settings=settings, on_outcome=keep).solve(spec, target, attempt)
            except Stopped:
                if self.search.ledger.exhausted():
                    raise


def ablation_of(tallies: tuple[WayTally, ...]) -> AuthorOf:
    """What `farm.sweep` asks for an author, for an ablation that counts into `tallies`."""

    @contextlib.asynccontextmanager
    async def author(
        plan: Plan, shop: Shop, versions: Versions, endpoint: Endpoint | None, note: Callable[[str], None]
    ) -> AsyncIterator[Ablation]:
        async with author_of(plan, shop, versions, endpoint, note) as search:
            assert isinstance(search, ModelSearch)
            yield Ablation(search, tallies)

    return author
