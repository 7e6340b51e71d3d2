"""Proofs about single columns: a column that a test hides from every row need not be computed at all. Decides no schedule.

The tiles that a mask's statement ties together element by element share their columns. A hidden column is neutral when every
reduction along a row gets its identity there (-inf for rowmax, 0 for rowsum) and every product contracts a 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from generator.tl.ir import Compute, Copy, Expr, For, Gemm, If, Op, Program, Reshape, Stmt, names, walk
from generator.tl.types import REDUCTIONS
from generator.translate.passes.scope import Scope, carried, exposed, uses
from generator.translate.passes.values import Node, Values


def column_tiles(loop: For, program: Program, scope: Scope, tests: tuple[Expr, ...]) -> frozenset[str]:
    """The tiles whose columns the tests hide; empty when a hidden column of one of them could be seen in another way."""
    tied = {s.into for s in loop.body if isinstance(s, Compute) and len(scope.tiles[s.into]) == 2 and _asks(s.value, tests)}
    while True:
        more = {
            n for s in loop.body if isinstance(s, Compute | Reshape) for n in _elements(s, scope) if tied & _elements(s, scope)
        }
        if more <= tied:
            break
        tied |= more
    if len({scope.tiles[n] for n in tied}) != 1 or tied & set(carried(loop.body)) or tied & exposed(_without(program.code, loop)):
        return frozenset()
    return frozenset(tied) if all(_keeps_columns(s, tied) for s in loop.body) else frozenset()


def _asks(e: Expr, tests: tuple[Expr, ...]) -> bool:
    return any(x in tests for x in walk(e))


def _elements(s: Compute | Reshape, scope: Scope) -> set[str]:
    """The tiles with two axes that one statement ties together."""
    if len(scope.tiles[s.into]) != 2:
        return set()
    read = names(s.value) if isinstance(s, Compute) else {s.source}
    return {n for n in read | {s.into} if len(scope.tiles.get(n, ())) == 2}


def _without(body: tuple[Stmt, ...], loop: For) -> tuple[Stmt, ...]:
    out: list[Stmt] = []
    for s in body:
        match s:
            case For() if s is loop:
                continue
            case For():
                s = replace(s, body=_without(s.body, loop))
            case If():
                s = replace(s, then=_without(s.then, loop), otherwise=_without(s.otherwise, loop))
        out.append(s)
    return tuple(out)


def _keeps_columns(s: Stmt, tied: set[str]) -> bool:
    """Whether a statement reads the tiles by columns only: element-wise, in a reduction, contracted as the first operand."""
    match s:
        case Gemm():
            return s.b not in tied and not (s.a in tied and s.a_transposed) and not (s.into in tied and s.a in tied)
        case Copy():
            return not uses(s) & tied and s.into not in tied
        case Compute() | Reshape():
            return True
    return not uses(s) & tied


def neutral(
    loop: For, tied: frozenset[str], tests: Iterable[Expr], starts: list[dict[str, Node]], values: Values
) -> tuple[Expr, ...]:
    """The tests that, false for a whole column, leave nothing of it behind, from every state the loop can be in."""
    return tuple(t for t in tests if tied and all(_is_neutral(loop, tied, t, start, values) for start in starts))


def _is_neutral(loop: For, tied: frozenset[str], test: Expr, start: dict[str, Node], values: Values) -> bool:
    seen, hidden = dict(start), dict(start)  # values where something is visible; the same rows, in the hidden column
    identity = {"rowmax": values.number(float("-inf")), "rowsum": values.number(0)}
    for s in loop.body:
        match s:
            case Compute():
                for reduction in _reductions(s.value):
                    if (
                        names(reduction) & tied
                        and values.value(reduction.args[0], hidden, {test: False}) != identity[reduction.fn]
                    ):
                        return False
                element = values.value(s.value, hidden, {test: False}) if s.into in tied else None
                seen = values.run((s,), seen, {})
                hidden[s.into] = element if element is not None else seen[s.into]
            case Gemm() if s.a in tied and hidden.get(s.a) != values.number(0):
                return False
            case Reshape() if s.into in tied:
                seen, hidden[s.into] = values.run((s,), seen, {}), hidden[s.source]
            case _:
                seen = values.run((s,), seen, {})
                hidden |= {n: v for n, v in seen.items() if n not in tied or isinstance(s, Gemm) and n == s.into}
    return True


def _reductions(e: Expr) -> Iterator[Op]:
    return (x for x in walk(e) if isinstance(x, Op) and x.fn in REDUCTIONS)
