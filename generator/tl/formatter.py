"""A text in canonical spelling and indentation, comments and blank lines kept. Not what is hashed: that is the printer's form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from generator.tl.ir import For, If, Program, Prose, Stmt, walk_statements
from generator.tl.lexer import read_text, split_comment, split_lines
from generator.tl.parser import opens_block, parse_or_raise
from generator.tl.printer import INDENT, print_body, print_statement


def format_text(text: str | bytes, filename: str = "") -> str:
    """The same program, formatted: `parse` gives the same for both. Raises TLError for a text that does not parse."""
    program = parse_or_raise(text, filename=filename)
    lines = split_lines(read_text(text)[0])
    return "\n".join(_without_gaps(_format(program, lines))) + "\n"


def _format(program: Program, lines: list[str]) -> Iterator[str]:
    """The formatted lines; a line of several statements becomes several, its comment on the last,
    in the column where it stood if there is room."""
    by_line: dict[int, list[Stmt]] = {}
    for s in walk_statements(program.body):
        by_line.setdefault(s.span.line, []).append(s)
    depth = 0
    for number, raw in enumerate(lines, 1):
        code, comment = split_comment(raw)
        statements = by_line.get(number, [])
        word = code.split()[0].lower() if code.split() else ""
        if word in ("end", "else"):
            depth -= 1
        heads = [*_heads(statements, code, word, program)]
        if not heads:
            yield INDENT * depth + f"# {comment}" if "#" in raw else ""
        for head in heads[:-1]:
            yield INDENT * depth + head
        for head in heads[-1:]:
            line = INDENT * depth + head
            yield line.ljust(max(len(line) + 2, len(code))) + f"# {comment}" if comment else line
        if word == "else" or any(isinstance(s, For | If) or (isinstance(s, Prose) and opens_block(s.text)) for s in statements):
            depth += 1


def _heads(statements: list[Stmt], code: str, word: str, program: Program) -> Iterator[str]:
    """The first line of each statement of a source line: all of it, but for blocks."""
    if word == "kernel":
        yield f"Kernel {program.name}"
    elif word in ("end", "else"):
        yield word
    elif statements and isinstance(statements[0], For | If):
        yield next(print_statement(statements[0]))
    elif statements:
        yield from (line.strip() for line in print_body(statements))
    elif code.strip():
        raise AssertionError(f"no statement of the program stands on this line: {code!r}")


def _without_gaps(lines: Iterable[str]) -> Iterator[str]:
    """At most one blank line in a row, none at the start or the end; no space behind anything."""
    pending = False
    started = False
    for line in lines:
        line = line.rstrip()
        if not line:
            pending = started
            continue
        if pending:
            yield ""
        pending, started = False, True
        yield line
