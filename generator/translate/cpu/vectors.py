"""Vector text of element-wise expressions. Each part is computed where its rank asks: once, for a row, a column or an element.

`Vectors` knows the functions; the two subclasses know where rows and columns are: in lanes or in a loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

from generator.tl.ir import COLS, ROWS, DType, Expr, Index, Op, Var, walk
from generator.tl.types import COMPARISONS, Rank
from generator.translate.cpu.limits import Both, Either, Limit, LimitTests, Tree
from generator.translate.cpu.names import Names, folded, tile_name
from generator.translate.cpu.ops import Refused
from generator.translate.passes.conditions import conjuncts

Kind = Literal["f", "i", "m"]  # floats, whole numbers, tests
TYPES: dict[Kind, str] = {"f": "vf", "i": "vi", "m": "vm"}
SPREAD: dict[Kind, str] = {"f": "vset({})", "i": "viset({})", "m": "vmset({})"}
LOAD: dict[Kind, str] = {"f": "vload({})", "i": "viload({})"}
STORE: dict[Kind, str] = {"f": "vstore({}, {})", "i": "vistore({}, {})"}
#: Over the N vectors of a block of lanes.
EACH_VECTOR = "UNROLL for (int j = 0; j < N; ++j)"

FLOATS = {
    "+": "({} + {})", "-": "({} - {})", "*": "({} * {})", "/": "({} / {})", "neg": "vneg({})",
    "max": "vmax({}, {})", "min": "vmin({}, {})",
    "abs": "vabs({})", "log": "vlog({})", "log2": "vlog2({})", "sqrt": "vsqrt({})", "tanh": "vtanh({})",
}  # fmt: skip
INTEGERS = {
    "+": "({} + {})", "-": "({} - {})", "*": "({} * {})", "neg": "(-{})", "//": "vidiv({}, {})", "%": "vimod({}, {})",
    "ceildiv": "viceildiv({}, {})", "max": "vimax({}, {})", "min": "vimin({}, {})", "abs": "viabs({})",
}  # fmt: skip
LOGIC = {"and": "vand({}, {})", "or": "vor({}, {})", "not": "vnot({})"}
TESTS = {"<": "vlt", "<=": "vle", ">": "vgt", ">=": "vge", "==": "veq", "!=": "vne"}


#: The dtype that keeps values of exp2 or exp -> degree of the polynomial behind them, which errs less than the dtype rounds.
EXP_DEGREE: dict[DType, int] = {"f32": 5, "f16": 4, "bf16": 3}


def kind_of(dtype: DType) -> Kind:
    """What vectors of a tile's elements hold."""
    return "i" if dtype == "i32" else "f"


def lane_array(name: str, kind: Kind, text: str) -> list[str]:
    """A vector for each j of N, from a text that says j."""
    return [f"{TYPES[kind]} {name}[N];", f"{EACH_VECTOR} {name}[j] = {text};"]


