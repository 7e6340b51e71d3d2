"""What a sweep tries for one problem when a language model is the author: its search, judged by the sweep's own attempts.

Sends no request and judges nothing itself: the author asks through its client, and rows come from the stages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from catalog.artifacts import Artifacts
from catalog.errors import StorageError
from farm import model_feedback
from farm.compiler_lines import in_tl
from farm.executors import trouble_of
from farm.jobs import Job, Row, device_seconds
from farm.model_prompts import prompts_of, translation_of
from farm.model_settings import ModelSettings
from farm.plan import Plan
from farm.scheduler import Stopped
from farm.search import Attempt, Versions, fastest_first, order_choices
from farm.variants import calls_to_load
from generator.authors.clients import ModelClient, OpenAIClient
from generator.authors.exchange import Exchange
from generator.authors.ledger import Ledger, Spent
from generator.authors.llm import Judged, LanguageModelAuthor, Outcome, Style
from generator.authors.prompting import PromptTooLong
from generator.authors.proposal import Proposal
from generator.authors.rules import RuleAuthor
from generator.authors.transcripts import TranscriptStore
from generator.canonical import canonical_json, digest
from generator.feedback import Feedback
from generator.spec import AttentionSpec, SpecError
from generator.tl.checker import parse_and_check
from generator.tl.fill import fill, spread_choices
from generator.tl.ir import Program
from generator.tl.printer import print_program
from generator.tuning import Holes
from verifier.reviewer import review_apart

#: So many choices of a program's holes are looked at; a stranger's program may have any number of them.
MAX_CHOICES = 128
#: The author of programs that a search may start from.
RULES = "rules"


@dataclass
class ModelSearch:
    """Searches by a language model for one sweep: one ledger, one client and one transcript store for all problems."""

    plan: Plan
    versions: Versions
    settings: ModelSettings
    client: ModelClient
    store: TranscriptStore
    artifacts: Artifacts
    ledger: Ledger = field(default_factory=Ledger)
    note: Callable[[str], None] = lambda text: None
    on_outcome: Callable[[AttentionSpec, str, Outcome, Spent], None] | None = None

    @property
    def width(self) -> int:
        """Problems worth having open at a time: while one waits for the model, others may be asked about or judged."""
        return self.settings.concurrency

    def line(self) -> str:
        """`model NAME: 3 asked, the longest for 41 s; 7 answers, 12,000 tokens in, ...; left of the budget: 1.2 usd`."""
        sent = list(self.client.waiting.values()) if isinstance(self.client, OpenAIClient) else []
        parts = [f"{len(sent)} asked, the longest for {time.monotonic() - min(sent):.0f} s"] if sent else []
        spent = self.ledger.spent
        parts.append(f"{spent.requests} answers, {spent.in_words()}" if spent.requests else "no answer yet")
        if left := ", ".join(f"{amount:,.4g} {name}" for name, amount in self.ledger.remaining().items()):
            parts.append(f"left of the budget: {left}")
        if lost := self.store.unsettled() - len(sent):
            parts.append(f"asked without an answer, perhaps paid: {lost}")
        return f"model {self.settings.model}: {'; '.join(parts)}"

    async def solve(self, spec: AttentionSpec, target: str, attempt: Attempt) -> None:
        """All proposals for one problem; each one judged is one attempt, or as many as its holes are given values.

        Raises Stopped where no other problem can fare better: the budget is spent, or the model has never answered.
        """
        evaluator = Evaluator(self, spec, target, attempt)
        try:
            prompts = prompts_of(spec, target, self.settings)
            translation = translation_of(spec, target, self.settings)
            seeds = await self._seeds(evaluator) if self.settings.seed_with_rules else []
        except (SpecError, PromptTooLong) as error:
            await attempt(self._job_of_nothing(spec, target, str(error)))
            return
        style: Style = self.settings.style  # type: ignore[assignment]
        search, sampling = self.settings.search(), self.settings.sampling()
        author = LanguageModelAuthor(
            self.client,
            sampling,
            prompts,
            style,
            search,
            self.ledger,
            self.store,
            translation,
            f"{spec.hash} {target}",
            model_feedback.of_sketch,
        )
        outcome = await author.run(evaluator.judge, seeds)
        if self.on_outcome is not None:
            self.on_outcome(spec, target, outcome, evaluator.spent)
        if outcome.cause == "budget":
            self.note(_said(spec, outcome, evaluator.spent))
            raise Stopped(outcome.stopped)
        if not outcome.judged:
            await attempt(self._job_of_nothing(spec, target, outcome.stopped))
        else:
            self.note(_said(spec, outcome, evaluator.spent))
        if outcome.cause == "unavailable" and not self.ledger.spent.requests:
            raise Stopped(outcome.stopped)

    async def _seeds(self, evaluator: Evaluator) -> list[Judged]:
        """The rule author's program as one to start from, judged like any other; what was said of it is kept."""
        code = RuleAuthor().code(evaluator.spec, evaluator.target)
        proposal = Proposal(RULES, "tl", print_program(code))
        name = digest({"seed": proposal.hash, "spec": evaluator.spec.hash, "target": evaluator.target})
        feedback = await evaluator.judge(proposal)
        if (known := await self.store.find_feedback(name)) is not None:
            feedback = known
        elif feedback.is_correct:
            feedback = await self.store.keep_feedback(name, feedback)
        return [Judged(proposal, feedback)] if feedback.is_correct else []

    def _job_of_nothing(self, spec: AttentionSpec, target: str, message: str) -> Job:
        name, mode = self.settings.model, "llm-direct" if self.settings.style == "direct" else "llm"
        key = self.versions.key_without_program(spec, target, f"{mode}:{name}")
        columns = {"author": name, "author_mode": mode}
        return Job(key, spec, target, "", trouble=("author_failed", message), columns=columns)


