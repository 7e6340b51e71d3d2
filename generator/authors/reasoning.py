"""Parameter reasoning: from a sketch (what moves, what is computed) to code (every size, coordinate, allocation and Reshape).

Knows no attention: a `Problem` says what the matrices are and how they are cut; the rest follows from the sketch. The inverse,
`erase`, gives the sketch that a code contains.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from generator.tl.grammar import FRAGMENT_A, FRAGMENT_C
from generator.tl.ir import (
    INF,
    NEG_INF,
    Allocate,
    Argument,
    Compute,
    Constant,
    Copy,
    Declaration,
    DType,
    Expr,
    For,
    Gemm,
    Grid,
    Hint,
    If,
    Index,
    Let,
    Num,
    Op,
    Option,
    Program,
    Reshape,
    Stmt,
    Var,
    names,
    walk,
    walk_statements,
)

#: What a sketch writes for a number of tiles: `for j = 0:tiles`.
TILES = Var("tiles")
_NEUTRAL: dict[str, Expr] = {"max": NEG_INF, "min": INF}


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


def reason(sketch: Program, problem: Problem) -> Program:
    """The code that does what the sketch says. Raises ReasoningError for what the problem does not decide."""
    shapes = _Shapes(sketch, problem).solve()
    body = _Writer(problem, _operands_from_registers(sketch.body, shapes)).write(sketch.body)
    registers = _registers(sketch, shapes)
    used = _names_in(body) | {name for axis in problem.grid.axes for name in names(axis.extent)}
    matrices = tuple(a for a in problem.matrices if a.name in used)
    used |= {name for a in (*matrices, *registers) for e in (*a.shape, *a.offset) for name in names(e)}
    declared: list[Stmt] = [replace(a, names=kept) for a in problem.arguments if (kept := tuple(n for n in a.names if n in used))]
    declared += [c for c in problem.constants if c.name in used]
    declared += [*problem.settings, problem.grid, *matrices, *registers]
    return Program(problem.name, "code", (*declared, *body))


def erase(code: Program) -> Program:
    """The sketch that code contains: declarations, sizes, coordinates, ranges and Reshapes left out."""
    return Program(code.name, "sketch", tuple(_erase(code.body, {})))


def _erase(body: tuple[Stmt, ...], source_of: dict[str, str]) -> Iterator[Stmt]:
    for s in body:
        match s:
            case Reshape():
                source_of[s.into] = s.source
            case Copy():
                yield replace(s, shape=(), coordinate=())
            case For():
                yield replace(s, lo=Num(0), hi=TILES, body=tuple(_erase(s.body, source_of)))
            case If():
                yield replace(s, then=tuple(_erase(s.then, source_of)), otherwise=tuple(_erase(s.otherwise, source_of)))
            case Gemm():
                yield replace(s, a=source_of.get(s.a, s.a), b=source_of.get(s.b, s.b))
            case _ if not isinstance(s, Declaration):
                yield s


# ----------------------------------------------------------------------------------------------------------- shapes

#: Row axis and column axis of a value; None where it is the same along that axis.
Shape = tuple[Expr | None, Expr | None]
_SCALAR: Shape = (None, None)


def _join(*shapes: Shape) -> Shape:
    """The shape that all broadcast to."""
    rows = next((r for r, _ in shapes if r is not None), None)
    columns = next((c for _, c in shapes if c is not None), None)
    return rows, columns


class _Shapes:
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


def _registers(sketch: Program, shapes: dict[str, Shape]) -> tuple[Allocate, ...]:
    """An allocation for every computed tile, in order of first mention; what a loop carries starts neutral."""
    states = _initial_states(sketch.body)
    made = dict.fromkeys(s.into for s in walk_statements(sketch.body) if isinstance(s, Compute | Gemm))
    out = []
    for name in made:
        rows, columns = shapes[name]
        if rows is None:
            raise ReasoningError(f"{name}: its shape does not follow from the sketch: nothing that it is computed from has rows")
        out.append(Allocate(name, "register", (rows,) if columns is None else (rows, columns), "f32", init=states.get(name)))
    return tuple(out)


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
        if isinstance(s, Compute | Gemm | Reshape):
            written.add(s.into)
    return tuple(name for name in read_first if name in written)


def _tiles_read(s: Stmt) -> set[str]:
    match s:
        case Compute():
            return names(s.value)
        case Gemm():
            return {s.a, s.b} | ({s.into} if s.accumulate else set())
        case Copy() | Reshape():
            return {s.source}
        case _:
            return set()


def _neutral(name: str, loop: For) -> Expr:
    for s in walk_statements(loop.body):
        for e in walk(s.value) if isinstance(s, Compute) else ():
            if isinstance(e, Op) and e.fn in _NEUTRAL and Var(name) in e.args:
                return _NEUTRAL[e.fn]
    return Num(0)


# -------------------------------------------------------------------------------------------------------- statements


def _operands_from_registers(body: tuple[Stmt, ...], shapes: dict[str, Shape]) -> set[str]:
    """Left operands of GEMMs that another GEMM feeds, whatever lies between: those that a Reshape has to turn."""
    fed: set[str] = set()
    for s in walk_statements(body):
        match s:
            case Gemm():
                fed.add(s.into)
            case Compute() if shapes[s.into][1] is not None and names(s.value) & fed:
                fed.add(s.into)
    return {s.a for s in walk_statements(body) if isinstance(s, Gemm) and s.a in fed}


class _Writer:
    """Statements of the sketch with what they lack; each name of `lets` stands before its first use, in its loop."""

    def __init__(self, problem: Problem, reshaped: set[str]) -> None:
        self.problem, self.reshaped = problem, reshaped

    def write(
        self, body: tuple[Stmt, ...], open_loops: frozenset[str] = frozenset(), known: frozenset[str] = frozenset()
    ) -> tuple[Stmt, ...]:
        out: list[Stmt] = []
        for s in body:
            for let in self._lets_for(s, open_loops):
                if let.name not in known:
                    out.append(let)
                    known |= {let.name}
            out += self._statement(s, open_loops, known)
        return tuple(out)

    def _lets_for(self, s: Stmt, open_loops: frozenset[str]) -> Iterator[Let]:
        """The names that s (and what it holds) needs and that can be defined here."""
        needed = _names_in((s,))
        for name in reversed(self.problem.lets):
            if name in needed:
                needed |= names(self.problem.lets[name])
        for name, value in self.problem.lets.items():
            if name in needed and not self._loops_of(value) - open_loops:
                yield Let(name, value)

    def _loops_of(self, e: Expr) -> set[str]:
        """Loop variables that a value depends on."""
        found = names(e)
        return (found & set(self.problem.loops)).union(
            *(self._loops_of(self.problem.lets[n]) for n in found & set(self.problem.lets))
        )

    def _statement(self, s: Stmt, open_loops: frozenset[str], known: frozenset[str]) -> Iterator[Stmt]:
        match s:
            case Copy():
                matrix = s.into if s.into_level == "global" else s.source
                cut = self.problem.cuts[matrix]
                yield replace(s, shape=cut.shape, coordinate=cut.coordinate)
            case Gemm() if s.a in self.reshaped:
                operand = f"{s.a}A"
                yield Reshape(s.a, FRAGMENT_C, FRAGMENT_A, operand, self.problem.operand_dtype)
                yield replace(s, a=operand)
            case For():
                if s.var not in self.problem.loops:
                    raise ReasoningError(f"{s.var}: no loop of this problem; known are {', '.join(self.problem.loops)}")
                lo, hi = self.problem.loops[s.var]
                yield replace(s, lo=lo, hi=hi, body=self.write(s.body, open_loops | {s.var}, known))
            case If():
                then, otherwise = (self.write(body, open_loops, known) for body in (s.then, s.otherwise))
                yield replace(s, then=then, otherwise=otherwise)
            case Gemm() | Compute():
                yield s
            case _:
                raise ReasoningError(f"{type(s).__name__}: this statement of the sketch cannot be turned into code by rules")


def _names_in(body: tuple[Stmt, ...]) -> set[str]:
    """Every name that statements mention, tiles and matrices included."""
    found: set[str] = set()
    for s in walk_statements(body):
        match s:
            case Compute():
                found |= names(s.value) | {s.into}
            case Let():
                found |= names(s.value)
            case Copy():
                found |= {s.source, s.into}.union(*map(names, s.shape + s.coordinate))
            case Gemm():
                found |= {s.a, s.b, s.into}
            case For():
                found |= names(s.lo) | names(s.hi)
            case If():
                found |= names(s.test)
    return found
