"""Conditions on rows: text, pairs or Arrow expressions, turned into one Arrow expression that is pushed down. Reads nothing.

status = 'ok' and p50_s < 1e-3 and (target in ('cpu', 'sm_90a') or author like 'rules%') and revoked_at is null
"""

from __future__ import annotations

import datetime as dt
import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from catalog.errors import QueryError
from catalog.schema import COLUMNS

#: Text in the little language above, column -> value (a list means any of them), an Arrow expression, or None for every row.
Filters: TypeAlias = str | Mapping[str, Any] | pc.Expression | None

_TOKEN = re.compile(
    r"\s*(?:(?P<text>'(?:[^']|'')*'|\"[^\"]*\")|(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)|(?P<word>\w+)|(?P<sign><=|>=|<>|!=|==|[=<>(),]))"
)
#: How deep parentheses and `not` may nest.
_MOST_NESTED = 100
_COMPARE: dict[str, Callable[[Any, Any], pc.Expression]] = {
    "=": lambda a, b: a == b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<>": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def to_expression(filters: Filters) -> pc.Expression | None:
    """One Arrow expression; None for every row. Raises QueryError that shows the place."""
    if filters is None or isinstance(filters, pc.Expression):
        return filters
    if isinstance(filters, str):
        return _Parser(filters).parse() if filters.strip() else None
    return _all_of(filters)


def _all_of(wanted: Mapping[str, Any]) -> pc.Expression | None:
    """Every column has its value, or one of its values."""
    expression = None
    for name, value in wanted.items():
        column = _column(name)
        if isinstance(value, list | tuple | set | frozenset):
            one = column.isin(pa.array([_value(name, v) for v in value], COLUMNS[name].type))
        else:
            one = column.is_null() if value is None else column == _value(name, value)
        expression = one if expression is None else expression & one
    return expression


def _column(name: str) -> pc.Expression:
    if name not in COLUMNS:
        close = difflib.get_close_matches(name, COLUMNS, n=1)
        raise QueryError(f"{name}: no such column" + (f"; did you mean {close[0]}?" if close else "; docs/catalog.md lists them"))
    return pc.field(name)


def _value(name: str, value: Any) -> pa.Scalar:
    """A value as the column's own type. Raises QueryError."""
    kind = COLUMNS[name].type
    if pa.types.is_timestamp(kind) and isinstance(value, str):
        value = _time(name, value)
    fits = {
        pa.string(): str,
        pa.bool_(): bool,
        pa.int64(): int,
        pa.float64(): int | float,
        COLUMNS["created_at"].type: dt.datetime,
    }
    if kind not in fits:
        raise QueryError(f"{name}: a column of lists cannot be compared")
    if not isinstance(value, fits[kind]) or (isinstance(value, bool) and kind != pa.bool_()):
        raise QueryError(f"{name}: expected a value of type {kind}, found {value!r}")
    return pa.scalar(value, kind)


def _time(name: str, text: str) -> dt.datetime:
    try:
        when = dt.datetime.fromisoformat(text)
    except ValueError:
        raise QueryError(f"{name}: expected a time such as 2025-05-01T12:00Z, found {text!r}") from None
    if len(text) == len("2025-05-01"):
        return when.replace(tzinfo=dt.UTC)
    if when.tzinfo is None:
        raise QueryError(f"{name}: expected a time with a zone such as 2025-05-01T12:00Z, found {text!r}")
    return when


class _Parser:
    """Recursive descent over: or, and, not, comparison."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._split()
        self._at = self._nested = 0

    def parse(self) -> pc.Expression:
        expression = self._either()
        if self._at < len(self._tokens):
            raise self._wrong("the end, or 'and' or 'or'")
        return expression

    def _split(self) -> list[tuple[str, str, int]]:
        tokens, at, end = [], 0, len(self._text.rstrip())
        while at < end:
            match = _TOKEN.match(self._text, at)
            if match is None:
                raise QueryError(f"filter: cannot read {self._text[at:].strip()[:20]!r} at character {at + 1} of {self._text!r}")
            kind = match.lastgroup or ""
            tokens.append((kind, match[kind], match.start(kind)))
            at = match.end()
        return tokens

    def _wrong(self, expected: str) -> QueryError:
        found, at = (
            (repr(self._tokens[self._at][1]), self._tokens[self._at][2])
            if self._at < len(self._tokens)
            else ("the end", len(self._text))
        )
        return QueryError(f"filter: expected {expected}, found {found} at character {at + 1} of {self._text!r}")

    def _peek(self) -> str:
        return self._tokens[self._at][1].lower() if self._at < len(self._tokens) else ""

    def _take(self, *allowed: str) -> str | None:
        """The next token when it is one of these words or signs."""
        if self._at < len(self._tokens) and self._tokens[self._at][0] != "text" and self._peek() in allowed:
            self._at += 1
            return self._tokens[self._at - 1][1].lower()
        return None

    def _need(self, *allowed: str) -> str:
        taken = self._take(*allowed)
        if taken is None:
            raise self._wrong(" or ".join(repr(a) for a in allowed))
        return taken

    def _either(self) -> pc.Expression:
        expression = self._both()
        while self._take("or"):
            expression = expression | self._both()
        return expression

    def _both(self) -> pc.Expression:
        expression = self._one()
        while self._take("and"):
            expression = expression & self._one()
        return expression

    def _one(self) -> pc.Expression:
        if self._take("not"):
            return ~self._inside(self._one)
        if self._take("("):
            expression = self._inside(self._either)
            self._need(")")
            return expression
        return self._comparison()

    def _inside(self, part: Callable[[], pc.Expression]) -> pc.Expression:
        if self._nested == _MOST_NESTED:
            raise QueryError(f"filter: expected parentheses and 'not' at most {_MOST_NESTED} deep, found more")
        self._nested += 1
        expression = part()
        self._nested -= 1
        return expression

    def _comparison(self) -> pc.Expression:
        if self._at >= len(self._tokens) or self._tokens[self._at][0] != "word":
            raise self._wrong("a column's name")
        name = self._tokens[self._at][1]
        column = _column(name)
        self._at += 1
        if self._take("is"):
            negated = self._take("not")
            self._need("null")
            return column.is_valid() if negated else column.is_null()
        negated = self._take("not")
        if self._take("in"):
            expression = column.isin(pa.array(self._values(name), COLUMNS[name].type))
        elif self._take("like"):
            expression = pc.match_like(column, self._literal(name).as_py())
        elif negated:
            raise self._wrong("'in' or 'like'")
        else:
            return _COMPARE[self._need(*_COMPARE)](column, self._literal(name))
        return ~expression if negated else expression

    def _values(self, name: str) -> list[pa.Scalar]:
        self._need("(")
        values = [self._literal(name)]
        while self._take(","):
            values.append(self._literal(name))
        self._need(")")
        return values

    def _literal(self, name: str) -> pa.Scalar:
        if self._at >= len(self._tokens):
            raise self._wrong("a value")
        kind, text, _ = self._tokens[self._at]
        value: Any
        if kind == "text":
            value = text[1:-1].replace("''", "'") if text[0] == "'" else text[1:-1]
        elif kind == "number":
            value = float(text) if set(text) & set(".eE") else int(text)
        elif text.lower() in ("true", "false"):
            value = text.lower() == "true"
        else:
            raise self._wrong("a number, true, false or a text in quotes")
        self._at += 1
        return _value(name, value)
