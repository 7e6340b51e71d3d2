"""Reads one YAML document field by field, with the path and line of everything that is wrong. Knows no plan.

A reader never stops at the first fault: each wrong field adds one `Problem` and yields None, so that one run shows them all.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import yaml

from farm.console import printable

T = TypeVar("T")
MAX_BYTES = 1 << 20
MAX_NODES = 50_000  # read in about a second
MAX_DEPTH = 50
MOST_TOLD = 20
LONGEST_NAME = 200


@dataclass(frozen=True, slots=True)
class Problem:
    """One wrong field: where it stands, what was expected and what was found."""

    path: str
    line: int
    message: str

    def render(self, file: str) -> str:
        place = f"{file}:{self.line}" if self.line else file
        return f"{place}: {self.path}: {self.message}" if self.path else f"{place}: {self.message}"


class DocumentError(ValueError):
    """A document that cannot be used: all of its problems, and as text one line for each, as far as a screen goes."""

    def __init__(self, file: str, problems: tuple[Problem, ...]) -> None:
        self.file, self.problems = file, problems
        file = printable(file)
        more = [f"{file}: {len(problems) - MOST_TOLD} more wrong fields"] if len(problems) > MOST_TOLD else []
        super().__init__("\n".join([p.render(file) for p in problems[:MOST_TOLD]] + more))


def show(value: Any) -> str:
    """A found value for a message: short, on one line."""
    text = {True: "true", False: "false", None: "nothing"}.get(value) if isinstance(value, bool | None) else repr(value)
    assert text is not None
    return text if len(text) <= 60 else text[:57] + "..."


def did_you_mean(word: str, allowed: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(word, allowed, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


@dataclass(slots=True)
class Reader:
    """One value of the document, and ways to take typed things out of it."""

    value: Any  # scalars as Python values, mappings as dict[str, Reader], sequences as list[Reader]
    path: str
    line: int
    problems: list[Problem]
    taken: set[str] = field(default_factory=set)

    def wrong(self, message: str) -> None:
        self.problems.append(Problem(self.path, self.line, message))

    def expected(self, what: str) -> None:
        self.wrong(f"expected {what}, found {self._kind()}")

    def fields(self, what: str) -> bool:
        """True when this is a mapping; else notes the problem."""
        if not isinstance(self.value, dict):
            self.expected(f"a mapping ({what})")
        return isinstance(self.value, dict)

    def get(self, name: str) -> Reader | None:
        """The field, or None where it is left out or empty."""
        assert isinstance(self.value, dict)
        self.taken.add(name)
        found = self.value.get(name)
        return None if found is None or found.value is None else found

    def take(self, name: str, read: Callable[[Reader], T | None], default: T | None = None, required: bool = False) -> T | None:
        """The field as `read` gives it; the default where it is left out. A missing required field is a problem."""
        found = self.get(name)
        if found is not None:
            return read(found)
        if required:
            self.wrong(f"{name} is missing")
        return default

    def finish(self) -> None:
        """Notes every field that nobody took."""
        assert isinstance(self.value, dict)
        allowed = tuple(sorted(self.taken))
        for name, reader in self.value.items():
            if name not in self.taken:
                reader.wrong(f"unknown field{did_you_mean(name, allowed) or '; expected one of ' + ', '.join(allowed)}")

    def items(self) -> list[Reader]:
        """The elements of a list; notes the problem and gives none for anything else."""
        if not isinstance(self.value, list):
            self.expected("a list")
            return []
        return self.value

    def all(self, read: Callable[[Reader], T | None]) -> tuple[T, ...]:
        """Every element that could be read."""
        return tuple(v for v in map(read, self.items()) if v is not None)

    def some_of(self, *allowed: str) -> tuple[str, ...]:
        """At least one of these names, each once."""
        if self.value == []:
            self.wrong(f"expected at least one of {', '.join(allowed)}, found none")
        return tuple(dict.fromkeys(self.all(lambda r: r.one_of(*allowed))))

    def whole(self, lo: int = 1, hi: int = 2**31 - 1) -> int | None:
        if isinstance(self.value, int) and not isinstance(self.value, bool) and lo <= self.value <= hi:
            return self.value
        too_large = isinstance(self.value, int) and self.value > hi
        limits = f"from {lo} to {hi}" if too_large or hi < 2**31 - 1 else f"of at least {lo}"
        return self.expected(f"a whole number {limits}")

    def number(self, lo: float = -math.inf, what: str = "a finite number", hi: float = math.inf) -> float | None:
        """A finite number. YAML 1.1 reads 1e-5 as text: such text is taken as the number that its writer meant."""
        value = self.value
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                value = None
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and lo <= value <= hi:
            return float(value)
        return self.expected(what)

    def text(self, what: str = "a text") -> str | None:
        """Of characters that can be seen: what a plan names is printed in tables and stands in the names of files."""
        if not isinstance(self.value, str) or not self.value.strip():
            return self.expected(what)
        return self.value if self.value.isprintable() else self.expected(f"{what} on one line, of characters that can be seen")

    def name(self) -> str | None:
        if isinstance(self.value, str) and len(self.value) > LONGEST_NAME:
            return self.wrong(f"expected a text of at most {LONGEST_NAME} characters, found {len(self.value)}")
        return self.text()

    def one_of(self, *allowed: str) -> str | None:
        if isinstance(self.value, str) and self.value in allowed:
            return self.value
        near = did_you_mean(self.value, allowed) if isinstance(self.value, str) else ""
        return self.wrong(f"expected one of {', '.join(allowed)}, found {self._kind()}{near}")

    def _kind(self) -> str:
        return "a mapping" if isinstance(self.value, dict) else "a list" if isinstance(self.value, list) else show(self.value)


class _TooLarge(Exception):
    """A document that would take long to read."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML's safe scalars, without times: `2026-11-30` and `12:30:00` are texts. Stops at the first value too many."""

    num_nodes = depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        self.num_nodes += 1
        self.depth += 1
        if self.num_nodes > MAX_NODES:
            raise _TooLarge(f"more than {MAX_NODES} values")
        if self.depth > MAX_DEPTH:
            raise _TooLarge(f"nested deeper than {MAX_DEPTH} levels")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key
            yield value
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def _check_aliases(root: yaml.Node) -> None:
    """Raises _TooLarge: aliases of aliases may stand for millions of fields."""
    count, open_nodes = 0, [(root, 0)]
    while open_nodes:
        node, depth = open_nodes.pop()
        count += 1
        if count > MAX_NODES:
            raise _TooLarge(f"more than {MAX_NODES} values")
        if depth > MAX_DEPTH:
            raise _TooLarge(f"nested deeper than {MAX_DEPTH} levels")
        open_nodes.extend((child, depth + 1) for child in _children(node))


