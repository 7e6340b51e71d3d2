"""Tiles as core code passes them from statement to statement: has it a value yet, which shape, accumulator or operand?

Names that nothing defines are left alone: `statements.py` has reported them. Loops are read twice, so that what the second
iteration finds is checked as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field, replace
from typing import Literal, assert_never

from generator.tl.checks.bounds import Bounds, runs
from generator.tl.checks.report import Report, shape_text
from generator.tl.fold import integers
from generator.tl.ir import (
    COLS,
    Allocate,
    Argument,
    Compute,
    Constant,
    Copy,
    DType,
    Expr,
    For,
    Gemm,
    Grid,
    Hint,
    If,
    Index,
    Let,
    Level,
    Named,
    Op,
    Option,
    Program,
    Prose,
    Reshape,
    Span,
    Stmt,
    Var,
    children,
    names,
    walk,
)
from generator.tl.types import REDUCTIONS

Form = Literal["plain", "operand", "either"]


@dataclass(frozen=True, slots=True)
class State:
    """What a tile is at one point. `form` is "either" where paths disagree; `maybe` is the loop or if that may not run."""

    level: Level
    shape: tuple[int, ...]
    dtype: DType
    has_value: bool
    form: Form = "plain"
    operand_dtype: DType = "f32"
    maybe: str = ""


@dataclass(slots=True)
class Flow:
    """The walk over one core program; `states` is where it stands."""

    report: Report
    bounds: Bounds
    matrices: dict[str, Allocate]
    silent: Set[str] = frozenset()
    told: dict[str, Span] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)

    def body(self, body: Iterable[Stmt]) -> None:
        for s in body:
            match s:
                case Allocate():
                    self._allocate(s)
                case Copy():
                    self._copy(s)
                case Gemm():
                    self._gemm(s)
                case Compute():
                    self._compute(s)
                case Reshape():
                    self._reshape(s)
                case For():
                    self._for(s)
                case If():
                    self._if(s)
                case Argument() | Constant() | Grid() | Let() | Hint() | Option() | Named() | Prose():
                    pass
                case _:
                    assert_never(s)

    def _allocate(self, s: Allocate) -> None:
        if s.level == "global":
            return
        shape = integers(s.shape)
        if shape is None:
            if self._is_silent(s.shape):
                return
            hint = "use integers and constants: its size has to be known before the kernel runs"
            self.report.error("shape", f"{s.name} needs a constant shape, found {shape_text(s.shape)}", s.span, hint)
            return
        if s.name in self.states or len(shape) not in (1, 2):
            return  # reported; of two with one name the first counts
        if any(n < 1 for n in shape):
            self.report.error("shape", f"{s.name} has no elements: {shape_text(shape)}", s.span, "extents are at least 1")
        self.states[s.name] = State(s.level, tuple(shape), s.dtype, s.init is not None)

    def _is_silent(self, shape: tuple[Expr, ...]) -> bool:
        return any(not self.silent.isdisjoint(names(e)) for e in shape)

    def _copy(self, s: Copy) -> None:
        shape = integers(s.shape)
        if shape is None:
            if self._is_silent(s.shape):
                return
            hint = "use integers and constants; the matrix may be ragged, its tiles are not"
            self.report.error("shape", f"a tile needs a constant shape, found {shape_text(s.shape)}", s.span, hint)
            return
        tile = tuple(shape)
        for name, level in ((s.source, s.source_level), (s.into, s.into_level)):
            if level == "global" and name in self.matrices and tile:
                self._axes(s, tile, self.matrices[name])
        if s.source_level != "global":
            tile = self._copied_tile(s, tile)
        if s.into_level != "global":
            self._make(s, tile)

    def _axes(self, s: Copy, tile: tuple[int, ...], matrix: Allocate) -> None:
        if len(tile) != len(matrix.shape):
            message = f"the tile {shape_text(tile)} and the matrix {matrix.name} {shape_text(matrix.shape)} differ in axes"
            self.report.error("shape", message, s.span, "", f"{len(matrix.shape)} axes", f"{len(tile)}")

    def _copied_tile(self, s: Copy, tile: tuple[int, ...]) -> tuple[int, ...]:
        """Check the tile that is the source; its shape."""
        state = self._read(s.source, s.span)
        if state is None:
            return tile
        if tile and state.shape != tile:
            message = f"{s.source} is {shape_text(state.shape)}, the copy says {shape_text(tile)}"
            hint = f"write Copy {s.source} ... {shape_text(state.shape)}"
            self.report.error("shape", message, s.span, hint, shape_text(state.shape), shape_text(tile))
        return state.shape

    def _make(self, s: Copy, shape: tuple[int, ...]) -> None:
        state = self.states.get(s.into)
        if state is None and len(shape) not in (1, 2):
            return  # reported
        if state is None:
            dtype: DType = "f32"
            if s.source_level == "global" and s.source in self.matrices:
                dtype = self.matrices[s.source].dtype
            elif s.source in self.states:
                dtype = self.states[s.source].dtype
            state = State(s.into_level, shape, dtype, True)
        elif shape and state.shape != shape:
            message = f"{s.into} is {shape_text(state.shape)}, this copy makes it {shape_text(shape)}"
            self.report.error("shape", message, s.span, "a tile keeps its shape: choose another name (Copy A into B ...)")
        self.states[s.into] = replace(state, has_value=True, form="plain", maybe="")

    def _gemm(self, s: Gemm) -> None:
        a, b = self._operand(s, s.a, left=True), self._operand(s, s.b, left=False)
        if s.into in (s.a, s.b):
            self.report.error("gemm", f"{s.into} is read and written by one GEMM", s.span, "accumulate into a tile of its own")
        if s.accumulate:
            self._accumulated(s)
        if a is not None and b is not None:
            self._product(s, a, b)
        self._write(s.into)

    def _accumulated(self, s: Gemm) -> None:
        state = self.states.get(s.into)
        if state is None or (state.has_value and state.form == "plain"):
            return
        if not state.has_value:
            hint = f"write Allocate {s.into} in register {shape_text(state.shape)} f32 = 0, or get instead of accumulate"
            self._without_value(s.into, f"accumulates into {s.into}, which has no value yet", s.span, hint)
        else:
            self._read(s.into, s.span)

    def _operand(self, s: Gemm, name: str, left: bool) -> State | None:
        """An operand that may stand there: in shared memory, or reshaped in registers as the left one."""
        state = self.states.get(name)
        if state is None or len(state.shape) != 2:
            return None
        if state.level == "shared":
            return self._read(name, s.span)
        if not left:
            hint = f"copy it into shared memory first: Copy {name} into {name}s {shape_text(state.shape)} from register to shared"
            message = f"the right operand of a GEMM lies in shared memory, {name} in registers"
            self.report.error("gemm", message, s.span, hint, "shared", "register")
            return None
        if state.form == "plain" and state.has_value:
            layouts = "from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)"
            right = self.states.get(s.b)
            dtype = right.dtype if right is not None else "bf16"
            hint = f"add before it: Reshape {name} {layouts} and get {name}_operand {dtype}; then multiply {name}_operand"
            message = f"{name} comes from registers as an accumulator: a Reshape has to stand before this GEMM"
            self.report.error("missing-reshape", message, s.span, hint, "an operand", "an accumulator")
            return None
        state = self._read(name, s.span, operand=True)
        return replace(state, dtype=state.operand_dtype) if state is not None else None

    def _product(self, s: Gemm, a: State, b: State) -> None:
        m, k = a.shape[::-1] if s.a_transposed else a.shape
        k_of_b, n = b.shape[::-1] if s.b_transposed else b.shape
        left, right = s.a + "^T" * s.a_transposed, s.b + "^T" * s.b_transposed
        if k != k_of_b:
            message = f"GEMM {left}, {right}: contracted dimensions disagree, {m} x {k} times {k_of_b} x {n}"
            self.report.error("gemm-shape", message, s.span, self._repair(s, a, b), str(k), str(k_of_b))
        elif s.into in self.states and self.states[s.into].shape != (m, n):
            found = shape_text(self.states[s.into].shape)
            message = f"GEMM {left}, {right} gives {shape_text((m, n))}, but {s.into} is {found}"
            self.report.error("gemm-shape", message, s.span, self._repair(s, a, b), shape_text((m, n)), found)
        if a.dtype != b.dtype:
            message = f"the operands have one dtype: {s.a} is {a.dtype}, {s.b} is {b.dtype}"
            hint = f"reshape {s.a} to {b.dtype}" if a.level == "register" else "allocate both alike"
            self.report.error("dtype", message, s.span, hint, b.dtype, a.dtype)

    def _repair(self, s: Gemm, a: State, b: State) -> str:
        """Transpositions under which the shapes fit."""
        into = self.states.get(s.into)
        fitting = []
        for at in (False, True):
            for bt in (False, True):
                (m, k), (k_of_b, n) = a.shape[::-1] if at else a.shape, b.shape[::-1] if bt else b.shape
                if k == k_of_b and (into is None or into.shape == (m, n)):
                    fitting.append(f"GEMM {s.a}{'^T' * at}, {s.b}{'^T' * bt}")
        return f"did you mean {' or '.join(fitting)}?" if fitting else "see the shapes of the tiles"

    def _compute(self, s: Compute) -> None:
        for name in _tiles_read(s.value):
            self._read(name, s.span)
        state = self.states.get(s.into)
        if state is not None:
            self._agree(s.value, s, state.shape)
        self._write(s.into)

    def _agree(self, e: Expr, s: Compute, shape: tuple[int, ...]) -> None:
        """Tiles that meet in one expression have one shape; inside a reduction only the rows are those of the result."""
        if isinstance(e, Op) and e.fn in REDUCTIONS:
            inner = [self.states[n].shape for n in _tiles_read(e) if n in self.states and len(self.states[n].shape) == 2]
            if not inner:
                self._without_columns(e, s)
                return
            for child in children(e):
                self._agree(child, s, (shape[0], inner[0][1]))
            return
        if isinstance(e, Var) and e.name in self.states:
            found = self.states[e.name].shape
            if found != shape and found != shape[:1]:
                message = f"{e.name} is {shape_text(found)}, it does not fit {shape_text(shape)} of this statement"
                if len(found) <= len(shape):  # a rank error is reported as such
                    self.report.error("shape", message, s.span, "", shape_text(shape), shape_text(found))
        for child in children(e):
            self._agree(child, s, shape)

    def _without_columns(self, e: Op, s: Compute) -> None:
        """A reduction of columns that no tile counts; one that has no columns at all is a rank error, and reported as such."""
        if any(x == COLS or isinstance(x, Index) for x in walk(e)):
            message = f"{e.fn} has no tile that says how many columns there are"
            self.report.error("shape", message, e.span if e.span.line else s.span, "reduce a tile with two axes")

    def _reshape(self, s: Reshape) -> None:
        state = self.states.get(s.source)
        if state is None or state.level != "register" or len(state.shape) != 2:
            return
        if state.has_value and state.form == "operand":
            hint = "reshape the accumulator once, and multiply the result as often as needed"
            self.report.error("reshape", f"{s.source} is an operand already", s.span, hint, "an accumulator", "an operand")
        else:
            self._read(s.source, s.span)
        into = self.states.get(s.into)
        if into is not None and s.into != s.source:
            self._reshaped_into(s, state, into)
        made = into if into is not None else State("register", state.shape, s.dtype, True)
        self.states[s.into] = replace(made, has_value=True, form="operand", operand_dtype=s.dtype, maybe="")

    def _reshaped_into(self, s: Reshape, source: State, into: State) -> None:
        if into.shape != source.shape or into.level != "register":
            message = f"{s.into} is {shape_text(into.shape)} in {into.level}, {s.source} is {shape_text(source.shape)}"
            self.report.error("shape", message, s.span, "give the operand a name of its own", shape_text(source.shape))
        elif into.form == "plain" and into.dtype != s.dtype:
            message = f"{s.into} is {into.dtype}, the Reshape gives {s.dtype}"
            self.report.error("dtype", message, s.span, f"allocate it as {s.dtype}, or not at all", into.dtype, s.dtype)

    def _for(self, s: For) -> None:
        before = dict(self.states)
        inside = self.bounds.within(s)
        outside, self.bounds = self.bounds, inside
        self.body(s.body)
        first = self.states
        if any(name in before and before[name].form != state.form for name, state in first.items()):
            self.states = _join(before, first, "")
            self.body(s.body)
        self.bounds = outside
        always = runs(s, outside)
        self.states = first if always else _join(before, first, f"the loop of line {s.span.line}")

    def _if(self, s: If) -> None:
        before = dict(self.states)
        self.body(s.then)
        then, self.states = self.states, before
        self.body(s.otherwise)
        self.states = _join(self.states, then, f"one branch of the if of line {s.span.line}")

    def _read(self, name: str, span: Span, operand: bool = False) -> State | None:
        """A read of the tile's value; None where there is nothing to go on with."""
        state = self.states.get(name)
        if state is None:
            return None
        if not state.has_value:
            when = f": only {state.maybe} gives it one" if state.maybe else ""
            hint = (
                "state that a loop carries starts in its Allocate: ... = 0, or = -inf" if not state.maybe else "define it before"
            )
            self._without_value(name, f"{name} has no value yet{when}", span, hint)
            return None
        if state.form == "either":
            message = f"{name} is an operand on one path to this line and an accumulator on another"
            self.report.error("reshape", message, span, f"give the operand a name of its own: Reshape {name} ... and get {name}A")
            return None
        if state.form == "operand" and not operand:
            message = f"{name} is an operand fragment here: only a GEMM reads it"
            self.report.error("reshape", message, span, "read the accumulator before the Reshape", "an accumulator", "an operand")
            return None
        return state

    def _without_value(self, name: str, message: str, span: Span, hint: str) -> None:
        """Report the first read of a tile without value, not those that follow from it."""
        if self.told.setdefault(name, span) == span:
            self.report.error("no-value", message, span, hint)

    def _write(self, name: str) -> None:
        state = self.states.get(name)
        if state is not None:
            self.states[name] = replace(state, has_value=True, form="plain", maybe="")


