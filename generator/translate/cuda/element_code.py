"""What element-wise code knows of its program and of the place where a statement stands. Writes no code."""

from __future__ import annotations

from dataclasses import dataclass, field

from generator.tl.ir import Expr
from generator.translate.cuda.scalars import Scalars
from generator.translate.passes.scope import Scope


@dataclass(frozen=True, slots=True)
class Setting:
    """What is known where a statement stands.

    visible: tests known true. off: a test and the C of a bool; where the bool is true, the test counts as false everywhere.
    deferred: row sums that stay per lane.
    """

    visible: frozenset[Expr] = frozenset()
    off: tuple[Expr, str] | None = None
    deferred: frozenset[str] = frozenset()


PLAIN = Setting()


@dataclass
class ElementCode:
    """What the statements of one program share. shared: C for an element of a shared tile at (row, column)."""

    scalars: Scalars
    shared: dict[str, str] = field(default_factory=dict)  # shared tile -> the C function that reads it, as "f(tile, {r}, {c})"
    counter: int = 0
    masks_as_bits: bool = False  # a row's limits as one mask: fewer instructions, a few more registers

    @property
    def scope(self) -> Scope:
        return self.scalars.scope

    def temporary(self) -> str:
        self.counter += 1
        return f"x{self.counter}"
