"""Shapes of a sketch's tiles, and what state starts with, as they follow from its statements. Writes no code."""

from __future__ import annotations

from generator.authors.problem import Cut, Problem, ReasoningError
from generator.tl.ir import (
    INF,
    NEG_INF,
    Allocate,
    Compute,
    Copy,
    Expr,
    For,
    Gemm,
    Index,
    Named,
    Num,
    Op,
    Program,
    Reshape,
    Stmt,
    Var,
    names,
    walk,
    walk_statements,
)

_NEUTRAL: dict[str, Expr] = {"max": NEG_INF, "min": INF}

#: Row axis and column axis of a value; None where it is the same along that axis.
Shape = tuple[Expr | None, Expr | None]
_SCALAR: Shape = (None, None)


def _join(*shapes: Shape) -> Shape:
    """The shape that all broadcast to."""
    rows = next((r for r, _ in shapes if r is not None), None)
    columns = next((c for _, c in shapes if c is not None), None)
    return rows, columns


class Shapes:
    """Shapes of all tiles, by going over the statements until nothing new is learned: state is read before it is written."""

    def __init__(self, sketch: Program, problem: Problem) -> None:
        self.sketch, self.problem = sketch, problem
        self.known: dict[str, Shape] = {}

    def solve(self) -> dict[str, Shape]:
        before = None
        while before != self.known:
            before = dict(self.known)
            for s in walk_statements(self.sketch.body):
                self._learn(s)
        return self.known

    def _learn(self, s: Stmt) -> None:
        match s:
            case Copy(into_level="shared" | "register", source_level="global"):
                cut = self._cut(s.source)
                self.known[s.into] = (cut.shape[0], cut.shape[1] if len(cut.shape) > 1 else None)
            case Copy(into_level="global"):
                self._cut(s.into)
            case Gemm():
                a, b = self.known.get(s.a, _SCALAR), self.known.get(s.b, _SCALAR)
                self.known[s.into] = (a[1] if s.a_transposed else a[0], b[0] if s.b_transposed else b[1])
            case Compute():
                self.known[s.into] = _join(self.known.get(s.into, _SCALAR), self._of(s.value))
            case Named():
                scores = self.known.get(s.operands[0], _SCALAR)
                self.known[s.into or s.operands[0]] = scores
                self.known |= dict.fromkeys(s.state[:2], (scores[0], None))

    def _cut(self, matrix: str) -> Cut:
        if matrix not in self.problem.cuts:
            raise ReasoningError(f"{matrix}: no matrix of this problem; known are {', '.join(self.problem.cuts)}")
        return self.problem.cuts[matrix]

    def _of(self, e: Expr) -> Shape:
        match e:
            case Num():
                return _SCALAR
            case Var("rows"):
                return self.problem.row_axis, None
            case Var("cols"):
                return None, self.problem.column_axis
            case Var():
                return self._of(self.problem.lets[e.name]) if e.name in self.problem.lets else self.known.get(e.name, _SCALAR)
            case Index():
                return _join(*map(self._of, e.indices))
            case Op("rowmax" | "rowsum"):
                return self._of(e.args[0])[0], None
            case Op():
                return _join(*map(self._of, e.args))


def allocate_registers(sketch: Program, shapes: dict[str, Shape]) -> tuple[Allocate, ...]:
    """An allocation for every computed tile, in order of first mention; what a loop carries starts neutral."""
    states = _initial_states(sketch.body)
    made = dict.fromkeys(name for s in walk_statements(sketch.body) for name in made_by(s))
    out = []
    for name in made:
        rows, columns = shapes[name]
        if rows is None:
            raise ReasoningError(f"{name}: its shape does not follow from the sketch: nothing that it is computed from has rows")
        out.append(Allocate(name, "register", (rows,) if columns is None else (rows, columns), "f32", init=states.get(name)))
    return tuple(out)


def made_by(s: Stmt) -> tuple[str, ...]:
    """Register tiles that a statement writes."""
    match s:
        case Compute() | Gemm() | Reshape():
            return (s.into,)
        case Named():
            return (s.into or s.operands[0], *s.state)
        case _:
            return ()


def _initial_states(body: tuple[Stmt, ...]) -> dict[str, Expr]:
    """What is read in a loop before the loop writes it -> the neutral element of what combines it there."""
    states: dict[str, Expr] = {}
    for loop in walk_statements(body):
        if isinstance(loop, For):
            for name in carried(loop):
                states.setdefault(name, _neutral(name, loop))
    return states


def carried(loop: For) -> tuple[str, ...]:
    """Tiles that an iteration reads before it writes them, and writes."""
    written: set[str] = set()
    read_first: dict[str, None] = {}
    for s in walk_statements(loop.body):
        reads = _tiles_read(s)
        read_first |= dict.fromkeys(sorted(reads - written))
        written.update(made_by(s))
    return tuple(name for name in read_first if name in written)


def _tiles_read(s: Stmt) -> set[str]:
    match s:
        case Compute():
            return names(s.value)
        case Gemm():
            return {s.a, s.b} | ({s.into} if s.accumulate else set())
        case Copy() | Reshape():
            return {s.source}
        case Named():
            return {*s.operands, *s.state}
        case _:
            return set()


def _neutral(name: str, loop: For) -> Expr:
    for s in walk_statements(loop.body):
        if isinstance(s, Named) and s.state[:1] == (name,):
            return NEG_INF  # Softmax keeps the row maximum in its first tile
        for e in walk(s.value) if isinstance(s, Compute) else ():
            if isinstance(e, Op) and e.fn in _NEUTRAL and Var(name) in e.args:
                return _NEUTRAL[e.fn]
    return Num(0)
