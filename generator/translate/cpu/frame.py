"""What stands around a kernel's statements: runtime headers, arguments, the block's scratch, the grid, the entry point."""

from __future__ import annotations

from importlib.resources import files

from generator.tl.ir import Allocate, Argument, For, Program, Var, walk_statements
from generator.translate.cpu.copies import declare_load, declare_matrix, enter_matrix, pack_shared
from generator.translate.cpu.limits import sees_more
from generator.translate.cpu.names import tile_name
from generator.translate.cpu.ops import Product, Tile, every
from generator.translate.cpu.unit import Unit, indent
from generator.translate.cpu.widths import cache_lines, chunks, padded
from generator.translate.passes.affine import grows_with

#: Headers that every kernel starts with, in the order in which they use each other; bf16.h comes behind where it is needed.
RUNTIME = ("simd.h", "call.h", "limits.h", "tiles.h")
#: What a computed tile's elements are in memory: values are floats until they are stored.
CPP_TYPES = {"f32": "float", "f16": "float", "bf16": "float", "i32": "int32_t"}


def head(program: Program) -> list[str]:
    """What the source is, and what its names begin with."""
    return [
        f"// {program.name}: code for CPUs, translated by rules from a Thinking Language program. Do not edit.",
        "// t_: tiles, m_: matrices as the block sees them, w_: where a copied tile lies, q_: its transpose,",
        "// a_: arguments, g_: grid axes, v_: loop variables.",
    ]


def runtime(unit: Unit) -> list[str]:
    """The headers, written out: a source includes nothing of ours."""
    folder = files("generator.translate.cpu") / "runtime"
    names = RUNTIME + (("bf16.h",) if unit.placement.bf16 else ())
    return [line for name in names for line in ("", f"// ---- {name}", (folder / name).read_text().rstrip())]


def arguments(unit: Unit) -> list[str]:
    """The struct of what a call gives, and of where one block of the grid stands in it."""
    p = unit.program
    matrices = [a for a in p.allocations.values() if a.level == "global"]
    count = " * ".join(f"n_{a.name}" for a in p.axes) or "1"
    members = [f"{'int64_t' if a.dtype == 'i32' else 'float'} a_{n};" for n, a in _scalars(p)]
    members += [f"int64_t n_{a.name}, g_{a.name};  // grid axis: its extent, and where this block stands" for a in p.axes]
    members += [line for a in matrices for line in declare_matrix(unit, a)]
    functions = ["MEMBER void begin(const FarmCall& call) {", *indent(_begin(unit, matrices)), "}"]
    functions.append(f"MEMBER int64_t num_blocks() const {{ return {count}; }}")
    functions.append("// The block of a number: its place in the grid, its matrices.")
    functions += ["MEMBER void enter(int64_t item) {", *indent(_enter(unit, matrices)), "}"]
    return ["", "// ---- the kernel", "namespace {", "struct Arguments {", *indent([*members, *functions, *_sharing(unit)]), "};"]


def _scalars(p: Program) -> list[tuple[str, Argument]]:
    """Whole numbers before floats: a call gives them apart."""
    return sorted(p.arguments.items(), key=lambda item: item[1].dtype != "i32")


def _begin(unit: Unit, matrices: list[Allocate]) -> list[str]:
    """Everything that all blocks of a call share, and the extents of the grid: those may depend on captured values."""
    p = unit.program
    out: list[str] = []
    given = {"ints": 0, "floats": 0}
    for name, argument in _scalars(p):
        kind = "ints" if argument.dtype == "i32" else "floats"
        out.append(f"a_{name} = call.{kind}[{given[kind]}];")
        given[kind] += 1
    out.append("const int64_t* strides = call.strides;")
    for i, a in enumerate(matrices):
        ndim = len(a.offset) + len(a.shape)
        out.append(f"p_{a.name} = (decltype(p_{a.name}))call.tensors[{i}];")
        if ndim:
            out.append(f"for (int i = 0; i < {ndim}; ++i) s_{a.name}[i] = *strides++;")
    out += [f"g_{a.name} = 0;" for a in p.axes] + [line for a in matrices for line in enter_matrix(unit, a)]
    return out + [f"n_{a.name} = imax(0, {unit.names.text(a.extent)});" for a in p.axes]


def _enter(unit: Unit, matrices: list[Allocate]) -> list[str]:
    out = []
    for i, a in enumerate(unit.program.axes):
        last = i == len(unit.program.axes) - 1
        place = "item" if last else f"item % n_{a.name}"
        out.append(f"g_{a.name} = {f'n_{a.name} - 1 - ' if longest_first(unit, i) else ''}{place};")
        if not last:
            out.append(f"item /= n_{a.name};")
    return out + [line for a in matrices for line in enter_matrix(unit, a)]


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
    size = " + ".join(cache_lines(p.size) for p in unit.packs)
    return [
        "// Packed copies that blocks share; false: no memory.",
        "bool share(Packs& packs, int64_t threads) {",
        f"  {last}",
        f"  auto same = [&](int64_t place) {{ enter(place * n_{first}); const bool is = {same}; {keep} return is; }};",
        f"  auto tiles = [&](int64_t) {{ return {tiles}; }};",
        f"  return packs.prepare(num_blocks() / n_{first}, n_{first}, threads, {size}, same, tiles);",
        "}",
    ]


