"""One line of TL for each statement, as a comment in emitted code."""

from __future__ import annotations

from generator.tl.ir import For, If, Stmt
from generator.tl.printer import print_expression, print_statement

MAX_COMMENT = 160


def describe(s: Stmt) -> str:
    """The statement's first line; a long one is cut."""
    match s:
        case For():
            text = f"for {s.var} = {print_expression(s.lo)}:{print_expression(s.hi)}{' reversed' if s.reversed else ''}"
        case If():
            text = f"if {print_expression(s.test)}"
        case _:
            text = next(iter(print_statement(s)))
    return text if len(text) <= MAX_COMMENT else text[: MAX_COMMENT - 3] + "..."
