"""The macro `Softmax`, written out as statements. Knows no other macro and no target.

`Compute Softmax S, scale and get P with row_max, row_sum, acc` is one step of the online softmax: P = exp(scale * S - reference),
where the reference follows the running row maximum lazily, and everything kept so far (row_sum, and each accumulator) is rescaled
when the reference moves. Without `scale` the scores are taken as they are; the scale has to be positive. `row_sum` and the
accumulators start at 0, `row_max` at -inf. The division by row_sum is the program's own epilogue.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import assert_never

from generator.tl.diagnostics import Diagnostic, TLError
from generator.tl.ir import (
    NEG_INF,
    Allocate,
    Argument,
    Compute,
    Constant,
    Copy,
    Expr,
    For,
    Gemm,
    Grid,
    Hint,
    If,
    Let,
    Named,
    Num,
    Op,
    Option,
    Program,
    Prose,
    Reshape,
    Stmt,
    Var,
    walk_statements,
)
from generator.tl.rewrite import map_statements

LOG2_E = Num(1.4426950408889634)
#: The reference is kept while no score of the row lies further above it, in powers of two: exp2 of it still fits every dtype.
LAZY_LIMIT = Num(8)


def expand_macros(program: Program) -> Program:
    """The same code with every macro written out, its temporaries allocated behind the tile they belong to. Sketches stay.

    Raises TLError for an operator that is no macro.
    """
    wrong = [s for s in walk_statements(program.body) if isinstance(s, Named) and not _is_sound(s)]
    if program.stage == "code" and wrong:
        raise TLError(map(_no_macro, wrong))
    return macros_written_out(program)


def macros_written_out(program: Program) -> Program:
    """`expand_macros` that leaves what it cannot read."""
    macros = [s for s in walk_statements(program.body) if isinstance(s, Named) and _is_sound(s)]
    if program.stage != "code" or not macros:
        return program
    taken = set(names_of(program))
    states = dict.fromkeys((s.state[0], s.state[1]) for s in macros)
    temporaries = {state: _Temporaries.make(*state, taken) for state in states}

    def written_out(s: Stmt) -> Iterable[Stmt]:
        match s:
            case Named() if _is_sound(s):
                yield from _softmax(s, temporaries[s.state[0], s.state[1]])
            case Allocate():
                yield s
                for (row_max, _), t in temporaries.items():
                    if s.name == row_max:
                        yield from (replace(s, name=name, init=None) for name in (t.new_max, t.base, t.rescale))
            case _:
                yield s

    return replace(program, body=map_statements(program.body, written_out))


def _is_sound(s: Named) -> bool:
    return s.operator == "Softmax" and len(s.state) >= 2 and len(s.operands) in (1, 2)


def _no_macro(s: Named) -> Diagnostic:
    hint = "write Compute Softmax S, scale and get P with row_max, row_sum, acc; or write it out as Compute NAME = EXPRESSION"
    if s.operator == "Softmax":
        return Diagnostic(
            "macro", "error", "Softmax needs its scores and the tiles that keep its row maximum and row sum", s.span, hint
        )
    return Diagnostic("macro", "error", f"{s.operator} has no stated meaning", s.span, hint, "Softmax", s.operator)


@dataclass(frozen=True, slots=True)
class _Temporaries:
    """Names of the row tiles that one pair of row_max and row_sum needs."""

    new_max: str
    base: str
    rescale: str

    @staticmethod
    def make(row_max: str, row_sum: str, taken: set[str]) -> _Temporaries:
        wanted = (f"{row_max}_new", f"{row_max}_base", f"{row_sum}_rescale")
        return _Temporaries(*(fresh(name, taken) for name in wanted))


def _softmax(s: Named, t: _Temporaries) -> tuple[Stmt, ...]:
    row_max, row_sum, new_max, base, rescale = map(Var, (*s.state[:2], t.new_max, t.base, t.rescale))
    scores = Var(s.operands[0])
    into = Var(s.into if s.into is not None else s.operands[0])
    factor: Expr = Op("*", (Var(s.operands[1]), LOG2_E)) if len(s.operands) == 2 else LOG2_E

    def times(a: Expr, b: Expr) -> Expr:
        return Op("*", (a, b))

    def minus(a: Expr, b: Expr) -> Expr:
        return Op("-", (a, b))

    close = Op("<=", (times(minus(new_max, row_max), factor), LAZY_LIMIT))
    steps: list[tuple[Var, Expr]] = [
        (new_max, Op("max", (row_max, Op("rowmax", (scores,))))),
        (new_max, Op("where", (close, row_max, new_max))),
        (base, Op("where", (Op("==", (new_max, NEG_INF)), Num(0.0), new_max))),
        (rescale, Op("exp2", (times(minus(row_max, base), factor),))),
        (row_max, new_max),
        (into, Op("exp2", (times(minus(scores, base), factor),))),
        (row_sum, Op("+", (times(row_sum, rescale), Op("rowsum", (into,))))),
        *((Var(name), times(Var(name), rescale)) for name in s.state[2:]),
    ]
    return tuple(Compute(name.name, value, span=s.span) for name, value in steps)


def names_of(program: Program) -> Iterable[str]:
    """Every name that a program defines."""
    for s in walk_statements(program.body):
        match s:
            case Argument():
                yield from s.names
            case Grid():
                yield from (a.name for a in s.axes)
            case Constant() | Let() | Allocate():
                yield s.name
            case Copy() | Gemm() | Compute() | Reshape():
                yield s.into
            case Named():
                yield from filter(None, (s.into, *s.state))
            case For():
                yield s.var
            case If() | Hint() | Option() | Prose():
                pass
            case _:
                assert_never(s)


def fresh(wanted: str, taken: set[str]) -> str:
    """`wanted`, or `wanted_2` and so on: a name that the program does not use yet. It is taken from then on."""
    name, number = wanted, 2
    while name in taken:
        name, number = f"{wanted}_{number}", number + 1
    taken.add(name)
    return name
