"""The Thinking Language as frozen dataclasses: every expression and statement a program can hold.

This file is not a parser, checker or translator; those read and build what is defined here. One line of text is one node:

    Let kv = j * BN + cols                                          Let("kv", Op("+", ...))
    Copy K (BN, D) in coordinate [L = j] from global to shared      Copy("K", "K", ...)
    Compute GEMM Q, K^T and get S                                   Gemm("Q", False, "K", True, "S", False)
    Compute S = where(kv < SeqK, S, -inf)                           Compute("S", Op("where", ...))

A program is its statements in textual order, declarations included. Equality and hashing ignore `span`, so that two
programs that print the same are equal. A *sketch* has only what moves and what is computed (no declarations, no sizes); *code*
has everything. `generator.tl.expand` turns code into *core* code: macros written out, `Let` and `Constant` substituted,
constants folded. Analyses and translators read core code only.

Source: the statements are those of QiMeng-Attention (arXiv 2506.12355); the rest is described in docs/language.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, assert_never

Level = Literal["global", "shared", "register"]
DType = Literal["f32", "f16", "bf16", "i32"]
Stage = Literal["sketch", "code"]

LEVELS: tuple[Level, ...] = ("global", "shared", "register")
DTYPES: tuple[DType, ...] = ("f32", "f16", "bf16", "i32")

#: Functions of an expression and their number of arguments. Infix and prefix operators are functions too.
FUNCTIONS: dict[str, int] = {
    "+": 2, "-": 2, "*": 2, "/": 2, "//": 2, "%": 2, "neg": 1,
    "<": 2, "<=": 2, ">": 2, ">=": 2, "==": 2, "!=": 2, "and": 2, "or": 2, "not": 1,
    "max": 2, "min": 2, "where": 3, "ceildiv": 2, "abs": 1, "floor": 1,
    "exp": 1, "exp2": 1, "log": 1, "log2": 1, "sqrt": 1, "tanh": 1,
    "rowmax": 1, "rowsum": 1,
}  # fmt: skip

#: The largest magnitude of an integer literal.
MAX_INT = 2**63 - 1

#: Numeric options -> their values, the default first. What each allows is said in docs/language.md, section 6.
OPTIONS: dict[str, tuple[str, ...]] = {
    "row_sums": ("each_tile", "deferred", "rounded"),
    "row_maxima": ("each_tile", "on_demand"),
    "functions": ("accurate", "fast"),
}


#: Hints that something reads -> what they say. Values are the reader's; "off" turns a rule of the translators off.
HINTS: dict[str, str] = {
    "stages": "tiles in flight of each copy",
    "warps": "warps of a block",
    "skip": "off: run tiles that are masked altogether",
    "split": "off: one loop with every test in place",
    "rotate": "on or off: one tile's softmax under the next tile's GEMM",
    "lazy": "off: rescale even where the factor is 1",
    "pingpong": "on or off: groups of warps out of phase, one at products while another is at the softmax",
    "ahead": "off: a block's next tile of the grid starts when the one before is stored",
    "announce": "on: a block brings the first tiles of the one that takes its place into the cache",
    "anchor": "off: leave the order of waits to the compiler",
    "resident": "on or off: a loop's left operand stays in registers",
    "swizzle": "the layout of tiles in shared memory",
    "view": "grouped: the query heads of one key head are the rows of Q; read by who binds tensors to the kernel",
    "order": "static: tiles of the grid by number, without a counter",
    "family": "mma: mma.sync where wgmma would do",
}


@dataclass(frozen=True, slots=True)
class Span:
    """Where a node stands in its text. Lines and columns count from 1; `end_column` is one past the last character."""

    line: int
    column: int
    end_column: int


NOWHERE = Span(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Node:
    """What every expression, declaration and statement is: fields of its own in the order of the text, and where it stands."""

    span: Span = field(default=NOWHERE, compare=False, repr=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Num(Node):
    """A literal. An int is exact index arithmetic, a float is a value; `inf` is Num(float("inf"))."""

    value: int | float

    def __eq__(self, other: object) -> bool:
        """1 and 1.0 are different literals: one is an index, the other a value."""
        return isinstance(other, Num) and type(self.value) is type(other.value) and repr(self.value) == repr(other.value)

    def __hash__(self) -> int:
        return hash((type(self.value), repr(self.value)))


@dataclass(frozen=True, slots=True)
class Var(Node):
    """An argument, constant, `Let`, grid axis, loop variable, tile, or one of `rows` and `cols`.

    `rows` and `cols` are the position inside the tile that the statement writes.
    """

    name: str


@dataclass(frozen=True, slots=True)
class Op(Node):
    """A function of FUNCTIONS on its arguments: `Op("where", (test, a, b))`, `Op("<=", (a, b))`."""

    fn: str
    args: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Index(Node):
    """One element of a captured global tensor or vector: `Slopes[h]`, `DocEnd[q]`, `Bias[q, kv]`.

    The indices address the matrix that the block sees (after its `with offset`), element by element. An index outside the
    matrix's extents reads as zero.
    """

    tensor: str
    indices: tuple[Expr, ...]


Expr: TypeAlias = Num | Var | Op | Index

ROWS, COLS = Var("rows"), Var("cols")
INF = Num(float("inf"))
NEG_INF = Num(float("-inf"))


@dataclass(frozen=True, slots=True)
class Argument(Node):
    """`Argument scale f32 positive`, `Argument SeqQ, SeqK i32`: scalars known at the call.

    `positive` is a promise (> 0) that analyses may use and that whoever launches the kernel has to check.
    """

    names: tuple[str, ...]
    dtype: DType
    positive: bool = False


@dataclass(frozen=True, slots=True)
class Constant(Node):
    """`Constant BM = 128`, or a hole for the tuner: `Constant BM in {64, 128}`. Code without holes has one choice each."""

    name: str
    choices: tuple[int, ...]

    @property
    def is_hole(self) -> bool:
        return len(self.choices) != 1


@dataclass(frozen=True, slots=True)
class Axis(Node):
    """One axis of the grid: `m = 0:ceildiv(SeqQ, BM)`."""

    name: str
    extent: Expr


@dataclass(frozen=True, slots=True)
class Grid(Node):
    """`Grid m = 0:ceildiv(SeqQ, BM), h = 0:Heads`: one block a value; the first axis runs fastest."""

    axes: tuple[Axis, ...]


@dataclass(frozen=True, slots=True)
class Let(Node):
    """`Let q = m * BM + rows`: a name for an expression from here on; it is substituted, not stored."""

    name: str
    value: Expr


@dataclass(frozen=True, slots=True)
class Allocate(Node):
    """A matrix in global memory or a tile in registers (or shared memory).

    global: `shape` is what one block addresses, (rows, cols) or (rows,) or () for one scalar, its extents expressions of scalars;
    `offset` holds the leading indices (batch, head). register: the block-wide tile, constant after substitution; `init` is the
    value it starts with, which state carried through a loop needs.
    """

    name: str
    level: Level
    shape: tuple[Expr, ...]
    dtype: DType
    offset: tuple[Expr, ...] = ()
    init: Expr | None = None


@dataclass(frozen=True, slots=True)
class Hint(Node):
    """`Hint stages = 2`: about speed only. Dropping every hint leaves the values unchanged, bit for bit."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Option(Node):
    """`Option row_sums = deferred`: a freedom that may change bits (never more than rounding), one of OPTIONS.

    Without it the first value of OPTIONS holds. A translator may ignore a freedom; it may not take one that is not stated.
    """

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Copy(Node):
    """Move one tile between levels.

    `Copy K (BN, D) in coordinate [L = j] from global to shared` makes the tile K; `source` and `into` are both "K".
    `Copy acc into O (BM, DV) in coordinate [L = m] from register to global` writes it.
    `coordinate` counts tiles of `shape`, not elements: one for each axis, (row tile, column tile), 0 where it is not written.
    In a sketch `shape` and `coordinate` are empty.
    """

    source: str
    into: str
    shape: tuple[Expr, ...]
    coordinate: tuple[Expr, ...]
    source_level: Level
    into_level: Level


