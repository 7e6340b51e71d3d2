"""Expressions from tokens, by operator precedence. Reads no statement and evaluates nothing."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

from generator.tl.diagnostics import Diagnostic, TLError
from generator.tl.ir import FUNCTIONS, MAX_INT, Expr, Index, Num, Op, Span, Var
from generator.tl.lexer import LineError, Token, read_text, tokenize

#: An infix operator -> how tightly it binds. All associate to the left, comparisons not at all.
BINDING: dict[str, int] = {
    "or": 1, "and": 2,
    "<": 4, "<=": 4, ">": 4, ">=": 4, "==": 4, "!=": 4,
    "+": 5, "-": 5, "*": 6, "/": 6, "//": 6, "%": 6,
}  # fmt: skip
NOT_BINDING, COMPARISON_BINDING, NEG_BINDING, ATOM_BINDING = 3, 4, 7, 8

#: Deeper expressions are refused, so that no reader of a program needs more than so many frames.
MAX_DEPTH = 60
_MAX_NESTING = 2 * MAX_DEPTH + 10  # parentheses and right operands together: a tree of MAX_DEPTH in its canonical form fits


#: Words of other languages for what a hint can then name.
SYNONYMS = {
    "smem": "shared",
    "gmem": "global",
    "hbm": "global",
    "reg": "register",
    "rmem": "register",
    "f64": "f32",
    "i64": "i32",
}


class Cursor:
    """A place in the tokens of one line, with errors that say what was expected there."""

    def __init__(self, tokens: list[Token], line: int, form: str = "") -> None:
        self.tokens, self.line, self.form, self.at = tokens, line, form, 0
        self.notes: list[Diagnostic] = []

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    def next(self) -> Token:
        token = self.token
        self.at = min(self.at + 1, len(self.tokens) - 1)
        return token

    def peek(self, ahead: int = 1) -> Token:
        return self.tokens[min(self.at + ahead, len(self.tokens) - 1)]

    def is_word(self, word: str) -> bool:
        return self.token.word == word

    def accept(self, *words: str) -> bool:
        """Step over these words or symbols if they stand here, all of them."""
        if all(self.peek(i).word == word for i, word in enumerate(words)):
            self.at += len(words)
            return True
        return False

    def expect(self, word: str, after: str = "") -> Token:
        if not self.is_word(word):
            raise self.error(f"expected {word!r}{f' after {after}' if after else ''}, found {self.found()}", expected=word)
        return self.next()

    def name(self, what: str) -> str:
        """A name; `what` says whose."""
        if self.token.kind != "name":
            raise self.error(f"expected {what}, found {self.found()}", expected=what)
        return self.next().text

    def choice(self, what: str, allowed: dict[str, str]) -> str:
        """One of the keys of `allowed`, as its value."""
        if self.token.word not in allowed:
            listed = ", ".join(dict.fromkeys(allowed.values()))
            hint = did_you_mean(SYNONYMS.get(self.token.word, self.token.word), allowed)
            raise self.error(f"expected {what} ({listed}), found {self.found()}", hint, listed)
        return allowed[self.next().word]

    def binding(self) -> int:
        """How tightly the infix operator that stands here binds; -1 for none. The `and` of `and get` is a keyword."""
        if self.is_word("and") and self.peek().word == "get":
            return -1
        return BINDING.get(self.token.word, -1)

    def finish(self) -> None:
        """The line must end here."""
        if self.token.kind != "end":
            raise self.error(f"expected the end of the line, found {self.found()}", expected="the end of the line")

    def found(self) -> str:
        return "the end of the line" if self.token.kind == "end" else repr(self.token.text)

    def span(self, start: Token) -> Span:
        """From `start` to the token before this one."""
        return Span(self.line, start.column, max(self.tokens[max(self.at - 1, 0)].end, start.end))

    def note(self, code: str, message: str, hint: str) -> None:
        """A warning about what stands just before."""
        before = self.tokens[max(self.at - 1, 0)]
        self.notes.append(Diagnostic(code, "warning", message, Span(self.line, before.column, before.end), hint))

    def error(self, message: str, hint: str = "", expected: str = "", at: Token | None = None, code: str = "syntax") -> LineError:
        token = at or self.token
        found = "the end of the line" if token.kind == "end" else token.text
        hint = hint or (f"the form is: {self.form}" if self.form else "")
        return LineError(Diagnostic(code, "error", message, Span(self.line, token.column, token.end), hint, expected, found))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint that names the closest known word, or nothing."""
    if len(word) > 40:
        return ""
    close = difflib.get_close_matches(word.lower(), {k.lower(): k for k in known}, n=1, cutoff=0.6)
    return f"did you mean {next(k for k in known if k.lower() == close[0])}?" if close else ""


