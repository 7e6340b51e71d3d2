"""What numbers do in TL: rounding to a dtype, and every function of an expression on NumPy values. Knows no program and no tile.

Whole numbers are exact (Python ints and int64 arrays). Values are float32 when rounding is as the program states, float64 when
it is exact; a whole number that meets a value becomes one. Infinities and NaN follow IEEE 754 and warn nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from generator.tl.ir import DType

Precision = Literal["stated", "exact"]
#: A Python int, or a NumPy array or scalar of int64, float or bool.
Value = Any


def round_bf16(x: np.ndarray) -> np.ndarray:
    """float32 with each element rounded to the nearest bfloat16, ties to even; infinities and NaN kept."""
    x = np.asarray(x, dtype=np.float32)
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), x, rounded.view(np.float32))


def is_whole(x: Value) -> bool:
    return isinstance(x, int) or x.dtype.kind in "iu"


def is_test(x: Value) -> bool:
    return not isinstance(x, int) and x.dtype.kind == "b"


@dataclass(frozen=True, slots=True)
class Numerics:
    """`stated`: each result is a float32 and tiles are rounded to their dtype. `exact`: float64 and no rounding."""

    precision: Precision = "stated"

    @property
    def real(self) -> type[np.floating[Any]]:
        return np.float32 if self.precision == "stated" else np.float64

    def literal(self, value: int | float) -> Value:
        return value if isinstance(value, int) else self.real(value)

    def round_to(self, dtype: DType, x: Value) -> Value:
        """The value that a tile or matrix of `dtype` holds after x was stored in it, as a float (whole numbers for i32)."""
        if dtype == "i32":
            return np.asarray(x).astype(np.int32).astype(np.int64)
        if self.precision == "exact":
            return np.asarray(x, dtype=np.float64)
        match dtype:
            case "f32":
                return np.asarray(x, dtype=np.float32)
            case "f16":
                return np.asarray(x, dtype=np.float32).astype(np.float16).astype(np.float32)
            case "bf16":
                return round_bf16(np.asarray(x, dtype=np.float32))

    def matmul(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """The product of two matrices that hold values of their dtypes; float32 (exact: float64) accumulation."""
        product: np.ndarray = np.matmul(np.asarray(a, dtype=self.real), np.asarray(b, dtype=self.real))
        return product

    def apply(self, fn: str, args: list[Value]) -> Value:
        """One function of `ir.FUNCTIONS`, reductions left out. Broadcasts as NumPy does."""
        if fn == "where":
            return np.where(args[0], *self._alike(args[1:]))
        if fn == "floor":
            return args[0] if is_whole(args[0]) else np.floor(args[0]).astype(np.int64)
        if fn in _LOGIC:
            return _LOGIC[fn](*args)
        if fn in _WHOLE and all(map(is_whole, args)):
            return _WHOLE[fn](*args)
        args = [self._real(x) for x in args]
        return _REAL[fn](*args)

    def _real(self, x: Value) -> Value:
        return self.real(x) if isinstance(x, int) else x.astype(self.real, copy=False)

    def _alike(self, values: list[Value]) -> list[Value]:
        same = all(map(is_whole, values)) or all(map(is_test, values))
        return values if same else [self._real(x) for x in values]


def _floor_divide(a: Value, b: Value) -> Value:
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b else 0
    return np.where(b == 0, 0, np.floor_divide(a, np.where(b == 0, 1, b)))


def _modulo(a: Value, b: Value) -> Value:
    return a - _floor_divide(a, b) * b


def _ceil_divide(a: Value, b: Value) -> Value:
    return -_floor_divide(-a, b)


def _maximum(a: Value, b: Value) -> Value:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else np.maximum(a, b)


def _minimum(a: Value, b: Value) -> Value:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else np.minimum(a, b)


_LOGIC: dict[str, Callable[..., Value]] = {"and": np.logical_and, "or": np.logical_or, "not": np.logical_not}

#: On whole numbers the result is a whole number (or a test), exactly; division by zero gives 0.
_WHOLE: dict[str, Callable[..., Value]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": _floor_divide,
    "%": _modulo,
    "ceildiv": _ceil_divide,
    "neg": lambda a: -a,
    "abs": abs,
    "max": _maximum,
    "min": _minimum,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
    "==": np.equal,
    "!=": np.not_equal,
}

_REAL: dict[str, Callable[..., Value]] = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.divide,
    "neg": np.negative,
    "abs": np.abs,
    "max": np.maximum,
    "min": np.minimum,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
    "==": np.equal,
    "!=": np.not_equal,
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
}
