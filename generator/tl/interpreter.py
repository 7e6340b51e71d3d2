"""The meaning of TL: runs a program on NumPy arrays, block after block, statement after statement, tile by tile.

This file does not check programs, know attention or try to be fast; whatever a translator emits must agree with it.

A tile is an array of two axes; one value a row is (R, 1). What lies beyond a matrix's extents reads as zero, whatever memory
holds there, and is never written. Memory that nobody wrote is NaN (the lowest int32 in i32), so that reading it shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from generator.tl.expand import expand
from generator.tl.ir import (
    Allocate,
    Argument,
    Compute,
    Constant,
    Copy,
    Expr,
    For,
    Gemm,
    Grid,
    Hint,
    If,
    Index,
    Let,
    Named,
    Num,
    Op,
    Option,
    Program,
    Prose,
    Reshape,
    Stmt,
    Var,
    names,
    walk,
)
from generator.tl.numerics import Numerics, Precision, Value, is_whole
from generator.tl.types import Tile, tiles

LOWEST_I32 = int(np.iinfo(np.int32).min)


class CallError(ValueError):
    """An argument that the program cannot be run on: names the parameter, what was expected and what was found."""


class ProgramError(ValueError):
    """A program that has no meaning; `generator.tl.checker` says so earlier and better."""


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
    is written into (a copy of it). scalars: every argument; others are ignored. `trace` sees every tile after each statement.
    Raises CallError for arguments that do not fit, ProgramError for programs that the checker refuses.
    """
    program = expand(program)
    with np.errstate(all="ignore"):
        memory = _Memory(program, Numerics(precision), dict(_check_scalars(program, scalars, Numerics(precision))))
        memory.load_inputs(tensors)
        memory.make_outputs()
        for coordinates in memory.blocks():
            _Block(memory, coordinates, trace).execute(program.body)
        return {name: memory.result(name) for name in program.outputs}


def _check_scalars(program: Program, scalars: Mapping[str, int | float], numerics: Numerics) -> Iterator[tuple[str, Value]]:
    for name, argument in program.arguments.items():
        if name not in scalars:
            raise CallError(f"{name}: expected a number ({argument.dtype}), found nothing")
        value = scalars[name]
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if argument.dtype == "i32" and not whole:
            raise CallError(f"{name}: expected a whole number (i32), found {value!r}")
        if not whole and not isinstance(value, float | np.floating):
            raise CallError(f"{name}: expected a number ({argument.dtype}), found {value!r}")
        if argument.positive and not value > 0:
            raise CallError(f"{name}: expected a positive number, as the program promises, found {value!r}")
        yield name, int(value) if argument.dtype == "i32" else numerics.real(numerics.round_to(argument.dtype, float(value)))


@dataclass(frozen=True, slots=True)
class _Matrix:
    """What one block addresses: `memory` starts at the block's offset and may be larger than `extents`."""

    memory: np.ndarray
    extents: tuple[int, ...]


