"""Rank and kind of the expressions of one core program, and which names a statement reads and defines. Checks nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from generator.tl.ir import (
    Compute,
    Copy,
    Declaration,
    Expr,
    For,
    Gemm,
    If,
    Index,
    Named,
    Num,
    Op,
    Program,
    Prose,
    Reshape,
    Stmt,
    Var,
    names,
)
from generator.tl.types import ARITHMETIC, Environment, Kind, Rank, Typing, environment, join, operation

#: Functions that give whole numbers when all their arguments are.
INTEGER_FUNCTIONS = ARITHMETIC | {"//", "%", "ceildiv", "where", "floor"}
#: Extremes of a row value, which only ranges hold (`passes.ranges`).
ROW_EXTREMES = frozenset({"rows_min", "rows_max"})
_INDEX = Typing(Rank.SCALAR, Kind.INT)


@dataclass(frozen=True, slots=True)
class Scope:
    """What names mean in one core program."""

    names: Environment
    tiles: dict[str, tuple[int, ...]]  # register and shared tiles: their block-wide shape
    promised: frozenset[str]  # arguments promised to be positive

    @staticmethod
    def of(program: Program) -> Scope:
        known = environment(program)
        shapes = {name: tile.extents for name, tile in known.tiles.items()}
        return Scope(known, shapes, frozenset(n for n, a in program.arguments.items() if a.positive))

    def typing(self, e: Expr) -> Typing:
        """Rank and kind; a name that the program does not have (a row of a block, say) is a whole number for the block."""
        match e:
            case Num(value):
                return Typing(Rank.SCALAR, Kind.INT if isinstance(value, int) else Kind.FLOAT)
            case Var(name):
                return self.names.of_name(name) or _INDEX
            case Index(tensor, indices):
                kind = Kind.INT if self.names.matrices[tensor].dtype == "i32" else Kind.FLOAT
                return Typing(join(*(self.rank(i) for i in indices)), kind)
            case Op(fn, args):
                return _INDEX if fn in ROW_EXTREMES else operation(fn, [self.typing(a) for a in args])

    def rank(self, e: Expr) -> Rank:
        return self.typing(e).rank

    def is_integer(self, e: Expr) -> bool:
        return self.typing(e).kind is Kind.INT

    def columns(self, e: Expr) -> int:
        """The width of the tiles that an expression reads; 0 where it reads none."""
        return max((self.tiles[n][1] for n in names(e) if len(self.tiles.get(n, ())) == 2), default=0)


def defs(s: Stmt) -> set[str]:
    """Tiles that a statement gives a value. A store to global memory defines no tile."""
    match s:
        case Copy(into_level="global"):
            return set()
        case Copy(into=into) | Gemm(into=into) | Compute(into=into) | Reshape(into=into):
            return {into}
        case For(body=body):
            return defs_of(body)
        case If(then=then, otherwise=otherwise):
            return defs_of(then) | defs_of(otherwise)
        case Named():
            raise AssertionError("a macro in core code")
        case _:
            assert isinstance(s, Declaration | Prose), s
            return set()


def uses(s: Stmt) -> set[str]:
    """Names whose values a statement reads: tiles, scalars, loop variables and captured tensors."""
    match s:
        case Copy(source_level="global"):
            return {n for e in s.coordinate for n in names(e)}
        case Copy():
            return {s.source} | {n for e in s.coordinate for n in names(e)}
        case Gemm():
            return {s.a, s.b} | ({s.into} if s.accumulate else set())
        case Compute():
            return names(s.value)
        case Reshape():
            return {s.source}
        case For():
            return uses_of(s.body) | names(s.lo) | names(s.hi)
        case If():
            return names(s.test) | uses_of(s.then) | uses_of(s.otherwise)
        case Named():
            raise AssertionError("a macro in core code")
        case _:
            assert isinstance(s, Declaration | Prose), s
            return set()


def defs_of(body: Iterable[Stmt]) -> set[str]:
    return {n for s in body for n in defs(s)}


def uses_of(body: Iterable[Stmt]) -> set[str]:
    return {n for s in body for n in uses(s)}


def flatten(body: Iterable[Stmt]) -> Iterator[Stmt]:
    """The statements in textual order, loops and branches opened."""
    for s in body:
        match s:
            case For():
                yield from flatten(s.body)
            case If():
                yield from flatten(s.then)
                yield from flatten(s.otherwise)
            case _:
                yield s


def exposed(body: Iterable[Stmt]) -> set[str]:
    """Names that the body may read before it has defined them."""
    return _exposed(tuple(body), set())[0]


def _exposed(body: tuple[Stmt, ...], seen: set[str]) -> tuple[set[str], set[str]]:
    """(exposed reads, names certainly defined after the body)."""
    out: set[str] = set()
    seen = set(seen)
    for s in body:
        match s:
            case If():
                out |= names(s.test) - seen
                reads_then, after_then = _exposed(s.then, seen)
                reads_else, after_else = _exposed(s.otherwise, seen)
                out |= reads_then | reads_else
                seen = after_then & after_else
            case For():  # its body may run no time at all, so it defines nothing for certain
                out |= (names(s.lo) | names(s.hi)) - seen
                out |= _exposed(s.body, seen | {s.var})[0]
            case _:
                out |= uses(s) - seen
                seen |= defs(s)
    return out, seen


def carried(body: tuple[Stmt, ...], live_after: Iterable[str] = ()) -> tuple[str, ...]:
    """Tiles whose value goes from one iteration into the next, in order of their first definition.

    A name is carried when the body may read it before defining it, and may define it. A name of `live_after` that the body
    defines only in a branch or an inner loop is carried too: the old value may stay, and is asked for behind the loop.
    """
    reads, certain = _exposed(body, set())
    defined = dict.fromkeys(n for s in flatten(body) for n in sorted(defs(s)))
    kept = set(live_after) - certain
    return tuple(n for n in defined if n in reads or n in kept)
