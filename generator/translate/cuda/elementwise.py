"""Element-wise statements, masks and row reductions as unrolled loops over one thread's share of a tile.

This file writes the statements; their values are `element_values`, the tests in them `element_tests`.
"""

from __future__ import annotations

from dataclasses import dataclass

from generator.tl.ir import Compute, Op, Var
from generator.tl.types import Kind
from generator.translate.cuda import names as mangle
from generator.translate.cuda.dtypes import TYPES
from generator.translate.cuda.element_code import PLAIN, ElementCode, Setting
from generator.translate.cuda.element_values import ElementValues
from generator.translate.passes.scope import Scope


def compute(code: ElementCode, s: Compute, setting: Setting = PLAIN) -> list[str]:
    """The lines of one statement."""
    return _Statement(code, setting, s.into).lines(s)


def compute_in_two(code: ElementCode, s: Compute, setting: Setting, groups: int) -> tuple[list[str], list[str]]:
    """The lines of a statement on a tile: up to this many groups of eight columns, and the rest."""
    return _Statement(code, setting, s.into).in_two(s, groups)


@dataclass
class _Statement(ElementValues):
    """One `into = value`, with the lines before it."""

    def lines(self, s: Compute) -> list[str]:
        dtype, shape = self.scope.names.tiles[s.into].dtype, self.scope.tiles[s.into]
        if not shape:
            return [f"{mangle.tile(s.into)} = {self.code.scalars.text(s.value, Kind.INT if dtype == 'i32' else Kind.FLOAT)};"]
        assignment = self._assignment(s)
        if not assignment:
            return []
        last = f"{f'FOR_TILE({shape[1]})' if len(shape) == 2 else 'FOR_ROWS'} {assignment}"
        return ["{", *self.before, last, "}"] if self.before else [last]

    def in_two(self, s: Compute, groups: int) -> tuple[list[str], list[str]]:
        assignment, columns = self._assignment(s), self.scope.tiles[s.into][1]
        parts = [f"FOR_PART({a}, {b}) {assignment}" for a, b in ((0, groups), (groups, columns // 8))] if assignment else ["", ""]
        return ["{", *self.before, parts[0]], [parts[1], "}"]

    def _assignment(self, s: Compute) -> str:
        """`X[...] = value;` of one element or row; "" where that does nothing."""
        dtype, shape = self.scope.names.tiles[s.into].dtype, self.scope.tiles[s.into]
        kind = Kind.INT if dtype == "i32" else Kind.FLOAT
        self.columns = shape[-1]
        value = self.element(s.value, kind) if len(shape) == 2 else self.row(s.value, kind)
        place = f"{mangle.tile(s.into)}[t][{'AT' if len(shape) == 2 else 'r'}]"
        if value == place:
            return ""
        return f"{place} = rounded<{TYPES[dtype]}>({value});" if dtype in ("f16", "bf16") else f"{place} = {value};"


def scales_by_row(s: Compute, scope: Scope) -> str | None:
    """The row tile r of `X = X * r`: x * 1 is x, so the statement can wait until some row changes."""
    match s.value:
        case Op("*", (Var(x), Var(r))) | Op("*", (Var(r), Var(x))) if (
            x == s.into and len(scope.tiles.get(x, ())) == 2 and len(scope.tiles.get(r, ())) == 1
        ):
            return r
    return None
