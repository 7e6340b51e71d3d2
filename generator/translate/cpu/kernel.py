"""One translation: the passes in order, then the source text put together. Its parts are written by the other files here."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.resources import files

from generator.targets import Target
from generator.tl.ir import For, Gemm, Op, Program, Var, walk, walk_statements
from generator.tl.printer import program_hash
from generator.translate.cpu.copies import declare_load, declare_matrix, enter_matrix, pack_shared
from generator.translate.cpu.layouts import bf16_products, is_dot, place
from generator.translate.cpu.limits import LimitTests, find_limits, grows_with
from generator.translate.cpu.loops import BodyWriter
from generator.translate.cpu.names import Names, tile_name
from generator.translate.cpu.nests import Sections
from generator.translate.cpu.ops import Loop, Ops, Product, Refused, every, fold_scales, lower, with_liveness
from generator.translate.cpu.sharing import find_packs
from generator.translate.cpu.types import Types
from generator.translate.cpu.unit import Unit, chunks, indent, padded
from generator.translate.passes import Analysis, analyze
from generator.translate.records import Launch, Translated, Untranslatable, scalar_parameters, tensor_parameters

RUNTIME = ("simd.h", "call.h", "limits.h", "tiles.h")
#: Instruction sets that multiply bf16 values; their products need one more header.
BF16_SETS = ("avx512bf16", "amx")
#: Blocks of at most so many rows keep their columns in lanes: a share of a vector of rows would be wasted otherwise.
SMALL_ROWS = 4


def translate_cpu(program: Program, target: Target) -> Translated | Untranslatable:
    """`program` is core code (expanded, filled)."""
    try:
        return _translate(program, target)
    except Refused as refused:
        return Untranslatable(refused.reason, str(refused), refused.line)


def _translate(program: Program, target: Target) -> Translated:
    analysis = analyze(program)
    unit = plan(analysis, target.isa)
    entry = "farm_" + re.sub(r"\W", "_", program.name or "kernel")
    body = BodyWriter(unit, Sections(unit.ops, unit.types, unit.placement, unit.spans)).body(unit.ops.body, None)
    source = "\n".join([*_head(program), *_runtime(unit), *_arguments(unit), *_block(unit, body), *_entry(unit, entry), ""])
    return Translated(target.name, "c++", source, launch(program, entry, target), program_hash(program), schedule(unit))


def plan(analysis: Analysis, isa: str) -> Unit:
    """Everything that is decided before text is written."""
    program = analysis.program
    ops = lower(program, analysis.scope)
    bf16 = {id(op) for op in bf16_products(ops)} if isa in BF16_SETS else set()
    ops = with_liveness(fold_scales(ops.body, ops.tiles, bf16), ops.tiles)
    types = Types.of(program, ops.tiles)
    scalars = {n: f"a_{n}" for n in program.arguments} | {a.name: f"g_{a.name}" for a in program.axes}
    scalars |= {s.var: f"v_{s.var}" for s in walk_statements(program.code) if isinstance(s, For)}
    use_skip = program.hints.get("skip") != "off"
    limits = {
        op.index: find_limits(op, analysis.loops[op.index], types, use_skip) for op in every(ops.body) if isinstance(op, Loop)
    }
    spans = frozenset((i, n) for i, tests in limits.items() for n in _hidden_columns(analysis, i, tests))
    rows = max((t.rows for t in ops.tiles.values() if not t.loaded and t.shape), default=1)
    live = analysis.live_rows if _rows_stay_apart(ops, rows) else None
    placement = place(ops, SMALL_ROWS, bf16)
    chunked = frozenset(op.index for op in every(ops.body) if isinstance(op, Loop) and any(id(x) in bf16 for x in every(op.body)))
    unit = Unit(program, analysis, ops, types, Names(types, scalars), placement, limits, spans, live, rows, chunked)
    return replace(unit, packs=find_packs(unit))


def _hidden_columns(analysis: Analysis, loop: int, tests: LimitTests) -> frozenset[str]:
    """Tiles of a loop whose unseen columns need not be computed: every test that hides one has to be neutral there."""
    hidden = analysis.loops[loop].columns
    skipping = [m for m in tests.masked if m.skippable]
    return analysis.loops[loop].column_tiles if skipping and all(m.test in hidden for m in skipping) else frozenset()


def _rows_stay_apart(ops: Ops, rows: int) -> bool:
    """Whether a row of the block reaches no other row: then those past the end of the outputs need not be right."""
    made = {n for n, t in ops.tiles.items() if not t.loaded}
    if any(t.rows != rows for n, t in ops.tiles.items() if n in made and t.shape):
        return False
    return not any(isinstance(op, Product) and (op.gemm.b in made or op.gemm.a_transposed) for op in every(ops.body))


# ----------------------------------------------------------------------------------------------------------------- texts


def _head(program: Program) -> list[str]:
    return [
        f"// {program.name}: code for CPUs, translated by rules from a Thinking Language program. Do not edit.",
        "// t_: tiles, m_: matrices as the block sees them, w_: where a copied tile lies, q_: its transpose,",
        "// a_: arguments, g_: grid axes, v_: loop variables.",
    ]


def _runtime(unit: Unit) -> list[str]:
    folder = files("generator.translate.cpu") / "runtime"
    names = RUNTIME + (("bf16.h",) if unit.placement.bf16 else ())
    return [line for name in names for line in ("", f"// ---- {name}", (folder / name).read_text().rstrip())]


def _arguments(unit: Unit) -> list[str]:
    p = unit.program
    ints = [n for n, a in p.arguments.items() if a.dtype == "i32"]
    others = [n for n, a in p.arguments.items() if a.dtype != "i32"]
    out = ["", "// ---- the kernel", "namespace {", "struct Arguments {"]
    out += indent([f"int64_t a_{n};" for n in ints] + [f"float a_{n};" for n in others])
    out += indent([f"int64_t n_{a.name}, g_{a.name};  // grid axis: its extent, and where this block stands" for a in p.axes])
    matrices = [a for a in p.allocations.values() if a.level == "global"]
    out += indent([line for a in matrices for line in declare_matrix(unit, a)])
    fill = [f"a_{n} = call.ints[{i}];" for i, n in enumerate(ints)] + [f"a_{n} = call.floats[{i}];" for i, n in enumerate(others)]
    fill.append("const int64_t* strides = call.strides;")
    for i, a in enumerate(matrices):
        ndim = len(a.offset) + len(a.shape)
        fill.append(f"p_{a.name} = (decltype(p_{a.name}))call.tensors[{i}];")
        if ndim:
            fill.append(f"for (int i = 0; i < {ndim}; ++i) s_{a.name}[i] = *strides++;")
    fill += [f"g_{a.name} = 0;" for a in p.axes] + [f"m_{a.name} = p_{a.name};" for a in matrices]
    fill += [f"n_{a.name} = imax(0, {unit.names.text(a.extent)});" for a in p.axes]
    out += indent(["MEMBER void begin(const FarmCall& call) {", *indent(fill), "}"])
    count = " * ".join(f"n_{a.name}" for a in p.axes) or "1"
    out += indent([f"MEMBER int64_t num_blocks() const {{ return {count}; }}"])
    out += indent(
        [
            "// The block of a number: its place in the grid, its matrices.",
            "MEMBER void enter(int64_t item) {",
            *indent(_enter(unit)),
            "}",
        ]
    )
    return [*out, *indent(_sharing(unit)), "};"]


def _sharing(unit: Unit) -> list[str]:
    """How blocks share packed copies: which places on the outer axes see the same matrices, and how many tiles these have."""
    if not unit.packs:
        return []
    first = unit.program.axes[0].name
    matrices = {p.copy.source: unit.tile(p.tile).rows for p in unit.packs}
    last = " ".join(f"const void* p{i} = nullptr; int64_t x{i} = -1;" for i in range(len(matrices)))
    same = " && ".join(f"p{i} == m_{n} && x{i} == x_{n}[0]" for i, n in enumerate(matrices))
    keep = " ".join(f"p{i} = m_{n}, x{i} = x_{n}[0];" for i, n in enumerate(matrices))
    tiles = "0"
    for n, rows in matrices.items():
        tiles = f"imax({tiles}, ceildiv(x_{n}[0], {rows}))"
    size = " + ".join(f"({p.size} + 63) / 64 * 64" for p in unit.packs)
    return [
        "// Packed copies that blocks share; false: no memory.",
        "bool share(Packs& packs) {",
        f"  {last}",
        f"  auto same = [&](int64_t place) {{ enter(place * n_{first}); const bool is = {same}; {keep} return is; }};",
        f"  auto tiles = [&](int64_t) {{ return {tiles}; }};",
        f"  return packs.prepare(num_blocks() / n_{first}, num_blocks(), {size}, same, tiles);",
        "}",
    ]


def _block(unit: Unit, body: list[str]) -> list[str]:
    members = [f"int64_t v_{s.var};" for s in walk_statements(unit.program.code) if isinstance(s, For)]
    members = list(dict.fromkeys(members)) + unit.members
    if unit.live_rows is not None:
        members.append("int64_t live_rows;  // rows of the block that any output keeps")
    for name, tile in unit.ops.tiles.items():
        if tile.loaded and tile.is_element:
            members += declare_load(unit, name)
        elif not tile.is_element:
            members.append(_small_tile(name, tile.shape, tile.dtype))
    for name in dict.fromkeys(unit.placement.buffer.values()):
        rows, cols = unit.tile(name).shape
        if name in unit.placement.pairs:
            members.append(f"alignas(64) bf16 {tile_name(name)}[{rows} * {cols}];  // {name}, in pairs")
            continue
        if any(id(op) in unit.placement.bf16 and op.gemm.into == name for op in every(unit.ops.body) if isinstance(op, Product)):
            cols = chunks(cols)
        kind = "int32_t" if unit.tile(name).dtype == "i32" else "float"
        shared = [n for n, b in unit.placement.buffer.items() if b == name]
        members.append(f"alignas(64) {kind} {tile_name(name)}[{padded(rows)} * {padded(cols)} + VL];  // {', '.join(shared)}")
    live = (
        [f"live_rows = {unit.names.text(unit.live_rows)};", "if (live_rows <= 0) return;"] if unit.live_rows is not None else []
    )
    slot = [f"if (shared) slot = shared->slot_of[item / n_{unit.program.axes[0].name}];"] if unit.packs else []
    run = ["void run(int64_t item) {", *indent(["enter(item);", *slot, *live, *body]), "}"]
    scope = "TileScope" if unit.placement.bf16 else "NoScope"
    members += [f"typedef {scope} Scope;", "const Packs* shared;  // null: every block packs for itself", "int64_t slot;"]
    pack = ["void pack(int64_t item) {", *indent(_pack(unit)), "}"]
    run = [*pack, *run]
    return ["", "struct Block : Arguments {", *indent([*members, *unit.functions, *run]), "};", "}  // namespace"]


def _small_tile(name: str, shape: tuple[int, ...], dtype: str) -> str:
    kind = "int32_t" if dtype == "i32" else "float"
    return f"{kind} {tile_name(name)};" if not shape else f"alignas(64) {kind} {tile_name(name)}[{padded(shape[0])}];"


def _pack(unit: Unit) -> list[str]:
    """One tile of every packed copy that blocks share."""
    if not unit.packs:
        return []
    return [
        "slot = item / shared->tiles;",
        "const int64_t tile = item % shared->tiles;",
        f"enter(shared->place_of[slot] * n_{unit.program.axes[0].name});",
        *pack_shared(unit),
    ]


def _enter(unit: Unit) -> list[str]:
    out = []
    for i, a in enumerate(unit.program.axes):
        last = i == len(unit.program.axes) - 1
        place = "item" if last else f"item % n_{a.name}"
        out.append(f"g_{a.name} = {f'n_{a.name} - 1 - ' if _longest_first(unit, i) else ''}{place};")
        if not last:
            out.append(f"item /= n_{a.name};")
    for matrix in unit.program.allocations.values():
        if matrix.level == "global":
            out += enter_matrix(unit, matrix)
    return out


def _longest_first(unit: Unit, axis: int) -> bool:
    """Along the fastest axis, blocks that visit more tiles start first, so that no thread ends with a long one."""
    name = unit.program.axes[axis].name
    bounds = [s.hi for s in walk_statements(unit.program.code) if isinstance(s, For)]
    grows = any(Var(name) in walk(e) and not any(isinstance(x, Op) and x.fn in ("-", "neg") for x in walk(e)) for e in bounds)
    return axis == 0 and (grows or any(grows_with(name, tests) for tests in unit.limits.values()))


def _entry(unit: Unit, entry: str) -> list[str]:
    permission = ["if (!tiles_allowed()) return 2;  // the system refuses the tile registers"] if unit.placement.bf16 else []
    run = ["Packs packs;"]
    if unit.packs:
        run.append("if (a.num_blocks() > 0 && !a.share(packs)) return 1;")
    run.append("return Crew<Block>{*call, packs.slots * packs.tiles, a.num_blocks(), packs.memory ? &packs : nullptr}.run();")
    return [
        "",
        f'extern "C" int32_t {entry}(const FarmCall* call) {{',
        *indent([*permission, "Arguments a;", "a.begin(*call);", *run]),
        "}",
    ]


# --------------------------------------------------------------------------------------------------------------- records


def launch(program: Program, entry: str, target: Target) -> Launch:
    facts = {"isa": target.isa} | ({"view": program.hints["view"]} if "view" in program.hints else {})
    return Launch(entry, tensor_parameters(program), scalar_parameters(program), facts)


def schedule(unit: Unit) -> dict[str, object]:
    """The decisions as plain values, for people and for golden tests."""
    p = unit.placement
    products = [op for op in every(unit.ops.body) if isinstance(op, Product)]
    return {
        **unit.analysis.to_plain(),
        "layouts": {n: {"layout": layout.value, "reason": p.reason[n]} for n, layout in p.layout.items()},
        "memory": {n: b for n, b in p.buffer.items() if n != b},
        "copies": {n: _copy_forms(unit, n) for n, t in unit.ops.tiles.items() if t.loaded and t.is_element},
        "products": [_product_form(unit, op) for op in products],
        "nests": unit.decisions,
        "unseen columns left out": [f"{n} in loop {i}" for i, n in sorted(unit.spans)],
        "packed once for all blocks of a head": [f"{p.tile}: {p.form}" for p in unit.packs],
        "rows past the end": "left out" if unit.live_rows is not None else "computed: a row may reach another, or all are kept",
        "grid": [
            f"{a.name}: {'longest first' if _longest_first(unit, i) else 'in order'}" for i, a in enumerate(unit.program.axes)
        ],
    }


def _copy_forms(unit: Unit, name: str) -> list[str]:
    p = unit.placement
    forms = ["transposed once"] if name in p.turned else []
    forms += [
        word
        for names, word in ((p.rows16, "16-bit rows"), (p.turned16, "16-bit, columns made rows"), (p.pairs, "16-bit pairs"))
        if name in names
    ]
    if name in p.plain:
        forms.append("rows of whole vectors, packed where they are not" if name in p.padded else "read in place")
    return forms


def _product_form(unit: Unit, op: Product) -> str:
    g: Gemm = op.gemm
    kind = "columns broadcast, rows in lanes" if unit.is_lanes(g.into) else "rows broadcast, columns in lanes"
    if is_dot(g, unit.ops, unit.placement):
        kind = "dot products, the contraction in lanes"
    if id(op) in unit.placement.bf16:
        kind = "bf16 chunks, rows in lanes"
    scaled = f", scaled by {op.scale} on loading" if op.scale else ""
    a, b = g.a + "^T" * g.a_transposed, g.b + "^T" * g.b_transposed
    return f"{g.into} {'+=' if g.accumulate else '='} {a} {b}: {kind}{scaled}"
