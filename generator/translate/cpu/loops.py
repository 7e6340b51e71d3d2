"""Control flow as C++: bodies as runs of sections, loops with their visible range and edge tiles, branches."""

from __future__ import annotations

from generator.tl.ir import ROWS, For, Gemm, Stmt
from generator.tl.printer import print_expression, print_statement
from generator.translate.cpu.copies import load, store
from generator.translate.cpu.elementwise import NestWriter, comment
from generator.translate.cpu.folding import is_zero, touched
from generator.translate.cpu.gemm import BlockPass, product, takes_pass
from generator.translate.cpu.lanes import LaneNest
from generator.translate.cpu.limits import Limit, LimitTests, Tree, conjuncts_of, seen_by_row, seen_text, whole_text
from generator.translate.cpu.nests import Nest, Sections, split_first
from generator.translate.cpu.ops import Branch, Load, Loop, Product, Step, Store, Work, every, reads
from generator.translate.cpu.rows import RowNest, ScalarNest
from generator.translate.cpu.unit import Unit, indent
from generator.translate.cpu.widths import CHUNK, padded


class BodyWriter:
    """Statements in order. Nest functions and loop functions are added to the unit; what is returned calls them."""

    def __init__(self, unit: Unit, sections: Sections) -> None:
        self.unit, self.sections = unit, sections
        self.num_nests = 0
        self.whole_vectors: set[int] = set()  # loops whose columns are walked in whole vectors, beyond those that are seen

    def body(self, body: tuple[Work, ...], loop: Loop | None) -> list[str]:
        """The lines of a body. loop: the innermost loop that it stands in, whose columns may be bounded."""
        out: list[str] = []
        before: Work | None = None
        section: list[Step] = []
        for op in (*body, None):
            if isinstance(op, Step):
                section.append(op)
                continue
            out += self._with_section(before, section, loop)
            before, section = op, []
        return out

    def _with_section(self, op: Work | None, steps: list[Step], loop: Loop | None) -> list[str]:
        """A statement and the section behind it, whose first pass a product may run on its blocks."""
        if not isinstance(op, Product) or not takes_pass(self.unit, op) or not steps:
            return [*(self.work(op, loop) if op is not None else []), *(self.section(steps, loop) if steps else [])]
        return self.section(steps, loop, op)

    def work(self, op: Work, loop: Loop | None) -> list[str]:
        match op:
            case Load(s):
                return [_comment(s), *load(self.unit, s, *self._rows_read(s.into, loop))]
            case Store(s, scale):
                return [_comment(s), *store(self.unit, s, scale)]
            case Product(g):
                return [_comment(g), *product(self.unit, op, loop.index if loop is not None else None)]
            case Loop():
                self.loop(op)
                return [f"loop{op.index}();"]
            case Branch(s):
                then, otherwise = self.body(op.then, loop), self.body(op.otherwise, loop)
                out = [f"if ({self.unit.names.text(s.test)}) {{", *indent(then), "}"]
                return out[:-1] + ["} else {", *indent(otherwise), "}"] if otherwise else out
            case Step():
                raise AssertionError(op)

    def section(self, steps: list[Step], loop: Loop | None, made_by: Product | None = None) -> list[str]:
        """Statements in nests. made_by: the product in front, whose code then stands here too."""
        live = set(self.unit.ops.after(steps[-1]))
        zeros = [s for s in steps if s.into in self.unit.zeros and is_zero(s, self.unit.ops.tiles)]
        zeros = [s for s in zeros if not touched((t for t in steps if t is not s), s.into)]
        nests = self.sections.nests([s for s in steps if s not in zeros], loop.index if loop is not None else -1)
        out = [line for s in zeros for line in (comment(s), f"zero_{s.into} = true;")]
        if made_by is not None:
            nests, lines = self._product_with_pass(made_by, nests, live, loop)
            out += lines
        for i, nest in enumerate(nests):
            later = {n for other in nests[i + 1 :] for s in other.steps for n in s.reads}
            if nest.kind == "rows" and any(p.span is not None for p in nest.phases) and loop is not None:
                self.whole_vectors.add(loop.index)
            out += self._nest(nest, live | later, loop)[1]
        return out

    def _nest(self, nest: Nest, after: set[str], loop: Loop | None, blockwise: bool = False) -> tuple[NestWriter, list[str]]:
        """A nest's function, and the lines that call it."""
        limits = self.unit.limits[loop.index] if loop is not None else LimitTests()
        writer: NestWriter
        match nest.kind:
            case "lanes":
                writer = LaneNest(self.unit, nest, after, limits, blockwise)
            case "rows":
                writer = RowNest(self.unit, nest, after, limits)
            case "scalars":
                writer = ScalarNest(self.unit, nest, after, limits)
        calls = writer.finish(self.num_nests)
        touches = {n for n in self.unit.zeros - writer.guarded if touched(nest.steps, n)}
        where = ", block by block as the product makes it" if blockwise else ""
        self.unit.decisions.append(f"nest{self.num_nests}: {describe(nest)}{where}")
        self.num_nests += 1
        return writer, [line for n in sorted(touches) for line in self.unit.settle(n)] + calls

    def _product_with_pass(
        self, op: Product, nests: list[Nest], live: set[str], loop: Loop | None
    ) -> tuple[list[Nest], list[str]]:
        """The nests that are left for later, and the product with the pass that its blocks run, if there is one."""
        made, at = op.gemm.into, loop.index if loop is not None else None
        halves = split_first(nests[0], made, self.unit.ops.tiles) if nests else None
        if halves is None or halves[0].phases[0].span != self.unit.span_of(made, at):
            return nests, self.work(op, loop)
        first, *later = [*halves, *nests[1:]]
        later = [nest for nest in later if nest.phases]
        number, read = self.num_nests, {n for nest in later for s in nest.steps for n in s.reads}
        writer, calls = self._nest(first, live | read, loop, blockwise=True)
        maxima = tuple(s.into for s in first.steps if s.kind == "rowmax")
        behind = BlockPass(f"nest{number}", writer.has_edge, maxima, tuple(calls))
        return later, [_comment(op.gemm), *product(self.unit, op, at, behind)]

    def _rows_read(self, name: str, loop: Loop | None) -> tuple[str, str]:
        """All rows of a loaded tile, or only those behind the columns that the block may see."""
        rows = self.unit.tile(name).rows
        if loop is None or not self.unit.tile(name).is_element or name in self.unit.placement.turned:
            return "0", str(rows)
        uses = [op for op in every(loop.body) if not isinstance(op, Loop | Branch) and name in reads(op)]
        bounded = all(isinstance(op, Product) and self._bounds_rows(op.gemm, name, loop.index) for op in uses)
        outlives = name in self.unit.ops.after(loop.body[-1])
        return self.unit.span(loop.index if bounded and uses and not outlives else None, rows)

    def _bounds_rows(self, g: Gemm, name: str, loop: int) -> bool:
        return name == g.b and name != g.a and (loop, g.into if g.b_transposed else g.a) in self.unit.spans

    def loop(self, op: Loop) -> None:
        tests = self.unit.limits[op.index]
        body = self.body(op.body, op)
        has_edge = any("EDGE" in x for x in body)
        head = f"template <bool EDGE> void body{op.index}() {{" if has_edge else f"void body{op.index}() {{"
        lines = [_comment(op.stmt), f"void loop{op.index}() {{", *indent(self._range(op.stmt, tests, has_edge)), "}"]
        self.unit.functions += [head, *indent(body), "}", *lines]

    def _range(self, s: For, tests: LimitTests, has_edge: bool) -> list[str]:
        t, v = self.unit.names.text, self.unit.names.scalars[s.var]
        out = self._fill(tests)
        out.append(f"int64_t begin = {t(s.lo)}, end = {t(s.hi)};")
        if tests.seen is not None:
            out += self._shorten(tests.seen, tests.columns)
        steps = f"{v} = end - 1; {v} >= begin; --{v}" if s.reversed else f"{v} = begin; {v} < end; ++{v}"
        return [*out, f"for ({steps}) {{", *indent(self._iteration(tests, has_edge)), "}"]

    def _fill(self, tests: LimitTests) -> list[str]:
        """The bound of every row, once; tests that only whole tiles ask for are filled as well."""
        rows = self.unit.rows(tests.rows)
        out = []
        for x in tests.limits:
            self.unit.members.append(
                f"Limit<{padded(tests.rows)}> {x.name};  // column {'<' if x.upper else '>='} {print_expression(x.bound)}"
            )
            text = self.unit.names.text(x.bound, {ROWS: "r"})
            out.append(f"{x.name}.fill({rows}, [&](int64_t r) {{ return {text}; }});")
        return out

    @staticmethod
    def _shorten(tree: Tree, columns: int) -> list[str]:
        """Tiles that no row sees: the loop leaves them out, since the masked body does nothing (proved)."""
        out = []
        for x in conjuncts_of(tree):
            if isinstance(x, Limit) and x.kappa > 0:
                if x.upper:
                    out.append(f"end = imin(end, floordiv({x.name}.most - 1, {x.kappa}) + 1);")
                else:
                    out.append(f"begin = imax(begin, ceildiv({x.name}.least - {columns - 1}, {x.kappa}));")
        return out

    def _iteration(self, tests: LimitTests, has_edge: bool) -> list[str]:
        """One tile: left out where no row sees it, its body without tests where every row sees all of it."""
        if not tests.masked:
            return [f"body{tests.index}{'<true>' if has_edge else ''}();"]
        i, columns = tests.index, tests.columns
        out = []
        for kappa in tests.kappas:
            self.unit.members.append(f"int64_t {tests.offset(kappa)};")
            out.append(f"{tests.offset(kappa)} = {kappa} * {self.unit.names.scalars[self._variable(i)]};")
        if tests.seen is not None:
            out += [f"const Span seen = both(Span{{0, {columns}}}, {seen_text(tests.seen, tests)});"]
            out += ["if (seen.first >= seen.last) continue;  // no row sees anything here"]
        bounded = any(i == loop for loop, _ in self.unit.spans)
        if bounded:
            out += self._bound_columns(tests)
        if not has_edge:
            return [*out, f"body{i}();"]
        assert tests.whole is not None
        first, last = (f"first{i}", f"last{i}") if bounded else ("0", str(columns))
        if i in self.whole_vectors:
            first, last = (f"{first} / VL * VL" if bounded else first), f"imin({columns}, up({last}))"
        whole = whole_text(tests.whole, tests, first, last)
        return [*out, f"if ({whole}) body{i}<false>();  // every row sees every column: no mask", f"else body{i}<true>();"]

    def _bound_columns(self, tests: LimitTests) -> list[str]:
        """The columns that some row sees, in whole chunks for bf16 products; and those of each row, if one interval."""
        i = tests.index
        self.unit.members.append(f"int64_t first{i}, last{i};  // columns of the tile that some row sees")
        out = [f"first{i} = seen.first, last{i} = seen.last;"]
        if i in self.unit.chunked:
            self.unit.members.append(f"Span exact{i};  // before it was rounded to chunks")
            first, last = f"seen.first / {CHUNK} * {CHUNK}", f"(seen.last + {CHUNK - 1}) / {CHUNK} * {CHUNK}"
            out = [f"exact{i} = seen;", f"first{i} = {first}, last{i} = imin({tests.columns}, {last});"]
        if (by_row := seen_by_row(tests)) is not None:
            self.unit.members.append(f"Seen seen{i};")
            out.append(f"seen{i} = {by_row};")
        return out

    def _variable(self, index: int) -> str:
        return self.unit.analysis.loops[index].loop.var


def _comment(s: Stmt) -> str:
    """The statement's first line as TL writes it."""
    return f"// {next(iter(print_statement(s))).strip()}"


def describe(nest: Nest) -> str:
    """One line of the schedule: what runs in which pass."""
    passes = [
        f"{p.over}: {', '.join(s.into if s.kind in ('row', 'element', 'scalar') else s.into.split('@')[0] for s in p.steps)}"
        for p in nest.phases
    ]
    return f"{nest.kind}, {nest.rows} rows; " + " | ".join(passes)
