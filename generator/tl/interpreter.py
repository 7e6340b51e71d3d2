"""The meaning of TL: runs a program on NumPy arrays, block after block, statement after statement, tile by tile.

This file does not check programs, know attention or try to be fast; whatever a translator emits must agree with it.

A tile is an array of two axes; one value a row is (R, 1). What lies beyond a matrix's extents reads as zero, whatever memory
holds there, and is never written. A tile that nobody wrote is NaN (the lowest int32 in i32), so that reading it shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, assert_never

import numpy as np

from generator.tl.evaluate import Matrix, ProgramError, Scope, TileShape
from generator.tl.expand import expand
from generator.tl.ir import (
    Allocate,
    Argument,
    Compute,
    Constant,
    Copy,
    DType,
    For,
    Gemm,
    Grid,
    Hint,
    If,
    Let,
    Named,
    Option,
    Program,
    Prose,
    Reshape,
    Stmt,
)
from generator.tl.memory import LOWEST_I32, CallError, Memory
from generator.tl.numerics import Numerics, Precision, Value
from generator.tl.types import tiles

__all__ = ["CallError", "ProgramError", "Step", "run"]


@dataclass(frozen=True, slots=True)
class Step:
    """What one statement wrote, as `trace` sees it: `value` is the tile (R, C) after rounding; `written` is its name."""

    block: Mapping[str, int]
    loops: Mapping[str, int]
    statement: Stmt
    written: str
    value: np.ndarray


def run(
    program: Program,
    tensors: Mapping[str, Any],
    scalars: Mapping[str, int | float],
    *,
    precision: Precision = "stated",
    trace: Callable[[Step], None] | None = None,
) -> dict[str, np.ndarray]:
    """The program's outputs by name: float32 arrays that hold values of their dtype (int32 for i32), float64 with `exact`.

    tensors: every matrix that is read, offset axes first: Q is (batch, heads, SeqQ, D). An output found here is the memory that
    is written into (a copy of it). scalars: every argument; others are ignored. `exact` computes in float64 and rounds nothing.
    `trace` sees every tile after each statement, which is one of core code (macros written out; spans are the text's).
    Raises CallError for arguments that do not fit, TLError for what is no filled code, ProgramError for what the checker refuses.
    """
    core = expand(program)
    shapes = {t.name: (_two_axes(t.extents), t.dtype) for t in tiles(core).values()}
    with np.errstate(all="ignore"):
        memory = Memory.of(core, tensors, scalars, Numerics(precision))
        for coordinates in memory.blocks():
            _Block(memory, shapes, coordinates, trace).execute(core.body)
        return {name: memory.result(name) for name in core.outputs}


class _Block:
    """One block of the grid: its scope, and what its statements do to it."""

    def __init__(
        self,
        memory: Memory,
        shapes: Mapping[str, tuple[TileShape, DType]],
        coordinates: dict[str, int],
        trace: Callable[[Step], None] | None,
    ) -> None:
        self.memory, self.shapes, self.coordinates, self.trace = memory, shapes, coordinates, trace
        self.numerics = memory.numerics
        self.scope: Scope = memory.scope(coordinates)
        self.loops: dict[str, int] = {}

    def execute(self, body: tuple[Stmt, ...]) -> None:
        for s in body:
            match s:
                case For():
                    self._loop(s)
                case If():
                    self.execute(s.then if self.scope.value(s.test) else s.otherwise)
                case Allocate():
                    self._allocate(s)
                case Copy():
                    self._copy(s)
                case Gemm():
                    self._store(s, s.into, self._gemm(s))
                case Compute():
                    self._store(s, s.into, self.scope.value(s.value, self._shape(s.into)))
                case Reshape():
                    self._store(s, s.into, self.scope.tile(s.source))
                case Argument() | Grid() | Hint() | Option():
                    pass
                case Let() | Constant() | Named() | Prose():
                    raise AssertionError(f"{type(s).__name__} in core code")
                case _:
                    assert_never(s)

    def _loop(self, s: For) -> None:
        lo, hi = self.scope.whole((s.lo, s.hi))
        for i in reversed(range(lo, hi)) if s.reversed else range(lo, hi):
            self.scope.scalars[s.var] = self.loops[s.var] = i
            self.execute(s.body)
        self.loops.pop(s.var, None)

    def _allocate(self, a: Allocate) -> None:
        if a.level == "global":
            self.scope.matrices[a.name] = self.memory.matrix(a, self.scope)
        elif a.init is not None:
            self.scope.tiles[a.name] = self._round(a.name, self.scope.value(a.init, self._shape(a.name)))
        else:
            self.scope.tiles[a.name] = self._round(a.name, LOWEST_I32 if a.dtype == "i32" else self.numerics.real(np.nan))

    def _copy(self, s: Copy) -> None:
        if s.into_level == "global":
            value = self.scope.tile(s.source)
            self._write(s, value)
            self._report(s, s.into, value)
        elif s.source_level == "global":
            self._store(s, s.into, self._read(s))
        else:
            self._store(s, s.into, self.scope.tile(s.source))

    def _gemm(self, s: Gemm) -> np.ndarray:
        a, b = self.scope.tile(s.a), self.scope.tile(s.b)
        a, b = a.T if s.a_transposed else a, b.T if s.b_transposed else b
        if a.shape[1] != b.shape[0]:
            raise ProgramError(f"line {s.span.line}: GEMM of {a.shape} and {b.shape}: contracted dims disagree")
        product = self.numerics.matmul(a, b)
        return self.scope.tile(s.into) + product if s.accumulate else product

    def _shape(self, name: str) -> TileShape:
        if name not in self.shapes:
            raise ProgramError(f"{name}: expected an Allocate, a Copy or a Reshape that makes this tile, found none")
        return self.shapes[name][0]

    def _store(self, s: Stmt, name: str, value: Value) -> None:
        self.scope.tiles[name] = self._round(name, value)
        self._report(s, name, self.scope.tiles[name])

    def _round(self, name: str, value: Value) -> np.ndarray:
        """`value` as the tile `name` holds it."""
        shape = self._shape(name)
        rounded: np.ndarray = self.numerics.round_to(self.shapes[name][1], value)
        try:
            return rounded if rounded.shape == shape else np.broadcast_to(rounded, shape)
        except ValueError:
            raise ProgramError(f"{name}: expected a value that fits {shape}, found {np.shape(value)}") from None

    def _report(self, s: Stmt, name: str, value: np.ndarray) -> None:
        if self.trace is not None:
            self.trace(Step(dict(self.coordinates), dict(self.loops), s, name, value))

    def _read(self, s: Copy) -> np.ndarray:
        matrix = self.scope.matrices[s.source]
        inside, part, shape = self._box(s, matrix)
        tile = np.zeros(shape, matrix.memory.dtype)
        tile[part] = matrix.memory[inside]
        return tile.reshape(_two_axes(shape))

    def _write(self, s: Copy, value: np.ndarray) -> None:
        matrix = self.scope.matrices[s.into]
        inside, part, shape = self._box(s, matrix)
        if value.shape != _two_axes(shape):
            raise ProgramError(f"line {s.span.line}: {s.source} is {value.shape}, but {shape} is written")
        dtype = self.memory.allocations[s.into].dtype
        matrix.memory[inside] = self.numerics.round_to(dtype, value).reshape(shape)[part]

    def _box(self, s: Copy, matrix: Matrix) -> tuple[tuple[slice, ...], tuple[slice, ...], tuple[int, ...]]:
        """Where the tile lies: slices of the matrix and of the tile that overlap, and the tile's shape."""
        shape, coordinate = self.scope.whole(s.shape), self.scope.whole(s.coordinate)
        if len(shape) != len(matrix.extents):
            raise ProgramError(f"line {s.span.line}: a tile of shape {shape} of a matrix with extents {matrix.extents}")
        inside, part = [], []
        for size, extent, tile in itertools.zip_longest(shape, matrix.extents, coordinate[: len(shape)], fillvalue=0):
            start = tile * size
            lo = min(max(start, 0), extent)
            hi = max(min(start + size, extent), lo)
            inside.append(slice(lo, hi))
            part.append(slice(lo - start, hi - start) if hi > lo else slice(0, 0))
        return tuple(inside), tuple(part), shape


def _two_axes(shape: tuple[int, ...]) -> TileShape:
    rows, columns, *_ = (*shape, 1, 1)
    return rows, columns
