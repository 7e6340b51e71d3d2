"""TL to CUDA C++: one program and one target in, self-contained source with a launch description out. Compiles nothing.

By instruction family: copies (`mma_tiles`, `runtime/copy_*.cuh`), products (`mma_block`), loops (`mma_loop`, `mma_pipeline`,
`mma_overlap`), element-wise code, masks and reductions (`element*`), stores (`epilogue`), blocks and tile ranges
(`grid`). wgmma kernels have files of their own.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from generator.targets import Target
from generator.tl.ir import Program
from generator.tl.printer import program_hash
from generator.translate.cuda import names
from generator.translate.cuda.launch import blocks, make_launch, vector_loads
from generator.translate.cuda.mma_kernel import MmaKernel
from generator.translate.cuda.mma_order import Shape
from generator.translate.cuda.mma_sums import ONES, with_rounded_sums
from generator.translate.cuda.refusal import Refused
from generator.translate.cuda.unaligned import entry_of, unaligned_facts, unaligned_unit
from generator.translate.cuda.unit import Unit, round_up
from generator.translate.cuda.wgmma_block import write_wgmma_kernel
from generator.translate.cuda.wgmma_instructions import section
from generator.translate.cuda.wgmma_kernel import Frame
from generator.translate.cuda.wgmma_tiles import why_not
from generator.translate.facts import CudaFacts
from generator.translate.passes.scope import Scope
from generator.translate.passes.whole_numbers import too_wide
from generator.translate.records import Translated, Untranslatable

__all__ = ["translate_cuda"]

HEADERS = Path(__file__).parent / "runtime"
#: Parts of the runtime that a text begins with, in order.
MMA_HEADERS = ("ptx.cuh", "ptx_mma.cuh", "ptx_narrow.cuh", "common.cuh", "shared_tile.cuh", "mma.cuh", "repack.cuh", "narrow.cuh")
ASYNC_COPIES = ("copy_async.cuh", "narrow_async.cuh", "copy_async_narrow.cuh")
STAGED_COPIES = ("copy_staged.cuh", "copy_staged_narrow.cuh")
WGMMA_HEADERS = (
    "ptx.cuh", "ptx_wgmma.cuh", "ptx_narrow.cuh", "common.cuh", "wgmma.cuh", "repack.cuh", "narrow.cuh", "narrow_async.cuh",
    "wgmma_narrow.cuh",
)  # fmt: skip
#: Columns of products' results that a warp of 32 rows holds in registers, a register each and thread.
RESULT_COLUMNS = 200


def translate_cuda(core: Program, target: Target) -> Translated | Untranslatable:
    """CUDA C++ for core code. A program that the target has no code for is a value, not an exception."""
    try:
        why, line = too_wide(core, Scope.of(core), everywhere=True)
        if why:
            raise Refused("translate_failed", why, line)
        if target.compute_capability < 90:
            return _mma(core, target)
        why = "the program's hint" if core.hints.get("family") == "mma" else why_not(Unit.of(core, target))
        return _mma(core, target, f"no wgmma: {why}") if why else _wgmma(core, target)
    except Refused as refused:
        return Untranslatable(refused.reason, refused.message, refused.line)


@cache
def header(name: str) -> str:
    return (HEADERS / name).read_text()


def _mma(core: Program, target: Target, why: str = "") -> Translated:
    asynchronous = target.compute_capability >= 80
    stated, core = core, with_rounded_sums(core)
    u = Unit.of(core, target)
    kernel = MmaKernel(u, _shape(u), asynchronous, names.entry(core.name))
    u.w.raw(
        f"// {core.name}: from TL, for {target.isa}; {kernel.shape.warps} warps of {kernel.shape.row_blocks} x 16 rows\n"
        f"#define FARM_MMA_K {16 if asynchronous else 8}"
    )
    order = ("tile_order.cuh",) if kernel.in_sections else ()
    for name in (*MMA_HEADERS, *order, *(ASYNC_COPIES if asynchronous else STAGED_COPIES)):
        u.w.raw(header(name))
    u.w("", f"constexpr int MT = {kernel.shape.row_blocks}, ROW_STEP = 16, THREADS = {kernel.shape.threads};", "")
    kernel.write()
    narrow = unaligned_unit(core, target, u.w)
    second = MmaKernel(narrow, kernel.shape, asynchronous, entry_of(kernel.entry))
    second.write()
    facts: CudaFacts = {
        "family": "mma.sync",
        "isa": target.isa,
        "grid": [blocks(u), 1, 1],
        "threads": kernel.shape.threads,
        "shared_bytes": kernel.smem,
        "cluster": [1, 1, 1],
        "aligned_16": vector_loads(u),
        "repack": "farm_repack",
        "unaligned": unaligned_facts(kernel.entry, second.smem, "cp.async" if asynchronous else "registers"),
        "tensor_maps": [],
        "workspace": None,
        "parameters": kernel.parameters().facts(),
    }
    launch = make_launch(u, kernel.entry, facts)
    schedule = {
        **u.analysis.to_plain(),
        "notes": [*([why] if why else []), *kernel.notes],
        "orders": kernel.orders,
        "blocks": "longest first, in sections" if kernel.in_sections else "in order",
        "slots": {t.name: t.stages for t in u.tiles.values()},
        "warps": kernel.shape.warps,
        "row_blocks": kernel.shape.row_blocks,
    }
    return Translated(target.name, "cuda", u.w.text, launch, program_hash(stated), schedule)


def _wgmma(core: Program, target: Target) -> Translated:
    u = Unit.of(core, target)
    u.code.masks_as_bits = True
    frame, entry, w = Frame.of(u), names.entry(core.name), u.w
    narrow = unaligned_unit(core, target, w)
    narrow.code.masks_as_bits = True
    second = Frame.of(narrow)
    w.raw(f"// {core.name}: from TL, for {target.isa}; {frame.groups} consumer warpgroups of {frame.row_blocks} x 64 rows")
    for name in WGMMA_HEADERS:
        w.raw(header(name))
    w.raw(section(frame.products() | second.products()))
    w("", f"constexpr int MT = {frame.row_blocks}, ROW_STEP = 64;", "")
    parameters = frame.parameters()
    parameters.write(w)
    write_wgmma_kernel(frame, entry)
    second.parameters().write(w, second.block_type)
    write_wgmma_kernel(second, entry_of(entry))
    unaligned = unaligned_facts(entry, second.placement.bytes, "wgmma", second.parameters())
    facts: CudaFacts = {
        "isa": target.isa,
        "cluster": [1, 1, 1],
        "aligned_16": vector_loads(u),
        "repack": "farm_repack",
        "unaligned": unaligned,
        "family": "wgmma",
        "grid": frame.grid(),
        "threads": frame.threads,
        "shared_bytes": frame.placement.bytes,
        "tensor_maps": frame.tensor_maps(),
        "workspace": frame.workspace(),
        "parameters": parameters.facts(),
    }
    schedule = {
        **u.analysis.to_plain(),
        "notes": [],
        "groups": frame.groups,
        "row_blocks": frame.row_blocks,
        "pingpong": frame.pingpong,
        "ahead": frame.ahead,
        "stages": {t.name: t.stages for t in u.tiles.values()},
    }
    return Translated(target.name, "cuda", w.text, make_launch(u, entry, facts), program_hash(core), schedule)


def _result_columns(u: Unit) -> int:
    return sum(u.shape(n)[1] for n in {g.into for g in u.gemms() if g.b != ONES})


def _shape(u: Unit) -> Shape:
    """Rows over warps: `Hint warps`, else 32 rows a warp where their results fit: right operands are then read half as often."""
    rows = round_up(u.rows, 16)
    hint = u.program.hints.get("warps")
    if hint is not None:
        warps = int(hint)
    elif rows % 128 == 0:
        warps = 4 if rows == 128 else 8
    elif rows == 64 and u.target.compute_capability >= 80 and _result_columns(u) <= RESULT_COLUMNS:
        warps = 2
    else:
        warps = next(n for n in (4, 3, 2, 1) if rows % (16 * n) == 0)
    if warps < 1 or rows % (16 * warps) or rows // (16 * warps) > 4 or warps > 16:
        message = f"Hint warps: {warps} warps cannot share {rows} rows in blocks of 16, at most four a warp"
        raise Refused("translate_failed", message)
    return Shape(warps, rows // (16 * warps))