class Vectors(ABC):
    """limits: which tests are column limits of the loop around; they vanish where the loop knows them to hold.

    degree: of exp2 and exp, from the precision that the consumers of a value keep.
    """

    def __init__(self, names: Names, limits: LimitTests) -> None:
        self.names, self.types, self.limits, self.degree = names, names.types, limits, EXP_DEGREE["f32"]
        self.elements: dict[str, str] = {}  # version of an element tile -> its name in this iteration

    @abstractmethod
    def home(self, e: Expr) -> str | None:
        """The name of a value that belongs to an outer level (computed there now, if need be); None: compute it here."""

    @abstractmethod
    def leaf(self, e: Expr, kind: Kind) -> str:
        """`rows`, `cols`, a tile or a captured value, here."""

    @abstractmethod
    def limit(self, name: str, upper: bool, kappa: int) -> str:
        """The test of one column limit, here."""

    def kind(self, e: Expr) -> Kind:
        return "m" if self.types.is_test(e) else "i" if self.types.is_integer(e) else "f"

    def f(self, e: Expr) -> str:
        """Floats; whole numbers are converted."""
        return self.text(Op("to_float", (e,)) if self.kind(e) == "i" else e)

    def typed(self, e: Expr, kind: Kind) -> str:
        """As a value of `kind`: whole numbers as they are, everything else as floats."""
        return self.text(e) if kind == "i" else self.f(e)

    def text(self, e: Expr) -> str:
        if (outer := self.home(e)) is not None:
            return outer
        kind = self.kind(e)
        match e:
            case Var() | Index():
                return self.leaf(e, kind)
            case Op("to_float", (a,)):
                return f"vcvt({self.text(a)})"
            case Op("where", (test, a, b)):
                return self._where(test, a, b, kind)
            case Op("and" | "or" | "not" as fn, args):
                texts = [self.text(a) for a in args]
                return folded(LOGIC[fn], texts)
            case Op(fn, (a, b)) if fn in COMPARISONS:
                common: Kind = "i" if self.types.is_integer(a) and self.types.is_integer(b) else "f"
                return f"{TESTS[fn]}({self.typed(a, common)}, {self.typed(b, common)})"
            case Op("exp" | "exp2" as fn, (a,)):
                return f"v{fn}<{self.degree}>({self.f(a)})"
            case Op("floor", (a,)):
                return self.text(a) if self.types.is_integer(a) else f"vifloor({self.text(a)})"
            case Op(fn, args) if kind == "i":
                return folded(INTEGERS[fn], [self.text(a) for a in args])
            case Op(fn, args) if fn in FLOATS:
                return FLOATS[fn].format(*map(self.f, args))
        raise Refused(f"no vector code for {e}", e.span.line)

    def _where(self, test: Expr, a: Expr, b: Expr, kind: Kind) -> str:
        """Tests that are column limits are made only in edge tiles; `a` stands alone elsewhere."""
        known, others = self.limits.split(conjuncts(test))
        branches = f"{self.typed(a, kind)}, {self.typed(b, kind)}"
        edge = self._limits(known) if known is not None else None
        rest = folded(LOGIC["and"], [self.text(o) for o in others]) if others else None
        if edge is None:
            return f"vsel({rest}, {branches})"
        return f"edge_sel<EDGE>({edge}, {branches})" if rest is None else f"vsel(edge_and<EDGE>({edge}, {rest}), {branches})"

    def _limits(self, tree: Tree) -> str:
        match tree:
            case Limit():
                return self.limit(tree.name, tree.upper, tree.kappa)
            case Both(parts):
                return folded(LOGIC["and"], [self._limits(p) for p in parts])
            case Either(parts):
                return folded(LOGIC["or"], [self._limits(p) for p in parts])

    def by_lane(self, e: Index, kind: Kind, given: dict[Expr, str], start: str) -> str:
        """A captured value for each lane, read one by one."""
        if any(self.types.tile(x) is not None and x not in given for x in walk(e)):
            raise Refused(f"{e.tensor}: an index may not depend on a tile here", e.span.line)
        fn = "vlanes" if kind == "f" else "vilanes"
        return f"{fn}([&](int64_t lane_) {{ return {self.names.text(e, given)}; }}, {start})"


