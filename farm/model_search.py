"""What a sweep tries for one problem when a language model is the author: its search, judged by the sweep's own attempts.

Sends no request and judges nothing itself: the author asks through its client, and rows come from the stages.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

from catalog.artifacts import Artifacts
from farm import model_feedback
from farm.jobs import Job, Row
from farm.model_settings import ModelSettings
from farm.plan import Plan
from farm.search import Attempt, Holes, Versions, fastest_first, order_choices
from generator.authors.clients import ModelClient
from generator.authors.exchange import Exchange
from generator.authors.ledger import Ledger, Spent
from generator.authors.llm import Judged, LanguageModelAuthor, Outcome, Style
from generator.authors.prompting import PromptTooLong, TaskPrompts, task_prompts
from generator.authors.proposal import Proposal
from generator.authors.rules import RuleAuthor
from generator.authors.transcripts import TranscriptStore
from generator.canonical import canonical_json, digest
from generator.feedback import Feedback
from generator.spec import AttentionSpec, SpecError
from generator.targets import find_target
from generator.tl.checker import parse_and_check
from generator.tl.fill import fill, hole_choices
from generator.tl.ir import Program
from generator.tl.printer import print_program
from verifier.environment import cpu_flags
from verifier.review import review_apart

#: Reasons that say nothing about a program: the sweep comes back to it.
_TELLS_NOTHING = "not_judged"


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

    async def solve(self, spec: AttentionSpec, target: str, attempt: Attempt) -> None:
        """All proposals for one problem; each one judged is one attempt, or as many as its holes are given values."""
        try:
            prompts = self._prompts(spec, target)
            seeds = await self._seeds(spec, target, attempt) if self.settings.seed_with_rules else []
        except (SpecError, PromptTooLong) as error:
            await attempt(self._job_of_nothing(spec, target, str(error)))
            return
        style: Style = self.settings.style  # type: ignore[assignment]
        author = LanguageModelAuthor(
            self.client, self.settings.sampling(), prompts, style, self.settings.search(), self.ledger, self.store
        )
        outcome = await author.run(Evaluator(self, spec, target, attempt).judge, seeds)
        if not outcome.judged:
            await attempt(self._job_of_nothing(spec, target, outcome.stopped))
        self.note(_said(spec, outcome, self.ledger))

    def _prompts(self, spec: AttentionSpec, target: str) -> TaskPrompts:
        facts = find_target(target, cpu_flags() if target.startswith("cpu") else ())
        text = f"{facts.isa}: {', '.join(facts.instructions)}"
        if facts.shared_bytes:
            text += f"; {facts.shared_bytes // 1024} KiB of shared memory a block, {facts.registers} registers a thread"
        return task_prompts(spec, facts.hardware[0], text + ".", self.settings.token_limit - self.settings.max_tokens)

    async def _seeds(self, spec: AttentionSpec, target: str, attempt: Attempt) -> list[Judged]:
        """The rule author's program as one to start from, judged like any other."""
        code = RuleAuthor().code(spec, target)
        proposal = Proposal("rules", "tl", print_program(code))
        feedback = await Evaluator(self, spec, target, attempt).judge(proposal)
        return [Judged(proposal, feedback)] if feedback.is_correct else []

    def _job_of_nothing(self, spec: AttentionSpec, target: str, message: str) -> Job:
        name = self.settings.model
        key = self.versions.key_without_program(spec, target, f"llm:{name}")
        columns = {"author": name, "author_mode": "llm"}
        return Job(key, spec, target, "", trouble=("author_failed", message), columns=columns)