def _build(loader: yaml.SafeLoader, node: yaml.Node, path: str, problems: list[Problem]) -> Reader:
    line = node.start_mark.line + 1
    reader = Reader(None, path, line, problems)
    if isinstance(node, yaml.SequenceNode):
        reader.value = [_build(loader, child, f"{path}[{i}]", problems) for i, child in enumerate(node.value)]
    elif isinstance(node, yaml.MappingNode):
        reader.value = {}
        for key, value in node.value:
            name = str(key.value) if isinstance(key, yaml.ScalarNode) else "?"
            below = f"{path}.{name}" if path else name
            if name in reader.value:
                problems.append(Problem(below, key.start_mark.line + 1, "the field is given twice"))
            reader.value[name] = _build(loader, value, below, problems)
    else:
        try:
            reader.value = loader.construct_object(node)
        except (yaml.YAMLError, ValueError):
            problems.append(Problem(path, line, f"expected a plain value, found {show(node.value)}"))
    return reader


def read_document(text: str, file: str) -> Reader:
    """The document's root. Raises DocumentError for text that is not one small YAML document."""

    def refuse(message: str, line: int = 0) -> DocumentError:
        return DocumentError(file, (Problem("", line, message),))

    if len(text) > MAX_BYTES:
        raise refuse(f"expected at most {MAX_BYTES} characters, found {len(text)}")
    try:
        loader = _Loader(text)
    except yaml.YAMLError as error:
        raise refuse(f"not a text file: {str(error).splitlines()[0]}") from None
    try:
        root = loader.get_single_node()
        if root is None:
            raise refuse("the file is empty")
        _check_aliases(root)
        return _build(loader, root, "", [])
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise refuse(f"not YAML: {error.problem or error.context or 'cannot be read'}", line) from None
    except _TooLarge as error:
        raise refuse(str(error)) from None
    except yaml.YAMLError as error:
        raise refuse(f"not YAML: {str(error).splitlines()[0] or type(error).__name__}") from None
    finally:
        loader.dispose()
