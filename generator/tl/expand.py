"""`Program` to core code: macros written out, names substituted, constants folded. What it is given has been checked.

Core code has no Named, Let, Constant and no Reshape in place; every expression speaks of arguments, grid axes, loop variables,
`rows`, `cols`, tiles and captured matrices only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import assert_never

from generator.tl.diagnostics import Diagnostic, TLError
from generator.tl.fold import substitute, truth
from generator.tl.ir import (
    Allocate,
    Argument,
    Axis,
    Compute,
    Constant,
    Copy,
    Expr,
    For,
    Gemm,
    Grid,
    Hint,
    If,
    Let,
    Named,
    Num,
    Option,
    Program,
    Prose,
    Reshape,
    Span,
    Stmt,
    Var,
    children,
)
from generator.tl.rewrite import map_children
from generator.tl.softmax import expand_macros, fresh, macros_written_out, names_of

__all__ = ["expand", "expand_macros", "lower", "sizes", "too_large"]

#: A substituted expression with more nodes or deeper than this is refused: chained Lets grow without bound.
MAX_NODES = 4_000
MAX_DEPTH = 200


def expand(program: Program) -> Program:
    """Core code of filled code. Raises TLError for a sketch, for unfilled holes, and for expressions that grow too large."""
    if program.stage != "code":
        raise TLError(
            [Diagnostic("sketch", "error", "a sketch has no core code", hint="reason its sizes out first, then expand the code")]
        )
    if program.holes:
        message = f"{', '.join(program.holes)} left to choose"
        raise TLError([Diagnostic("hole", "error", message, h.span, "fill the holes first") for h in program.holes.values()])
    program = expand_macros(program)
    core = lower(program)
    return replace(core, body=_Operands(set(names_of(core))).body(core.body))


def lower(program: Program) -> Program:
    """Core code but for Reshapes in place, which the checker wants to see; macros that are wrong stay as they are.

    Raises TLError for expressions that grow too large.
    """
    return replace(program, body=tuple(_Substitution().body(macros_written_out(program).body, {})))


def sizes(e: Expr, known: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """(nodes, depth) of an expression after substitution of the names in `known`."""
    if isinstance(e, Var):
        return known.get(e.name, (1, 1))
    below = [sizes(c, known) for c in children(e)]
    return 1 + sum(nodes for nodes, _ in below), 1 + max((depth for _, depth in below), default=0)


class _Substitution:
    """Lets and Constants replaced by what they name; a Let holds until the end of its block."""

    def __init__(self) -> None:
        self.sizes: dict[str, tuple[int, int]] = {}

    def body(self, body: tuple[Stmt, ...], values: Mapping[str, Expr]) -> Iterator[Stmt]:
        scope = dict(values)
        for s in body:
            match s:
                case Let():
                    self._bounded(s)
                    scope[s.name] = substitute(s.value, scope)
                case Constant():
                    scope[s.name] = Num(s.choices[0], span=s.span)
                case If():
                    yield from self._if(s, scope)
                case For():
                    lo, hi = substitute(s.lo, scope), substitute(s.hi, scope)
                    yield replace(s, lo=lo, hi=hi, body=tuple(self.body(s.body, scope)))
                case _:
                    yield self._statement(s, scope)

    def _bounded(self, s: Let) -> None:
        nodes, depth = self.sizes[s.name] = sizes(s.value, self.sizes)
        if nodes > MAX_NODES or depth > MAX_DEPTH:
            raise TLError([too_large(s.name, s.span)])

    def _if(self, s: If, scope: Mapping[str, Expr]) -> Iterator[Stmt]:
        test = substitute(s.test, scope)
        known = truth(test)
        if known is not None:
            yield from self.body(s.then if known else s.otherwise, scope)
        else:
            yield replace(s, test=test, then=tuple(self.body(s.then, scope)), otherwise=tuple(self.body(s.otherwise, scope)))

    def _statement(self, s: Stmt, scope: Mapping[str, Expr]) -> Stmt:
        def all_of(items: tuple[Expr, ...]) -> tuple[Expr, ...]:
            return tuple(substitute(i, scope) for i in items)

        match s:
            case Grid():
                return replace(s, axes=tuple(Axis(a.name, substitute(a.extent, scope), span=a.span) for a in s.axes))
            case Allocate():
                init = None if s.init is None else substitute(s.init, scope)
                return replace(s, shape=all_of(s.shape), offset=all_of(s.offset), init=init)
            case Copy():
                return replace(s, shape=all_of(s.shape), coordinate=all_of(s.coordinate))
            case Compute():
                return replace(s, value=substitute(s.value, scope))
            case Argument() | Hint() | Option() | Gemm() | Reshape() | Named() | Prose():
                return s
            case Let() | Constant() | If() | For():
                raise AssertionError(f"{type(s).__name__} is handled where bodies are")
            case _:
                assert_never(s)


def too_large(name: str, span: Span, most: int = MAX_NODES) -> Diagnostic:
    message = f"{name} grows beyond {most:,} terms once its names are substituted"
    return Diagnostic("too-large", "error", message, span, "keep intermediate values in tiles (Compute) rather than in Lets")


class _Operands:
    """`Reshape S ... and get S` gives the operand a name of its own; what reads S until its next definition reads that."""

    def __init__(self, taken: set[str]) -> None:
        self.taken = taken
        self.operand_of: dict[str, str] = {}

    def body(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        return tuple(self.statement(s) for s in body)

    def statement(self, s: Stmt) -> Stmt:
        name = self.operand_of.get
        match s:
            case Reshape() if s.into == s.source:
                operand = fresh(f"{s.source}_operand", self.taken)
                self.operand_of[s.source] = operand
                return replace(s, into=operand)
            case Gemm():
                renamed = replace(s, a=name(s.a, s.a), b=name(s.b, s.b))
                if not s.accumulate:
                    self.operand_of.pop(s.into, None)
                return renamed
            case Compute():
                renamed_value = _rename(s.value, self.operand_of)
                self.operand_of.pop(s.into, None)
                return replace(s, value=renamed_value)
            case Copy():
                source = s.source if s.source_level == "global" else name(s.source, s.source)
                if s.into_level != "global":
                    self.operand_of.pop(s.into, None)
                return replace(s, source=source)
            case Reshape():
                self.operand_of.pop(s.into, None)
                return replace(s, source=name(s.source, s.source))
            case For():
                return replace(s, body=self.body(s.body))
            case If():
                before = dict(self.operand_of)
                then = self.body(s.then)
                after, self.operand_of = self.operand_of, before
                otherwise = self.body(s.otherwise)
                self.operand_of |= after
                return replace(s, then=then, otherwise=otherwise)
            case Argument() | Grid() | Allocate() | Hint() | Option() | Named() | Prose():
                return s
            case Let() | Constant():
                raise AssertionError(f"{type(s).__name__} in core code")
            case _:
                assert_never(s)


def _rename(e: Expr, names: Mapping[str, str]) -> Expr:
    if isinstance(e, Var):
        return Var(names.get(e.name, e.name), span=e.span)
    return map_children(e, lambda child: _rename(child, names))
