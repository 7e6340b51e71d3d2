"""Bytes to lines to tokens. Knows characters and words, no statement and no expression."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal
from unicodedata import combining

from generator.tl.diagnostics import Diagnostic
from generator.tl.ir import Span

#: A longer text is refused unread, and so is a longer line: no kernel comes near, and no input may take more than a moment.
MAX_TEXT = 1_000_000
MAX_LINE = 5_000

TokenKind = Literal["name", "int", "float", "symbol", "end"]


@dataclass(frozen=True, slots=True)
class Token:
    """One word of a line. `column` counts from 1; `end` is one past the last character."""

    kind: TokenKind
    text: str
    column: int
    end: int

    @property
    def word(self) -> str:
        """For keywords, which are read in any case."""
        return self.text.lower() if self.kind == "name" else self.text


class LineError(Exception):
    """This line is not a statement. Caught by the parser, line by line; never leaves `generator.tl`."""

    def __init__(self, diagnostic: Diagnostic) -> None:
        self.diagnostic = diagnostic
        super().__init__(diagnostic.message)


_TOKEN = re.compile(
    r"(?P<float>(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)"
    r"|(?P<int>[0-9]+)"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<symbol>//|<=|>=|==|!=|[-+*/%<>=()\[\]{},:^])"
    r"|(?P<space>[ \t\f\v]+)"
)

#: Characters that people and models write for something TL spells otherwise.
_LOOKALIKES = {
    "×": "*", "·": "*", "∗": "*", "÷": "/", "−": "-", "–": "-", "—": "-", "≤": "<=", "≥": ">=", "≠": "!=", "∞": "inf",
    "∧": "and", "∨": "or", "¬": "not", "（": "(", "）": ")", "，": ",", "：": ":", "＝": "=", "ᵀ": "^T",
    "&": "and", "|": "or", "!": "not", "'": "^T", "@": "Compute GEMM A, B and get C", ";": "each statement on its own line",
    "\u00a0": "a plain space", "\u200b": "nothing here", "“": "no quotes", "”": "no quotes", '"': "no quotes",
    ".": "^T behind a transposed operand, 0.5 for a number",
}  # fmt: skip


def read_text(source: str | bytes) -> tuple[str, list[Diagnostic]]:
    """The text without byte order mark; with errors for what is not text. Size is checked before anything else."""
    if len(source) > MAX_TEXT:
        message = f"the text has {len(source):,} characters; at most {MAX_TEXT:,} are read"
        return "", [Diagnostic("text-too-long", "error", message, Span(1, 1, 2), "is this a TL file?")]
    if isinstance(source, str):
        return source.removeprefix("\ufeff"), []
    try:
        return source.decode("utf-8").removeprefix("\ufeff"), []
    except UnicodeDecodeError as error:
        before = source[: error.start]
        column = error.start - before.rfind(b"\n")
        message = f"byte 0x{source[error.start]:02x} is not UTF-8 text"
        hint = "save the file as UTF-8; a binary file is no TL program"
        span = Span(before.count(b"\n") + 1, column, column + 1)
        return source.decode("utf-8", "replace"), [Diagnostic("not-text", "error", message, span, hint)]


def split_lines(text: str) -> list[str]:
    """Lines as editors count them: LF, CR LF or CR, nothing else."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def split_comment(line: str) -> tuple[str, str]:
    """What stands before `#`, and the comment without it."""
    code, mark, comment = line.partition("#")
    return code, comment.strip() if mark else ""


def tokenize(line: str, number: int) -> list[Token]:
    """The tokens of one line (comment removed), an `end` token last. Raises LineError for a character that TL does not have."""
    if len(line) > MAX_LINE:
        message = f"the line has {len(line):,} characters; at most {MAX_LINE:,} are read"
        raise LineError(
            Diagnostic("line-too-long", "error", message, Span(number, 1, 2), "use Let to name parts of a long expression")
        )
    tokens: list[Token] = []
    at = 0
    while at < len(line):
        match = _TOKEN.match(line, at)
        if match is None:
            raise LineError(_bad_character(line, number, at))
        kind = match.lastgroup
        if kind in ("int", "float") and match.end() < len(line) and (line[match.end()].isalnum() or line[match.end()] in "._"):
            raise LineError(_bad_number(line, number, at))
        if kind != "space":
            tokens.append(Token(kind, match.group(), at + 1, match.end() + 1))  # type: ignore[arg-type]
        at = match.end()
    end = len(line.rstrip()) + 1
    return [*tokens, Token("end", "", end, end + 1)]


def _bad_character(line: str, number: int, at: int) -> Diagnostic:
    character = line[at]
    shown = f"U+{ord(character):04X}" + (f" ({character})" if character.isprintable() and not combining(character) else "")
    shown = repr(character) if " " < character <= "~" else shown
    hint = f"write {_LOOKALIKES[character]}" if character in _LOOKALIKES else "names are ASCII letters, digits and _"
    return Diagnostic("bad-character", "error", f"{shown} is no part of TL", Span(number, at + 1, at + 2), hint)


def _bad_number(line: str, number: int, at: int) -> Diagnostic:
    end = at
    while end < len(line) and end < at + 60 and (line[end].isalnum() or line[end] in "._"):
        end += 1
    hint = "write 1, 1.0 or 1e-3, without a suffix; a name does not start with a digit"
    return Diagnostic("bad-number", "error", f"{line[at:end]!r} is not a number", Span(number, at + 1, end + 1), hint)