@dataclass
class Evaluator:
    """Judges the proposals for one problem by attempts of the sweep; remembers their rows, so that children name parents."""

    search: ModelSearch
    spec: AttentionSpec
    target: str
    attempt: Attempt
    rows: dict[str, str] = field(default_factory=dict)

    async def judge(self, proposal: Proposal) -> Feedback:
        """Parser and checker, interpreter, then the sweep's stages: the first that finds something wrong speaks."""
        if not proposal.text:
            said = "; ".join(proposal.remarks) or "no block tagged `tl` with a program was found in the answer"
            return model_feedback.of_row(await self._refuse(proposal, "author_failed", said))
        parsed = parse_and_check(proposal.text, "code")
        if parsed.program is None:
            feedback = model_feedback.of_diagnostics(parsed.diagnostics, proposal.text)
            await self._refuse(proposal, "tl_rejected", feedback.text)
            return feedback
        wrong = await asyncio.to_thread(review_apart, proposal.text, self.spec)
        if wrong is not None:
            feedback = model_feedback.of_review(wrong, proposal.text)
            await self._refuse(proposal, "wrong_value", feedback.text)
            return feedback
        return await self._measure(proposal, parsed.program)

    async def _measure(self, proposal: Proposal, program: Program) -> Feedback:
        """The program with the first few choices of its holes; feedback is the fastest right one's, else the first one's."""
        choices = order_choices(list(hole_choices(program)))[: self.search.plan.tuning.candidates]
        rows = await asyncio.gather(*(self.attempt(self._job(proposal, program, holes)) for holes in choices))
        pairs = list(zip(choices, rows, strict=True))
        best = fastest_first(pairs)
        row = rows[choices.index(best[0])] if best else rows[0]
        self.rows[proposal.hash] = row.get("row_id", "")
        self._count(rows)
        return model_feedback.of_row(row, self._log(row))

    def _job(self, proposal: Proposal, program: Program, holes: Holes) -> Job:
        plan, text = self.search.plan, print_program(fill(program, holes))
        return Job(
            key=self.search.versions.key(self.spec, self.target, text, 0, plan.rivals),
            spec=self.spec,
            target=self.target,
            program=text,
            measure_s=plan.tuning.measure_s,
            rivals=plan.rivals,
            texts={"sketch": proposal.sketch, "code": proposal.text},
            columns=self._columns(proposal) | {"tuning": holes},
        )

    async def _refuse(self, proposal: Proposal, reason: str, message: str) -> Row:
        """A row for a proposal that no compiler gets to see."""
        asked = digest(
            {"proposal": proposal.hash, "reason": reason, "exchanges": proposal.transcript if not proposal.text else ()}
        )
        key = self.search.versions.key_without_program(self.spec, self.target, f"{proposal.author}:{asked}")
        job = Job(
            key=key,
            spec=self.spec,
            target=self.target,
            program="",
            trouble=(reason, message),
            texts={"sketch": proposal.sketch, "code": proposal.text},
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

    def _log(self, row: Row) -> str:
        name = row.get("log_hash")
        return self.search.artifacts.get(name).decode(errors="replace") if name else ""

    def _count(self, rows: list[Row]) -> None:
        """Compile and device seconds of the attempts into the ledger."""
        spent = Spent(
            compile_s=sum(row.get("compile_s") or 0.0 for row in rows),
            gpu_s=sum((row.get("verify_s") or 0.0) + (row.get("measure_s") or 0.0) for row in rows),
        )
        self.search.ledger.settle(None, spent)


def _said(spec: AttentionSpec, outcome: Outcome, ledger: Ledger) -> str:
    """One line for the person who watches."""
    right = sum(j.feedback.is_correct for j in outcome.judged)
    spent = dataclasses.asdict(ledger.spent)
    best = f", best {1e6 * outcome.best.feedback.score_s:,.0f} us" if outcome.best and outcome.best.feedback.score_s else ""
    money = f", {spent['usd']:.4f} USD" if spent["usd"] else ""
    return (
        f"{spec.name or spec}: {len(outcome.judged)} proposals, {right} right{best}; {outcome.stopped}; so far "
        f"{ledger.spent.tokens:,} tokens{money}, {ledger.spent.model_s:.0f} s of model"
    )
