"""Where a compiler's complaints come from in TL: emitted code names the statement behind each piece, in a comment above it.

Compiles nothing. What is emitted differs in detail (names replaced, tests turned round): statements are found by what they write.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from generator.tl.expand import expand
from generator.tl.fill import fill
from generator.tl.ir import For, If, Stmt, walk_statements
from generator.tl.parser import parse
from generator.tl.printer import print_statement

#: `kernel.cpp:12:5: error: ...` of g++ and clang, `kernel.cu(12): error: ...` of NVRTC and nvcc.
_PLACE = re.compile(r"kernel\.(?:cpp|cu)[:(](\d+)")
_ERROR = re.compile(r"\b(?:error|fatal)\b", re.IGNORECASE)
_COMMENT = re.compile(r"^\s*// (?:rowmax of: |rowsum of: )?((?:Copy|Compute|Reshape|for|if)\b.*)$")
MAX_ERRORS = 5


def in_tl(log: str, source: str, text: str, holes: Mapping[str, int] | None = None) -> list[str]:
    """One line for each error of the log that can be placed: the line of the author's `text`, and what was said of it.

    source: the emitted code that the log speaks of; holes: what the text's holes were filled with.
    """
    emitted = source.split("\n")
    statements = _statements(text, holes or {})
    found: list[str] = []
    for said in log.splitlines():
        place = _PLACE.search(said)
        if place is None or not _ERROR.search(said) or (statement := _above(emitted, int(place[1]))) is None:
            continue
        if (line := _line_of(statement, statements)) == 0:
            continue
        about = said[place.end() :].lstrip(":0123456789) ")
        found.append(f"line {line}: {text.splitlines()[line - 1].strip()}\n  {about}")
    return list(dict.fromkeys(found))[:MAX_ERRORS]


def _above(emitted: list[str], line: int) -> str | None:
    """The statement named by the nearest comment at or above a line."""
    for text in reversed(emitted[: max(0, min(line, len(emitted)))]):
        if match := _COMMENT.match(text):
            return match[1]
    return None


def _statements(text: str, holes: Mapping[str, int]) -> list[tuple[str, int]]:
    """(statement as emitted code names it, line of the text), of a program that the checker has accepted."""
    program = parse(text).program
    if program is None:
        return []
    known = {name: value for name, value in holes.items() if name in program.constants}
    body = walk_statements(expand(fill(program, known)).body)
    return [(_first_line(s), s.span.line) for s in body]


def _first_line(s: Stmt) -> str:
    line = next(iter(print_statement(s))).strip()
    return line.removesuffix(" then") if isinstance(s, For | If) else line


def _line_of(statement: str, statements: list[tuple[str, int]]) -> int:
    """The line of the statement that writes the same thing and reads most alike; 0 where there is none."""
    head = statement.partition(" = ")[0]
    alike = [
        (difflib.SequenceMatcher(None, s, statement).ratio(), -line) for s, line in statements if s.partition(" = ")[0] == head
    ]
    return -max(alike)[1] if alike else 0