def block(unit: Unit, body: list[str]) -> list[str]:
    """The struct of one block: its scratch memory, the functions that its statements became, and `run`."""
    enter = ["enter(item);"]
    if unit.live_rows is not None:
        enter += [f"live_rows = {unit.names.text(unit.live_rows)};", "if (live_rows <= 0) return;"]
    functions = [
        *unit.functions,
        f"MEMBER int64_t blocks_of_place() const {{ return {f'n_{unit.program.axes[0].name}' if unit.packs else 1}; }}",
        *("void pack(int64_t place, int64_t tile) {", *indent(_pack(unit)), "}"),
        *("void run(int64_t item) {", *indent([*enter, *body]), "}"),
    ]
    return ["", "struct Block : Arguments {", *indent([*_members(unit), *functions]), "};", "}  // namespace"]


def _members(unit: Unit) -> list[str]:
    """What a block keeps: loop variables, what emitters asked for, every tile's memory."""
    loops = [f"int64_t v_{s.var};" for s in walk_statements(unit.program.code) if isinstance(s, For)]
    out = [*dict.fromkeys(loops), *unit.members]
    out += [f"bool zero_{n};  // {n} is zero, which memory does not say yet" for n in sorted(unit.zeros)]
    if unit.live_rows is not None:
        out.append("int64_t live_rows;  // rows of the block that any output keeps")
    for name, tile in unit.ops.tiles.items():
        if tile.loaded and tile.is_element:
            out += declare_load(unit, name)
        elif not tile.is_element:
            out.append(_small_tile(name, tile))
    out += [_scratch(unit, name) for name in dict.fromkeys(unit.placement.buffer.values())]
    out.append(f"typedef {'TileScope' if unit.placement.bf16 else 'NoScope'} Scope;")
    out.append("const Packs* shared;  // null: every block packs for itself")
    out.append("char* packed;  // by whoever took the slot")
    return out


def _small_tile(name: str, tile: Tile) -> str:
    """One value a row, or a single one."""
    kind = CPP_TYPES[tile.dtype]
    return f"{kind} {tile_name(name)};" if not tile.shape else f"alignas(64) {kind} {tile_name(name)}[{padded(tile.rows)}];"


def _scratch(unit: Unit, name: str) -> str:
    """The memory of a computed tile with two axes, and of those that share it."""
    rows, cols = unit.tile(name).shape
    if name in unit.placement.pairs:
        return f"alignas(64) bf16 {tile_name(name)}[{rows} * {cols}];  // {name}, in pairs"
    if any(id(op) in unit.placement.bf16 and op.gemm.into == name for op in every(unit.ops.body) if isinstance(op, Product)):
        cols = chunks(cols)
    shared = ", ".join(n for n, memory in unit.placement.buffer.items() if memory == name)
    kind = CPP_TYPES[unit.tile(name).dtype]
    return f"alignas(64) {kind} {tile_name(name)}[{padded(rows)} * {padded(cols)} + VL];  // {shared}"


def _pack(unit: Unit) -> list[str]:
    """One tile of every packed copy that blocks share."""
    if not unit.packs:
        return []
    return ["enter(place * blocks_of_place());", *pack_shared(unit)]


def longest_first(unit: Unit, axis: int) -> bool:
    """Along the fastest axis, blocks that visit more tiles start first, so that no thread ends with a long one."""
    place = Var(unit.program.axes[axis].name)
    bounds = [s.hi for s in walk_statements(unit.program.code) if isinstance(s, For)]
    grows = any(grows_with(e, place) for e in bounds) or any(sees_more(place, tests) for tests in unit.limits.values())
    return axis == 0 and grows


def entry_point(unit: Unit, entry: str) -> list[str]:
    """The function that a launch calls, as docs/architecture.md has it."""
    permission = ["if (!tiles_allowed()) return 2;  // the system refuses the tile registers"] if unit.placement.bf16 else []
    run = ["Packs packs;"]
    if unit.packs:
        run.append("if (a.num_blocks() > 0 && !a.share(packs, call->parallel ? imax(1, call->num_threads) : 1)) return 1;")
    run.append("return Crew<Block>{*call, a.num_blocks(), packs.memory ? &packs : nullptr}.run();")
    return [
        "",
        f'extern "C" int32_t {entry}(const FarmCall* call) {{',
        *indent([*permission, "Arguments a;", "a.begin(*call);", *run]),
        "}",
    ]
