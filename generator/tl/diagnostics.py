"""What the language says about a text: diagnostics as data, and their rendering for people. Finds nothing by itself.

A person reads the rendering, a model reads the same fields, `--json` prints `to_plain`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from generator.tl.ir import NOWHERE, Span

Severity = Literal["error", "warning"]

#: Every code -> what it says. A warning never makes a program invalid.
CODES: dict[str, str] = {
    "text-too-long": "the text is longer than any program",
    "not-text": "the bytes are not UTF-8",
    "line-too-long": "a line is longer than any statement",
    "too-many": "more errors, or more statements, than are read",
    "empty": "the text holds no statement",
    "bad-character": "a character that TL does not have",
    "bad-number": "a number that is none, or out of range",
    "unknown-statement": "the first word of a line is no keyword",
    "syntax": "a line does not have the form of its statement",
    "block": "for, if, else and end do not match",
    "too-deep": "an expression or blocks nested too deep",
    "too-large": "an expression that grows without bound when names are substituted",
    "prose": "a line that is no statement (a warning in a sketch)",
    "stage": "a declaration in a sketch",
    "sketch": "a sketch where code is due",
    "hole": "a constant left to choose, or a value that is no choice",
    "misplaced": "a declaration inside a block",
    "reserved-name": "a name that is a word of the language",
    "duplicate-name": "a name defined twice in one block",
    "shadowing": "a name of an outer block defined again",
    "unknown-name": "a name that nothing defines",
    "use-before-definition": "a name used above its definition, or outside its block",
    "unallocated": "a result without an Allocate",
    "unknown-function": "a function that TL does not have",
    "unknown-hint": "a hint that no translator reads (warning)",
    "arity": "a wrong number of arguments",
    "kind": "an integer, a float or a test where another is due",
    "rank": "a value a row, a column or an element where another is due",
    "division-by-zero": "a constant divisor that is zero",
    "level": "a statement on the wrong level of memory",
    "dtype": "a dtype that does not fit",
    "missing-dtype": "a dtype that is not stated (warning where f32 is taken)",
    "missing-shape": "a copy in code without its tile",
    "shape": "shapes that disagree, or that are not constant",
    "gemm": "an operand that cannot stand in a GEMM",
    "gemm-shape": "contracted dimensions, or the result's shape, disagree",
    "transposed": "a GEMM whose sizes agree by accident and whose axes do not",
    "inferred": "a transposition that was not stated and is taken from the shapes (warning)",
    "missing-reshape": "a GEMM fed by registers without a Reshape",
    "reshape": "a Reshape that is wrong, or an operand read by anything but a GEMM",
    "macro": "an operator without a meaning, or a macro without its state",
    "promise": "a macro that needs a positive scale, and an argument that promises none (warning)",
    "no-value": "a tile read before it has a value",
    "coordinate": "a tile coordinate outside its matrix",
    "ragged": "a loop past the end of a matrix that no test hides (warning)",
    "writes-input": "a matrix both read and written",
    "output-not-written": "a matrix neither written nor read",
    "no-output": "a program that writes nothing",
    "race": "blocks that write the same place (warning)",
    "sentinel": "a large finite number in place of minus infinity (warning)",
    "let-of-tile": "a Let that reads a tile anew at every use (warning)",
    "unused": "a name or a result that nothing reads (warning)",
    "shared-memory": "tiles in shared memory over the target's limit",
    "registers": "register tiles over the target's limit",
}

#: So many diagnostics are rendered in full; the rest is counted.
RENDERED = 20
#: A source line wider than this is clipped around the caret.
WIDTH = 120


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding. `code` is one of CODES, `hint` says what to try.

    `expected` and `found` are filled where both have a short form (a shape, a dtype, a word).
    """

    code: str
    severity: Severity
    message: str
    span: Span = NOWHERE
    hint: str = ""
    expected: str = ""
    found: str = ""

    def __post_init__(self) -> None:
        assert self.code in CODES, self.code

    def __str__(self) -> str:
        where = f"line {self.span.line}: " if self.span.line else ""
        return f"{where}{self.severity}[{self.code}]: {self.message}" + (f" ({self.hint})" if self.hint else "")