def expression(text: str) -> Expr:
    """The expression that a text states: `expression("where(kv <= q, S, -inf)")`. Raises TLError."""
    clean, diagnostics = read_text(text)
    try:
        if diagnostics:
            raise LineError(diagnostics[0])
        cursor = Cursor(tokenize(clean, 1), 1)
        value = parse_expression(cursor)
        cursor.finish()
    except LineError as error:
        raise TLError([error.diagnostic], text) from None
    return value


def parse_expression(cursor: Cursor) -> Expr:
    """The longest expression that starts at the cursor. Raises LineError."""
    return _binary(cursor, 0, 0)[0]


# Each function below returns an expression and the depth of its tree.
_Parsed = tuple[Expr, int]


def _binary(cursor: Cursor, least: int, nesting: int) -> _Parsed:
    start = cursor.token
    left, depth = _prefix(cursor, nesting)
    compared = False
    while (binding := cursor.binding()) > least:
        operator = cursor.token
        if binding == COMPARISON_BINDING and compared:
            hint = "join two comparisons by and: lo <= x and x < hi"
            raise cursor.error(f"a comparison cannot be compared again by {operator.text!r}", hint)
        compared = compared or binding == COMPARISON_BINDING
        cursor.next()
        right, right_depth = _binary(cursor, binding, nesting + 1)
        left = Op(operator.word, (left, right), span=cursor.span(start))
        depth = _deeper(cursor, start, depth, right_depth)
    return left, depth


def _prefix(cursor: Cursor, nesting: int) -> _Parsed:
    start = cursor.token
    if nesting > _MAX_NESTING:
        raise _too_deep(cursor, start)
    if cursor.is_word("not"):
        cursor.next()
        value, depth = _binary(cursor, NOT_BINDING - 1, nesting + 1)
        return Op("not", (value,), span=cursor.span(start)), _deeper(cursor, start, depth)
    if cursor.is_word("-"):
        cursor.next()
        if cursor.token.kind in ("int", "float") or cursor.is_word("inf"):
            number = _number(cursor)
            return Num(-number.value, span=cursor.span(start)), 1
        value, depth = _prefix(cursor, nesting + 1)
        return Op("neg", (value,), span=cursor.span(start)), _deeper(cursor, start, depth)
    if cursor.is_word("+"):
        raise cursor.error("a leading + is not written in TL", "leave the + out")
    return _atom(cursor, nesting)


def _atom(cursor: Cursor, nesting: int) -> _Parsed:
    start = cursor.token
    if start.kind in ("int", "float") or cursor.is_word("inf"):
        return _number(cursor), 1
    if cursor.accept("("):
        inside = _binary(cursor, 0, nesting + 1)
        cursor.expect(")", "the expression in parentheses")
        return inside
    if start.kind != "name" or start.word in BINDING:
        raise cursor.error(f"expected an expression, found {cursor.found()}", expected="an expression")
    cursor.next()
    if cursor.accept("("):
        arguments, depth = _list(cursor, ")", nesting, start)
        function = start.word if start.word in FUNCTIONS else start.text
        return Op(function, arguments, span=cursor.span(start)), depth
    if cursor.accept("["):
        indices, depth = _list(cursor, "]", nesting, start)
        return Index(start.text, indices, span=cursor.span(start)), depth
    return Var(start.text, span=cursor.span(start)), 1


def _list(cursor: Cursor, close: str, nesting: int, start: Token) -> tuple[tuple[Expr, ...], int]:
    items: list[Expr] = []
    deepest = 0
    while not cursor.accept(close):
        if items:
            cursor.expect(",", f"an argument of {start.text}")
        item, depth = _binary(cursor, 0, nesting + 1)
        items.append(item)
        deepest = max(deepest, depth)
    return tuple(items), _deeper(cursor, start, deepest)


def _number(cursor: Cursor) -> Num:
    token = cursor.next()
    span = Span(cursor.line, token.column, token.end)
    if token.word == "inf":
        return Num(math.inf, span=span)
    if token.kind == "float":
        value = float(token.text)
        if math.isinf(value):
            raise cursor.error(
                f"{token.text} is beyond the range of a number", "write inf for infinity", at=token, code="bad-number"
            )
        return Num(value, span=span)
    if len(token.text) > 19 or int(token.text) > MAX_INT:
        raise cursor.error(f"{token.text[:40]} does not fit into 64 bits", "write a float: 1e30", at=token, code="bad-number")
    return Num(int(token.text), span=span)


def _deeper(cursor: Cursor, start: Token, *depths: int) -> int:
    depth = max(depths) + 1
    if depth > MAX_DEPTH:
        raise _too_deep(cursor, start)
    return depth


def _too_deep(cursor: Cursor, start: Token) -> LineError:
    message = f"the expression is nested more than {MAX_DEPTH} deep"
    return cursor.error(message, "name parts of it with Let or Compute", at=start, code="too-deep")
