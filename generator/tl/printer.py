"""`Program` to its canonical text, which is what is hashed. Checks nothing; comments are not part of a program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import assert_never

from generator.canonical import digest_text
from generator.tl.expressions import ATOM_BINDING, BINDING, COMPARISON_BINDING, NEG_BINDING, NOT_BINDING
from generator.tl.ir import (
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
    Index,
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
)
from generator.tl.softmax import expand_macros

INDENT = "  "


def print_program(program: Program) -> str:
    """The canonical text, one statement a line, ending in a newline. `parse` of it gives the same program."""
    head = [f"Kernel {program.name}"] if program.name else []
    return "".join(line + "\n" for line in (*head, *print_body(program.body)))


def program_hash(program: Program) -> str:
    """SHA-256 (hex) of the canonical text with macros written out; `Let` and `Constant` are kept as they stand.

    Two programs that differ in white space, comments or a spelling of the same statement have one hash; a renamed tile is another
    program.
    """
    return digest_text(print_program(expand_macros(program)))


def print_body(body: Sequence[Stmt], depth: int = 0) -> Iterator[str]:
    """The lines of a body. Constants that follow each other share a line; prose that opens a block indents what it holds."""
    for is_constant, group in groupby(body, key=lambda s: isinstance(s, Constant)):
        if is_constant:
            yield INDENT * depth + "Constant " + ", ".join(_constant(s) for s in group if isinstance(s, Constant))
            continue
        for s in group:
            if isinstance(s, Prose):
                word = s.text.split(" ", 1)[0].lower()
                depth = max(depth - (word in ("end", "else")), 0)
                yield INDENT * depth + s.text
                depth += word in ("for", "if", "else")
                continue
            yield from (INDENT * depth + line for line in print_statement(s))


def print_statement(s: Stmt) -> Iterator[str]:
    """The lines of one statement."""
    match s:
        case For():
            yield f"for {s.var} = {print_expression(s.lo)}:{print_expression(s.hi)}{' reversed' if s.reversed else ''}"
            yield from print_body(s.body, 1)
            yield "end"
        case If():
            yield f"if {print_expression(s.test)}"
            yield from print_body(s.then, 1)
            if s.otherwise:
                yield "else"
                yield from print_body(s.otherwise, 1)
            yield "end"
        case Constant():
            yield f"Constant {_constant(s)}"
        case _:
            yield _print_line(s)


def _print_line(s: Stmt) -> str:
    match s:
        case Argument():
            return f"Argument {', '.join(s.names)} {s.dtype}{' positive' if s.positive else ''}"
        case Grid():
            return "Grid " + ", ".join(f"{a.name} = 0:{print_expression(a.extent)}" for a in s.axes)
        case Let():
            return f"Let {s.name} = {print_expression(s.value)}"
        case Allocate():
            offset = f" with offset [{_list(s.offset)}]" if s.offset else ""
            init = f" = {print_expression(s.init)}" if s.init is not None else ""
            return f"Allocate {s.name} in {s.level} ({_list(s.shape)}) {s.dtype}{offset}{init}"
        case Hint():
            return f"Hint {s.name} = {s.value}"
        case Option():
            return f"Option {s.name} = {s.value}"
        case Copy():
            return _copy(s)
        case Gemm():
            a, b = s.a + "^T" * s.a_transposed, s.b + "^T" * s.b_transposed
            return f"Compute GEMM {a}, {b} and {'accumulate' if s.accumulate else 'get'} {s.into}"
        case Compute():
            return f"Compute {s.into} = {print_expression(s.value)}"
        case Named():
            into = f" and get {s.into}" if s.into is not None else ""
            state = f" with {', '.join(s.state)}" if s.state else ""
            return f"Compute {s.operator} {', '.join(s.operands)}{into}{state}"
        case Reshape():
            source, into = ", ".join(s.source_layout), ", ".join(s.into_layout)
            return f"Reshape {s.source} from ({source}) to ({into}) and get {s.into} {s.dtype}"
        case Prose():
            return s.text
        case For() | If() | Constant():
            raise AssertionError("printed by print_statement")
        case _:
            assert_never(s)


def _constant(s: Constant) -> str:
    return f"{s.name} in {{{', '.join(map(str, s.choices))}}}" if s.is_hole else f"{s.name} = {s.choices[0]}"


def _copy(s: Copy) -> str:
    into = f" into {s.into}" if s.into != s.source else ""
    shape = ""
    if s.shape:
        written = len(s.coordinate)
        while written > 1 and s.coordinate[written - 1] == Num(0):
            written -= 1
        axes = ", ".join(f"{axis} = {print_expression(c)}" for axis, c in zip("LD", s.coordinate[:written], strict=False))
        shape = f" ({_list(s.shape)}) in coordinate [{axes}]"
    return f"Copy {s.source}{into}{shape} from {s.source_level} to {s.into_level}"


def _list(items: Sequence[Expr]) -> str:
    return ", ".join(map(print_expression, items))


def print_expression(e: Expr) -> str:
    """The expression with as few parentheses as its tree allows, floats so that they read back bit for bit."""
    return _print(e, 0)


def _print(e: Expr, least: int) -> str:
    """`e` in a place that only an expression binding more tightly than `least` may fill without parentheses."""
    match e:
        case Num():
            return repr(e.value)
        case Var():
            return e.name
        case Index():
            return f"{e.tensor}[{_list(e.indices)}]"
        case Op():
            text, binding = _operation(e)
            return text if binding > least else f"({text})"
        case _:
            assert_never(e)


def _operation(e: Op) -> tuple[str, int]:
    if e.fn == "neg" and len(e.args) == 1:
        # -(3) is the negation of 3, -3 is a literal
        inside = f"({_print(e.args[0], 0)})" if isinstance(e.args[0], Num) else _print(e.args[0], NEG_BINDING - 1)
        return f"-{inside}", NEG_BINDING
    if e.fn == "not" and len(e.args) == 1:
        return f"not {_print(e.args[0], NOT_BINDING - 1)}", NOT_BINDING
    if e.fn in BINDING and len(e.args) == 2:
        binding = BINDING[e.fn]
        left = _print(e.args[0], binding if binding == COMPARISON_BINDING else binding - 1)
        return f"{left} {e.fn} {_print(e.args[1], binding)}", binding
    return f"{e.fn}({_list(e.args)})", ATOM_BINDING
