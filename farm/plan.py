"""A plan: which attention problems to solve, for which targets, by which author, within which budget. Does no work itself.

`farm.plan_file` reads one from YAML. Plans stream: `Plan.specs` is a generator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from generator.authors.ledger import Price
from generator.spec import AttentionSpec, Rule

AUTHORS = ("rules", "llm", "llm-direct")


@dataclass(frozen=True, slots=True)
class Shape:
    """One call: `seqlen_q` queries against `seqlen_k` keys, for `batch` sequences."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    phase: str = "prefill"


@dataclass(frozen=True, slots=True)
class Model:
    """Attention as one model (or one kind of its layers) has it, at the lengths asked for."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    masks: tuple[Rule, ...] = ()
    scores: tuple[Rule, ...] = ()
    softmax_scale: float | None = None
    layout: str = "bhsd"

    def specs(self) -> Iterator[AttentionSpec]:
        for dtype in self.dtypes:
            for shape in self.shapes:
                yield AttentionSpec(
                    self.num_heads,
                    self.num_kv_heads,
                    self.head_dim,
                    self.head_dim_v,
                    shape.batch,
                    shape.seqlen_q,
                    shape.seqlen_k,
                    dtype,  # type: ignore[arg-type]  # checked against TL_DTYPES
                    self.masks,
                    self.scores,
                    shape.phase,  # type: ignore[arg-type]
                    self.softmax_scale,
                    self.layout,  # type: ignore[arg-type]
                    name=self.name,
                )


@dataclass(frozen=True, slots=True)
class Tuning:
    """How far the holes of one program are searched: successive halving.

    candidates: choices of the holes that are built and timed at first (1: the author's first choice only).
    keep: the share that goes on to the next rung, which measures twice as long; the last rung has one candidate.
    measure_s: seconds of measuring for a candidate of the first rung, rivals included.
    """

    candidates: int = 4
    keep: float = 0.5
    measure_s: float = 0.5


@dataclass(frozen=True, slots=True)
class Budget:
    """When to stop admitting attempts. None: no limit."""

    minutes: float | None = None
    attempts: int | None = None
    usd: float | None = None
    tokens: int | None = None
    gpu_s: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a sweep is told. raw_specs: problems that no model stands for."""

    name: str
    models: tuple[Model, ...]
    raw_specs: tuple[AttentionSpec, ...] = ()
    targets: tuple[str, ...] = ("cpu",)
    author: str = "rules"
    author_options: tuple[tuple[str, Any], ...] = ()
    rivals: tuple[str, ...] | None = None  # None: whatever may be the fastest; (): our own time alone
    tuning: Tuning = field(default_factory=Tuning)
    budget: Budget = field(default_factory=Budget)
    prices: tuple[tuple[str, Price], ...] = ()  # of models, by name
    catalog: str | None = None
    variants: str | None = None  # a Python file with the user's own rules

    def specs(self) -> Iterator[AttentionSpec]:
        """Every problem once, in the plan's order."""
        seen: set[str] = set()
        for source in (*(m.specs() for m in self.models), iter(self.raw_specs)):
            for spec in source:
                if (key := spec.hash) not in seen:
                    seen.add(key)
                    yield spec

    def problems(self) -> Iterator[tuple[AttentionSpec, str]]:
        """(spec, target), targets innermost, so that every class of device has work from the start."""
        for spec in self.specs():
            for target in self.targets:
                yield spec, target

    def with_changes(self, **changes: Any) -> Plan:
        """The plan with what the command line says instead; fields given as None stay."""
        return replace(self, **{k: v for k, v in changes.items() if v is not None})
