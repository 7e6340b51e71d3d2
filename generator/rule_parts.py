"""What mask rules and score rules are made of: parameters, scalar arguments and captured tensors. Holds no rule.

A rule is data: text in TL over the names below, and the facts that an author, a binding, a prompt and a plan need about it.

| name | in a rule's text it stands for |
| --- | --- |
| `kv` | the key's index, 0 to SeqK - 1 |
| `row` | the query's index, 0 to SeqQ - 1 |
| `q` | the query's position on the key axis: `row + SeqK - SeqQ` (bottom-right), or `row` where the rule's `align` is top_left |
| `b`, `h` | batch and query head |
| `x` | the score so far, in natural units (score rules only) |
| `SeqQ`, `SeqK`, `Heads`, `KvHeads`, `Batch` | the call's sizes |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from generator.spec import Rule, SpecError
from generator.tl.ir import DType

Number = int | float
ALIGNMENTS = ("bottom_right", "top_left")
#: Stands for an unbounded side of a window: larger than any length, small enough to add to one in 32 bits.
UNBOUNDED = 2**30


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a rule, as a plan writes it. `default` None: it has to be given. Bounds are inclusive."""

    name: str
    kind: Literal["int", "float", "choice"]
    meaning: str
    default: Number | str | None = None
    minimum: Number | None = None
    above: Number | None = None
    choices: tuple[str, ...] = ()

    @property
    def allowed(self) -> str:
        if self.kind == "choice":
            return f"one of {', '.join(self.choices)}"
        bound = f" of at least {self.minimum}" if self.minimum is not None else ""
        bound += f" above {self.above}" if self.above is not None else ""
        return ("a whole number" if self.kind == "int" else "a finite number") + bound

    def accepts(self, value: object) -> bool:
        if self.kind == "choice":
            return value in self.choices
        if isinstance(value, bool) or not isinstance(value, int if self.kind == "int" else int | float):
            return False
        assert isinstance(value, int | float)
        in_range = (self.minimum is None or value >= self.minimum) and (self.above is None or value > self.above)
        return math.isfinite(value) and in_range and (self.kind != "int" or value < UNBOUNDED)


ALIGN = Parameter("align", "choice", "which key the last query's position is counted from", "bottom_right", choices=ALIGNMENTS)


@dataclass(frozen=True, slots=True)
class Scalar:
    """A scalar argument that a rule adds to the program: its TL name, and its value from the rule's parameters."""

    name: str
    dtype: DType
    meaning: str
    value: Callable[[Mapping[str, Number | str]], Number]
    positive: bool = False


@dataclass(frozen=True, slots=True)
class Captured:
    """A tensor that a rule reads besides Q, K and V: `Allocate NAME in global (shape) DTYPE with offset [offset]`.

    `offset` holds grid axes (`b`), `shape` names of sizes (`SeqQ`, `SeqK`, `Heads`, `Batch`, ...); the whole tensor has both.
    """

    name: str
    dtype: DType
    meaning: str
    shape: tuple[str, ...]
    offset: tuple[str, ...] = ()


def resolve_parameters(rule: Rule, parameters: tuple[Parameter, ...], where: str) -> dict[str, Number | str]:
    """The values, defaults filled in. Raises SpecError naming `where.parameter`, what is allowed and what was found."""
    given = dict(rule.parameters)
    known = {p.name: p for p in parameters}
    if unknown := [name for name in given if name not in known]:
        names = ", ".join(known) or "no parameter"
        raise SpecError(f"{where}.{unknown[0]}: {rule.name} has no such parameter: expected {names}")
    values: dict[str, Number | str] = {}
    for name, parameter in known.items():
        value = given.get(name, parameter.default)
        if value is None:
            raise SpecError(f"{where}.{name}: expected {parameter.allowed}, found nothing")
        if not parameter.accepts(value):
            raise SpecError(f"{where}.{name}: expected {parameter.allowed}, found {value!r}")
        values[name] = value
    return values
