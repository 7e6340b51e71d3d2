"""One translation: the passes in order, then the source text put together. Its parts are written by the other files here."""

from __future__ import annotations

import re
from dataclasses import replace

from generator.targets import Target
from generator.tl.ir import For, Program, walk_statements
from generator.tl.printer import program_hash
from generator.tl.types import Rank
from generator.translate.cpu.folding import fold_into_stores, fold_scales, lazy_zeros
from generator.translate.cpu.frame import arguments, block, entry_point, head, runtime
from generator.translate.cpu.layouts import Placement, bf16_products, is_dot, place
from generator.translate.cpu.limits import LimitTests, find_limits
from generator.translate.cpu.loops import BodyWriter
from generator.translate.cpu.names import Names
from generator.translate.cpu.nests import Sections
from generator.translate.cpu.ops import Loop, Ops, Product, Refused, every, lower, with_liveness
from generator.translate.cpu.schedule import schedule
from generator.translate.cpu.sharing import find_packs
from generator.translate.cpu.types import Types
from generator.translate.cpu.unit import Unit
from generator.translate.facts import LaunchFacts
from generator.translate.passes import Analysis, analyze
from generator.translate.passes.whole_numbers import too_wide
from generator.translate.records import Launch, Translated, Untranslatable, scalar_parameters, tensor_parameters

#: Instruction sets that multiply bf16 values.
BF16_SETS = ("avx512bf16", "amx")
#: Blocks of at most so many rows keep their columns in lanes: a share of a vector of rows would be wasted otherwise.
SMALL_ROWS = 4


def translate_cpu(program: Program, target: Target) -> Translated | Untranslatable:
    """`program` is core code (expanded, filled). What it cannot have code for is told with the reason and the line."""
    try:
        return _translate(program, target)
    except Refused as refused:
        return Untranslatable(refused.reason, str(refused), refused.line)


def _translate(program: Program, target: Target) -> Translated:
    analysis = analyze(program)
    why, line = too_wide(program, analysis.scope, everywhere=False)
    if why:
        raise Refused(why, line)
    unit = plan(analysis, target.isa)
    entry = "farm_" + re.sub(r"\W", "_", program.name or "kernel")
    body = BodyWriter(unit, Sections(unit.ops, unit.types, unit.placement, unit.spans)).body(unit.ops.body, None)
    lines = [*head(program), *runtime(unit), *arguments(unit), *block(unit, body), *entry_point(unit, entry), ""]
    return Translated(target.name, "c++", "\n".join(lines), launch(program, entry, target), program_hash(program), schedule(unit))


def plan(analysis: Analysis, isa: str) -> Unit:
    """Everything that is decided before text is written."""
    program = analysis.program
    ops, types, bf16 = _folded(program, analysis, isa)
    placement = place(ops, SMALL_ROWS, bf16)
    loops = [op for op in every(ops.body) if isinstance(op, Loop)]
    use_skip = program.hints.get("skip") != "off"
    limits = {op.index: find_limits(op, analysis.loops[op.index], types, use_skip) for op in loops}
    block_rows = max((t.rows for t in ops.tiles.values() if not t.loaded and t.shape), default=1)
    unit = Unit(
        program,
        analysis,
        ops,
        types,
        Names(types, _scalar_names(program)),
        placement,
        limits,
        spans=frozenset((i, n) for i, tests in limits.items() for n in _hidden_columns(analysis, i, tests)),
        live_rows=analysis.live_rows if _rows_stay_apart(ops, block_rows) else None,
        block_rows=block_rows,
        chunked=frozenset(op.index for op in loops if any(id(x) in bf16 for x in every(op.body))),
    )
    return replace(unit, packs=find_packs(unit), zeros=lazy_zeros(ops, placement.buffer, lambda op: _starts(op, ops, placement)))


def _folded(program: Program, analysis: Analysis, isa: str) -> tuple[Ops, Types, set[int]]:
    """The ops with their scalings folded away, and which products (by id) multiply bf16 values."""
    ops = lower(program, analysis.scope)
    bf16 = {id(op) for op in bf16_products(ops)} if isa in BF16_SETS else set()
    ops = with_liveness(fold_scales(ops.body, ops.tiles, bf16), ops.tiles)
    types = Types.of(program, ops.tiles)
    body = fold_into_stores(ops, lambda e: types.rank(e) is Rank.ROW and not types.is_integer(e))
    return with_liveness(body, ops.tiles), types, bf16


def _scalar_names(program: Program) -> dict[str, str]:
    """TL name -> C++ name of arguments, grid axes and loop variables."""
    names = {n: f"a_{n}" for n in program.arguments} | {a.name: f"g_{a.name}" for a in program.axes}
    return names | {s.var: f"v_{s.var}" for s in walk_statements(program.code) if isinstance(s, For)}


def _starts(op: Product, ops: Ops, placement: Placement) -> bool:
    """Whether a product that adds can start from zero instead: one of bf16 tiles, or one whose result lies row by row."""
    if id(op) in placement.bf16:
        return True
    return not placement.is_lanes(op.gemm.into) and not is_dot(op.gemm, ops, placement)


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


def launch(program: Program, entry: str, target: Target) -> Launch:
    """How the entry point is called; `view` says whose rows Q's are where they are not its own (`generator.binding`)."""
    facts: LaunchFacts = {"isa": target.isa}
    if "view" in program.hints:
        facts["view"] = program.hints["view"]
    return Launch(entry, tensor_parameters(program), scalar_parameters(program), facts)
