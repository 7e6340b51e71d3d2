"""One line to one statement, the paper's looser spellings included. Sees no other line: blocks and inference are the parser's."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from generator.tl import declarations
from generator.tl.declarations import listed, whole
from generator.tl.diagnostics import Diagnostic
from generator.tl.expressions import Cursor, did_you_mean, parse_expression
from generator.tl.grammar import ARITHMETIC, DTYPE_WORDS, FORMS, LEVEL_WORDS, MACROS, UNSTATED, ElseLine, EndLine, Line
from generator.tl.ir import FUNCTIONS, Compute, Copy, DType, Expr, For, Gemm, If, Level, Named, Num, Op, Reshape, Var
from generator.tl.lexer import LineError, Token


def parse_line(tokens: list[Token], number: int) -> tuple[Line, list[Diagnostic]]:
    """What one line states, with warnings. Raises LineError."""
    word = tokens[0].word
    if word not in KEYWORDS:
        raise _unknown(Cursor(tokens, number))
    form, parser = KEYWORDS[word]
    cursor = Cursor(tokens, number, FORMS[form])
    cursor.next()
    line = parser(cursor)
    cursor.finish()
    return line, cursor.notes


def _unknown(cursor: Cursor) -> LineError:
    first = cursor.token
    listed_forms = f"statements start with {', '.join(_SHOWN)}"
    hint = _KEYWORD_HINTS.get(first.word) or did_you_mean(first.word, _SHOWN) or listed_forms
    if cursor.peek().word == "=" and first.kind == "name":
        hint = f"did you mean Compute {first.text} = ...?"
    return cursor.error(f"{cursor.found()} is no statement", hint, "a statement", code="unknown-statement")


def _copy(cursor: Cursor) -> Line:
    source = cursor.name("what to copy")
    into = cursor.name("where it goes") if cursor.accept("into") else source
    shape: tuple[Expr, ...] = ()
    coordinate: tuple[Expr, ...] = ()
    if cursor.is_word("("):
        shape = listed(cursor, "(", ")", "the name")
        coordinate = (Num(0),) * len(shape)
        if cursor.accept("in"):
            cursor.expect("coordinate", "in")
            coordinate = _coordinate(cursor, len(shape))
    cursor.expect("from", "what to copy")
    source_level = cast(Level, cursor.choice("a memory level", LEVEL_WORDS))
    cursor.expect("to", "the level")
    into_level = cast(Level, cursor.choice("a memory level", LEVEL_WORDS))
    return (Copy(source, into, shape, coordinate, source_level, into_level, span=whole(cursor)),)


def _coordinate(cursor: Cursor, axes: int) -> tuple[Expr, ...]:
    """`[L = i, D = j]`, by name or by position; an axis that is not written is 0."""
    start = cursor.expect("[", "coordinate")
    tiles: dict[int, Expr] = {}
    while not cursor.accept("]"):
        if tiles:
            cursor.expect(",", "a coordinate")
        axis = len(tiles)
        at = cursor.token
        if cursor.peek().word == "=":
            axis = {"l": 0, "d": 1}.get(cursor.token.word, -1)
            cursor.at += 2
        if axis < 0 or axis in tiles:
            raise cursor.error(
                f"{at.text!r} is no further axis of a tile", "the row tile is L, the column tile is D", "L or D", at=at
            )
        tiles[axis] = parse_expression(cursor)
    if any(axis >= axes for axis in tiles):
        raise cursor.error(f"the coordinate has {len(tiles)} axes, the tile has {axes}", at=start)
    return tuple(tiles.get(axis, Num(0)) for axis in range(axes))


def _compute(cursor: Cursor) -> Line:
    start = cursor.token
    operator = cursor.name("what to compute")
    if cursor.accept("="):
        return (Compute(start.text, parse_expression(cursor), span=whole(cursor)),)
    if cursor.token.word in ("+", "-", "*", "/") and cursor.peek().word == "=":
        symbol = cursor.token.text
        raise cursor.error(f"{symbol}= is not written in TL", f"write Compute {operator} = {operator} {symbol} ...")
    if operator.lower() == "gemm":
        cursor.form = FORMS["Compute GEMM"]
        return (_gemm(cursor),)
    cursor.form = FORMS["Compute OPERATOR"]
    if operator.lower() in ARITHMETIC:
        return (_arithmetic(cursor, ARITHMETIC[operator.lower()]),)
    return (_named(cursor, MACROS.get(operator.lower(), operator)),)


def _gemm(cursor: Cursor) -> Gemm:
    a, a_transposed = _operand(cursor)
    cursor.expect(",", "the first operand")
    b, b_transposed = _operand(cursor)
    cursor.expect("and", "the operands")
    accumulate = cursor.choice("what becomes of the product", {"get": "get", "accumulate": "accumulate"}) == "accumulate"
    into = _target(cursor)
    return Gemm(a, a_transposed, b, b_transposed, into, accumulate, span=whole(cursor))


def _operand(cursor: Cursor) -> tuple[str, bool]:
    name = cursor.name("a tile")
    if cursor.accept("^"):
        if not cursor.is_word("t"):
            raise cursor.error(f"expected T after ^, found {cursor.found()}", f"write {name}^T for {name} transposed", "T")
        cursor.next()
        return name, True
    return name, False


def _target(cursor: Cursor) -> str:
    """`S`, or `new S` as the paper writes it."""
    if cursor.is_word("new") and cursor.peek().kind == "name":
        cursor.next()
    return cursor.name("the result's name")


def _arithmetic(cursor: Cursor, function: str) -> Compute:
    start = cursor.token
    operands = [parse_expression(cursor)]
    while cursor.accept(","):
        operands.append(parse_expression(cursor))
    needed = FUNCTIONS[function]
    if len(operands) != needed:
        raise cursor.error(f"expected {needed} operand{'s' * (needed > 1)}, found {len(operands)}", at=start, code="arity")
    span = cursor.span(start)
    if cursor.accept("and"):
        cursor.expect("get", "and")
        into = _target(cursor)
    elif isinstance(operands[0], Var):
        into = operands[0].name
    else:
        raise cursor.error(f"expected 'and get', found {cursor.found()}", "say which tile takes the result", "and get NAME")
    return Compute(into, Op(function, tuple(operands), span=span), span=whole(cursor))


def _named(cursor: Cursor, operator: str) -> Named:
    operands: list[str] = []
    while not operands or cursor.accept(","):
        operands.append(cursor.name("an operand"))
    into = None
    if cursor.accept("and"):
        cursor.expect("get", "and")
        into = _target(cursor)
    state: list[str] = []
    if cursor.accept("with"):
        while not state or cursor.accept(","):
            state.append(cursor.name("a tile that keeps state"))
    return Named(operator, tuple(operands), into, tuple(state), span=whole(cursor))


def _reshape(cursor: Cursor) -> Line:
    source = cursor.name("a tile")
    cursor.expect("from", "the tile")
    source_layout = _layout(cursor)
    cursor.expect("to", "the layout")
    into_layout = _layout(cursor)
    into, dtype = source, UNSTATED
    if cursor.accept("and"):
        cursor.expect("get", "and")
        into = _target(cursor)
        if cursor.token.kind != "end":
            dtype = cast(DType, cursor.choice("a dtype", DTYPE_WORDS))
    return (Reshape(source, source_layout, into_layout, into, dtype, span=whole(cursor)),)


def _layout(cursor: Cursor) -> tuple[str, ...]:
    cursor.expect("(", "the layout")
    axes = [cursor.name("an axis of the fragment")]
    while cursor.accept(","):
        axes.append(cursor.name("an axis of the fragment"))
    cursor.expect(")", "the axes")
    return tuple(axes)


def _for(cursor: Cursor) -> Line:
    var = cursor.name("the loop variable")
    if not cursor.accept("in"):
        cursor.expect("=", "the loop variable")
    lo = parse_expression(cursor)
    cursor.expect(":", "the first value")
    hi = parse_expression(cursor)
    backwards = cursor.accept("reversed")
    return (For(var, lo, hi, backwards, (), span=whole(cursor)),)


def _if(cursor: Cursor) -> Line:
    test = parse_expression(cursor)
    return (If(test, (), (), span=whole(cursor)),)


def _else(cursor: Cursor) -> Line:
    if cursor.is_word("if"):
        raise cursor.error("else if is not written in TL", "open an if of its own behind else, with an end of its own")
    return ElseLine(whole(cursor))


def _end(cursor: Cursor) -> Line:
    if cursor.token.word in ("for", "if"):
        cursor.next()
    return EndLine(whole(cursor))


#: First word of a line -> the key of its form, and its parser.
KEYWORDS: dict[str, tuple[str, Callable[[Cursor], Line]]] = {
    "kernel": ("Kernel", declarations.kernel),
    "argument": ("Argument", declarations.argument),
    "constant": ("Constant", declarations.constant),
    "let": ("Let", declarations.let),
    "grid": ("Grid", declarations.grid),
    "allocate": ("Allocate", declarations.allocate),
    "hint": ("Hint", declarations.hint),
    "option": ("Option", declarations.option),
    "copy": ("Copy", _copy),
    "compute": ("Compute", _compute),
    "reshape": ("Reshape", _reshape),
    "for": ("for", _for),
    "if": ("if", _if),
    "else": ("else", _else),
    "end": ("end", _end),
}
_SHOWN = tuple(form for form, _ in KEYWORDS.values())
_KEYWORD_HINTS = {
    **dict.fromkeys(("arg", "param"), "did you mean Argument?"),
    **dict.fromkeys(("endfor", "endif", "done", "}"), "did you mean end?"),
    "const": "did you mean Constant?",
    "alloc": "did you mean Allocate?",
    "load": "did you mean Copy ... from global to shared?",
    "store": "did you mean Copy ... from register to global?",
    "gemm": "did you mean Compute GEMM?",
    "softmax": "did you mean Compute Softmax?",
    "while": "TL has for loops only",
    "elif": "open an if of its own behind else",
    "return": "a kernel ends with its last line",
    "//": "a comment starts with #",
}
