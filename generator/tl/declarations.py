"""Lines that declare: Kernel, Argument, Constant, Let, Grid, Allocate, Hint, Option. The others are in `statements.py`."""

from __future__ import annotations

from typing import cast

from generator.tl.expressions import Cursor, parse_expression
from generator.tl.grammar import DTYPE_WORDS, LEVEL_WORDS, KernelLine, Line
from generator.tl.ir import Allocate, Argument, Axis, Constant, DType, Expr, Grid, Hint, Let, Level, Num, Option, Span, Stmt


def whole(cursor: Cursor) -> Span:
    """The line up to here."""
    return cursor.span(cursor.tokens[0])


def listed(cursor: Cursor, opening: str, closing: str, what: str) -> tuple[Expr, ...]:
    """Expressions between brackets, a trailing comma allowed."""
    cursor.expect(opening, what)
    items: list[Expr] = []
    while not cursor.accept(closing):
        if items:
            cursor.expect(",", f"an item of {what}")
            if cursor.accept(closing):
                break
        items.append(parse_expression(cursor))
    return tuple(items)


def kernel(cursor: Cursor) -> Line:
    return KernelLine(cursor.name("the kernel's name"), whole(cursor))


def argument(cursor: Cursor) -> Line:
    statements: list[Stmt] = []
    while True:
        start = cursor.token
        names = [cursor.name("an argument's name")]
        while cursor.accept(","):
            names.append(cursor.name("an argument's name"))
        cursor.accept(":")
        dtype = cast(DType, cursor.choice("a dtype", DTYPE_WORDS))
        positive = cursor.accept("positive")
        statements.append(Argument(tuple(names), dtype, positive, span=cursor.span(start)))
        if not cursor.accept(","):
            return tuple(statements)


def constant(cursor: Cursor) -> Line:
    statements: list[Stmt] = []
    while True:
        start = cursor.token
        name = cursor.name("a constant's name")
        choices: list[int] = []
        if cursor.accept("in"):
            cursor.expect("{", "in")
            while not cursor.accept("}"):
                if choices:
                    cursor.expect(",", "a choice")
                choices.append(_integer(cursor, name))
            if len(choices) < 1:
                raise cursor.error(f"{name} has no choices", f"write Constant {name} in {{64, 128}}")
        else:
            cursor.expect("=", "the name")
            choices.append(_integer(cursor, name))
        statements.append(Constant(name, tuple(choices), span=cursor.span(start)))
        if not cursor.accept(","):
            return tuple(statements)


def _integer(cursor: Cursor, name: str) -> int:
    start = cursor.token
    value = parse_expression(cursor)
    if not isinstance(value, Num) or not isinstance(value.value, int):
        hint = f"a constant is a whole number; for an expression write Let {name} = ..."
        raise cursor.error(f"expected a whole number for {name}", hint, "a whole number", at=start)
    return value.value


def let(cursor: Cursor) -> Line:
    name = cursor.name("a name")
    cursor.expect("=", "the name")
    return (Let(name, parse_expression(cursor), span=whole(cursor)),)


def grid(cursor: Cursor) -> Line:
    axes: list[Axis] = []
    while not axes or cursor.accept(","):
        start = cursor.token
        name = cursor.name("a grid axis")
        cursor.expect("=", "the axis")
        first = cursor.token
        if parse_expression(cursor) != Num(0):
            raise cursor.error(
                "a grid axis starts at 0", f"write {name} = 0:EXTENT and add the offset where {name} is used", "0", at=first
            )
        cursor.expect(":", "0")
        extent = parse_expression(cursor)
        axes.append(Axis(name, extent, span=cursor.span(start)))
    return (Grid(tuple(axes), span=whole(cursor)),)


def allocate(cursor: Cursor) -> Line:
    name = cursor.name("a name")
    cursor.expect("in", "the name")
    level = cast(Level, cursor.choice("a memory level", LEVEL_WORDS))
    shape = listed(cursor, "(", ")", "the level")
    dtype: DType = "f32"
    if cursor.token.kind == "name" and not cursor.is_word("with"):
        dtype = cast(DType, cursor.choice("a dtype", DTYPE_WORDS))
    elif level != "register":
        cursor.note("missing-dtype", f"the dtype of {name} is not stated: read as f32", "write f32, f16, bf16 or i32")
    offset: tuple[Expr, ...] = ()
    if cursor.accept("with"):
        cursor.expect("offset", "with")
        offset = listed(cursor, "[", "]", "offset") if cursor.is_word("[") else (parse_expression(cursor),)
    init = parse_expression(cursor) if cursor.accept("=") else None
    return (Allocate(name, level, shape, dtype, offset, init, span=whole(cursor)),)


def hint(cursor: Cursor) -> Line:
    name, value = _setting(cursor)
    return (Hint(name, value, span=whole(cursor)),)


def option(cursor: Cursor) -> Line:
    name, value = _setting(cursor)
    return (Option(name, value, span=whole(cursor)),)


def _setting(cursor: Cursor) -> tuple[str, str]:
    name = cursor.name("a name")
    cursor.expect("=", "the name")
    if cursor.token.kind not in ("name", "int", "float"):
        raise cursor.error(f"expected a word or a number, found {cursor.found()}")
    return name, cursor.next().text
