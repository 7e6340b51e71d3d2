"""The language-model author: asks for a sketch, then code, repairs what was judged wrong and speeds up what is right.

It judges nothing: `evaluate` is given by the caller, and feedback comes back as plain data. It sends nothing by itself either: a
ModelClient does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from generator.authors.answers import MAX_BLOCK_CHARS, Extracted, clean, estimate_tokens, extract
from generator.authors.clients import ModelClient
from generator.authors.direct_prompts import DirectPrompts
from generator.authors.exchange import Exchange, Message, ModelUnavailable, Request, Sampling
from generator.authors.ledger import Ledger, Spent
from generator.authors.prompting import PromptTooLong, TaskPrompts, fit_messages
from generator.authors.proposal import Proposal
from generator.canonical import digest
from generator.feedback import Feedback

Style = Literal["two_stage", "one_pass", "direct"]
Evaluate = Callable[[Proposal], Awaitable[Feedback]]


class FeedbackRecord(Protocol):
    """Remembers what was fed back, so that a replay says the same words again. name: of the exchange and the problem."""

    async def find_feedback(self, name: str) -> Feedback | None: ...
    async def keep_feedback(self, name: str, feedback: Feedback) -> Feedback: ...


@dataclass(frozen=True, slots=True)
class Search:
    """How far to look. samples: independent first answers; repairs: bound on mending one of them; beam: how many right ones
    are taken further; improvements: rounds of asking for faster ones; min_gain: a round that gains less counts as none;
    patience: rounds without gain before stopping.
    """

    samples: int = 1
    repairs: int = 4
    beam: int = 1
    improvements: int = 2
    min_gain: float = 0.02
    patience: int = 1

    def __post_init__(self) -> None:
        for name, least in (("samples", 1), ("repairs", 0), ("beam", 1), ("improvements", 0), ("patience", 1)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"search {name}: expected at least {least}, found {value}")


@dataclass(frozen=True, slots=True)
class Judged:
    """A proposal and what was said of it. sample: which of the independent answers it goes back to."""

    proposal: Proposal
    feedback: Feedback
    sample: int = 0


#: Why a search ended: its rounds or gains did, the budget is spent, the model gave no answer, a prompt did not fit its limit.
Cause = Literal["done", "budget", "unavailable", "prompt"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything proposed, in the order judged; the fastest right one; why the search ended, in words and by kind."""

    judged: tuple[Judged, ...]
    best: Judged | None
    stopped: str
    cause: Cause = "done"


@dataclass(frozen=True, slots=True)
class _Chain:
    """Where a chain of answers starts: the first request, in whose words it is mended, and what it comes from.

    before: exchanges that led to the request. program: the TL that source is asked for, "" for none.
    """

    prompts: TaskPrompts
    messages: tuple[Message, ...]
    sample: int
    sketch: str = ""
    before: tuple[Exchange, ...] = ()
    parent: str | None = None
    round: int = 0
    program: str = ""


class _BudgetSpent(Exception):
    """No room in the budget for another request."""