@dataclass(slots=True)
class _Memory:
    """Everything that outlives a block: scalars and whole arrays."""

    program: Program
    numerics: Numerics
    scalars: dict[str, Value]
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    global_allocations: dict[str, Allocate] = field(default_factory=dict)
    tiles: dict[str, Tile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tiles = tiles(self.program)
        self.global_allocations = {n: a for n, a in self.program.allocations.items() if a.level == "global"}

    def blocks(self, only: set[str] | None = None) -> Iterator[dict[str, int]]:
        """Every value of the grid, the first axis running fastest; `only` keeps these axes and leaves the others at 0."""
        extents = {}
        for axis in self.program.axes:
            extents[axis.name] = int(_Block(self, {}, None).evaluate(axis.extent)) if only is None or axis.name in only else 1
        for point in itertools.product(*(range(extent) for extent in reversed(extents.values()))):
            yield dict(zip(extents, reversed(point), strict=True))

    def load_inputs(self, tensors: Mapping[str, Any]) -> None:
        for name, a in self.global_allocations.items():
            if name in self.program.outputs and name not in tensors:
                continue
            ndim = len(a.offset) + len(a.shape)
            if name not in tensors:
                raise CallError(f"{name}: expected an array with {ndim} axes, found nothing")
            array = np.asarray(tensors[name])
            if array.ndim != ndim:
                raise CallError(f"{name}: expected {ndim} axes ({len(a.offset)} leading), found shape {array.shape}")
            if array.dtype.kind not in ("iu" if a.dtype == "i32" else "fiu"):
                raise CallError(f"{name}: expected numbers ({a.dtype}), found an array of {array.dtype}")
            array = self.numerics.round_to(a.dtype, array)
            self.arrays[name] = array.copy() if name in self.program.outputs else array

    def make_outputs(self) -> None:
        """Memory of the outputs: as large as the largest offset and extents of any block."""
        for name in self.program.outputs:
            if name in self.arrays:
                continue
            a = self.global_allocations[name]
            read = set().union(*(names(e) for e in a.offset + a.shape)) if a.offset + a.shape else set()
            ends = [tuple(o + 1 for o in b.whole(a.offset)) + b.whole(a.shape) for b in self._partial_blocks(read)]
            shape = tuple(map(max, zip(*ends, strict=True))) if ends else self._shape_without_blocks(a)
            self.arrays[name] = np.full(shape, LOWEST_I32) if a.dtype == "i32" else np.full(shape, np.nan, self.numerics.real)

    def _partial_blocks(self, only: set[str]) -> Iterator[_Block]:
        for coordinates in self.blocks(only):
            block = _Block(self, coordinates, None)
            for s in self.program.body:
                if isinstance(s, Allocate) and s.level == "global" and s.name in self.arrays:
                    block.execute((s,))
            yield block

    def _shape_without_blocks(self, a: Allocate) -> tuple[int, ...]:
        """An empty grid: offset axes are as long as the grid axes they name, else 0."""
        block = _Block(self, {axis.name: 0 for axis in self.program.axes}, None)
        extents: dict[Expr, Expr] = {Var(axis.name): axis.extent for axis in self.program.axes}
        return tuple(block.whole((extents[e],))[0] if e in extents else 0 for e in a.offset) + block.whole(a.shape)

    def result(self, name: str) -> np.ndarray:
        return self.arrays[name].astype(np.int32) if self.global_allocations[name].dtype == "i32" else self.arrays[name]


class _Block:
    """One block of the grid: its names, its views of the matrices, its tiles."""

    def __init__(self, memory: _Memory, coordinates: dict[str, int], trace: Callable[[Step], None] | None) -> None:
        self.memory, self.coordinates, self.trace = memory, coordinates, trace
        self.numerics = memory.numerics
        self.scalars: dict[str, Value] = memory.scalars | coordinates
        self.loops: dict[str, int] = {}
        self.matrices: dict[str, _Matrix] = {}
        self.tiles: dict[str, np.ndarray] = {}

    # ------------------------------------------------------------------------------------------------- statements

    def execute(self, body: tuple[Stmt, ...]) -> None:
        for s in body:
            match s:
                case For():
                    self._loop(s)
                case If():
                    self.execute(s.then if self.evaluate(s.test) else s.otherwise)
                case Allocate():
                    self._allocate(s)
                case Copy():
                    self._copy(s)
                case Gemm():
                    self._store(s, s.into, self._gemm(s))
                case Compute():
                    self._store(s, s.into, self.evaluate(s.value, self._shape(s.into)))
                case Reshape():
                    self._store(s, s.into, self._tile(s.source))
                case Argument() | Grid() | Hint() | Option():
                    pass
                case Let() | Constant() | Named() | Prose():
                    raise AssertionError(f"{type(s).__name__} in core code")

    def _loop(self, s: For) -> None:
        lo, hi = self.whole((s.lo, s.hi))
        for i in reversed(range(lo, hi)) if s.reversed else range(lo, hi):
            self.scalars[s.var] = self.loops[s.var] = i
            self.execute(s.body)
        self.loops.pop(s.var, None)

    def _allocate(self, a: Allocate) -> None:
        if a.level != "global":
            empty = LOWEST_I32 if a.dtype == "i32" else self.numerics.real(np.nan)
            self.tiles[a.name] = self._round(a.name, empty if a.init is None else self.evaluate(a.init, self._shape(a.name)))
            return
        shape = self.whole(a.shape)
        memory, offset = self.memory.arrays[a.name], self.whole(a.offset)
        if any(not 0 <= i < n for i, n in zip(offset, memory.shape, strict=False)):
            raise CallError(f"{a.name}: expected leading axes that hold index {offset}, found shape {memory.shape}")
        found = memory.shape[len(offset) :]
        varies = any(
            isinstance(x, Index) or (isinstance(x, Var) and x.name in self.coordinates) for e in a.shape for x in walk(e)
        )
        if any(n < want if varies else n != want for n, want in zip(found, shape, strict=True)):
            expected = f"{'at least ' if varies else ''}{shape}"
            raise CallError(f"{a.name}: expected {expected} in its last axes, found shape {memory.shape}")
        self.matrices[a.name] = _Matrix(memory[offset], shape)

    def _copy(self, s: Copy) -> None:
        if s.into_level == "global":
            value = self._tile(s.source)
            self._write(s, value)
            self._report(s, s.into, value)
        elif s.source_level == "global":
            self._store(s, s.into, self._read(s))
        else:
            self._store(s, s.into, self._tile(s.source))

    def _gemm(self, s: Gemm) -> np.ndarray:
        a, b = self._tile(s.a), self._tile(s.b)
        a, b = a.T if s.a_transposed else a, b.T if s.b_transposed else b
        if a.shape[1] != b.shape[0]:
            raise ProgramError(f"line {s.span.line}: GEMM of {a.shape} and {b.shape}: contracted dims disagree")
        product = self.numerics.matmul(a, b)
        return self._tile(s.into) + product if s.accumulate else product

    # ------------------------------------------------------------------------------------------ tiles and matrices

    def _tile(self, name: str) -> np.ndarray:
        if name not in self.tiles:
            raise ProgramError(f"{name}: expected a tile that was made before, found none")
        return self.tiles[name]

    def _store(self, s: Stmt, name: str, value: Value) -> None:
        self.tiles[name] = self._round(name, value)
        self._report(s, name, self.tiles[name])

    def _round(self, name: str, value: Value) -> np.ndarray:
        """`value` as the tile `name` holds it."""
        shape = self._shape(name)
        try:
            return np.broadcast_to(self.numerics.round_to(self.memory.tiles[name].dtype, value), shape)
        except ValueError:
            raise ProgramError(f"{name}: expected a value that fits {shape}, found {np.shape(value)}") from None

    def _shape(self, name: str) -> tuple[int, int]:
        if name not in self.memory.tiles:
            raise ProgramError(f"{name}: expected an Allocate, a Copy or a Reshape that makes this tile, found none")
        return _two_axes(self.memory.tiles[name].extents)

    def _report(self, s: Stmt, name: str, value: np.ndarray) -> None:
        if self.trace is not None:
            self.trace(Step(dict(self.coordinates), dict(self.loops), s, name, value))

    def _box(self, s: Copy, matrix: _Matrix) -> tuple[tuple[slice, ...], tuple[slice, ...], tuple[int, ...]]:
        """Where the tile lies: slices of the matrix and of the tile that overlap, and the tile's shape."""
        shape, coordinate = self.whole(s.shape), self.whole(s.coordinate)
        if len(shape) != len(matrix.extents):
            raise ProgramError(f"line {s.span.line}: a tile of shape {shape} of a matrix with extents {matrix.extents}")
        inside, part = [], []
        for size, extent, tile in itertools.zip_longest(shape, matrix.extents, coordinate[: len(shape)], fillvalue=0):
            start = tile * size
            lo, hi = min(max(start, 0), extent), max(min(start + size, extent), 0)
            inside.append(slice(lo, max(lo, hi)))
            part.append(slice(lo - start, max(lo, hi) - start) if hi > lo else slice(0, 0))
        return tuple(inside), tuple(part), shape

    def _read(self, s: Copy) -> np.ndarray:
        matrix = self.matrices[s.source]
        inside, part, shape = self._box(s, matrix)
        tile = np.zeros(shape, matrix.memory.dtype)
        tile[part] = matrix.memory[inside]
        return tile.reshape(_two_axes(shape))

    def _write(self, s: Copy, value: np.ndarray) -> None:
        matrix = self.matrices[s.into]
        inside, part, shape = self._box(s, matrix)
        if value.shape != _two_axes(shape):
            raise ProgramError(f"line {s.span.line}: {s.source} is {value.shape}, but {shape} is written")
        dtype = self.memory.global_allocations[s.into].dtype
        matrix.memory[inside] = self.numerics.round_to(dtype, value).reshape(shape)[part]

    # ------------------------------------------------------------------------------------------------- expressions

    def whole(self, expressions: tuple[Expr, ...]) -> tuple[int, ...]:
        """Scalar whole numbers: extents, offsets, coordinates, bounds."""
        return tuple(int(self.evaluate(e)) for e in expressions)

    def evaluate(self, e: Expr, shape: tuple[int, int] = (1, 1)) -> Value:
        """The value of e in a statement that writes a tile of `shape`: a scalar, or an array that broadcasts to it."""
        match e:
            case Num():
                return self.numerics.literal(e.value)
            case Var("rows"):
                return np.arange(shape[0])[:, None]
            case Var("cols"):
                return np.arange(shape[1])[None, :]
            case Var():
                return self.scalars[e.name] if e.name in self.scalars else self._tile(e.name)
            case Index():
                return self._element(e, shape)
            case Op("rowmax" | "rowsum"):
                return self._reduce(e, shape)
            case Op():
                return self.numerics.apply(e.fn, [self.evaluate(x, shape) for x in e.args])

    def _reduce(self, e: Op, shape: tuple[int, int]) -> Value:
        """Over the columns; `cols` inside counts those of the tile that is reduced."""
        inner = (shape[0], max((self.tiles[n].shape[1] for n in names(e) if n in self.tiles), default=1))
        x = np.broadcast_to(self.evaluate(e.args[0], inner), inner).astype(self.numerics.real, copy=False)
        return x.max(axis=1, keepdims=True) if e.fn == "rowmax" else x.sum(axis=1, keepdims=True)

    def _element(self, e: Index, shape: tuple[int, int]) -> Value:
        """One element for each position; zero where an index lies outside the matrix."""
        if e.tensor not in self.matrices:
            raise ProgramError(f"{e.tensor}: expected a matrix in global memory to index, found none of this name")
        matrix = self.matrices[e.tensor]
        indices = [self.evaluate(x, shape) for x in e.indices]
        if len(indices) != len(matrix.extents):
            raise ProgramError(f"{e.tensor}: expected {len(matrix.extents)} indices, found {len(indices)}")
        inside: Any = True
        for i, n in zip(indices, matrix.extents, strict=True):
            inside = inside & (np.asarray(i) >= 0) & (np.asarray(i) < n)
        if matrix.memory.size == 0:
            return np.zeros(np.shape(inside), matrix.memory.dtype)
        found = matrix.memory[tuple(np.where(inside, i, 0) for i in indices)]
        found = np.where(inside, found, found.dtype.type(0))
        return found if found.ndim else (int(found) if is_whole(found) else found[()])


def _two_axes(shape: tuple[int, ...]) -> tuple[int, int]:
    rows, columns, *_ = (*shape, 1, 1)
    return rows, columns