class TLError(ValueError):
    """A text or a program that is not valid TL, with every diagnostic found."""

    def __init__(self, diagnostics: Iterable[Diagnostic], text: str = "", filename: str = "") -> None:
        self.diagnostics = tuple(diagnostics)
        self.text = text
        self.filename = filename
        super().__init__(render(self.diagnostics, text, filename))


def has_errors(diagnostics: Iterable[Diagnostic]) -> bool:
    return any(d.severity == "error" for d in diagnostics)


def in_order(diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """By place in the text, errors before warnings of the same place; repeated findings once."""
    unique = dict.fromkeys(diagnostics)
    return tuple(sorted(unique, key=lambda d: (d.span.line, d.span.column, d.severity, d.code)))


def to_plain(diagnostics: Iterable[Diagnostic]) -> list[dict[str, Any]]:
    """Plain JSON values; fields that say nothing are left out."""

    def one(d: Diagnostic) -> dict[str, Any]:
        place = {"line": d.span.line, "column": d.span.column, "end_column": d.span.end_column} if d.span.line else {}
        words = {"hint": d.hint, "expected": d.expected, "found": d.found}
        return {"code": d.code, "severity": d.severity, "message": d.message} | place | {k: v for k, v in words.items() if v}

    return [one(d) for d in diagnostics]


def render(diagnostics: Sequence[Diagnostic], text: str = "", filename: str = "", limit: int = RENDERED) -> str:
    """The findings with their source line and a caret, the first `limit` in full, then a count by kind.

    Errors come first when there is not room for all.
    """
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n") if text else []
    shown = list(diagnostics)
    if len(shown) > limit:
        shown = sorted(shown, key=lambda d: d.severity)[:limit]
    blocks = [_render_one(d, lines, filename) for d in shown]
    if len(diagnostics) > limit:
        blocks.append(f"... and {len(diagnostics) - limit} more")
    return "\n".join(blocks + [_summary(diagnostics)] if diagnostics else [])


def _summary(diagnostics: Sequence[Diagnostic]) -> str:
    def count(severity: Severity) -> str:
        number = sum(d.severity == severity for d in diagnostics)
        return f"{number} {severity}{'' if number == 1 else 's'}" if number else ""

    return ", ".join(filter(None, (count("error"), count("warning"))))


def _render_one(d: Diagnostic, lines: Sequence[str], filename: str) -> str:
    place = ":".join(filter(None, (filename, f"{d.span.line}:{d.span.column}" if d.span.line else "")))
    out = [f"{place}: {d.severity}[{d.code}]: {d.message}" if place else f"{d.severity}[{d.code}]: {d.message}"]
    if 0 < d.span.line <= len(lines):
        out += _excerpt(lines[d.span.line - 1], d.span)
    if d.expected and d.found and not (d.expected in d.message and d.found in d.message):
        out.append(f"    expected {d.expected}, found {d.found}")
    if d.hint:
        out.append(f"    hint: {d.hint}")
    return "\n".join(out)


def _excerpt(line: str, span: Span) -> list[str]:
    """The source line and its caret line, control characters made visible, clipped to WIDTH around the caret."""
    first = min(max(span.column - 1, 0), len(line))
    length = max(1, min(span.end_column - span.column, len(line) - first))
    start = max(0, first - WIDTH // 3) if len(line) > WIDTH else 0
    clipped = line[start : start + WIDTH]
    before, after = ("..." if start else ""), ("..." if start + WIDTH < len(line) else "")
    shown = before + "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in clipped) + after
    carets = "^" * max(1, min(length, WIDTH - (first - start)))
    gutter = f"{span.line:>5} | "
    return [gutter + shown, " " * (len(gutter) - 2) + "| " + " " * (len(before) + first - start) + carets]