@dataclass(frozen=True, slots=True)
class Gemm(Node):
    """`Compute GEMM A, B^T and get S` (overwrite) or `... and accumulate S` (add). `^T` marks an operand used transposed.

    S (M, N) = A (M, K) B (K, N), each after its transposition; sums are f32.
    """

    a: str
    a_transposed: bool
    b: str
    b_transposed: bool
    into: str
    accumulate: bool


@dataclass(frozen=True, slots=True)
class Compute(Node):
    """`Compute S = where(kv <= q, S, -inf)`: element by element, row values broadcast over columns.

    The paper's spellings (`Compute Multiply S, scale and get new S`) parse to this form.
    """

    into: str
    value: Expr


@dataclass(frozen=True, slots=True)
class Named(Node):
    """`Compute Softmax S, scale and get P with row_max, row_sum, acc`: a macro; `generator.tl.expand` writes it out.

    In a sketch any operator name with any operands may stand here; core code has none.
    """

    operator: str
    operands: tuple[str, ...]
    into: str | None = None
    state: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reshape(Node):
    """Turn an accumulator fragment into an operand fragment of `dtype`: required before a GEMM fed by registers.

    `Reshape P from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new) and get PA bf16`. What moves is the target's matter
    (a cast, or a view); the values are P's, rounded to `dtype`. `into` needs no Allocate. It may be `source` itself (in place);
    core code has none of those: `generator.tl.expand` gives the operand a name of its own.
    """

    source: str
    source_layout: tuple[str, ...]
    into_layout: tuple[str, ...]
    into: str
    dtype: DType


