"""In which order a loop of an mma.sync kernel runs, how many slots its tiles have, what fits into registers. Writes nothing.

Orders other than the program's need what the passes call a rotated schedule: products that depend on no value of the iteration
before (the first ones), and products that only add to such values (the second ones), element-wise code between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from generator.tl.ir import Copy, Gemm
from generator.translate.cuda.mma_sums import ONES
from generator.translate.cuda.mma_tiles import COLUMN_UNIT, contraction, shared_copies, slot_bytes
from generator.translate.cuda.unit import Unit, round_up
from generator.translate.passes import LoopPlan
from generator.translate.passes.scope import defs_of, uses_of

Order = Literal["turns", "rotated", "program"]

#: Registers of a thread that a rotated loop's tiles and operands may take: more spill, beside addresses and the rows' values.
ROTATED_WORDS = 200
#: A block of as many warps has two on every scheduler of a multiprocessor, which can take turns.
TURNS_WARPS = 8
#: Registers of a thread that tiles and operands may take where operands stay in registers for all iterations.
RESIDENT_WORDS = 160


@dataclass(frozen=True, slots=True)
class Shape:
    """How the block's rows are dealt out: `row_blocks` of 16 for each of `warps`."""

    warps: int
    row_blocks: int

    @property
    def threads(self) -> int:
        return 32 * self.warps


@dataclass
class Block:
    """What a kernel is written for. asynchronous: cp.async (sm_80) makes copies, else loads staged in registers (sm_75)."""

    u: Unit
    shape: Shape
    asynchronous: bool


def order_of(block: Block, plan: LoopPlan) -> Order:
    """How a loop is run: by `Hint pingpong` and `Hint rotate`, else turns in a block of eight warps, rotated where it fits."""
    hints = block.u.program.hints
    in_both = reads(plan, "first") & reads(plan, "second") & _copied(plan)
    if plan.schedule.kind != "rotated" or not block.asynchronous or in_both:
        return "program"
    turns = hints.get("pingpong", "on" if block.shape.warps == TURNS_WARPS else "off") != "off"
    if turns and block.shape.warps % 2 == 0 and _bytes(block, dict.fromkeys(_copied(plan), 2)) <= block.u.target.shared_bytes:
        return "turns"
    rotates = hints.get("rotate", "on" if _rotation_fits(block, plan) else "off") != "off"
    return "rotated" if rotates else "program"


def _rotation_fits(block: Block, plan: LoopPlan) -> bool:
    """Whether registers hold it, and as many blocks as they allow find room in a multiprocessor's shared memory."""
    words = tile_registers(block, plan) + _operand_registers(block, plan)
    return words <= ROTATED_WORDS and _shares_multiprocessor(block, plan, _one_and_two(plan))


def slots_of(block: Block, plan: LoopPlan, order: Order) -> dict[str, int]:
    """Slots of each tile that an overlapped loop copies: `Hint stages`, at least as many as the order needs."""
    wanted = int(block.u.program.hints.get("stages", "2"))
    stages = dict.fromkeys(sorted(_copied(plan)), max(2, wanted) if order == "turns" or wanted > 1 else 1)
    if order == "rotated" and wanted > 1 and not _shares_multiprocessor(block, plan, stages):
        return _one_and_two(plan)
    return stages


def _one_and_two(plan: LoopPlan) -> dict[str, int]:
    """The fewest slots with which no copy has to wait for its own iteration's products."""
    first = reads(plan, "first")
    return {n: 1 if n in first else 2 for n in sorted(_copied(plan))}


def _shares_multiprocessor(block: Block, plan: LoopPlan, stages: dict[str, int]) -> bool:
    """Whether as many blocks as the registers allow fit a multiprocessor's shared memory; each costs 1 KiB more."""
    blocks = max(1, 8 // block.shape.warps)
    return blocks * (_bytes(block, stages) + 1024) <= block.u.target.shared_bytes + 1024


def _bytes(block: Block, stages: dict[str, int]) -> int:
    """Shared memory of a block with these slots."""
    sizes = {c.into: slot_bytes(block.u, c) for c in shared_copies(block.u.program.code)}
    return sum(size * stages.get(n, 1) for n, size in sizes.items())


def _copied(plan: LoopPlan) -> set[str]:
    return {s.into for s in plan.loop.body if isinstance(s, Copy) and s.into_level == "shared"}


def reads(plan: LoopPlan, group: Literal["first", "second"]) -> set[str]:
    """Tiles that the first, or the second, products of a rotated schedule read."""
    return uses_of(plan.loop.body[i] for i in (plan.schedule.first if group == "first" else plan.schedule.second))


def _operand_registers(block: Block, plan: LoopPlan) -> int:
    """Registers of a thread that hold operands of the second products."""
    operands = reads(plan, "second") & set(block.u.operands())
    return block.shape.row_blocks * sum(block.u.shape(n)[1] // 4 for n in operands)


def has_room(block: Block, g: Gemm, plan: LoopPlan) -> bool:
    """Whether an operand of the loop fits beside its tiles: `Hint resident = on` or `off`, else by counting registers."""
    hint = block.u.program.hints.get("resident")
    if hint in ("on", "off"):
        return hint == "on"
    if g.a_transposed:
        return False
    return tile_registers(block, plan) + block.shape.row_blocks * (contraction(block.u, g) // 4) <= RESIDENT_WORDS


def tile_registers(block: Block, plan: LoopPlan) -> int:
    """Registers of a thread that the loop's tiles of numbers take; operands apart."""
    live = {x for s in plan.loop.body for x in defs_of((s,)) | uses_of((s,))}
    sums = {s.into for s in plan.loop.body if isinstance(s, Gemm) and s.b == ONES}  # as few as a row's values
    wide = {n for n in live - sums if n in block.u.register_tiles() and len(block.u.shape(n)) == 2}
    roots = {block.u.analysis.storage.get(n, n) for n in wide}
    return block.shape.row_blocks * sum(round_up(block.u.shape(n)[1], COLUMN_UNIT) // 2 for n in roots)
