"""Parameter reasoning: from a sketch (what moves, what is computed) to code (every size, coordinate, allocation and Reshape).

Knows no attention: a `Problem` says what the matrices are and how they are cut; the rest follows from the sketch. The inverse,
`erase`, gives the sketch that a code contains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from generator.authors.problem import Problem, ReasoningError
from generator.authors.sizing import Shape, Shapes, allocate_registers, made_by
from generator.tl.grammar import FRAGMENT_A, FRAGMENT_C
from generator.tl.ir import (
    Compute,
    Copy,
    Declaration,
    Expr,
    For,
    Gemm,
    If,
    Let,
    Named,
    Num,
    Program,
    Reshape,
    Stmt,
    Var,
    names,
    walk_statements,
)

#: What a sketch writes for a number of tiles: `for j = 0:tiles`.
TILES = Var("tiles")


def reason(sketch: Program, problem: Problem) -> Program:
    """The code that does what the sketch says. Raises ReasoningError for what the problem does not decide."""
    shapes = Shapes(sketch, problem).solve()
    body = _Writer(problem, _operands_from_registers(sketch.body, shapes)).write(sketch.body)
    registers = allocate_registers(sketch, shapes)
    used = _names_in(body) | {name for axis in problem.grid.axes for name in names(axis.extent)}
    addressed = [a for a in problem.matrices if a.name in used]
    used |= {name for a in (*addressed, *registers) for e in (*a.shape, *a.offset) for name in names(e)}
    matrices = [a for a in problem.matrices if a.name in used]  # those that hold an extent of another, too
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


def _operands_from_registers(body: tuple[Stmt, ...], shapes: Mapping[str, Shape]) -> set[str]:
    """Left operands of GEMMs that another GEMM feeds, whatever lies between: those that a Reshape has to turn."""
    fed: set[str] = set()
    for s in walk_statements(body):
        match s:
            case Gemm():
                fed.add(s.into)
            case Named() if s.operands[0] in fed:
                fed.add(s.into or s.operands[0])
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
            case Named(operator="Softmax"):
                yield s  # a macro: expanding it is no matter of sizes
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
            case Named():
                found |= {*s.operands, *made_by(s)}
            case For():
                found |= names(s.lo) | names(s.hi)
            case If():
                found |= names(s.test)
    return found