@dataclass
class Evaluator:
    """Judges the proposals for one problem by attempts of the sweep; remembers their rows, so that children name parents."""

    search: ModelSearch
    spec: AttentionSpec
    target: str
    attempt: Attempt
    rows: dict[str, str] = field(default_factory=dict)
    judgements: dict[str, asyncio.Task[Feedback]] = field(default_factory=dict)
    spent: Spent = field(default_factory=Spent)
    checked: dict[str, Proposal] = field(default_factory=dict)

    async def judge(self, proposal: Proposal) -> Feedback:
        """Parser and checker, interpreter, then the sweep's stages: the first that finds something wrong speaks.

        A fault of our own that a text brings to light costs this attempt, not the sweep.
        """
        self.spent += Spent(1, proposal.tokens_in, proposal.tokens_out, proposal.cost_usd, proposal.model_s)
        earlier = self.judgements.get(proposal.hash) if proposal.text else None
        if earlier is not None:
            return await self._repeated(proposal, await asyncio.shield(earlier))
        judgement = self.judgements[proposal.hash] = asyncio.ensure_future(self._judged_safely(proposal))
        try:
            return await judgement
        finally:
            judgement.cancel()

    async def _judged_safely(self, proposal: Proposal) -> Feedback:
        try:
            return await self._judged(proposal)
        except (Stopped, StorageError):
            raise
        except Exception as error:
            return model_feedback.of_row(await self._refuse(proposal, "not_run", trouble_of(error)))

    async def _repeated(self, proposal: Proposal, feedback: Feedback) -> Feedback:
        """The same program once more is not judged once more; its answer has a row all the same, for what it cost."""
        message = "the answer repeats a program that was judged before, letter for letter"
        first = self.rows.get(proposal.hash, "")
        await self._refuse(proposal, "author_failed", message)
        self.rows[proposal.hash] = first
        return replace(feedback, text=f"{message}. What was said of it:\n{feedback.text}")

    async def _judged(self, proposal: Proposal) -> Feedback:
        if said := _missing(proposal):
            return model_feedback.of_row(await self._refuse(proposal, "author_failed", said))
        if proposal.kind == "source":
            return await self._built(proposal)
        parsed = parse_and_check(proposal.text, "code")
        if parsed.program is None:
            feedback = model_feedback.of_diagnostics(parsed.diagnostics, proposal.text, proposal.remarks)
            await self._refuse(proposal, "tl_rejected", feedback.text)
            return feedback
        wrong = await asyncio.to_thread(review_apart, proposal.text, self.spec, first=calls_to_load())
        if wrong is not None:
            feedback = model_feedback.of_review(wrong, proposal.text)
            await self._refuse(proposal, "wrong_value", feedback.text)
            return feedback
        if self.search.settings.translator == "llm" and proposal.author != RULES:
            return self._checked(proposal, parsed.program)
        return await self._measure(proposal, parsed.program)

    def _checked(self, proposal: Proposal, program: Program) -> Feedback:
        """The program is right, and the model itself translates it: with the choice of its holes that we would try first."""
        holes = order_choices(spread_choices(program, MAX_CHOICES))[0]
        text = print_program(fill(program, holes))
        self.checked[text] = proposal
        said = "the program is right; it is yours to translate now"
        return Feedback("checked", said, data={"program": text})

    async def _built(self, proposal: Proposal) -> Feedback:
        """Device code that the model wrote: the stages read, compile, judge and time it like any other."""
        row = await self.attempt(self._source_job(proposal))
        self.rows[proposal.hash] = row.get("row_id", "")
        self._count([row])
        return model_feedback.of_row(row, self._artifact(row, "log_hash"))

    def _source_job(self, proposal: Proposal) -> Job:
        """What the program that is translated has cost stands in the row of its first translation."""
        plan, columns = self.search.plan, self._columns(proposal)
        code = self.checked.get(proposal.program)
        if code is not None and code.hash == proposal.parent:
            for name, own in self._columns(code).items():
                if name in _FREE:
                    columns[name] += own  # type: ignore[operator]
            conversation = (*self._exchanges(code), *self._exchanges(proposal))
            columns["transcript_hash"] = self.search.artifacts.put(canonical_json(conversation))
        text = canonical_json({"source": proposal.text, "launch": proposal.launch})
        return Job(
            key=self.search.versions.key(self.spec, self.target, text, 0, plan.rivals),
            spec=self.spec,
            target=self.target,
            program=proposal.program,
            measure_s=plan.tuning.measure_s,
            rivals=plan.rivals,
            source=proposal.text,
            launch=proposal.launch,
            texts={"sketch": proposal.sketch, "code": code.text if code is not None else ""},
            columns=columns,
        )

    async def _measure(self, proposal: Proposal, program: Program) -> Feedback:
        """The program with the first few choices of its holes; feedback is the fastest right one's, else the first one's."""
        choices = order_choices(spread_choices(program, MAX_CHOICES))[: self.search.plan.tuning.candidates]
        jobs = [self._job(proposal, program, holes, first=i == 0) for i, holes in enumerate(choices)]
        rows = await asyncio.gather(*(self.attempt(job) for job in jobs))
        pairs = list(zip(choices, rows, strict=True))
        best = fastest_first(pairs)
        at = choices.index(best[0]) if best else 0
        self.rows[proposal.hash] = rows[at].get("row_id", "")
        self._count(rows)
        return model_feedback.of_row(rows[at], self._compiler_said(rows[at], proposal, choices[at]))

    def _job(self, proposal: Proposal, program: Program, holes: Holes, first: bool) -> Job:
        """An attempt with one choice of the holes. What the answer cost stands in the first one's row, so that sums are true."""
        plan, text = self.search.plan, print_program(fill(program, holes))
        return Job(
            key=self.search.versions.key(self.spec, self.target, text, 0, plan.rivals),
            spec=self.spec,
            target=self.target,
            program=text,
            measure_s=plan.tuning.measure_s,
            rivals=plan.rivals,
            profile=self.search.settings.improvements > 0,
            texts={"sketch": proposal.sketch, "code": proposal.text},
            columns=self._columns(proposal) | ({} if first else _FREE) | {"tuning": holes},
        )

    async def _refuse(self, proposal: Proposal, reason: str, message: str) -> Row:
        """A row for a proposal that no compiler gets to see."""
        asked = digest(
            {"proposal": proposal.hash, "reason": reason, "exchanges": proposal.transcript if reason == "author_failed" else ()}
        )
        key = self.search.versions.key_without_program(self.spec, self.target, f"{proposal.author}:{asked}")
        job = Job(
            key=key,
            spec=self.spec,
            target=self.target,
            program="",
            trouble=(reason, message),
            texts={"sketch": proposal.sketch, "code": proposal.text if proposal.kind == "tl" else ""},
            columns=self._columns(proposal),
        )
        row = await self.attempt(job)
        self.rows[proposal.hash] = row.get("row_id", "")
        return row

    def _columns(self, proposal: Proposal) -> dict[str, object]:
        model = proposal.author.partition(":")
        columns: dict[str, object] = {
            "author": model[2] or proposal.author,
            "author_mode": model[0],
            "generation": proposal.round,
            "tokens_in": proposal.tokens_in,
            "tokens_out": proposal.tokens_out,
            "cost_usd": proposal.cost_usd,
            "author_s": proposal.model_s,
        }
        if proposal.parent and self.rows.get(proposal.parent):
            columns["parent_row_id"] = self.rows[proposal.parent]
        if exchanges := self._exchanges(proposal):
            columns["transcript_hash"] = self.search.artifacts.put(canonical_json(exchanges))
            columns["prompt_hash"] = self.search.artifacts.put(canonical_json(exchanges[-1].request))
        return columns

    def _exchanges(self, proposal: Proposal) -> tuple[Exchange, ...]:
        """The conversation that led to the proposal, as far as it is on record."""
        stored = (self.search.store.exchange(name) for name in proposal.transcript)
        return tuple(e for e in stored if e is not None)

    def _compiler_said(self, row: Row, proposal: Proposal, holes: Holes) -> str:
        """The compiler's log, the lines of the proposal that it complains of first."""
        log = self._artifact(row, "log_hash")
        if not log or not row["reason_code"].startswith("compile"):
            return log
        places = in_tl(log, self._artifact(row, "source_hash"), proposal.text, holes)
        return "\n".join([*places, *(["the compiler's own words:"] if places else []), log])

    def _artifact(self, row: Row, column: str) -> str:
        name = row.get(column)
        return self.search.artifacts.get(name).decode(errors="replace") if name else ""

    def _count(self, rows: list[Row]) -> None:
        """Compile and device seconds of the attempts into the ledgers, this kernel's and the run's."""
        for row in rows:
            spent = Spent(compile_s=row.get("compile_s") or 0.0, gpu_s=device_seconds(row))
            self.spent += spent
            self.search.ledger.settle(None, spent, row.get("row_id") or "")


