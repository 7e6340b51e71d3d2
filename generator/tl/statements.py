"""One line to one statement, the paper's looser spellings included. Sees no other line: blocks and inference are the parser's.

Keywords are read in any case. `FORMS` is the grammar that docs/language.md prints and hints quote.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from generator.tl.expressions import Cursor, did_you_mean, parse_expression
from generator.tl.ir import (
    FUNCTIONS,
    Allocate,
    Argument,
    Axis,
    Compute,
    Constant,
    Copy,
    DType,
    Expr,
    For,
    Gemm,
    Grid,
    Hint,
    If,
    Let,
    Level,
    Named,
    Num,
    Op,
    Option,
    Reshape,
    Span,
    Stmt,
    Var,
)
from generator.tl.lexer import Token

#: Keyword -> its canonical form.
FORMS: dict[str, str] = {
    "Kernel": "Kernel NAME",
    "Argument": "Argument NAME, ... DTYPE [positive]",
    "Constant": "Constant NAME = INTEGER, NAME in {INTEGER, ...}, ...",
    "Let": "Let NAME = EXPRESSION",
    "Grid": "Grid NAME = 0:EXTENT, ...",
    "Allocate": "Allocate NAME in LEVEL (EXTENT, ...) DTYPE [with offset [INDEX, ...]] [= INITIAL]",
    "Hint": "Hint NAME = VALUE",
    "Option": "Option NAME = VALUE",
    "Copy": "Copy NAME [into NAME] [(EXTENT, ...) in coordinate [L = ROW_TILE, D = COLUMN_TILE]] from LEVEL to LEVEL",
    "Compute": "Compute NAME = EXPRESSION",
    "Compute GEMM": "Compute GEMM NAME[^T], NAME[^T] and get|accumulate NAME",
    "Compute OPERATOR": "Compute OPERATOR OPERAND, ... [and get NAME] [with STATE, ...]",
    "Reshape": "Reshape NAME from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new) and get NAME DTYPE",
    "for": "for NAME = FIRST:END [reversed]",
    "if": "if TEST",
    "else": "else",
    "end": "end",
}

#: The paper's words for arithmetic -> the function. `Compute Multiply S, scale and get new S` is `Compute S = S * scale`.
ARITHMETIC: dict[str, str] = {
    "add": "+", "subtract": "-", "multiply": "*", "divide": "/", "max": "max", "maximum": "max", "min": "min", "minimum": "min",
    "exp": "exp", "exp2": "exp2", "log": "log", "log2": "log2", "sqrt": "sqrt", "tanh": "tanh", "abs": "abs", "negate": "neg",
    "rowmax": "rowmax", "rowsum": "rowsum",
}  # fmt: skip

#: Macros by their lower-case name.
MACROS: dict[str, str] = {"softmax": "Softmax"}

LEVEL_WORDS: dict[str, str] = {"global": "global", "shared": "shared", "register": "register", "registers": "register"}
DTYPE_WORDS: dict[str, str] = {
    "f32": "f32", "f16": "f16", "bf16": "bf16", "i32": "i32",
    "fp32": "f32", "float32": "f32", "float": "f32", "fp16": "f16", "float16": "f16", "half": "f16", "bfloat16": "bf16",
    "int32": "i32", "int": "i32",
}  # fmt: skip

#: What a Reshape without a dtype holds until the parser has looked for the GEMM that reads it.
UNSTATED = cast(DType, "")
FRAGMENT_C = ("MMA_C", "MMA_M", "MMA_N")
FRAGMENT_A = ("MMA_A", "MMA_M", "MMA_N_new")


@dataclass(frozen=True, slots=True)
class KernelLine:
    name: str
    span: Span


@dataclass(frozen=True, slots=True)
class ElseLine:
    span: Span


@dataclass(frozen=True, slots=True)
class EndLine:
    span: Span


#: A For or an If stands for its first line: its body is empty.
Line = KernelLine | ElseLine | EndLine | tuple[Stmt, ...]


def parse_line(tokens: list[Token], number: int) -> Line:
    """What one line states. Raises LineError."""
    word = tokens[0].word
    if word not in _PARSERS:
        cursor = Cursor(tokens, number)
        if cursor.peek().word == "=" and tokens[0].kind == "name":
            raise cursor.error(
                f"{tokens[0].text!r} is no statement", f"did you mean Compute {tokens[0].text} = ...?", code="unknown-statement"
            )
        hint = (
            _KEYWORD_HINTS.get(word) or did_you_mean(word, _PARSERS_SHOWN) or f"statements start with {', '.join(_PARSERS_SHOWN)}"
        )
        raise cursor.error(f"{cursor.found()} is no statement", hint, "a statement", code="unknown-statement")
    form, parser = _PARSERS[word]
    cursor = Cursor(tokens, number, FORMS[form])
    cursor.next()
    line = parser(cursor)
    cursor.finish()
    return line


def _whole(cursor: Cursor) -> Span:
    return cursor.span(cursor.tokens[0])


def _listed(cursor: Cursor, opening: str, closing: str, what: str) -> tuple[Expr, ...]:
    cursor.expect(opening, what)
    items: list[Expr] = []
    while not cursor.accept(closing):
        if items:
            cursor.expect(",", f"an item of {what}")
        items.append(parse_expression(cursor))
    return tuple(items)


# ----------------------------------------------------------------------------------------------------- declarations


def _kernel(cursor: Cursor) -> Line:
    return KernelLine(cursor.name("the kernel's name"), _whole(cursor))


def _argument(cursor: Cursor) -> Line:
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


def _constant(cursor: Cursor) -> Line:
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


def _let(cursor: Cursor) -> Line:
    name = cursor.name("a name")
    cursor.expect("=", "the name")
    return (Let(name, parse_expression(cursor), span=_whole(cursor)),)


def _grid(cursor: Cursor) -> Line:
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
    return (Grid(tuple(axes), span=_whole(cursor)),)


def _allocate(cursor: Cursor) -> Line:
    name = cursor.name("a name")
    cursor.expect("in", "the name")
    level = cast(Level, cursor.choice("a memory level", LEVEL_WORDS))
    shape = _listed(cursor, "(", ")", "the level")
    dtype: DType = "f32"
    if cursor.token.kind == "name" and not cursor.is_word("with"):
        dtype = cast(DType, cursor.choice("a dtype", DTYPE_WORDS))
    offset: tuple[Expr, ...] = ()
    if cursor.accept("with"):
        cursor.expect("offset", "with")
        offset = _listed(cursor, "[", "]", "offset") if cursor.is_word("[") else (parse_expression(cursor),)
    init = parse_expression(cursor) if cursor.accept("=") else None
    return (Allocate(name, level, shape, dtype, offset, init, span=_whole(cursor)),)


def _setting(kind: type[Hint] | type[Option]) -> Callable[[Cursor], Line]:
    def parse(cursor: Cursor) -> Line:
        name = cursor.name("a name")
        cursor.expect("=", "the name")
        if cursor.token.kind not in ("name", "int", "float"):
            raise cursor.error(f"expected a word or a number, found {cursor.found()}")
        value = cursor.next().text
        return (kind(name, value, span=_whole(cursor)),)

    return parse


# ------------------------------------------------------------------------------------------------- data and compute


def _copy(cursor: Cursor) -> Line:
    source = cursor.name("what to copy")
    into = cursor.name("where it goes") if cursor.accept("into") else source
    shape: tuple[Expr, ...] = ()
    coordinate: tuple[Expr, ...] = ()
    if cursor.is_word("("):
        shape = _listed(cursor, "(", ")", "the name")
        coordinate = (Num(0),) * len(shape)
        if cursor.accept("in"):
            cursor.expect("coordinate", "in")
            coordinate = _coordinate(cursor, len(shape))
    cursor.expect("from", "what to copy")
    source_level = cast(Level, cursor.choice("a memory level", LEVEL_WORDS))
    cursor.expect("to", "the level")
    into_level = cast(Level, cursor.choice("a memory level", LEVEL_WORDS))
    return (Copy(source, into, shape, coordinate, source_level, into_level, span=_whole(cursor)),)


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
        return (Compute(start.text, parse_expression(cursor), span=_whole(cursor)),)
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
    return Gemm(a, a_transposed, b, b_transposed, into, accumulate, span=_whole(cursor))


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
    return Compute(into, Op(function, tuple(operands), span=span), span=_whole(cursor))


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
    return Named(operator, tuple(operands), into, tuple(state), span=_whole(cursor))


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
    return (Reshape(source, source_layout, into_layout, into, dtype, span=_whole(cursor)),)


def _layout(cursor: Cursor) -> tuple[str, ...]:
    cursor.expect("(", "the layout")
    axes = [cursor.name("an axis of the fragment")]
    while cursor.accept(","):
        axes.append(cursor.name("an axis of the fragment"))
    cursor.expect(")", "the axes")
    return tuple(axes)


# ----------------------------------------------------------------------------------------------------------- blocks


def _for(cursor: Cursor) -> Line:
    var = cursor.name("the loop variable")
    if not cursor.accept("in"):
        cursor.expect("=", "the loop variable")
    lo = parse_expression(cursor)
    cursor.expect(":", "the first value")
    hi = parse_expression(cursor)
    backwards = cursor.accept("reversed")
    return (For(var, lo, hi, backwards, (), span=_whole(cursor)),)


def _if(cursor: Cursor) -> Line:
    test = parse_expression(cursor)
    return (If(test, (), (), span=_whole(cursor)),)


def _else(cursor: Cursor) -> Line:
    if cursor.is_word("if"):
        raise cursor.error("else if is not written in TL", "open an if of its own behind else, with an end of its own")
    return ElseLine(_whole(cursor))


def _end(cursor: Cursor) -> Line:
    if cursor.token.word in ("for", "if"):
        cursor.next()
    return EndLine(_whole(cursor))


#: First word of a line -> the key of its form, and its parser.
_PARSERS: dict[str, tuple[str, Callable[[Cursor], Line]]] = {
    "kernel": ("Kernel", _kernel),
    "argument": ("Argument", _argument),
    "constant": ("Constant", _constant),
    "let": ("Let", _let),
    "grid": ("Grid", _grid),
    "allocate": ("Allocate", _allocate),
    "hint": ("Hint", _setting(Hint)),
    "option": ("Option", _setting(Option)),
    "copy": ("Copy", _copy),
    "compute": ("Compute", _compute),
    "reshape": ("Reshape", _reshape),
    "for": ("for", _for),
    "if": ("if", _if),
    "else": ("else", _else),
    "end": ("end", _end),
}
_PARSERS_SHOWN = tuple(form for form, _ in _PARSERS.values())
_KEYWORD_HINTS = {
    "arg": "did you mean Argument?", "param": "did you mean Argument?", "const": "did you mean Constant?", "alloc": "did you mean Allocate?",
    "load": "did you mean Copy ... from global to shared?", "store": "did you mean Copy ... from register to global?",
    "while": "TL has for loops only", "elif": "open an if of its own behind else", "return": "a kernel ends with its last line",
    "//": "a comment starts with #", "endfor": "did you mean end?", "endif": "did you mean end?",
    "gemm": "did you mean Compute GEMM?", "softmax": "did you mean Compute Softmax?", "float": "a number is declared by Argument NAME f32",
}  # fmt: skip
