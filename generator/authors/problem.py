"""What a sketch leaves open, as data: the matrices, how they are cut into tiles, loops, and what names mean. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

from generator.tl.ir import Allocate, Argument, Constant, DType, Expr, Grid, Hint, Option


class ReasoningError(ValueError):
    """A sketch that this problem does not turn into code: names the tile or statement."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How one matrix is cut: the shape of its tiles, and which tile a block (or an iteration) takes."""

    shape: tuple[Expr, ...]
    coordinate: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """What a sketch leaves open. Only what the sketch uses is declared in the code.

    matrices: global allocations. cuts: matrix name -> its tiles. loops: loop variable -> its range. lets: names that the sketch's
    expressions use -> their meaning, in order of definition. row_axis, column_axis: extents that `rows` and `cols` range over.
    operand_dtype: what a Reshape gives the next GEMM.
    """

    name: str
    arguments: tuple[Argument, ...]
    constants: tuple[Constant, ...]
    grid: Grid
    matrices: tuple[Allocate, ...]
    cuts: dict[str, Cut]
    loops: dict[str, tuple[Expr, Expr]]
    lets: dict[str, Expr]
    row_axis: Expr
    column_axis: Expr
    operand_dtype: DType
    settings: tuple[Hint | Option, ...] = ()