@dataclass(frozen=True, slots=True)
class For(Node):
    """`for j = lo:hi` ... `end`, half open; with `reversed` the last iteration comes first. An empty range runs nothing."""

    var: str
    lo: Expr
    hi: Expr
    reversed: bool
    body: tuple[Stmt, ...]


@dataclass(frozen=True, slots=True)
class If(Node):
    """`if test` ... `else` ... `end`; the test is a scalar: the same for a whole block."""

    test: Expr
    then: tuple[Stmt, ...]
    otherwise: tuple[Stmt, ...] = ()


@dataclass(frozen=True, slots=True)
class Prose(Node):
    """A line of a sketch that is not a statement. Kept as text; never part of code.

    A loop whose range is prose (`for j over the tiles that a row can see`) stays flat: Prose, what it holds, Prose("end").
    """

    text: str


Declaration: TypeAlias = Argument | Constant | Grid | Let | Allocate | Hint | Option
Stmt: TypeAlias = Declaration | Copy | Gemm | Compute | Named | Reshape | For | If | Prose


@dataclass(frozen=True, slots=True)
class Program:
    """One kernel. `body` is every statement in textual order, declarations included."""

    name: str
    stage: Stage
    body: tuple[Stmt, ...]

    @property
    def arguments(self) -> dict[str, Argument]:
        """Scalar argument name -> its declaration line, in textual order."""
        return {name: s for s in self.body if isinstance(s, Argument) for name in s.names}

    @property
    def constants(self) -> dict[str, Constant]:
        """Name -> its declaration, holes included."""
        return {s.name: s for s in self.body if isinstance(s, Constant)}

    @property
    def holes(self) -> dict[str, Constant]:
        """The constants that a tuner has still to choose."""
        return {name: c for name, c in self.constants.items() if c.is_hole}

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of the grid, fastest first."""
        return tuple(axis for s in self.body if isinstance(s, Grid) for axis in s.axes)

    @property
    def allocations(self) -> dict[str, Allocate]:
        """Name -> its declaration, for matrices in global memory and tiles alike, in textual order."""
        return {s.name: s for s in walk_statements(self.body) if isinstance(s, Allocate)}

    @property
    def hints(self) -> dict[str, str]:
        return {s.name: s.value for s in self.body if isinstance(s, Hint)}

    @property
    def options(self) -> dict[str, str]:
        """Every numeric option with its value, defaults included."""
        stated = {s.name: s.value for s in self.body if isinstance(s, Option)}
        return {name: stated.get(name, values[0]) for name, values in OPTIONS.items()}

    @property
    def code(self) -> tuple[Stmt, ...]:
        """The body without declarations: what runs, in order."""
        return tuple(s for s in self.body if not isinstance(s, Declaration))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the global matrices that the program writes, in order of allocation."""
        written = {s.into for s in walk_statements(self.body) if isinstance(s, Copy) and s.into_level == "global"}
        return tuple(name for name in self.allocations if name in written)


def children(e: Expr) -> tuple[Expr, ...]:
    """The expressions right below this one."""
    match e:
        case Op():
            return e.args
        case Index():
            return e.indices
        case Num() | Var():
            return ()


def walk(e: Expr) -> Iterator[Expr]:
    """The expression and all below it, parents first."""
    yield e
    for child in children(e):
        yield from walk(child)


def names(e: Expr) -> set[str]:
    """Every name that the expression reads, indexed tensors included."""
    return {x.name if isinstance(x, Var) else x.tensor for x in walk(e) if isinstance(x, Var | Index)}


def expressions_of(s: Stmt) -> tuple[Expr, ...]:
    """The expressions that a statement holds itself (not those of its body)."""
    match s:
        case Grid():
            return tuple(axis.extent for axis in s.axes)
        case Let() | Compute():
            return (s.value,)
        case Allocate():
            return s.shape + s.offset + ((s.init,) if s.init is not None else ())
        case Copy():
            return s.shape + s.coordinate
        case For():
            return (s.lo, s.hi)
        case If():
            return (s.test,)
        case Named():
            return tuple(Var(name) for name in s.operands)
        case Argument() | Constant() | Hint() | Option() | Gemm() | Reshape() | Prose():
            return ()
        case _:
            assert_never(s)


def walk_statements(body: tuple[Stmt, ...]) -> Iterator[Stmt]:
    """Every statement, loops and branches before what they hold."""
    for s in body:
        yield s
        match s:
            case For():
                yield from walk_statements(s.body)
            case If():
                yield from walk_statements(s.then)
                yield from walk_statements(s.otherwise)