#: Columns of the rows that share an answer with another row.
_FREE = {"tokens_in": 0, "tokens_out": 0, "cost_usd": 0.0, "author_s": 0.0}


def _missing(proposal: Proposal) -> str:
    """What an answer lacks, in its own words where it was cut; "" where all is there."""
    cut = "; ".join(proposal.remarks)
    if not proposal.text and proposal.kind == "tl":
        return cut or "no block tagged `tl` with a program was found in the answer"
    if not proposal.text:
        return cut or "no block tagged `cpp` or `cuda` with source was found in the answer"
    if proposal.kind == "source" and not proposal.launch:
        return cut or "no block tagged `launch` with a launch description was found in the answer"
    return ""


def _said(spec: AttentionSpec, outcome: Outcome, spent: Spent) -> str:
    """One line about a kernel for the person who watches: what came of it, and what it cost."""
    right = sum(j.feedback.is_correct for j in outcome.judged)
    best = f", best {1e6 * outcome.best.feedback.score_s:,.0f} us" if outcome.best and outcome.best.feedback.score_s else ""
    return f"{spec.name or spec}: {_count_of(outcome.judged)}, {right} right{best}; {outcome.stopped}; {spent.in_words()}"


def _count_of(judged: Sequence[Judged]) -> str:
    return f"{len(judged)} proposal" + ("s" if len(judged) != 1 else "")
