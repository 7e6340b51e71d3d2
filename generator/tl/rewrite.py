"""Expressions and statement bodies made anew with parts of them changed. What changes, and why, is the caller's.

`generator.tl.ir` has the walks that only read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from generator.tl.ir import Expr, For, If, Index, Num, Op, Stmt, Var


def map_children(e: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """The expression with each of its children changed; a literal or a name is itself."""
    match e:
        case Op():
            return Op(e.fn, tuple(change(a) for a in e.args), span=e.span)
        case Index():
            return Index(e.tensor, tuple(change(i) for i in e.indices), span=e.span)
        case Num() | Var():
            return e


def map_statements(body: tuple[Stmt, ...], change: Callable[[Stmt], Iterable[Stmt]]) -> tuple[Stmt, ...]:
    """What `change` gives in place of each statement: none, one or several. Loops and branches stay, their bodies changed."""
    out: list[Stmt] = []
    for s in body:
        match s:
            case For():
                out.append(replace(s, body=map_statements(s.body, change)))
            case If():
                then, otherwise = map_statements(s.then, change), map_statements(s.otherwise, change)
                out.append(replace(s, then=then, otherwise=otherwise))
            case _:
                out += change(s)
    return tuple(out)
