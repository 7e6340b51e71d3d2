"""What is known of integer expressions: the least and the largest value they can take. Proves nothing about floats or tests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from generator.tl.ir import Argument, Expr, For, Grid, Index, Num, Op, Program, Var

#: Least and largest value; infinite where nothing is known.
Range = tuple[float, float]
ANYTHING: Range = (-math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Ranges of arguments, grid axes and loop variables. An argument that is the extent of something is at least 0."""

    ranges: Mapping[str, Range] = field(default_factory=dict)

    @staticmethod
    def of(program: Program) -> Bounds:
        """The ranges that hold everywhere in core code."""
        ranges: dict[str, Range] = {}
        extents = [e for a in program.allocations.values() if a.level == "global" for e in a.shape]
        for s in program.body:
            if isinstance(s, Argument):
                ranges |= dict.fromkeys(s.names, (1.0 if s.positive and s.dtype == "i32" else -math.inf, math.inf))
            elif isinstance(s, Grid):
                extents += [axis.extent for axis in s.axes]
        for e in extents:
            if isinstance(e, Var) and e.name in ranges:
                ranges[e.name] = (max(0.0, ranges[e.name][0]), math.inf)
        for axis in program.axes:
            ranges[axis.name] = (0.0, Bounds(ranges).of_expression(axis.extent)[1] - 1)
        return Bounds(ranges)

    def within(self, s: For) -> Bounds:
        """The ranges inside a loop."""
        lo, hi = self.of_expression(s.lo), self.of_expression(s.hi)
        return Bounds({**self.ranges, s.var: (lo[0], hi[1] - 1)})

    def of_expression(self, e: Expr) -> Range:
        match e:
            case Num():
                return (e.value, e.value) if isinstance(e.value, int) else ANYTHING
            case Var():
                return self.ranges.get(e.name, ANYTHING)
            case Op():
                return _operation(e.fn, [self.of_expression(a) for a in e.args])
            case Index():
                return ANYTHING


def runs(s: For, bounds: Bounds) -> bool:
    """Whether a loop is certain to run at least once."""
    return bounds.of_expression(s.hi)[0] > bounds.of_expression(s.lo)[1]


def _operation(fn: str, args: list[Range]) -> Range:
    match fn, args:
        case "+", [a, b]:
            return a[0] + b[0], a[1] + b[1]
        case "-", [a, b]:
            return a[0] - b[1], a[1] - b[0]
        case "*", [a, b]:
            corners = [_times(x, y) for x in a for y in b]
            return min(corners), max(corners)
        case "neg", [a]:
            return -a[1], -a[0]
        case "max", [a, b]:
            return max(a[0], b[0]), max(a[1], b[1])
        case "min", [a, b]:
            return min(a[0], b[0]), min(a[1], b[1])
        case "//" | "ceildiv", [a, b] if b[0] == b[1] and b[0] > 0:
            return _quotient(fn, a[0], b[0]), _quotient(fn, a[1], b[0])
        case "//" | "ceildiv", [a, b] if a[0] >= 0 and b[0] > 0:
            return 0.0 if fn == "//" or a[0] == 0 else 1.0, _quotient(fn, a[1], b[0])
        case "%", [_, b] if b[0] == b[1] and b[0] > 0:
            return 0.0, b[0] - 1
        case "where", [_, a, b]:
            return min(a[0], b[0]), max(a[1], b[1])
    return ANYTHING


def _times(a: float, b: float) -> float:
    return 0.0 if a == 0 or b == 0 else a * b


def _quotient(fn: str, a: float, b: float) -> float:
    if math.isinf(a):
        return a
    return math.ceil(a / b) if fn == "ceildiv" else math.floor(a / b)
