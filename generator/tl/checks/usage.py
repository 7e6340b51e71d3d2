"""What becomes of results: outputs never written, values nobody reads, blocks that write one place, memory that is too small."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from generator.tl.checks.report import Report, name_list
from generator.tl.fold import integers
from generator.tl.ir import (
    NOWHERE,
    Allocate,
    Axis,
    Compute,
    Constant,
    Copy,
    Expr,
    For,
    Gemm,
    Grid,
    If,
    Index,
    Let,
    Named,
    Num,
    Op,
    Program,
    Reshape,
    Stmt,
    children,
    expressions_of,
    names,
    walk,
    walk_statements,
)
from generator.tl.printer import print_expression
from generator.tl.types import tiles


@dataclass(frozen=True, slots=True)
class Limits:
    """What one block may use on a target, in bytes; None where there is no limit."""

    name: str
    shared_bytes: int | None = None
    register_bytes: int | None = None


def check_matrices(program: Program, report: Report) -> None:
    """Every matrix is read or written, not both, and something is written."""
    statements = tuple(walk_statements(program.body))
    written = {s.into for s in statements if isinstance(s, Copy) and s.into_level == "global"}
    loaded = {s.source for s in statements if isinstance(s, Copy) and s.source_level == "global"}
    loaded |= {e.tensor for s in statements for top in expressions_of(s) for e in walk(top) if isinstance(e, Index)}
    read = loaded | {name for s in statements for top in expressions_of(s) for name in names(top)}
    read |= {name for s in statements if isinstance(s, Gemm) for name in (s.a, s.b)}  # by mistake, and reported as such
    matrices = {name: a for name, a in program.allocations.items() if a.level == "global"}
    for s in statements:
        if isinstance(s, Copy) and s.source_level != s.into_level == "global" and s.into in loaded:
            hint = "blocks run in any order: write into a matrix of its own"
            report.error("writes-input", f"{s.into} is read and written", s.span, hint)
    for name, a in matrices.items():
        if name not in written | read:
            hint = f"Copy TILE into {name} ... from register to global, or remove its Allocate"
            report.error("output-not-written", f"{name} is neither written nor read", a.span, hint)
    if not written & set(matrices):
        last = statements[-1].span if statements else program.body[0].span if program.body else NOWHERE
        hint = "end with Copy acc into O (...) in coordinate [...] from register to global"
        report.error("no-output", "nothing is written to global memory", last, hint)


def check_unused_names(program: Program, report: Report) -> None:
    mentioned = mentioned_names(program)
    used = {name for s in walk_statements(program.body) for e in expressions_of(s) for name in names(e)}
    for s in walk_statements(program.body):
        if isinstance(s, Let | Constant) and s.name not in used:
            report.warning("unused", f"nothing uses {s.name}", s.span, "remove it")
        elif isinstance(s, Allocate) and s.level != "global" and s.name not in used | mentioned:
            report.warning("unused", f"no statement uses the tile {s.name}", s.span, "remove it")
        elif isinstance(s, Grid):
            for axis in s.axes:
                if axis.name not in used:
                    message = f"nothing uses {axis.name}: its blocks all do the same"
                    report.warning("unused", message, axis.span, "remove the axis")


def check_races(core: Program, report: Report) -> None:
    """Blocks that differ along one axis only have to write different places."""
    used = {name for s in walk_statements(core.body) for e in expressions_of(s) for name in names(e)}
    axes: list[Axis] = [a for a in core.axes if a.name in used and a.extent != Num(1)]
    for s in walk_statements(core.body):
        if isinstance(s, Copy) and s.into_level == "global" and s.into in core.allocations:
            place = s.coordinate + core.allocations[s.into].offset
            missing = [a.name for a in axes if not any(a.name in names(e) for e in place)]
            if missing:
                message = f"blocks that differ in {', '.join(missing)} write the same part of {s.into}"
                hint = f"use {', '.join(missing)} in the coordinate or in the offset of {s.into}"
                report.warning("race", message, s.span, hint)


def check_sentinels(program: Program, report: Report) -> None:
    """A large finite number in place of minus infinity: scores below it exist."""
    for s in walk_statements(program.body):
        for top in expressions_of(s):
            suspects = _choices(top) if not (isinstance(s, Allocate) and s.init is top) else (top,)
            for e in suspects:
                if _is_sentinel(e):
                    text = print_expression(e)
                    hint = "write -inf, and guard exp2(-inf - -inf) as in: base = where(new_max == -inf, 0.0, new_max)"
                    span = e.span if e.span.line else s.span
                    report.warning("sentinel", f"{text} stands for minus infinity, but scores can lie below it", span, hint)


def _choices(top: Expr) -> tuple[Expr, ...]:
    """Where a sentinel would stand: the values of where, the arguments of max."""
    return tuple(a for e in walk(top) if isinstance(e, Op) and e.fn in ("where", "max") for a in children(e))


def _is_sentinel(e: Expr) -> bool:
    value = e.value if isinstance(e, Num) else None
    return value is not None and not math.isinf(value) and value <= -1e4


@dataclass(slots=True)
class Liveness:
    """Backwards over core code: which tiles are still needed. Finds dead statements and the most bytes in registers at once."""

    register_bytes: dict[str, int]
    dead: dict[int, Stmt] = field(default_factory=dict)
    alive: set[int] = field(default_factory=set)
    most: int = 0
    most_names: tuple[str, ...] = ()
    most_line: int = 0

    def body(self, body: tuple[Stmt, ...], live: frozenset[str]) -> frozenset[str]:
        for s in reversed(body):
            live = self._before(s, live)
            total = sum(self.register_bytes.get(name, 0) for name in live)
            if total > self.most:
                self.most, self.most_line = total, s.span.line
                self.most_names = tuple(sorted(n for n in live if n in self.register_bytes))
        return live

    def _before(self, s: Stmt, live: frozenset[str]) -> frozenset[str]:
        match s:
            case For():
                around = live | self.body(s.body, live)
                self.body(s.body, around)  # what the next iteration needs is known only now
                return around | names(s.lo) | names(s.hi)
            case If():
                return self.body(s.then, live) | self.body(s.otherwise, live) | names(s.test)
            case Compute():
                return self._defines(s, s.into, live, names(s.value))
            case Gemm():
                return self._defines(s, s.into, live, {s.a, s.b} | ({s.into} if s.accumulate else set()))
            case Reshape():
                return self._defines(s, s.into, live, {s.source})
            case Copy() if s.into_level == "global":
                return live | {s.source}
            case Copy():
                return self._defines(s, s.into, live, {s.source} if s.source_level != "global" else set())
            case Allocate() if s.level != "global":
                return live - {s.name}
            case _:
                return live

    def _defines(self, s: Stmt, name: str, live: frozenset[str], reads: set[str]) -> frozenset[str]:
        """A statement nobody needs reads nothing either. It is dead if it is so on every visit."""
        if name in live:
            self.alive.add(id(s))
        else:
            self.dead[id(s)] = s
        return (live - {name}) | reads


def check_liveness(core: Program, named: set[str], report: Report) -> Liveness:
    """Warn about statements whose result nobody reads."""
    known = tiles(core)
    sizes = {t.name: _tile_bytes(t.shape, 2 if t.operand else 4) for t in known.values() if t.level == "register"}
    liveness = Liveness(sizes)
    liveness.body(core.body, frozenset())
    for s in liveness.dead.values():
        if id(s) not in liveness.alive and isinstance(s, Compute | Gemm | Reshape | Copy) and s.into in named:
            report.warning("unused", f"nothing reads {s.into} after this line", s.span, "remove the line, or use its result")
    return liveness


def _tile_bytes(shape: tuple[Expr, ...], element: int) -> int:
    return math.prod(integers(shape) or [0]) * element


def check_limits(core: Program, liveness: Liveness, limits: Limits, report: Report) -> None:
    """A lower bound of what a block needs: each shared tile once, and the register tiles that are alive together."""
    width = {"f32": 4, "i32": 4, "f16": 2, "bf16": 2}
    shared = {t.name: _tile_bytes(t.shape, width[t.dtype]) for t in tiles(core).values() if t.level == "shared"}
    first = next((s.span for s in walk_statements(core.body) if isinstance(s, Copy) and s.into_level == "shared"), None)
    if limits.shared_bytes is not None and sum(shared.values()) > limits.shared_bytes and first is not None:
        sizes = name_list([f"{name} {size // 1024} KiB" for name, size in shared.items()])
        message = (
            f"the tiles in shared memory need {sum(shared.values()):,} bytes, {limits.name} has {limits.shared_bytes:,} ({sizes})"
        )
        report.error("shared-memory", message, first, "use smaller tiles", str(limits.shared_bytes), str(sum(shared.values())))
    if limits.register_bytes is not None and liveness.most > limits.register_bytes:
        held = next((a for a in core.allocations.values() if a.name in liveness.most_names), None)
        message = (
            f"the register tiles alive at line {liveness.most_line} ({name_list(liveness.most_names)}) need "
            f"{liveness.most:,} bytes, {limits.name} has {limits.register_bytes:,}"
        )
        span = held.span if held is not None else core.body[0].span
        report.error("registers", message, span, "use smaller tiles", str(limits.register_bytes), str(liveness.most))


def mentioned_names(program: Program) -> set[str]:
    """Tiles and matrices that statements name outside expressions; temporaries of macros are not among them."""
    found: set[str] = set()
    for s in walk_statements(program.body):
        match s:
            case Copy() | Reshape():
                found |= {s.source, s.into}
            case Gemm():
                found |= {s.a, s.b, s.into}
            case Named():
                found |= {*s.operands, *s.state, *((s.into,) if s.into else ())}
            case Compute():
                found.add(s.into)
            case _:
                pass
    return found
