"""What outlives a block when a program is interpreted: its scalars and whole matrices, checked and rounded. Runs no statement."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from generator.tl.evaluate import Matrix, Scope
from generator.tl.ir import Allocate, Argument, Expr, Index, Program, Var, names, walk
from generator.tl.numerics import Numerics, Value

LOWEST_I32 = int(np.iinfo(np.int32).min)
#: More blocks than anyone waits for: an interpreter takes milliseconds for each.
MAX_BLOCKS = 1_000_000


class CallError(ValueError):
    """An argument that the program cannot be run on: names the parameter, what was expected and what was found."""


@dataclass(slots=True)
class Memory:
    """The matrices of core code by name, offset axes first. Memory that nobody wrote is NaN (the lowest int32 in i32)."""

    program: Program
    numerics: Numerics
    scalars: dict[str, Value]
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    allocations: dict[str, Allocate] = field(default_factory=dict)

    @staticmethod
    def empty(program: Program, scalars: Mapping[str, Any], numerics: Numerics) -> Memory:
        """No matrix yet. Raises CallError for scalars that do not fit."""
        checked = {name: _scalar(name, a, scalars, numerics) for name, a in program.arguments.items()}
        memory = Memory(program, numerics, checked)
        memory.allocations = {name: a for name, a in program.allocations.items() if a.level == "global"}
        return memory

    @staticmethod
    def of(program: Program, tensors: Mapping[str, Any], scalars: Mapping[str, Any], numerics: Numerics) -> Memory:
        """Inputs taken over, outputs made as large as the blocks reach. Raises CallError."""
        memory = Memory.empty(program, scalars, numerics)
        for name, a in memory.allocations.items():
            if name in tensors or name not in program.outputs:
                memory.arrays[name] = memory._input(a, tensors)
        for name in program.outputs:
            if name not in memory.arrays:
                memory.arrays[name] = memory._output(memory.allocations[name])
        return memory

    def blocks(self, only: set[str] | None = None) -> Iterator[dict[str, int]]:
        """Every value of the grid, the first axis running fastest; `only` keeps these axes and leaves the others at 0.

        Raises CallError for more than MAX_BLOCKS.
        """
        scope = Scope(self.numerics, dict(self.scalars))
        extents = {
            a.name: 1 if only is not None and a.name not in only else scope.whole((a.extent,))[0] for a in self.program.axes
        }
        if math.prod(extents.values()) > MAX_BLOCKS:
            sizes = " x ".join(f"{name} {extent:,}" for name, extent in extents.items())
            raise CallError(f"grid: expected at most {MAX_BLOCKS:,} blocks, found {sizes}; give smaller sizes")
        for point in itertools.product(*(range(extent) for extent in reversed(extents.values()))):
            yield dict(zip(extents, reversed(point), strict=True))

    def scope(self, coordinates: Mapping[str, int]) -> Scope:
        """The names of one block before its first statement."""
        return Scope(self.numerics, self.scalars | dict(coordinates))

    def matrix(self, a: Allocate, scope: Scope) -> Matrix:
        """A block's view. Raises CallError where the array has no such offset, or other extents than the program says."""
        memory, offset, extents = self.arrays[a.name], scope.whole(a.offset), scope.whole(a.shape)
        if any(not 0 <= i < n for i, n in zip(offset, memory.shape, strict=False)):
            raise CallError(f"{a.name}: expected leading axes that hold index {offset}, found shape {memory.shape}")
        found = memory.shape[len(offset) :]
        axes = {axis.name for axis in self.program.axes}
        varies = any(isinstance(x, Index) or (isinstance(x, Var) and x.name in axes) for e in a.shape for x in walk(e))
        if any(n < want if varies else n != want for n, want in zip(found, extents, strict=True)):
            expected = f"{'at least ' if varies else ''}{extents}"
            raise CallError(f"{a.name}: expected {expected} in its last axes, found shape {memory.shape}")
        return Matrix(memory[offset], extents)

    def result(self, name: str) -> np.ndarray:
        return self.arrays[name].astype(np.int32) if self.allocations[name].dtype == "i32" else self.arrays[name]

    def _input(self, a: Allocate, tensors: Mapping[str, Any]) -> np.ndarray:
        ndim = len(a.offset) + len(a.shape)
        if a.name not in tensors:
            raise CallError(f"{a.name}: expected an array with {ndim} axes, found nothing")
        array = np.asarray(tensors[a.name])
        if array.ndim != ndim:
            raise CallError(f"{a.name}: expected {ndim} axes ({len(a.offset)} leading), found shape {array.shape}")
        if array.dtype.kind not in ("iu" if a.dtype == "i32" else "fiu"):
            raise CallError(f"{a.name}: expected numbers ({a.dtype}), found an array of {array.dtype}")
        rounded: np.ndarray = self.numerics.round_to(a.dtype, array)
        return rounded.copy() if a.name in self.program.outputs else rounded

    def _output(self, a: Allocate) -> np.ndarray:
        shape = self.shape(a)
        return np.full(shape, LOWEST_I32) if a.dtype == "i32" else np.full(shape, np.nan, self.numerics.real)

    def shape(self, a: Allocate) -> tuple[int, ...]:
        """As large as the largest offset and extents of any block."""
        read = {name for e in a.offset + a.shape for name in names(e)}
        ends = []
        for coordinates in self.blocks(read):
            scope = self.scope(coordinates)
            scope.matrices = {n: self.matrix(self.allocations[n], scope) for n in self.arrays if n in read}
            ends.append(tuple(o + 1 for o in scope.whole(a.offset)) + scope.whole(a.shape))
        return tuple(map(max, zip(*ends, strict=True))) if ends else self._shape_without_blocks(a)

    def _shape_without_blocks(self, a: Allocate) -> tuple[int, ...]:
        """An empty grid: offset axes are as long as the grid axes they name, else 0."""
        scope = self.scope({axis.name: 0 for axis in self.program.axes})
        extents: dict[Expr, Expr] = {Var(axis.name): axis.extent for axis in self.program.axes}
        return tuple(scope.whole((extents[e],))[0] if e in extents else 0 for e in a.offset) + scope.whole(a.shape)


def matrix_shapes(program: Program, scalars: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The whole shape, offset axes first, of every global matrix of core code at these scalars.

    Raises CallError for scalars that do not fit, ProgramError where a shape depends on what another matrix holds.
    """
    memory = Memory.empty(program, scalars, Numerics("exact"))
    with np.errstate(all="ignore"):
        return {name: memory.shape(a) for name, a in memory.allocations.items()}


def _scalar(name: str, argument: Argument, scalars: Mapping[str, Any], numerics: Numerics) -> Value:
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
    return int(value) if argument.dtype == "i32" else numerics.real(numerics.round_to(argument.dtype, float(value)))
