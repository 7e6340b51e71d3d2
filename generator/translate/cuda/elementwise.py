"""Element-wise statements, masks and row reductions as unrolled loops over one thread's share of a tile.

Each subexpression is computed at the rank of its variables: once, once a row, or in the element loop. Index expressions stay
linear: an element's value is its row's value plus a compile-time constant. Whole numbers up to 2^24 meet floats exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from generator.tl.ir import COLS, ROWS, Compute, Expr, Index, Num, Op, Var
from generator.tl.types import Kind, Rank
from generator.translate.cuda import names as mangle
from generator.translate.cuda.dtypes import TYPES
from generator.translate.cuda.scalars import INFIX, Scalars, number, whole
from generator.translate.passes.affine import Affine, affine, extremum, to_expr
from generator.translate.passes.conditions import AllOf, AnyOf, Condition, Limit, condition, conjuncts, is_column_limit
from generator.translate.passes.scope import Scope

#: C of an expression as a value of a kind, at some rank.
Part = Callable[[Expr, Kind], str]
GLOBAL_ROW = "(row0 + ROW(t, r))"
FLOAT_ONLY = frozenset({"/", "exp", "exp2", "log", "log2", "sqrt", "tanh"})


@dataclass(frozen=True, slots=True)
class Setting:
    """What is known where a statement stands.

    visible: tests known true. off: a test and the C of a bool; where the bool is true, the test counts as false everywhere.
    deferred: row sums that stay per lane.
    """

    visible: frozenset[Expr] = frozenset()
    off: tuple[Expr, str] | None = None
    deferred: frozenset[str] = frozenset()


PLAIN = Setting()


@dataclass
class ElementCode:
    """Statements of one program as C. `shared_read`: C for an element of a shared tile at (row, column)."""

    scalars: Scalars
    shared: dict[str, str] = field(default_factory=dict)  # shared tile -> the C function that reads it, as "f(tile, {r}, {c})"
    counter: int = 0
    masks_as_bits: bool = False  # a row's limits as one mask: fewer instructions, a few more registers

    @property
    def scope(self) -> Scope:
        return self.scalars.scope

    def temporary(self) -> str:
        self.counter += 1
        return f"x{self.counter}"

    def compute(self, s: Compute, setting: Setting = PLAIN) -> list[str]:
        """The lines of one statement."""
        return _Statement(self, setting, s.into).lines(s)

    def compute_in_two(self, s: Compute, setting: Setting, groups: int) -> tuple[list[str], list[str]]:
        """The lines of a statement on a tile: up to this many groups of eight columns, and the rest."""
        return _Statement(self, setting, s.into).in_two(s, groups)


@dataclass
class _Statement:
    code: ElementCode
    setting: Setting
    into: str
    before: list[str] = field(default_factory=list)
    memo: dict[object, str] = field(default_factory=dict)
    columns: int = 0  # of the tile that the element loop being written goes over

    @property
    def scope(self) -> Scope:
        return self.code.scope

    def lines(self, s: Compute) -> list[str]:
        dtype, shape = self.scope.names.tiles[s.into].dtype, self.scope.tiles[s.into]
        if not shape:
            return [f"{mangle.tile(s.into)} = {self.code.scalars.text(s.value, Kind.INT if dtype == 'i32' else Kind.FLOAT)};"]
        assignment = self._assignment(s)
        if not assignment:
            return []
        last = f"{f'FOR_TILE({shape[1]})' if len(shape) == 2 else 'FOR_ROWS'} {assignment}"
        return ["{", *self.before, last, "}"] if self.before else [last]

    def in_two(self, s: Compute, groups: int) -> tuple[list[str], list[str]]:
        assignment, columns = self._assignment(s), self.scope.tiles[s.into][1]
        parts = [f"FOR_PART({a}, {b}) {assignment}" for a, b in ((0, groups), (groups, columns // 8))] if assignment else ["", ""]
        return ["{", *self.before, parts[0]], [parts[1], "}"]

    def _assignment(self, s: Compute) -> str:
        """`X[...] = value;` of one element or row; "" where that does nothing."""
        dtype, shape = self.scope.names.tiles[s.into].dtype, self.scope.tiles[s.into]
        kind = Kind.INT if dtype == "i32" else Kind.FLOAT
        self.columns = shape[-1]
        value = self.element(s.value, kind) if len(shape) == 2 else self.row(s.value, kind)
        place = f"{mangle.tile(s.into)}[t][{'AT' if len(shape) == 2 else 'r'}]"
        if value == place:
            return ""
        return f"{place} = rounded<{TYPES[dtype]}>({value});" if dtype in ("f16", "bf16") else f"{place} = {value};"

    def hoist(self, e: Expr, kind: Kind) -> str:
        """The name of a value computed once (rank 0) or once a row, as a float or a whole number."""
        key = (e, kind)
        if key not in self.memo:
            x, c_type = self.code.temporary(), "float" if kind is Kind.FLOAT else "int" if kind is Kind.INT else "bool"
            if self.scope.rank(e) is Rank.SCALAR:
                self.before.append(f"const {c_type} {x} = {self.code.scalars.text(e, kind)};")
                self.memo[key] = x
            else:
                value = self._raw_row(e, kind)
                self.before += [f"{c_type} {x}[MT][2];", f"FOR_ROWS {x}[t][r] = {value};"]
                self.memo[key] = f"{x}[t][r]"
        return self.memo[key]

    def kind(self, e: Expr) -> Kind:
        return self.scope.typing(e).kind

    def row(self, e: Expr, kind: Kind = Kind.FLOAT) -> str:
        """C inside a FOR_ROWS loop."""
        if self.scope.rank(e) is Rank.SCALAR and not isinstance(e, Num):
            return self.hoist(e, kind)
        return self._raw_row(e, kind)

    def _raw_row(self, e: Expr, kind: Kind) -> str:
        own = self.kind(e)
        if kind is Kind.FLOAT and own is Kind.INT:
            return number(e.value) if isinstance(e, Num) else f"(float)({self._raw_row(e, Kind.INT)})"
        match e:
            case Num(value):
                return str(value) if own is Kind.INT else number(value)
            case Var(name):
                if e == ROWS:
                    return GLOBAL_ROW
                return f"{mangle.tile(name)}[t][r]" if name in self.scope.tiles else self.code.scalars.text(e)
            case Index(tensor, indices):
                return self.code.scalars.captured(tensor, [self.row(i, Kind.INT) for i in indices])
            case Op("rowmax" | "rowsum"):
                return self.reduce(e)
        return self._combine(e, own, self.row)

    def _combine(self, e: Expr, own: Kind, part: Part) -> str:
        """A function of parts that `part(expression, kind)` writes out."""
        assert isinstance(e, Op)
        match e:
            case Op("where", (test, a, b)):
                chosen = self.condition(test, part)
                if chosen in ("true", "false"):
                    return part(a if chosen == "true" else b, own)
                return f"({chosen} ? {part(a, own)} : {part(b, own)})"
            case Op("not", (a,)):
                return f"!({part(a, Kind.BOOL)})"
            case Op("and" | "or" as fn, (a, b)):
                return f"({part(a, Kind.BOOL)} {INFIX[fn]} {part(b, Kind.BOOL)})"
            case Op(fn, args) if all(self.kind(a) is Kind.INT for a in args) and fn not in FLOAT_ONLY:
                return whole(fn, [part(a, Kind.INT) for a in args])
            case Op("/", (a, b)) if self.code.scalars.functions.fast and self.scope.rank(b) < self.scope.rank(a):
                return f"({part(a, Kind.FLOAT)} * {self.hoist(Op('/', (Num(1.0), b)), Kind.FLOAT)})"
            case Op(fn, args):
                return self.code.scalars.functions.call(fn, [part(a, Kind.FLOAT) for a in args])

    def element(self, e: Expr, kind: Kind = Kind.FLOAT) -> str:
        """C inside a FOR_TILE loop."""
        rank, own = self.scope.rank(e), self.kind(e)
        if isinstance(e, Num):
            return number(e.value) if kind is Kind.FLOAT else str(e.value)
        if not rank & Rank.COL:
            return f"{mangle.tile(e.name)}[t][r]" if isinstance(e, Var) and e.name in self.scope.tiles else self.hoist(e, kind)
        if own is Kind.INT:
            return self._element_int(e, kind)
        if (scaled := self._scaled_index(e)) is not None:
            return scaled
        match e:
            case Var(name):
                return self._tile_element(name)
            case Index(tensor, indices):
                return self.code.scalars.captured(tensor, [self.element(i, Kind.INT) for i in indices])
        return self._combine(e, own, self.element)

    def _tile_element(self, name: str) -> str:
        if name in self.code.shared:
            return self.code.shared[name].format(r="(warp_row + (lane >> 2) + ROW(t, r))", c="(lane_col + COL)")
        return f"{mangle.tile(name)}[t][AT]"

    def _element_int(self, e: Expr, kind: Kind) -> str:
        """A whole number that varies along the row; as a float, its operations are done on floats."""
        form = affine(e)
        if form is not None and form.coefficient(COLS) and self._is_linear(form):
            return self._linear(form, kind)
        if isinstance(e, Index):
            text = self.code.scalars.captured(e.tensor, [self.element(i, Kind.INT) for i in e.indices])
            return f"(float)({text})" if kind is Kind.FLOAT else text
        assert isinstance(e, Op)
        if kind is Kind.FLOAT and e.fn in ("+", "-", "*", "neg", "max", "min", "abs"):
            return self.code.scalars.functions.call(e.fn, [self.element(a, Kind.FLOAT) for a in e.args])
        text = self._combine(e, Kind.INT, self.element)
        return f"(float)({text})" if kind is Kind.FLOAT else text

    def _is_linear(self, form: Affine) -> bool:
        return not any(self.scope.rank(s) & Rank.COL for s in form.symbols if s != COLS)

    def _linear(self, form: Affine, kind: Kind) -> str:
        """c * column + a value of the row, which includes the lane's first column."""
        c, rest = form.coefficient(COLS), to_expr(form.without(COLS))
        key = ("linear", rest, c, kind)
        if key not in self.memo:
            x = self.code.temporary()
            c_type, convert = ("float", "(float)") if kind is Kind.FLOAT else ("int", "")
            self.before += [
                f"{c_type} {x}[MT][2];",
                f"FOR_ROWS {x}[t][r] = {convert}({self.row(rest, Kind.INT)} + {c} * lane_col);",
            ]
            self.memo[key] = f"{x}[t][r]"
        offset = f"{c} * COL" if c != 1 else "COL"
        return f"({self.memo[key]} + {'(float)' if kind is Kind.FLOAT else ''}({offset}))"

    def _scaled_index(self, e: Expr) -> str | None:
        """value * index, less a row's value where one is taken off: one product a row and one multiply-add an element.

        value: the same along the row.
        """
        taken: Expr | None = None
        product = e
        match e:
            case Op("-", (Op("*") as product, taken)) if self.scope.rank(taken) & Rank.COL:
                return None
        match product:
            case Op("*", (a, b)) if not self.scope.rank(a) & Rank.COL and self.kind(a) is Kind.FLOAT and self.kind(b) is Kind.INT:
                form = affine(b)
                if form is None or not form.coefficient(COLS) or not self._is_linear(form):
                    return None
                if e not in self.memo:
                    c, value = form.coefficient(COLS), self.element(a)
                    rest = self.row(to_expr(form.without(COLS)), Kind.INT)
                    less = f" - {self.row(taken)}" if taken is not None else ""
                    x, y = self.code.temporary(), self.code.temporary()
                    self.before += [
                        f"float {x}[MT][2], {y}[MT][2];",
                        f"FOR_ROWS {y}[t][r] = {value} * {c}.0f;",
                        f"FOR_ROWS {x}[t][r] = {value} * (float)({rest} + {c} * lane_col){less};",
                    ]
                    self.memo[e] = f"({x}[t][r] + {y}[t][r] * (float)(COL))"
                return self.memo[e]
        return None

    def reduce(self, e: Op) -> str:
        """rowmax or rowsum: two chains over a thread's elements, started by the first ones, then the lane quad."""
        if e not in self.memo:
            x, n = self.code.temporary(), self.scope.columns(e.args[0])
            self.columns, outside = n, self.columns
            element = self.element(e.args[0])
            self.columns = outside
            join = "{0} + {1}" if e.fn == "rowsum" else "fmaxf({0}, {1})"
            local = e.fn == "rowsum" and self.into in self.setting.deferred
            close = "" if local else "quad_sum" if e.fn == "rowsum" else "quad_max"
            self.before += [
                f"float {x}[MT][2];",
                "FOR_ROWS {",
                "float u[2];",
                f"UNROLL for (int i = 0; i < {n // 8}; ++i) UNROLL for (int e = 0; e < 2; ++e)"
                f" u[e] = i == 0 ? {element} : {join.format('u[e]', element)};",
                f"{x}[t][r] = {close}({join.format('u[0]', 'u[1]')});",
                "}",
            ]
            self.memo[e] = f"{x}[t][r]"
        return self.memo[e]

    def condition(self, test: Expr, part: Part) -> str:
        """C of a test. Tests of the column against the row's limits become one compare against a compile-time column."""
        uppers: list[Expr] = []
        lowers: list[Expr] = []
        others: list[str] = []
        off = ""
        for c in conjuncts(test):
            if c in self.setting.visible:
                continue
            known = condition(c, self.scope) if self.scope.rank(c) & Rank.COL else None
            sides = column_range(known, self.scope) if known is not None else None
            if self.setting.off is not None and c == self.setting.off[0]:
                off = self.setting.off[1]
            if sides is not None:
                uppers += [sides[0]] if sides[0] is not None else []
                lowers += [sides[1]] if sides[1] is not None else []
            elif known is not None and _columns_only(known, self.scope):
                others.append(self._either(known))
            else:
                others.append(self._plain_test(c, part))
        if self.code.masks_as_bits and (uppers or lowers):
            others.append(self._seen(uppers, lowers, off))
            off = ""
        elif uppers:
            others.append(f"COL <= {self._limit(extremum('min', tuple(uppers)), off)}")
            off = ""
        if lowers and not self.code.masks_as_bits:
            others.append(f"COL >= {self._limit(extremum('max', tuple(lowers)))}")
        others += [f"!{off}"] if off else []
        return " && ".join(f"({o})" for o in others) if others else "true"

    def _plain_test(self, c: Expr, part: Part) -> str:
        if not self.scope.rank(c) & Rank.COL:
            return part(c, Kind.BOOL) if self.scope.rank(c) is Rank.SCALAR else self.row(c, Kind.BOOL)
        assert isinstance(c, Op)
        if c.fn in ("and", "or", "not"):
            inner = [self.condition(a, part) for a in c.args]
            return f"!({inner[0]})" if c.fn == "not" else f" {INFIX[c.fn]} ".join(f"({i})" for i in inner)
        whole_numbers = all(self.kind(a) is Kind.INT for a in c.args)
        a, b = (part(x, Kind.INT if whole_numbers else Kind.FLOAT) for x in c.args)
        return f"{a} {INFIX[c.fn]} {b}"

    def _either(self, c: Condition) -> str:
        """A condition whose parts are all limits of the column, as tests of them joined."""
        sides = column_range(c, self.scope)
        if sides is not None:
            tests = [f"COL <= {self._limit(sides[0])}"] if sides[0] is not None else []
            tests += [f"COL >= {self._limit(sides[1])}"] if sides[1] is not None else []
            return " && ".join(tests)
        assert isinstance(c, AllOf | AnyOf)
        return (" && " if isinstance(c, AllOf) else " || ").join(f"({self._either(p)})" for p in c.parts)

    def _seen(self, uppers: list[Expr], lowers: list[Expr], off: str) -> str:
        """Whether an element's column lies within the row's limits: a bit of the row's mask, which costs less than compares."""
        off_above, off_below = (off, "") if uppers else ("", off)
        above = self._limit(extremum("min", tuple(uppers)), off_above) if uppers else ""
        below = self._limit(extremum("max", tuple(lowers)), off_below, never=0x40000000) if lowers else ""
        key = ("seen", above, below)
        if key not in self.memo:
            x, words = self.code.temporary(), -(-self.columns // 128)
            parts = [f"columns_upto({above}, w)"] if above else []
            parts += [f"~columns_upto({below} - 1, w)"] if below else []
            self.before.append(f"u32 {x}[MT][2][{words}];")
            self.before.append(f"FOR_ROWS UNROLL for (int w = 0; w < {words}; ++w) {x}[t][r][w] = {' & '.join(parts)};")
            self.memo[key] = f"({x}[t][r][i / 16] & COLUMN_BIT) != 0"
        return self.memo[key]

    def _limit(self, e: Expr, off: str = "", never: int = -0x40000000) -> str:
        """The row's limit, counted from the lane's first column; where `off` is true, `never`, which no column meets."""
        key = ("limit", e, off)
        if key not in self.memo:
            x, value = self.code.temporary(), self.row(e, Kind.INT)
            value = f"({off} ? {never:#x} : {value})" if off else value
            self.before += [f"int {x}[MT][2];", f"FOR_ROWS {x}[t][r] = {value} - lane_col;"]
            self.memo[key] = f"{x}[t][r]"
        return self.memo[key]


def column_range(c: Condition, scope: Scope) -> tuple[Expr | None, Expr | None] | None:
    """(largest, smallest) column for which a condition holds, as expressions of the row; None where it is no such range."""
    match c:
        case Limit(form) if is_column_limit(form, scope):
            rest = form.without(COLS)
            return (to_expr(rest), None) if form.coefficient(COLS) < 0 else (None, to_expr(rest * -1))
        case AllOf(parts) | AnyOf(parts):
            sides = [column_range(p, scope) for p in parts]
            if None in sides:
                return None
            uppers = [s[0] for s in sides if s is not None and s[0] is not None]
            lowers = [s[1] for s in sides if s is not None and s[1] is not None]
            if isinstance(c, AnyOf) and uppers and lowers:
                return None
            up, down = ("min", "max") if isinstance(c, AllOf) else ("max", "min")
            return extremum(up, tuple(uppers)) if uppers else None, extremum(down, tuple(lowers)) if lowers else None
    return None


def _columns_only(c: Condition, scope: Scope) -> bool:
    match c:
        case Limit(form):
            return is_column_limit(form, scope)
        case AllOf(parts) | AnyOf(parts):
            return all(_columns_only(p, scope) for p in parts)
    return False


def scales_by_row(s: Compute, scope: Scope) -> str | None:
    """The row tile r of `X = X * r`: x * 1 is x, so the statement can wait until some row changes."""
    match s.value:
        case Op("*", (Var(x), Var(r))) | Op("*", (Var(r), Var(x))) if (
            x == s.into and len(scope.tiles.get(x, ())) == 2 and len(scope.tiles.get(r, ())) == 1
        ):
            return r
    return None
