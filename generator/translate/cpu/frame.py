"""What stands around a kernel's statements: runtime headers, arguments, the block's scratch, the grid, the entry point."""

from __future__ import annotations

from importlib.resources import files

from generator.tl.ir import For, Program, walk_statements
from generator.translate.cpu.copies import declare_load, declare_matrix, enter_matrix, pack_shared
from generator.translate.cpu.limits import grows_with, rises
from generator.translate.cpu.names import tile_name
from generator.translate.cpu.ops import Product, every
from generator.translate.cpu.unit import Unit, chunks, indent, padded

RUNTIME = ("simd.h", "call.h", "limits.h", "tiles.h")


def head(program: Program) -> list[str]:
    return [
        f"// {program.name}: code for CPUs, translated by rules from a Thinking Language program. Do not edit.",
        "// t_: tiles, m_: matrices as the block sees them, w_: where a copied tile lies, q_: its transpose,",
        "// a_: arguments, g_: grid axes, v_: loop variables.",
    ]


def runtime(unit: Unit) -> list[str]:
    folder = files("generator.translate.cpu") / "runtime"
    names = RUNTIME + (("bf16.h",) if unit.placement.bf16 else ())
    return [line for name in names for line in ("", f"// ---- {name}", (folder / name).read_text().rstrip())]


def arguments(unit: Unit) -> list[str]:
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
    fill += [f"g_{a.name} = 0;" for a in p.axes] + [line for a in matrices for line in enter_matrix(unit, a)]
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
        "bool share(Packs& packs, int64_t threads) {",
        f"  {last}",
        f"  auto same = [&](int64_t place) {{ enter(place * n_{first}); const bool is = {same}; {keep} return is; }};",
        f"  auto tiles = [&](int64_t) {{ return {tiles}; }};",
        f"  return packs.prepare(num_blocks() / n_{first}, n_{first}, threads, {size}, same, tiles);",
        "}",
    ]


def block(unit: Unit, body: list[str]) -> list[str]:
    members = [f"int64_t v_{s.var};" for s in walk_statements(unit.program.code) if isinstance(s, For)]
    members = list(dict.fromkeys(members)) + unit.members
    members += [f"bool zero_{n};  // {n} is zero, which memory does not say yet" for n in sorted(unit.zeros)]
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
    run = ["void run(int64_t item) {", *indent(["enter(item);", *live, *body]), "}"]
    scope = "TileScope" if unit.placement.bf16 else "NoScope"
    members += [
        f"typedef {scope} Scope;",
        "const Packs* shared;  // null: every block packs for itself",
        "char* packed;  // by whoever took the slot",
    ]
    pack = [
        f"MEMBER int64_t blocks_of_place() const {{ return {f'n_{unit.program.axes[0].name}' if unit.packs else 1}; }}",
        "void pack(int64_t place, int64_t tile) {",
        *indent(_pack(unit)),
        "}",
    ]
    run = [*pack, *run]
    return ["", "struct Block : Arguments {", *indent([*members, *unit.functions, *run]), "};", "}  // namespace"]


def _small_tile(name: str, shape: tuple[int, ...], dtype: str) -> str:
    kind = "int32_t" if dtype == "i32" else "float"
    return f"{kind} {tile_name(name)};" if not shape else f"alignas(64) {kind} {tile_name(name)}[{padded(shape[0])}];"


def _pack(unit: Unit) -> list[str]:
    """One tile of every packed copy that blocks share."""
    if not unit.packs:
        return []
    return ["enter(place * blocks_of_place());", *pack_shared(unit)]


def _enter(unit: Unit) -> list[str]:
    out = []
    for i, a in enumerate(unit.program.axes):
        last = i == len(unit.program.axes) - 1
        place = "item" if last else f"item % n_{a.name}"
        out.append(f"g_{a.name} = {f'n_{a.name} - 1 - ' if longest_first(unit, i) else ''}{place};")
        if not last:
            out.append(f"item /= n_{a.name};")
    for matrix in unit.program.allocations.values():
        if matrix.level == "global":
            out += enter_matrix(unit, matrix)
    return out


def longest_first(unit: Unit, axis: int) -> bool:
    """Along the fastest axis, blocks that visit more tiles start first, so that no thread ends with a long one."""
    name = unit.program.axes[axis].name
    bounds = [s.hi for s in walk_statements(unit.program.code) if isinstance(s, For)]
    grows = any(rises(e, name) for e in bounds) or any(grows_with(name, tests) for tests in unit.limits.values())
    return axis == 0 and grows


def entry_point(unit: Unit, entry: str) -> list[str]:
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