class LaneVectors(Vectors):
    """Rows in lanes, j of N vectors; columns in a loop over n. `top`: once; `outer`: row values; `column`: once a column."""

    def __init__(self, names: Names, limits: LimitTests) -> None:
        super().__init__(names, limits)
        self.top: list[str] = []
        self.outer: list[str] = []
        self.column: list[str] = []
        self.level: Literal["row", "element"] = "row"
        self.row_arrays: dict[str, str] = {}  # version of a row tile -> its array of vectors
        self._memo: dict[tuple[str, object], str] = {}
        self._count = 0

    def fresh(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def start_columns(self) -> None:
        """A new loop over the columns: nothing that was computed for a column is left."""
        self.level, self.column, self.elements = "element", [], {}
        self._memo = {k: v for k, v in self._memo.items() if k[0] != "column"}

    def home(self, e: Expr) -> str | None:
        rank, kind = self.types.rank(e), self.kind(e)
        if rank is Rank.SCALAR:
            text = self.names.text(e)
            return self._once("top", e, lambda x: self.top.append(f"const {TYPES[kind]} {x} = {SPREAD[kind].format(text)};"))
        if self.level == "element" and rank is Rank.COL:
            text = self.names.text(e, {COLS: "n"})
            return self._once(
                "column", e, lambda x: self.column.append(f"const {TYPES[kind]} {x} = {SPREAD[kind].format(text)};")
            )
        if self.level == "element" and rank is Rank.ROW and not (isinstance(e, Var) and e.name in self.row_arrays):
            return self.row_value(e, kind) + "[j]"
        return None

    def row_value(self, e: Expr, kind: Kind) -> str:
        """The array of a row expression, computed before the loop over the columns."""
        if ("outer", e) not in self._memo:
            level, self.level = self.level, "row"
            text, name = self.text(e), self.fresh("r")
            self.level = level
            self.outer += lane_array(name, kind, text)
            self._memo["outer", e] = name
        return self._memo["outer", e]

    def _once(self, place: str, e: object, emit: Callable[[str], None]) -> str:
        """The name of a value of `place`; `emit` states it under that name the first time."""
        if (place, e) not in self._memo:
            name = self.fresh("k" if place == "top" else "c")
            emit(name)
            self._memo[place, e] = name
        return self._memo[place, e]

    def leaf(self, e: Expr, kind: Kind) -> str:
        match e:
            case Var() if e == ROWS:
                return "(viset(lane + j * VL) + viota())"
            case Var(name) if name in self.row_arrays:
                return f"{self.row_arrays[name]}[j]"
            case Var(name) if name in self.elements:
                return self.elements[name]
            case Index():
                return self.by_lane(e, kind, {ROWS: "lane_", COLS: "n"}, "lane + j * VL")
        raise Refused(f"{e}: no value here")

    def limit(self, name: str, upper: bool, kappa: int) -> str:
        lanes = self._limit_array(name)
        x = self._once(
            "column", ("x", kappa), lambda v: self.column.append(f"const vi {v} = viset(n + {self.limits.offset(kappa)});")
        )
        return f"vlt({x}, {lanes}[j])" if upper else f"vle({lanes}[j], {x})"

    def _limit_array(self, name: str) -> str:
        if ("outer", name) not in self._memo:
            x = self.fresh("r")
            self.outer += lane_array(x, "i", f"viload({name}.at + lane + j * VL)")
            self._memo["outer", name] = x
        return self._memo["outer", name]


class RowVectors(Vectors):
    """Columns in lanes, from n on; rows in a loop over r. `top`: once; `row`: once a row."""

    def __init__(self, names: Names, limits: LimitTests) -> None:
        super().__init__(names, limits)
        self.top: list[str] = []
        self.row: list[str] = []
        self._memo: dict[tuple[str, object], str] = {}

    def home(self, e: Expr) -> str | None:
        rank, kind = self.types.rank(e), self.kind(e)
        if rank not in (Rank.SCALAR, Rank.ROW):
            return None
        place, out = ("top", self.top) if rank is Rank.SCALAR else ("row", self.row)
        if (place, e) not in self._memo:
            text = self.names.text(e, self._given(e))
            name = f"{'k' if place == 'top' else 'r'}{len(self._memo)}"
            out.append(f"const {TYPES[kind]} {name} = {SPREAD[kind].format(text)};")
            self._memo[place, e] = name
        return self._memo[place, e]

    def _given(self, e: Expr) -> dict[Expr, str]:
        rows: dict[Expr, str] = {
            x: f"{tile_name(x.name)}[r]"
            for x in walk(e)
            if isinstance(x, Var) and (t := self.types.tile(x)) and len(t.shape) == 1
        }
        return {ROWS: "r", **rows}

    def leaf(self, e: Expr, kind: Kind) -> str:
        match e:
            case Var() if e == COLS:
                return "(viset(n) + viota())"
            case Var(name) if name in self.elements:
                return self.elements[name]
            case Index():
                return self.by_lane(e, kind, {ROWS: "r", COLS: "lane_", **self._given(e)}, "n")
        raise Refused(f"{e}: no value here")

    def limit(self, name: str, upper: bool, kappa: int) -> str:
        if ("row", name) not in self._memo:
            bound = f"l{len(self._memo)}"
            self.row.append(f"const vi {bound} = viset({name}.at[r] - {self.limits.offset(kappa)});")
            self._memo["row", name] = bound
        bound = self._memo["row", name]
        return f"vlt(viset(n) + viota(), {bound})" if upper else f"vle({bound}, viset(n) + viota())"
