"""Rewrites `where` so that what is masked away stands last: masks then have one form. Changes no value of any program."""

from __future__ import annotations

from dataclasses import replace

from generator.tl.ir import Compute, Expr, Num, Op, Program, Stmt
from generator.tl.rewrite import map_children, map_statements
from generator.translate.passes.conditions import negate
from generator.translate.passes.scope import Scope


def normalize(program: Program) -> Program:
    """The same program with `where(kv > q, -inf, S)` as `where(kv <= q, S, -inf)`; only tests of integers are turned round."""
    scope = Scope.of(program)
    return replace(program, body=map_statements(program.body, lambda s: (_statement(s, scope),)))


def _statement(s: Stmt, scope: Scope) -> Stmt:
    return replace(s, value=_expression(s.value, scope)) if isinstance(s, Compute) else s


def _expression(e: Expr, scope: Scope) -> Expr:
    match e:
        case Op("where", (test, a, b)):
            test, a, b = (_expression(x, scope) for x in (test, a, b))
            turned = negate(test, scope)
            if isinstance(a, Num) and not isinstance(b, Num) and _is_plain(turned):
                return Op("where", (turned, b, a), span=e.span)
            return Op("where", (test, a, b), span=e.span)
        case _:
            return map_children(e, lambda child: _expression(child, scope))


def _is_plain(test: Expr) -> bool:
    """Whether the turned test lost its `not`: a comparison of floats keeps it, since NaN compares false both ways."""
    return not (
        isinstance(test, Op)
        and (test.fn == "not" or any(not _is_plain(a) for a in test.args if isinstance(a, Op) and test.fn in ("and", "or")))
    )
