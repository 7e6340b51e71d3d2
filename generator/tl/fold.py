"""Integer constants folded and names replaced in one expression. Floats stay as written: folding must not change a bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from generator.tl.ir import MAX_INT, Expr, Num, Op, Var
from generator.tl.rewrite import map_children

_INTEGERS: dict[str, Callable[..., int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "ceildiv": lambda a, b: -(-a // b),
    "max": max,
    "min": min,
    "neg": lambda a: -a,
    "abs": abs,
}
_TESTS: dict[str, Callable[[int, int], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}


def integers(args: tuple[Expr, ...]) -> list[int] | None:
    """The values of the arguments if all are integer literals."""
    values = [a.value for a in args if isinstance(a, Num) and isinstance(a.value, int)]
    return values if len(values) == len(args) else None


def fold(e: Op) -> Expr:
    """The operation with its own constants folded (its arguments are taken as folded already).

    A division by zero stays as it is (the checker reports it), and so does what would not fit into 64 bits.
    """
    if e.fn == "where" and len(e.args) == 3 and (test := truth(e.args[0])) is not None:
        return e.args[1] if test else e.args[2]
    values = integers(e.args)
    if values is None or e.fn not in _INTEGERS or (e.fn in ("//", "%", "ceildiv") and values[-1] == 0):
        return e
    try:
        value = _INTEGERS[e.fn](*values)
    except TypeError:  # a wrong number of arguments: the checker's matter
        return e
    return Num(value, span=e.span) if abs(value) <= MAX_INT else e


def truth(e: Expr) -> bool | None:
    """What a test of integer constants says, or None where it is not constant."""
    if not isinstance(e, Op):
        return None
    if e.fn in _TESTS and (values := integers(e.args)) is not None and len(values) == 2:
        return _TESTS[e.fn](*values)
    known = [truth(a) for a in e.args]
    match e.fn, known:
        case "not", [bool(value)]:
            return not value
        case "and", [_, _] if False in known:
            return False
        case "and", [True, True]:
            return True
        case "or", [_, _] if True in known:
            return True
        case "or", [False, False]:
            return False
    return None


def substitute(e: Expr, values: Mapping[str, Expr]) -> Expr:
    """The expression with names replaced, and integer constants folded on the way up."""
    if isinstance(e, Var):
        return values.get(e.name, e)
    changed = map_children(e, lambda child: substitute(child, values))
    return fold(changed) if isinstance(changed, Op) else changed
