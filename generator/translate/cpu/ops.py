"""Core TL as the CPU translator sees it: copies, products, single assignments, liveness. Chooses no layout, emits no text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from generator.tl.ir import (
    Allocate,
    Compute,
    Copy,
    Declaration,
    DType,
    Expr,
    For,
    Gemm,
    If,
    Named,
    Op,
    Program,
    Prose,
    Reshape,
    Stmt,
    Var,
    names,
    walk,
)  # fmt: skip
from generator.tl.types import REDUCTIONS
from generator.translate.passes.scope import Scope

StepKind = Literal["scalar", "row", "element", "rowmax", "rowsum"]


class Refused(ValueError):
    """A program that has no CPU code: the reason of the closed list, and the line."""

    def __init__(self, message: str, line: int = 0, reason: str = "translate_failed") -> None:
        super().__init__(message)
        self.reason, self.line = reason, line


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile of the block. `loaded`: its values come from a global matrix by a Copy, and no statement changes them."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    loaded: bool = False

    @property
    def is_element(self) -> bool:
        return len(self.shape) == 2

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1


# Ops are compared by identity: two equal statements at different places are different ops.


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """A tile from a global matrix."""

    copy: Copy


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """A tile into a global matrix. `scale`: rows by which it is multiplied on the way (folded `tile = tile * r`)."""

    copy: Copy
    scale: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A GEMM. `scale`: rows by which the accumulator is multiplied before the product is added (folded `acc = acc * corr`)."""

    gemm: Gemm
    scale: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """into = value, rounded to the tile's dtype; for a reduction, of value along each row."""

    into: str
    value: Expr
    kind: StepKind
    origin: Stmt

    @property
    def reads(self) -> set[str]:
        return names(self.value)


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """A loop of the program, its body as ops."""

    stmt: For
    index: int  # among all loops, in textual order
    body: tuple[Work, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """An `if`, its bodies as ops."""

    stmt: If
    then: tuple[Work, ...]
    otherwise: tuple[Work, ...]


Work: TypeAlias = Load | Store | Product | Step | Loop | Branch


@dataclass(frozen=True, slots=True)
class Ops:
    """A program's work, its tiles (temporaries of reductions included) and what is live after each op."""

    body: tuple[Work, ...]
    tiles: dict[str, Tile]
    live_after: dict[int, frozenset[str]] = field(default_factory=dict)  # by id() of the op

    def after(self, op: Work) -> frozenset[str]:
        return self.live_after[id(op)]


def lower(program: Program, scope: Scope) -> Ops:
    """The statements as ops, without liveness. Raises Refused for statements that core code does not have."""
    lowering = _Lowering(program, scope)
    return Ops(lowering.body(program.body), lowering.tiles)


class _Lowering:
    def __init__(self, program: Program, scope: Scope) -> None:
        self.program, self.scope = program, scope
        self.tiles: dict[str, Tile] = {}
        self.num_loops = self.num_reductions = 0
        for a in program.allocations.values():
            if a.level != "global":
                self.tiles[a.name] = Tile(a.name, scope.tiles[a.name], a.dtype)

    def body(self, body: tuple[Stmt, ...]) -> tuple[Work, ...]:
        return tuple(op for s in body for op in self.statement(s))

    def statement(self, s: Stmt) -> Iterator[Work]:
        match s:
            case Allocate(level="global"):
                return
            case Allocate():
                if s.init is not None:
                    yield from self.assign(s.name, s.init, s)
            case Copy():
                yield from self.copy(s)
            case Gemm():
                yield Product(s)
                if self.tiles[s.into].dtype != "f32":
                    yield Step(s.into, Var(s.into), "element", s)
            case Compute():
                yield from self.assign(s.into, s.value, s)
            case Reshape():
                self.tiles.setdefault(s.into, Tile(s.into, self.tiles[s.source].shape, s.dtype))
                yield from self.assign(s.into, Var(s.source), s)
            case For():
                index, self.num_loops = self.num_loops, self.num_loops + 1
                yield Loop(s, index, self.body(s.body))
            case If():
                yield Branch(s, self.body(s.then), self.body(s.otherwise))
            case Named() | Prose():
                raise Refused(f"{type(s).__name__} has no code of its own: expand the program first", s.span.line)
            case _:
                assert isinstance(s, Declaration), s

    def copy(self, s: Copy) -> Iterator[Work]:
        if s.into_level == "global":
            yield Store(s)
        elif s.source_level == "global":
            a = self.program.allocations[s.source]
            if s.into not in self.tiles:
                self.tiles[s.into] = Tile(s.into, self.scope.tiles[s.into], a.dtype, loaded=True)
            yield Load(s)
        else:
            source = self.tiles[s.source]
            self.tiles.setdefault(s.into, Tile(s.into, source.shape, source.dtype))
            yield from self.assign(s.into, Var(s.source), s)

    def assign(self, into: str, value: Expr, s: Stmt) -> Iterator[Work]:
        """Reductions first, each into a row of its own; then the assignment."""
        tile = self.tiles[into]
        steps: list[Step] = []
        value = self.take_reductions(value, tile.rows, s, steps)
        yield from steps
        kind: StepKind = ("scalar", "row", "element")[len(tile.shape)]
        yield Step(into, value, kind, s)

    def take_reductions(self, e: Expr, rows: int, s: Stmt, steps: list[Step]) -> Expr:
        match e:
            case Op(fn, (a,)) if fn in REDUCTIONS:
                a = self.take_reductions(a, rows, s, steps)
                if not any(isinstance(x, Var) and x.name in self.tiles and self.tiles[x.name].is_element for x in walk(a)):
                    raise Refused(f"{fn} of a value that is the same along each row", s.span.line)
                name = f"{fn}@{self.num_reductions}"
                self.num_reductions += 1
                self.tiles[name] = Tile(name, (rows,), "f32")
                steps.append(Step(name, a, "rowmax" if fn == "rowmax" else "rowsum", s))
                return Var(name)
            case Op(fn, args):
                return Op(fn, tuple(self.take_reductions(a, rows, s, steps) for a in args), span=e.span)
        return e


def reads(op: Work) -> set[str]:
    """Names of tiles and scalars whose values an op reads."""
    match op:
        case Load(copy):
            return {n for e in copy.coordinate for n in names(e)}
        case Store(copy, scale):
            return {copy.source} | {n for e in copy.coordinate for n in names(e)} | ({scale} if scale else set())
        case Product(gemm, scale):
            return {gemm.a, gemm.b} | ({gemm.into} if gemm.accumulate else set()) | ({scale} if scale else set())
        case Step():
            return op.reads
        case Loop():
            return names(op.stmt.lo) | names(op.stmt.hi) | {n for x in op.body for n in reads(x)}
        case Branch():
            return names(op.stmt.test) | {n for x in op.then + op.otherwise for n in reads(x)}


def writes(op: Work) -> set[str]:
    """Names of tiles that an op gives a value."""
    match op:
        case Load(copy):
            return {copy.into}
        case Store():
            return set()
        case Product(gemm):
            return {gemm.into}
        case Step():
            return {op.into}
        case Loop():
            return {n for x in op.body for n in writes(x)}
        case Branch():
            return {n for x in op.then + op.otherwise for n in writes(x)}


def every(body: Iterable[Work]) -> Iterator[Work]:
    """All ops, loops and branches before what they hold."""
    for op in body:
        yield op
        match op:
            case Loop():
                yield from every(op.body)
            case Branch():
                yield from every(op.then)
                yield from every(op.otherwise)


def with_liveness(body: tuple[Work, ...], tiles: dict[str, Tile]) -> Ops:
    """The ops with the tiles whose values are still read after each of them."""
    live: dict[int, frozenset[str]] = {}
    _backward(body, frozenset(), frozenset(tiles), live)
    return Ops(body, tiles, live)


def _backward(
    body: tuple[Work, ...], after: frozenset[str], tiles: frozenset[str], live: dict[int, frozenset[str]]
) -> frozenset[str]:
    """Tiles that are live before the body; notes what is live after each op on the way."""
    for op in reversed(body):
        live[id(op)] = after
        match op:
            case Loop():
                before = after | (names(op.stmt.lo) | names(op.stmt.hi)) & tiles
                while True:
                    entry = before | _backward(op.body, before, tiles, live)
                    if entry == before:
                        break
                    before = entry
                after = before
            case Branch():
                then, other = _backward(op.then, after, tiles, live), _backward(op.otherwise, after, tiles, live)
                after = then | other | names(op.stmt.test) & tiles
            case _:
                after = (after - writes(op)) | (reads(op) & tiles)
    return after
