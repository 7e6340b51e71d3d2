"""Reads hostile JSON field by field: every wrong field becomes one problem that says where, what is allowed and what was found.

Knows nothing of launches.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
MAX_TEXT = 64 * 1024


@dataclass(frozen=True, slots=True)
class Problem:
    """One wrong field: its path in the text, and what is wrong with it."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class _Duplicate(ValueError):
    """A field that stands twice in one object."""


@dataclass(frozen=True, slots=True)
class Field:
    """A value with its path. Reading gives None for what is wrong, and the problem is added to the list all fields share."""

    value: Any
    path: str
    problems: list[Problem]

    def wrong(self, message: str) -> T | None:
        """Adds a problem. Gives None, so that a reader can return it."""
        self.problems.append(Problem(self.path, message))
        return None

    def expected(self, what: str) -> T | None:
        return self.wrong(f"expected {what}, found {shown(self.value)}")

    def at(self, value: Any, step: str) -> Field:
        return Field(value, f"{self.path}{step}", self.problems)

    def whole(self, low: int, high: int, multiple: int = 1) -> int | None:
        """A whole number from low to high, a multiple of `multiple`."""
        if type(self.value) is int and low <= self.value <= high and self.value % multiple == 0:
            return self.value
        steps = f", a multiple of {multiple}" if multiple > 1 else ""
        return self.expected(f"a whole number from {low} to {high}{steps}")

    def truth(self) -> bool | None:
        return self.value if isinstance(self.value, bool) else self.expected("true or false")

    def text(self, pattern: str, what: str) -> str | None:
        if isinstance(self.value, str) and re.fullmatch(pattern, self.value):
            return self.value
        return self.expected(what)

    def one_of(self, allowed: Iterable[str], what: str = "") -> str | None:
        names = tuple(allowed)
        if isinstance(self.value, str) and self.value in names:
            return self.value
        self.wrong(f"expected {what or 'one of'} {', '.join(names)}, found {shown(self.value)}{meant(self.value, names)}")
        return None

    def items(self, low: int, high: int, what: str) -> list[Field] | None:
        """The entries of a list that has low to high of them."""
        if not isinstance(self.value, list) or not low <= len(self.value) <= high:
            count = f"{low}" if low == high else f"{low} to {high}"
            return self.expected(f"a list of {count} {what}")
        return [self.at(value, f"[{i}]") for i, value in enumerate(self.value)]

    def each(self, low: int, high: int, what: str, read: Callable[[Field], T | None]) -> tuple[T, ...] | None:
        """What `read` makes of every entry; None where any of them is wrong."""
        entries = self.items(low, high, what)
        if entries is None:
            return None
        found = [read(entry) for entry in entries]
        return None if any(x is None for x in found) else tuple(found)  # type: ignore[arg-type]

    def names(self, allowed: Iterable[str], what: str) -> tuple[str, ...] | None:
        """A list of names, each allowed and each once."""
        known = tuple(allowed)
        found = self.each(0, len(known), what, lambda f: f.one_of(known))
        if found is not None and len(set(found)) < len(found):
            return self.expected(f"each of the {what} once")
        return found

    def fields(self, allowed: Mapping[str, Any], required: Iterable[str]) -> dict[str, Field] | None:
        """The fields of an object; unknown and missing ones are problems of their own."""
        if not isinstance(self.value, dict):
            return self.expected(f"an object with {', '.join(allowed)}")
        for name in self.value:
            if name not in allowed:
                known = f"expected one of {', '.join(allowed)}{meant(name, tuple(allowed))}"
                self.at(name, f".{shown(name, 40)}").wrong(f"there is no such field; {known}")
        for name in required:
            if name not in self.value:
                self.at(None, f".{name}").wrong(f"it is missing; {allowed[name]}")
        return {name: self.at(value, f".{name}") for name, value in self.value.items() if name in allowed}


def read_json(text: str, path: str) -> Field | Problem:
    """The outermost value of a text, or why it is no JSON. Never raises, whatever the text."""
    if len(text) > MAX_TEXT:
        return Problem(path, f"expected at most {MAX_TEXT:,} characters, found {len(text):,}")
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except _Duplicate as error:
        return Problem(path, str(error))
    except RecursionError:
        return Problem(path, "expected lists and objects a few levels deep, found hundreds")
    except ValueError as error:
        return Problem(path, f"expected one JSON object, found text that is none: {error}")
    return Field(value, path, [])


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _Duplicate(f"{shown(name, 40)} stands twice in one object; give every field once")
        found[name] = value
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def shown(value: Any, limit: int = 80) -> str:
    """A value for a message, cut."""
    try:
        text = value if isinstance(value, str) and value.isidentifier() else json.dumps(value)
    except (ValueError, RecursionError):
        text = f"something of {type(value).__name__}"
    return text if len(text) <= limit else f"{text[:limit]}..."


def meant(found: Any, allowed: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(found, allowed, 1) if isinstance(found, str) and len(found) < 100 else []
    return f"; did you mean {close[0]}?" if close else ""