def _tiles_read(e: Expr) -> dict[str, None]:
    """Names in an expression, in order; an indexed matrix is not one."""
    return {x.name: None for x in walk(e) if isinstance(x, Var)}


def _join(a: dict[str, State], b: dict[str, State], maybe: str) -> dict[str, State]:
    """What holds on both paths. A tile that only one path makes has no value for certain."""
    joined: dict[str, State] = {}
    for name in {**a, **b}:
        one, other = a.get(name), b.get(name)
        if one is None or other is None:
            only = one or other
            assert only is not None
            joined[name] = replace(only, has_value=only.has_value and not maybe, maybe=only.maybe or maybe)
        elif one == other:
            joined[name] = one
        else:
            form: Form = one.form if one.form == other.form or not other.has_value else "either"
            if not one.has_value:
                form = other.form
            has_value = one.has_value and other.has_value
            joined[name] = replace(other, has_value=has_value, form=form, maybe="" if has_value else maybe)
    return joined


def check_flow(program: Program, report: Report, bounds: Bounds, silent: Set[str] = frozenset()) -> None:
    """`silent`: unknown names, which make a shape unknown without that being another mistake."""
    matrices = {name: a for name, a in program.allocations.items() if a.level == "global"}
    Flow(report, bounds, matrices, silent).body(program.body)
