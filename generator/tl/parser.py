"""Text to `Program`: blocks, stage, recovery line by line. `statements.py` reads a line; meaning is the checker's.

A text that declares something (Argument, Grid, Allocate) or gives a Copy its shape is code; anything else is a sketch, in which a
line that is no statement is kept as Prose.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from generator.tl.diagnostics import Diagnostic, TLError, has_errors, in_order
from generator.tl.grammar import FORMS, UNSTATED, ElseLine, EndLine, KernelLine, Line
from generator.tl.inference import infer
from generator.tl.ir import (
    Allocate,
    Argument,
    Copy,
    For,
    Grid,
    If,
    Program,
    Prose,
    Reshape,
    Span,
    Stage,
    Stmt,
    walk_statements,
)
from generator.tl.lexer import LineError, read_text, split_comment, split_lines, tokenize
from generator.tl.rewrite import map_statements
from generator.tl.statements import parse_line

#: After so many errors the rest of the text is not read.
MAX_ERRORS = 1_000
#: Blocks inside blocks, and statements: a kernel has a tenth of it.
MAX_BLOCKS = 6
MAX_STATEMENTS = 2_000
#: The name of code without a Kernel line.
DEFAULT_NAME = "kernel"


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a text says. `program` is None when there is any error; warnings leave it.

    recovered: what could be read of a text with errors, for a checker that wants to report everything at once; `broken` holds the
    words of the lines that could not be read.
    """

    program: Program | None
    diagnostics: tuple[Diagnostic, ...]
    recovered: Program | None = None
    broken: frozenset[str] = frozenset()


def parse(text: str | bytes, stage: Stage | None = None) -> Parsed:
    """Read a sketch or code; `stage` None decides by what the text holds. Never raises: every error is a diagnostic."""
    clean, errors = read_text(text)
    if errors:
        return Parsed(None, tuple(errors))
    reader = _Reader(clean)
    reader.read()
    found = stage or reader.stage()
    diagnostics = list(reader.diagnostics)
    if found == "sketch":
        diagnostics += [_as_prose(d) for d in reader.unread] if stage or reader.statements else reader.unread
    else:
        diagnostics += reader.unread
    body, notes = _finish(tuple(reader.body), found)
    diagnostics += notes
    if not reader.body and not has_errors(diagnostics):
        diagnostics.append(
            Diagnostic("empty", "error", "there is no statement", Span(1, 1, 2), f"a program starts with {FORMS['Kernel']}")
        )
    program = Program(reader.name or (DEFAULT_NAME if found == "code" else ""), found, body)
    ordered = in_order(diagnostics)
    return Parsed(None if has_errors(ordered) else program, ordered, program, frozenset(reader.broken))


def parse_or_raise(text: str | bytes, stage: Stage | None = None, filename: str = "") -> Program:
    """The program, or TLError with every diagnostic."""
    parsed = parse(text, stage)
    if parsed.program is None:
        raise TLError(parsed.diagnostics, text if isinstance(text, str) else text.decode("utf-8", "replace"), filename)
    return parsed.program


def _finish(body: tuple[Stmt, ...], stage: Stage) -> tuple[tuple[Stmt, ...], list[Diagnostic]]:
    """Prose belongs to sketches only; what code leaves unsaid is inferred from its declarations."""
    if stage == "sketch":
        return map_statements(body, lambda s: (_reshape_as_prose(s),)), []
    return infer(map_statements(body, lambda s: () if isinstance(s, Prose) else (s,)))


def _reshape_as_prose(s: Stmt) -> Stmt:
    """A Reshape without a dtype says too little to be one, and a sketch has no declarations to infer it from."""
    if isinstance(s, Reshape) and s.dtype is UNSTATED:
        layouts = f"({', '.join(s.source_layout)}) to ({', '.join(s.into_layout)})"
        return Prose(f"Reshape {s.source} from {layouts}" + (f" and get {s.into}" if s.into != s.source else ""), span=s.span)
    return s


def _as_prose(d: Diagnostic) -> Diagnostic:
    return Diagnostic("prose", "warning", f"kept as prose: {d.message}", d.span, d.hint, d.expected, d.found)


@dataclass(slots=True)
class _Block:
    """An open for or if (`statement`), or a line of prose that opened a block (None). A block nested too deep is dropped."""

    statement: For | If | None
    line: int
    outer: list[Stmt]
    dropped: bool = False
    then: list[Stmt] = field(default_factory=list)
    otherwise: list[Stmt] | None = None


