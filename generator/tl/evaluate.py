"""The value of an expression of core code, given what its names stand for. Runs no statement."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from generator.tl.ir import Expr, Index, Num, Op, Var, names
from generator.tl.numerics import Numerics, Value, is_whole

#: Rows and columns of the tile that a statement writes.
TileShape = tuple[int, int]


class ProgramError(ValueError):
    """A program that has no meaning; `generator.tl.checker` says so earlier and better."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """What one block addresses: `memory` starts at the block's offset and may be larger than `extents`."""

    memory: np.ndarray
    extents: tuple[int, ...]


@dataclass(slots=True)
class Scope:
    """What names stand for: scalars (arguments, grid axes, loop variables), matrices to index, and tiles of two axes."""

    numerics: Numerics
    scalars: dict[str, Value]
    matrices: dict[str, Matrix] = field(default_factory=dict)
    tiles: dict[str, np.ndarray] = field(default_factory=dict)

    def tile(self, name: str) -> np.ndarray:
        if name not in self.tiles:
            raise ProgramError(f"{name}: expected a scalar, or a tile that was made before; found neither")
        return self.tiles[name]

    def whole(self, expressions: tuple[Expr, ...]) -> tuple[int, ...]:
        """Scalar whole numbers: extents, offsets, coordinates, bounds."""
        return tuple(int(self.value(e)) for e in expressions)

    def value(self, e: Expr, shape: TileShape = (1, 1)) -> Value:
        """The value of e in a statement that writes a tile of `shape`: a scalar, or an array that broadcasts to it."""
        match e:
            case Num():
                return self.numerics.literal(e.value)
            case Var("rows"):
                return np.arange(shape[0])[:, None]
            case Var("cols"):
                return np.arange(shape[1])[None, :]
            case Var():
                return self.scalars[e.name] if e.name in self.scalars else self.tile(e.name)
            case Index():
                return self._element(e, shape)
            case Op("rowmax" | "rowsum"):
                return self._reduction(e, shape)
            case Op():
                return self.numerics.apply(e.fn, [self.value(x, shape) for x in e.args])

    def _reduction(self, e: Op, shape: TileShape) -> Value:
        """Over the columns; `cols` inside counts those of the tile that is reduced."""
        inner = (shape[0], max((self.tiles[n].shape[1] for n in names(e) if n in self.tiles), default=1))
        x = np.broadcast_to(self.value(e.args[0], inner), inner).astype(self.numerics.real, copy=False)
        return x.max(axis=1, keepdims=True) if e.fn == "rowmax" else x.sum(axis=1, keepdims=True)

    def _element(self, e: Index, shape: TileShape) -> Value:
        """One element for each position; zero where an index lies outside the matrix."""
        if e.tensor not in self.matrices:
            raise ProgramError(f"{e.tensor}: expected a matrix in global memory to index, found none of this name")
        matrix = self.matrices[e.tensor]
        indices = [self.value(x, shape) for x in e.indices]
        if len(indices) != len(matrix.extents):
            raise ProgramError(f"{e.tensor}: expected {len(matrix.extents)} indices, found {len(indices)}")
        inside: Any = np.True_
        for i, n in zip(indices, matrix.extents, strict=True):
            inside = inside & np.greater_equal(i, 0) & np.less(i, n)
        if not np.all(inside):
            if not np.any(inside):
                return np.zeros(np.shape(inside), matrix.memory.dtype)
            indices = [np.where(inside, i, 0) for i in indices]
        found = matrix.memory[tuple(indices)]
        found = np.where(inside, found, found.dtype.type(0))
        return found if found.ndim else (int(found) if is_whole(found) else found[()])