@dataclass
class LanguageModelAuthor:
    """One search for one spec on one target. translation: prompts of stage 2, where the model translates too and not our
    translator; `evaluate` then says `checked` of a right TL program. problem: names the problem in the record of what was fed
    back, since problems that differ in nothing that a prompt says share answers. check_sketch: what is wrong with a sketch, or
    "" for nothing.

    Deterministic but for the model's answers and the feedback: with both on record (`client` a RecordedClient, `record` a store
    of transcripts), a second run makes the same requests, bit for bit.
    """

    client: ModelClient
    sampling: Sampling
    prompts: TaskPrompts
    style: Style = "two_stage"
    search: Search = field(default_factory=Search)
    ledger: Ledger = field(default_factory=Ledger)
    record: FeedbackRecord | None = None
    translation: DirectPrompts | None = None
    problem: str = ""
    check_sketch: Callable[[str], str] = lambda sketch: ""
    _costs: dict[str, Spent] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        return f"{'llm-direct' if self.style == 'direct' else 'llm'}:{self.sampling.model}"

    async def run(self, evaluate: Evaluate, seeds: Sequence[Judged] = ()) -> Outcome:
        """Search until the rounds, the budget or the gains end. `seeds` are right programs of other authors to start from."""
        judged: list[Judged] = []
        try:
            broken = await _gather([self._first_answers(evaluate, judged, sample) for sample in range(self.search.samples)])
            stopped, cause = await self._improve(evaluate, judged, list(seeds), broken)
        except _BudgetSpent as spent:
            stopped, cause = str(spent), "budget"
        right = [*seeds, *(j for j in judged if j.feedback.is_correct)]
        return Outcome(tuple(judged), _fastest(right), stopped, cause)

    async def _first_answers(self, evaluate: Evaluate, judged: list[Judged], sample: int) -> None:
        system = Message("system", self.prompts.system)
        if self.style != "two_stage":
            chain = _Chain(self.prompts, (system, Message("user", self.prompts.first)), sample)
        else:
            asked = (system, Message("user", self.prompts.sketch))
            exchange = await self._ask(asked, sample)
            sketch = extract(exchange.answer.text).get("sketch") or clean(exchange.answer.text)[:MAX_BLOCK_CHARS]
            said = Message("user", self.prompts.code_after(await self._found_in_sketch(sketch, exchange)))
            messages = (*asked, _said_by_model(exchange), said)
            chain = _Chain(self.prompts, messages, sample, sketch, (exchange,))
        await self._translated(evaluate, judged, chain, await self._mend(evaluate, judged, chain))

    async def _found_in_sketch(self, sketch: str, exchange: Exchange) -> str:
        """What is wrong with a sketch: it is mended along with the code that follows it. On record as all that is fed back."""
        found = self.check_sketch(sketch)
        if self.record is None:
            return found
        name = digest([exchange.hash, "sketch"])
        known = await self.record.find_feedback(name)
        return (known or await self.record.keep_feedback(name, Feedback("tl_rejected" if found else "checked", found))).text

    async def _mend(self, evaluate: Evaluate, judged: list[Judged], chain: _Chain) -> Judged | None:
        """Ask, judge, and ask again with what was found, until right or the bound on repairs. Gives the last one judged."""
        messages, before, parent, last = chain.messages, chain.before, chain.parent, None
        for repair in range(self.search.repairs + 1):
            exchange = await self._ask(messages, chain.sample)
            exchanges = (*before, exchange) if repair == 0 else (exchange,)
            proposal = self._proposal(exchanges, chain, parent, chain.round + repair)
            feedback = await self._evaluate(evaluate, proposal, exchange)
            last = Judged(proposal, feedback, chain.sample)
            judged.append(last)
            if feedback.is_correct or feedback.kind in ("not_judged", "checked"):
                return last
            parent = proposal.hash
            messages = (*messages[:2], _said_by_model(exchange), Message("user", chain.prompts.repair(feedback)))
        return last

    async def _translated(self, evaluate: Evaluate, judged: list[Judged], chain: _Chain, checked: Judged | None) -> None:
        """Stage 2 by the model: source for a program that has been found right, mended in the same way."""
        if self.translation is None or checked is None or checked.feedback.kind != "checked":
            return
        program = str(checked.feedback.data.get("program") or checked.proposal.text)
        messages = (Message("system", self.translation.system), Message("user", self.translation.translate(program)))
        sketch, parent, round_ = checked.proposal.sketch, checked.proposal.hash, checked.proposal.round
        await self._mend(evaluate, judged, _Chain(self.translation, messages, chain.sample, sketch, (), parent, round_, program))

    async def _improve(
        self, evaluate: Evaluate, judged: list[Judged], seeds: list[Judged], broken: Exception | None
    ) -> tuple[str, Cause]:
        """Rounds of asking for faster programs. `broken` is what ended a chain of first answers early, if anything did."""
        stale = 0
        for round_ in range(self.search.improvements):
            right = [*seeds, *(j for j in judged if j.feedback.is_correct)]
            best = _fastest(right)
            if best is None:
                return _ended(broken, "no right program to improve")
            beam = _beam(right, self.search.beam)
            broken = await _gather([self._faster(evaluate, judged, j, round_, i) for i, j in enumerate(beam)])
            now = _fastest([*seeds, *(j for j in judged if j.feedback.is_correct)])
            assert now is not None
            stale = 0 if _time(now) < _time(best) * (1 - self.search.min_gain) else stale + 1
            if broken is not None:
                return _ended(broken, "")
            if stale >= self.search.patience:
                return f"no gain of {self.search.min_gain:.0%} in {stale} round{'s' if stale > 1 else ''}", "done"
        return _ended(broken, "all rounds done")

    async def _faster(self, evaluate: Evaluate, judged: list[Judged], base: Judged, round_: int, rank: int) -> None:
        of, translated = base.proposal, base.proposal.kind == "source" and self.translation is not None
        prompts = self.translation if translated and self.translation is not None else self.prompts
        messages = (Message("system", prompts.system), Message("user", prompts.improve(of, base.feedback)))
        sample = self.search.samples + round_ * self.search.beam + rank
        chain = _Chain(prompts, messages, sample, of.sketch, (), of.hash, of.round + 1, of.program)
        last = await self._mend(evaluate, judged, chain)
        if not translated:
            await self._translated(evaluate, judged, chain, last)

    async def _ask(self, messages: tuple[Message, ...], sample: int) -> Exchange:
        sampling = self.sampling
        fitted = fit_messages(messages, sampling.token_limit - sampling.max_tokens)
        request = Request(sampling.model, fitted, sampling.max_tokens, sampling.temperature, sampling.seed, sample)
        tokens_in = sum(estimate_tokens(m.content) for m in fitted)
        reservation = await self.ledger.reserve(self.ledger.estimate(sampling.model, tokens_in, sampling.max_tokens))
        if reservation is None:
            raise _BudgetSpent(self.ledger.exhausted() or "budget: spent")
        spent, paid_for = Spent(), ""
        try:
            exchange = await self.client.ask(request)
            self._costs[request.hash] = spent = self.ledger.cost_of(exchange)
            paid_for = request.hash
            return exchange
        finally:
            self.ledger.settle(reservation, spent, paid_for)

    def _proposal(self, exchanges: tuple[Exchange, ...], chain: _Chain, parent: str | None, round_: int) -> Proposal:
        found = extract(exchanges[-1].answer.text)
        is_source = chain.prompts.tag != "tl"
        cost = sum((self._costs.pop(e.request.hash, Spent()) for e in exchanges), Spent())
        return Proposal(
            author=self.name,
            kind="source" if is_source else "tl",
            text=found.get("source" if is_source else "tl") or "",
            sketch=found.get("sketch") or chain.sketch,
            launch=(found.get("launch") or "") if is_source else "",
            program=chain.program if is_source else "",
            parent=parent,
            transcript=tuple(e.request.hash for e in exchanges),
            prompt_hash=exchanges[-1].request.hash,
            round=round_,
            tokens_in=cost.tokens_in,
            tokens_out=cost.tokens_out,
            cost_usd=cost.usd,
            model_s=cost.model_s,
            remarks=_remarks(exchanges[-1], found),
        )

    async def _evaluate(self, evaluate: Evaluate, proposal: Proposal, exchange: Exchange) -> Feedback:
        """Always judged (so that every proposal has its row), but what is fed back is what was fed back the first time.

        That something could not be judged is not kept: the next start comes back to it.
        """
        feedback = await evaluate(proposal)
        if self.record is None:
            return feedback
        # What is said of a program where the model translates it is not what is said of it where we do.
        by_model = self.translation is not None and proposal.kind == "tl"
        name = digest([exchange.hash, self.problem, *(["translated by the model"] if by_model else [])])
        if (known := await self.record.find_feedback(name)) is not None:
            return known
        return feedback if feedback.kind == "not_judged" else await self.record.keep_feedback(name, feedback)


