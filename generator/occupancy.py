"""How many blocks of a kernel a multiprocessor holds, from what the compiler reports and the card's fact sheet. Runs nothing.

Used to leave out of a search what cannot run or wastes the device; never to foretell a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from generator.gpus import Gpu, cards_of
from generator.translate.facts import CudaFacts, LaunchFacts

#: Compute capability -> threads and blocks that a multiprocessor holds, and shared memory that the system takes of each block.
_LIMITS = {75: (1024, 16, 0), 80: (2048, 32, 1024), 90: (2048, 32, 1024)}
#: Registers are given to warps in pieces of this many; a thread's count is rounded up to eight.
_REGISTER_UNIT = 256
#: A multiprocessor has four schedulers; with fewer warps some have nothing to do.
SCHEDULERS = 4
#: Bytes a thread spilled above which a candidate waits for those that spill less.
SPILL_BYTES = 64


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Blocks and warps of one kernel on one multiprocessor of a card; 0 blocks: it cannot run there."""

    card: str
    blocks: int
    warps: int
    limit: str  # what there is too little of: registers, shared memory, threads, blocks


def occupancy(card: Gpu, capability: int, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """threads: of a block. registers: of a thread. shared_bytes: of a block, dynamic and static."""
    max_threads, max_blocks, reserved = _LIMITS[capability]
    warps = -(-threads // 32)
    of_warp = -(-max(registers, 1) // 8) * 8 * 32
    of_block = warps * -(-of_warp // _REGISTER_UNIT) * _REGISTER_UNIT
    fits = {
        "registers": card.registers_per_sm // of_block,
        "shared memory": card.shared_bytes_per_sm // (shared_bytes + reserved) if shared_bytes + reserved else max_blocks,
        "threads": max_threads // (warps * 32),
        "blocks": max_blocks,
    }
    limit = min(fits, key=lambda name: fits[name])
    return Occupancy(card.name, fits[limit], fits[limit] * warps, limit)


def occupancy_of(target: str, capability: int, facts: LaunchFacts, resources: Mapping[str, Any]) -> Occupancy | None:
    """By a launch's facts and a compiler's report; the target's card that holds the fewest. None where nothing was reported."""
    facts = cast(CudaFacts, facts)  # of a launch for another kind of target, `get` finds nothing
    registers, threads = resources.get("registers"), facts.get("threads")
    if not registers or not threads or capability not in _LIMITS:
        return None
    shared = facts.get("shared_bytes", 0)
    found = [occupancy(card, capability, threads, int(registers), shared) for card in cards_of(target)]
    return min(found, key=lambda o: o.blocks, default=None)


def cannot_run(found: Occupancy | None) -> str:
    """Why no block of it fits a multiprocessor; "" where one does."""
    return f"{found.limit}: no multiprocessor of {found.card} holds a block" if found and not found.blocks else ""


def not_worth_it(found: Occupancy | None, resources: Mapping[str, Any]) -> str:
    """Why a search should look at other candidates first; "" for one that is worth a measurement."""
    if (spilled := int(resources.get("spill_bytes") or 0)) > SPILL_BYTES:
        return f"it spills {spilled} bytes of a thread's registers"
    if found and found.warps < SCHEDULERS:
        return f"{found.limit}: {found.warps} warps on a multiprocessor of {found.card}, which has {SCHEDULERS} schedulers"
    return ""
