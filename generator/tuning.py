"""Which choices are worth measuring: a program's holes, pruned and ordered by what a target holds, and hints. Measures nothing.

A choice is a plain dict: constants by their names, hints by theirs (`{"BM": 128, "BN": 64, "stages": "2"}`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from generator.targets import Target
from generator.tl.expand import expand
from generator.tl.fill import fill, hole_choices
from generator.tl.ir import Copy, Gemm, Hint, Program, walk_statements
from generator.translate.passes.scope import Scope

Holes = dict[str, int]
Choice = dict[str, int | str]

#: Target -> hints that are worth trying beside what the translator does by itself, the most promising first. About speed only.
TUNED_HINTS: dict[str, tuple[tuple[str, str], ...]] = {
    "sm_75": (("warps", "8"), ("resident", "off"), ("warps", "4"), ("resident", "on")),
    "sm_80": (
        ("announce", "on"), ("rotate", "off"), ("stages", "1"), ("resident", "on"), ("stages", "3"), ("pingpong", "off"),
        ("rotate", "on"), ("warps", "8"), ("resident", "off"), ("warps", "2"), ("stages", "4"),
    ),
    "sm_90a": (("pingpong", "off"), ("order", "static"), ("stages", "2"), ("stages", "1")),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a block touches.

    scores: the largest tile that statements pass over; copied: tiles of global matrices; sums: tiles that products add to.
    """

    scores: int
    copied: int
    sums: int
    everything: int


def ordered_choices(code: Program, target: Target, caches: Mapping[str, int]) -> list[Holes]:
    """Every choice of the holes that fits, the most promising first; never empty. caches: bytes by name (l1d, l2), 0: unknown.

    On a CPU a choice whose tiles exceed L2 is left out unless nothing else is left; those come first that move the fewest bytes
    for each score. On a GPU the order is the program's own, without what exceeds registers or shared memory.
    """
    choices = list(hole_choices(code))
    if len(choices) < 2:
        return choices
    if target.family == "cuda":
        return [c for c in choices if _fits_gpu(fill(code, c), target)] or choices
    l2 = caches.get("l2") or 1 << 20
    sized = [(c, _footprint(fill(code, c), target)) for c in choices]
    fitting = [(c, f) for c, f in sized if f.everything <= l2] or [min(sized, key=lambda x: x[1].everything)]
    return [c for c, _ in sorted(fitting, key=lambda x: _cost(x[1], l2))]


def with_choice(code: Program, choice: Mapping[str, int | str]) -> Program:
    """The program with its holes filled and its hints (all that is no constant of it) set; a hint that it has is replaced.

    Raises TLError for values that are no choice of a constant.
    """
    hints = {name: str(value) for name, value in choice.items() if name not in code.constants}
    filled = fill(code, {name: int(value) for name, value in choice.items() if name not in hints})
    kept = tuple(s for s in filled.body if not (isinstance(s, Hint) and s.name in hints))
    return replace(filled, body=(*(Hint(name, value) for name, value in hints.items()), *kept))


def neighbours(choice: Choice, choices: Sequence[Holes], target: Target) -> Iterator[Choice]:
    """Choices one step away: one hint set, then one hole a step further up or down, then two hints set.

    choices: those of the holes that fit the target, as `ordered_choices` gives them.
    """
    holes = {name: choice[name] for name in choices[0]} if choices else {}
    changes: list[Choice] = [{name: value} for name, value in TUNED_HINTS.get(target.name, ())]
    for change in changes:
        if any(choice.get(name) != value for name, value in change.items()):
            yield choice | change
    for name in holes:
        values = sorted({c[name] for c in choices})
        above, below = [v for v in values if v > int(holes[name])], [v for v in values if v < int(holes[name])]
        for value in (*above[:1], *below[-1:]):
            if {**holes, name: value} in choices:
                yield choice | {name: value}
    for one, two in combinations(changes, 2):
        if set(one) != set(two):
            yield choice | one | two


#: Registers of a thread that products' tiles may take, beside addresses and rows' values: mma.sync, and wgmma by warpgroups.
MMA_WORDS, WGMMA_WORDS = 200, {1: 216, 2: 216, 3: 136}


def _fits_gpu(program: Program, target: Target) -> bool:
    """Whether results of products fit a thread's registers, and one slot of every copied tile the shared memory. An estimate."""
    tiles = Scope.of(expand(program)).tiles
    statements = list(walk_statements(program.code))
    gemms = [s for s in statements if isinstance(s, Gemm)]
    copied = {s.into for s in statements if isinstance(s, Copy) and s.into_level == "shared"}
    if not gemms:
        return True
    if 2 * sum(math.prod(tiles[n]) for n in copied) > target.shared_bytes - 4096:
        return False
    rows = max(tiles[g.into][0] for g in gemms)
    columns = sum(tiles[n][1] for n in {g.into for g in gemms})
    if target.compute_capability >= 90 and rows % 64 == 0:
        row_blocks = 1 if rows <= 192 else 2
        operands = sum(tiles[n][1] for n in {g.a for g in gemms} - copied)
        return row_blocks * (columns // 2 + operands // 4) <= WGMMA_WORDS.get(rows // 64 // row_blocks, 136)
    row_blocks = 2 if rows % 128 == 0 else 1
    return row_blocks * columns // 2 <= MMA_WORDS


#: What a byte of a sum costs against one of a copied tile, measured: sums are read, changed and written for each tile of keys,
#: while copied tiles are read ahead of the products that take them.
SUM_WEIGHT = 8.0


def _cost(f: Footprint, l2: int) -> float:
    """Bytes of operands and sums that pass by for each byte of scores; more where less than half of L2 is left over."""
    return (f.copied + SUM_WEIGHT * f.sums) / max(1, f.scores) * (1 + max(0.0, f.everything / l2 - 0.5))


def _footprint(code: Program, target: Target) -> Footprint:
    from generator.translate.cpu.kernel import plan
    from generator.translate.cpu.ops import Product, every
    from generator.translate.passes import analyze

    unit = plan(analyze(expand(code)), target.isa)
    tiles = {unit.placement.buffer.get(n, n): unit.tile(n) for n in unit.ops.tiles if unit.tile(n).is_element}
    halved = unit.placement.rows16 | unit.placement.turned16 | unit.placement.pairs | unit.placement.raw
    sizes = {n: math.prod(t.shape) * (2 if n in halved else 4) for n, t in tiles.items()}
    added = {op.gemm.into for op in every(unit.ops.body) if isinstance(op, Product) and op.gemm.accumulate}
    scores = max((size for n, size in sizes.items() if n in unit.placement.layout and n not in added), default=0)
    copied = sum(size for n, size in sizes.items() if tiles[n].loaded)
    sums = sum(size for n, size in sizes.items() if n in added)
    return Footprint(scores or max(sizes.values(), default=0), copied, sums, sum(sizes.values()))
