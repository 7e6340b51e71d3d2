"""What an author is told about a proposal: plain data. Judges nothing and knows no author."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

FeedbackKind = Literal[
    "no_program",  # nothing in the answer could be read as a program
    "tl_rejected",  # parser or checker found errors
    "source_rejected",  # device code or its launch description breaks a rule, before any compiler
    "wrong_tile",  # the interpreter shows which tile is wrong first
    "checked",  # the TL is right, as far as it can be told without a kernel; its translation is the author's own next step
    "translate_failed",
    "compile_failed",
    "fault",  # crash, time-out, out of bounds, unwritten output, mutated input, nondeterminism
    "wrong_value",
    "measured",  # right, and timed: ask for a faster one
    "not_judged",  # nothing is wrong with the proposal, but it could not be judged here
]

CORRECT: frozenset[FeedbackKind] = frozenset({"measured"})


@dataclass(frozen=True, slots=True)
class Feedback:
    """The outcome of one proposal for its author.

    text: what a person, or a model, should read: errors with lines and hints, or measured facts. score_s: median seconds per call
    of a correct, measured kernel (lower is better), else None; correctness and speed are never mixed into one number.
    """

    kind: FeedbackKind
    text: str
    score_s: float | None = None
    reason: str = ""  # of verifier.records.REASONS
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def is_correct(self) -> bool:
        return self.kind in CORRECT