class _Reader:
    """Lines to nested statements. Errors of single lines are in `unread`: a sketch keeps those lines as prose."""

    def __init__(self, text: str) -> None:
        self.lines = split_lines(text)
        self.name = ""
        self.body: list[Stmt] = []
        self.diagnostics: list[Diagnostic] = []
        self.unread: list[Diagnostic] = []
        self.broken: set[str] = set()
        self.statements = 0
        self._current = self.body
        self._blocks: list[_Block] = []

    def stage(self) -> Stage:
        declared = any(
            isinstance(s, Argument | Grid | Allocate) or (isinstance(s, Copy) and s.shape)
            for s in walk_statements(tuple(self.body))
        )
        return "code" if declared else "sketch"

    def read(self) -> None:
        for number, raw in enumerate(self.lines, 1):
            if len(self.unread) + len(self.diagnostics) >= MAX_ERRORS:
                self._error("too-many", f"more than {MAX_ERRORS:,} errors: the rest was not read", Span(number, 1, 2))
                break
            if self.statements > MAX_STATEMENTS:
                self._error("too-many", f"more than {MAX_STATEMENTS:,} statements: the rest was not read", Span(number, 1, 2))
                break
            self._read_line(raw, number)
        while self._blocks:
            self._close_at_the_end()

    def _read_line(self, raw: str, number: int) -> None:
        text, _ = split_comment(raw)
        if not text.strip():
            return
        try:
            line, notes = parse_line(tokenize(text, number), number)
        except LineError as error:
            self._keep_as_prose(text, error.diagnostic)
            return
        self.diagnostics += notes
        self._place(line, number)

    def _place(self, line: Line, number: int) -> None:
        match line:
            case KernelLine():
                self._kernel(line)
            case ElseLine():
                self._else(line)
            case EndLine():
                self._end(line)
            case (For() | If() as opener,):
                self.statements += 1
                self._open(_Block(opener, number, self._current), opener.span)
            case _:
                self.statements += 1
                self._current.extend(line)

    def _kernel(self, line: KernelLine) -> None:
        if self.name:
            self._error(
                "duplicate-name",
                f"the kernel is named twice: {self.name} and {line.name}",
                line.span,
                "one text holds one kernel",
            )
        self.name = self.name or line.name

    def _open(self, block: _Block, span: Span) -> None:
        if len(self._blocks) >= MAX_BLOCKS:
            self._error("too-deep", f"blocks are nested more than {MAX_BLOCKS} deep", span, "join loops or tests into one")
            block.dropped = True  # its end is still matched
        self._blocks.append(block)
        self._current = block.outer if block.statement is None else block.then

    def _else(self, line: ElseLine) -> None:
        block = self._blocks[-1] if self._blocks else None
        if block is not None and block.statement is None:
            self._current.append(Prose("else", span=line.span))
        elif block is None or not isinstance(block.statement, If) or block.otherwise is not None:
            self._error(
                "block", "else without an if that is open here", line.span, "an if has one else; end closes the innermost block"
            )
        else:
            block.otherwise = []
            self._current = block.otherwise

    def _end(self, line: EndLine) -> None:
        if not self._blocks:
            self._error("block", "end without a for or an if that is open here", line.span, "remove it, or open its block above")
            return
        block = self._blocks.pop()
        self._current = block.outer
        if block.statement is None:
            self._current.append(Prose("end", span=line.span))
        elif not block.dropped:
            self._current.append(_closed(block))

    def _close_at_the_end(self) -> None:
        block = self._blocks.pop()
        self._current = block.outer
        if block.statement is not None:
            word = "for" if isinstance(block.statement, For) else "if"
            hint = f"close it by a line that says end ({word} of line {block.line})"
            self._error("block", f"this {word} has no end", block.statement.span, hint)
            if not block.dropped:
                self._current.append(_closed(block))

    def _keep_as_prose(self, text: str, diagnostic: Diagnostic) -> None:
        self.unread.append(diagnostic)
        self.broken.update(w for w in text[:2000].replace(",", " ").replace("(", " ").split() if w.isidentifier())
        words = " ".join(text.split())
        prose = Prose(words, span=Span(diagnostic.span.line, 1, len(text) + 1))
        self._current.append(prose)
        if opens_block(words):
            self._open(_Block(None, diagnostic.span.line, self._current), prose.span)

    def _error(self, code: str, message: str, span: Span, hint: str = "") -> None:
        self.diagnostics.append(Diagnostic(code, "error", message, span, hint))


def opens_block(prose: str) -> bool:
    """Whether a line of prose is the head of a block, so that an `end` belongs to it."""
    return prose.split(" ", 1)[0].lower() in ("for", "if")


def _closed(block: _Block) -> For | If:
    if isinstance(block.statement, For):
        return replace(block.statement, body=tuple(block.then))
    assert block.statement is not None
    return replace(block.statement, then=tuple(block.then), otherwise=tuple(block.otherwise or ()))
