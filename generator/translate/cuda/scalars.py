"""Scalar expressions as C: bounds, coordinates, offsets, extents. Values of rows and elements are `elementwise`'s."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from generator.tl.ir import Expr, Index, Num, Op, Program, Var
from generator.tl.types import Kind
from generator.translate.cuda import names
from generator.translate.cuda.dtypes import C_TYPES
from generator.translate.passes.scope import Scope

INFIX = {
    "+": "+",
    "-": "-",
    "*": "*",
    "<": "<",
    "<=": "<=",
    ">": ">",
    ">=": ">=",
    "==": "==",
    "!=": "!=",
    "and": "&&",
    "or": "||",
}
#: What rounds to a finite float32, and what rounds to one that is not 0: halfway to the next number is rounded to the even one.
LARGEST, SMALLEST = float.fromhex("0x1.fffffefffffffp+127"), float.fromhex("0x1.0000000000001p-150")
LOG2E = "1.44269504088896341f"


def number(value: int | float) -> str:
    """A float literal. One that float32 does not hold is infinity or 0 there, and an error to the compiler."""
    v = float(value)
    if abs(v) > LARGEST or 0 < abs(v) < SMALLEST:
        v = math.copysign(float("inf") if abs(v) > 1 else 0.0, v)
    if v == float("inf"):
        return "INF"
    if v == float("-inf"):
        return "(-INF)"
    return f"{v!r}f" if math.copysign(1.0, v) > 0 else f"({v!r}f)"


@dataclass(frozen=True)
class Functions:
    """Names of float functions in the runtime: accurate to a few units in the last place, or the hardware's own."""

    fast: bool

    def call(self, fn: str, a: list[str]) -> str:
        """A function of floats, infix operators included."""
        if fn in INFIX:
            return f"({a[0]} {INFIX[fn]} {a[1]})"
        match fn:
            case "/":
                return self._divide(a[0], a[1])
            case "neg":
                return f"(-{a[0]})"
            case "max" | "min":
                return f"f{fn}f({a[0]}, {a[1]})"
            case "abs":
                return f"fabsf({a[0]})"
            case "exp2":
                return f"ex2({a[0]})"  # relative error 2^-22, results below 2^-126 become 0
            case "exp":
                return f"ex2({a[0]} * {LOG2E})" if self.fast else f"expf({a[0]})"
            case "tanh":
                return f"tanh_fast({a[0]})" if self.fast else f"tanhf({a[0]})"
            case "log" | "log2" | "sqrt":
                return f"{fn}f({a[0]})"
            case "floor":
                return f"__float2int_rd({a[0]})"
        raise AssertionError(f"no code for {fn}")

    def _divide(self, a: str, b: str) -> str:
        if not self.fast:
            return f"divide({a}, {b})"
        return f"rcp({b})" if a == "1.0f" else f"({a} * rcp({b}))"


def whole(fn: str, a: list[str]) -> str:
    """A function of whole numbers."""
    if fn in INFIX:
        return f"({a[0]} {INFIX[fn]} {a[1]})"
    match fn:
        case "//":
            return f"floordiv({a[0]}, {a[1]})"
        case "%":
            return f"floormod({a[0]}, {a[1]})"
        case "ceildiv":
            return f"ceildiv({a[0]}, {a[1]})"
        case "neg":
            return f"(-({a[0]}))" if a[0].startswith("-") else f"(-{a[0]})"  # C++ reads -- as another operator
        case "max" | "min" | "abs":
            return f"{fn}({', '.join(a)})"
        case "floor":
            return a[0]
    raise AssertionError(f"no whole-number code for {fn}")


@dataclass
class Scalars:
    """C text of scalar expressions. `extra`: names that stand for C expressions (row bounds, extremes of rows)."""

    program: Program
    scope: Scope
    functions: Functions
    extra: dict[Expr, str] = field(default_factory=dict)
    axes: frozenset[str] = frozenset()

    @staticmethod
    def of(program: Program, scope: Scope) -> Scalars:
        return Scalars(
            program,
            scope,
            Functions(program.options["functions"] == "fast"),
            axes=frozenset(a.name for a in program.axes),
        )

    def is_int(self, e: Expr) -> bool:
        return self.scope.typing(e).kind is Kind.INT

    def variable(self, name: str) -> str:
        if name in self.program.arguments:
            return names.scalar(name)
        if name in self.scope.tiles:
            return names.tile(name)
        return names.axis(name) if name in self.axes else names.loop_variable(name)

    def text(self, e: Expr, want: Kind | None = None) -> str:
        """C for a scalar expression, of its own kind, or converted to float where one is due."""
        own = self.scope.typing(e).kind
        if want is Kind.FLOAT and own is Kind.INT:
            return number(e.value) if isinstance(e, Num) else f"(float)({self.text(e)})"
        if e in self.extra:
            return self.extra[e]
        match e:
            case Num(value):
                return str(value) if isinstance(value, int) else number(value)
            case Var(name):
                return self.variable(name)
            case Index(tensor, indices):
                return self.captured(tensor, [self.text(i) for i in indices])
            case Op("where", (test, a, b)):
                return f"({self.text(test)} ? {self.text(a, own)} : {self.text(b, own)})"
            case Op("not", (a,)):
                return f"!({self.text(a)})"
            case Op("and" | "or" as fn, (a, b)):
                return f"({self.text(a)} {INFIX[fn]} {self.text(b)})"
            case Op(fn, args):
                if all(self.is_int(a) for a in args) and fn not in ("/", "exp", "exp2", "log", "log2", "sqrt", "tanh"):
                    return whole(fn, [self.text(a) for a in args])
                return self.functions.call(fn, [self.text(a, Kind.FLOAT) for a in args])

    def captured(self, tensor: str, indices: list[str]) -> str:
        """One element of a captured tensor; zero outside its extents."""
        offsets = len(self.program.allocations[tensor].offset)
        parts = [f"(const {C_TYPES[self.program.allocations[tensor].dtype]}*){names.lead(tensor)}"]
        for k, i in enumerate(indices):
            parts += [names.stride(tensor, offsets + k), names.extent(tensor, k), i]
        return f"captured({', '.join(parts)})"


def plain(e: Expr, values: Mapping[str, Any] | None = None) -> Any:
    """A scalar expression of arguments as nested JSON lists: `["ceildiv", "SeqQ", 128]`; what a launcher evaluates.

    Raises KeyError for what is no argument of the kernel (a captured value, a grid axis) unless `values` has it.
    """
    match e:
        case Num(value):
            return value
        case Var(name):
            if values is not None and name in values:
                return values[name]
            return name
        case Op(fn, args):
            return [fn, *(plain(a, values) for a in args)]
    raise KeyError("a captured value is not known to the launcher")
