"""Small algebra on expressions for authors: conjunctions, and factors gathered where they cost least. Evaluates nothing."""

from __future__ import annotations

from collections.abc import Set

from generator.tl.ir import Expr, Op, names


def conjuncts(test: Expr) -> list[Expr]:
    """`a and (b and c)` as [a, b, c]."""
    return [c for arg in test.args for c in conjuncts(arg)] if isinstance(test, Op) and test.fn == "and" else [test]


def conjunction(tests: list[Expr]) -> Expr:
    """`a and b and c` of all conjuncts, associated to the left as the parser does."""
    first, *rest = [c for test in tests for c in conjuncts(test)]
    for test in rest:
        first = Op("and", (first, test))
    return first


def multiplied(e: Expr, factor: Expr, elements: Set[str]) -> Expr:
    """e * factor with the factor pushed to what is the same for a whole row or block: `(cap * f) * tanh(...)`.

    `elements` names what varies from element to element.
    """
    match e:
        case Op("+" | "-", (a, b)):
            return Op(e.fn, (multiplied(a, factor, elements), multiplied(b, factor, elements)))
        case Op("*", (a, b)) if not names(a) & elements:
            return Op("*", (Op("*", (a, factor)), b))
        case Op("*", (a, b)) if not names(b) & elements:
            return Op("*", (a, Op("*", (b, factor))))
        case _:
            return Op("*", (e, factor))


def gathered(e: Expr, elements: Set[str]) -> Expr:
    """e with `x * a / b` and `x * a * b` written as `x * (a / b)` and `x * (a * b)` where a and b do not vary by element."""
    match e:
        case Op("*" | "/", (Op("*", (x, a)), b)) if names(x) & elements and not (names(a) | names(b)) & elements:
            return Op("*", (gathered(x, elements), Op(e.fn, (a, b))))
        case Op():
            return Op(e.fn, tuple(gathered(x, elements) for x in e.args))
        case _:
            return e