def _said_by_model(exchange: Exchange) -> Message:
    """The answer as the next request repeats it; some servers refuse messages without text."""
    return Message("assistant", exchange.answer.text.replace("\0", "") or "(no text)")


def _remarks(exchange: Exchange, found: Extracted) -> tuple[str, ...]:
    remarks = list(found.remarks)
    if exchange.answer.finish_reason == "length":
        remarks.append(f"the answer was cut off at {exchange.answer.tokens_out} tokens")
    if exchange.answer.refusal:
        remarks.append("the model refused")
    return tuple(remarks)


async def _gather(chains: Sequence[Awaitable[None]]) -> Exception | None:
    """All chains to their end; one that breaks does not cut the others off. Gives what broke one of them, if anything did.

    A spent budget and faults of our own are raised.
    """
    results = await asyncio.gather(*chains, return_exceptions=True)
    broken = [r for r in results if isinstance(r, ModelUnavailable | PromptTooLong)]
    for result in results:
        if isinstance(result, BaseException) and result not in broken:
            raise result
    return broken[0] if broken else None


def _ended(broken: Exception | None, otherwise: str) -> tuple[str, Cause]:
    match broken:
        case ModelUnavailable():
            return f"model unavailable: {broken}", "unavailable"
        case PromptTooLong():
            return str(broken), "prompt"
    return otherwise, "done"


def _time(j: Judged) -> float:
    return j.feedback.score_s if j.feedback.score_s is not None else float("inf")


def _beam(right: Sequence[Judged], width: int) -> list[Judged]:
    """The fastest programs, each once; ties go to the smaller hash so that runs agree."""
    distinct = {j.proposal.hash: j for j in sorted(right, key=lambda j: (-_time(j), j.proposal.hash))}
    return sorted(distinct.values(), key=lambda j: (_time(j), j.proposal.hash))[:width]


def _fastest(right: Sequence[Judged]) -> Judged | None:
    beam = _beam(right, 1)
    return beam[0] if beam else None
