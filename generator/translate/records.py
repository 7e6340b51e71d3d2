"""What a translator gives: source text with a typed launch description, or the reasons why not. Knows no spec and no author.

A kernel of any target is called with tensors and scalars by position, in the order of the program's declarations. The names are
the program's; `generator.binding` says what they stand for in an attention call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from generator.canonical import digest, digest_text
from generator.tl.ir import Argument, DType, Program
from generator.translate.facts import LaunchFacts


@dataclass(frozen=True, slots=True)
class TensorParameter:
    """A global matrix: its offset axes, then its own axes; unit stride in the last axis of a matrix with two axes of its own.

    `offset_axes` of leading indices, `axes` of its own (0, 1 or 2).
    """

    name: str
    dtype: DType
    offset_axes: int
    axes: int
    written: bool

    @property
    def ndim(self) -> int:
        return self.offset_axes + self.axes


@dataclass(frozen=True, slots=True)
class ScalarParameter:
    """A scalar argument; `positive` is a promise that the caller has checked."""

    name: str
    dtype: DType
    positive: bool


@dataclass(frozen=True, slots=True)
class Launch:
    """How the entry point is called.

    target_facts: what only one kind of target needs (grid, shared memory, instruction set): `CudaFacts` of a CUDA kernel.
    """

    entry: str
    tensors: tuple[TensorParameter, ...]
    scalars: tuple[ScalarParameter, ...]
    target_facts: LaunchFacts = field(default_factory=LaunchFacts)


@dataclass(frozen=True, slots=True)
class Translated:
    """One self-contained source file (runtime headers included in the text), and how to call it.

    schedule: the decisions of the passes as plain JSON values (roles, ranges, layouts, fallbacks with their reasons).
    """

    target: str
    language: str  # "c++" | "cuda"
    source: str
    launch: Launch
    program_hash: str
    schedule: dict[str, Any]

    @property
    def hash(self) -> str:
        return digest_text(self.source)


@dataclass(frozen=True, slots=True)
class Untranslatable:
    """Why this program has no code for this target: a reason of the closed list, and one sentence with the cure."""

    reason: str  # "translate_failed" | "unsupported_dtype" | "does_not_fit"
    message: str
    line: int = 0


def tensor_parameters(program: Program) -> tuple[TensorParameter, ...]:
    """The global matrices of a program in order of allocation: how every launch lists them."""
    written = set(program.outputs)
    matrices = [a for a in program.allocations.values() if a.level == "global"]
    return tuple(TensorParameter(a.name, a.dtype, len(a.offset), len(a.shape), a.name in written) for a in matrices)


def scalar_parameters(program: Program) -> tuple[ScalarParameter, ...]:
    """The scalar arguments of a program in textual order: how every launch lists them."""
    lines = [s for s in program.body if isinstance(s, Argument)]
    return tuple(ScalarParameter(name, s.dtype, s.positive) for s in lines for name in s.names)


def launch_from_plain(plain: dict[str, Any]) -> Launch:
    """The inverse of `generator.canonical.to_plain` for a Launch."""
    return Launch(
        plain["entry"],
        tuple(TensorParameter(**t) for t in plain["tensors"]),
        tuple(ScalarParameter(**s) for s in plain["scalars"]),
        plain["target_facts"],
    )


def launch_hash(launch: Launch) -> str:
    return digest(launch)
