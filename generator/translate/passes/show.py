"""Expressions as short text for schedules and comments in emitted code. Not the language's printer: nothing parses this."""

from __future__ import annotations

from generator.tl.ir import Expr, Index, Num, Op, Var

INFIX = {"or": 1, "and": 2, "<": 3, "<=": 3, ">": 3, ">=": 3, "==": 3, "!=": 3, "+": 4, "-": 4, "*": 5, "/": 5, "//": 5, "%": 5}


def show(e: Expr, level: int = 0) -> str:
    match e:
        case Num(value):
            return str(value)
        case Var(name):
            return name
        case Index(tensor, indices):
            return f"{tensor}[{', '.join(show(i) for i in indices)}]"
        case Op("neg", (a,)):
            return f"-{show(a, 6)}"
        case Op("not", (a,)):
            return f"not {show(a, 3)}"
        case Op(fn, args) if fn in INFIX:
            own = INFIX[fn]
            text = f" {fn} ".join(show(a, own + (1 if i else 0)) for i, a in enumerate(args))
            return f"({text})" if own < level else text
        case Op(fn, args):
            return f"{fn}({', '.join(show(a) for a in args)})"
