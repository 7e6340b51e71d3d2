"""All passes of one program in one record: `analyze(program)`. Holds results; each pass has a file of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from generator.tl.ir import Compute, Copy, Expr, For, Num, Op, Program, Stmt, Var, walk, walk_statements
from generator.tl.printer import print_expression as show
from generator.translate.passes.affine import extremum, sum_of
from generator.translate.passes.conditions import Condition, condition, conjuncts, limits, mentions
from generator.translate.passes.kept import Kept, kept
from generator.translate.passes.normalize import normalize
from generator.translate.passes.proofs import LoopProof, prove
from generator.translate.passes.ranges import Box, Interval, certain, edge_tiles, intersect, possible
from generator.translate.passes.schedule import Schedule, schedule
from generator.translate.passes.scope import Scope, carried
from generator.translate.passes.storage import shared_storage


@dataclass(frozen=True, slots=True)
class Mask:
    """A test of integers that varies along a loop: what hides elements of a tile.

    expr: the test as it stands in a `where` of the loop's body. rows, columns: the tile it is asked for.
    """

    expr: Expr
    condition: Condition
    rows: int
    columns: int
    skippable: bool


@dataclass(frozen=True, slots=True)
class TileRange:
    """Half-open ranges of the loop variable, as expressions (see passes.ranges for their symbols).

    lo, hi: the iterations worth running for rows ROW_FIRST..ROW_LAST; may be empty. gap: iterations inside that see nothing, or
    None. full_lo, full_hi: where every test of `split` is true for every element of these rows; within lo..hi only after
    clamping. `edge_above`: at most so many iterations lie in [full_hi, hi); None when no bound is known.
    """

    lo: Expr
    hi: Expr
    gap: tuple[Expr, Expr] | None
    full_lo: Expr
    full_hi: Expr
    has_edge_below: bool
    has_edge_above: bool
    edge_above: int | None


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """What is known of one loop.

    split: the tests that are true in [full_lo, full_hi) and can vanish there. covered: a tile in which all of `split` is false is
    the identity, so an empty range may be run as one masked tile. dead_first: positions in the body that do nothing in the first
    iteration. notes: every rule that did not apply, with its reason.
    """

    loop: For
    carried: tuple[str, ...]
    masks: tuple[Mask, ...]
    split: tuple[Expr, ...]
    range: TileRange
    schedule: Schedule
    covered: bool
    dead_first: tuple[int, ...]
    columns: tuple[Expr, ...]
    column_tiles: frozenset[str]
    kept: Kept | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Analysis:
    """program: the core program that the plans speak of (`where` normalised). loops: in textual order, outer ones first.

    live_rows: how many rows of the block any output keeps, as an expression; None when every row is kept or it is not known.
    storage: tile -> the tile whose registers it takes.
    """

    program: Program
    scope: Scope
    loops: tuple[LoopPlan, ...]
    storage: dict[str, str]
    live_rows: Expr | None

    def plan(self, loop: For) -> LoopPlan:
        """The plan of this very loop statement."""
        return next(p for p in self.loops if p.loop is loop)

    def to_plain(self) -> dict[str, Any]:
        """The record as plain JSON values, for people and for golden tests."""
        return {
            "live_rows": show(self.live_rows) if self.live_rows is not None else None,
            "storage": dict(sorted(self.storage.items())),
            "loops": [_plain_loop(p) for p in self.loops],
        }


def analyze(program: Program) -> Analysis:
    """Runs every pass on a core program."""
    program = normalize(program)
    scope = Scope.of(program)
    loops = [s for s in walk_statements(program.code) if isinstance(s, For)]
    found = [_masks(loop, scope) for loop in loops]
    proofs = prove(program, scope, {i: tuple(m.expr for m in masks) for i, masks in enumerate(found)})
    plans = tuple(_plan(loop, found[i], proofs[i], program, scope) for i, loop in enumerate(loops))
    return Analysis(program, scope, plans, shared_storage(program, scope), _live_rows(program, scope))


def _masks(loop: For, scope: Scope) -> list[Mask]:
    """Tests of the loop's own statements that hold its variable; that they may be skipped is still to be proved."""
    out: dict[Expr, Mask] = {}
    for s in loop.body:
        if not isinstance(s, Compute):
            continue
        rows = scope.tiles[s.into][0] if scope.tiles[s.into] else 1
        columns = scope.tiles[s.into][1] if len(scope.tiles[s.into]) == 2 else scope.columns(s.value)
        for e in walk(s.value):
            if isinstance(e, Op) and e.fn == "where":
                for test in conjuncts(e.args[0]):
                    c = condition(test, scope)
                    if limits(c) and mentions(c, loop.var):
                        out[test] = Mask(test, c, rows, columns, skippable=False)
    return list(out.values())


def _plan(loop: For, found: list[Mask], proof: LoopProof, program: Program, scope: Scope) -> LoopPlan:
    notes = []
    use_skip = program.hints.get("skip") != "off"
    masks = tuple(replace(m, skippable=m.expr in proof.skippable) for m in found)
    skipping = tuple(m for m in masks if m.skippable and use_skip)
    if masks and len(skipping) < len(masks):
        notes.append(
            f"no tile is skipped for {'; '.join(show(m.expr) for m in masks if m not in skipping)}: {proof.why or 'the hint'}"
        )
    candidates = tuple(m for m in masks if m.skippable) or masks
    split = tuple(m for m in candidates if certain(m.condition, loop.var, Box(m.columns), scope) is not None)
    if program.hints.get("split") == "off":
        split = ()
        notes.append("not split: the program's hint")
    order = schedule(loop, program)
    if order.why:
        notes.append(f"{order.kind}: {order.why}")
    return LoopPlan(
        loop,
        carried=carried(loop.body, live_after=scope.tiles),
        masks=masks,
        split=tuple(m.expr for m in split),
        range=_range(loop, skipping, split, scope),
        schedule=order,
        covered=bool(skipping),
        dead_first=proof.dead_first,
        columns=proof.columns,
        column_tiles=proof.column_tiles,
        kept=kept(loop, program, scope),
        notes=tuple(notes),
    )


def _range(loop: For, skipping: tuple[Mask, ...], split: tuple[Mask, ...], scope: Scope) -> TileRange:
    some = intersect(tuple(possible(m.condition, loop.var, Box(m.columns), scope) for m in skipping))
    full = intersect(tuple(c for m in split if (c := certain(m.condition, loop.var, Box(m.columns), scope)) is not None))
    edges = [edge_tiles(m.condition, loop.var, Box(m.columns), m.rows, scope) for m in split]
    lo = extremum("max", (loop.lo, some.lo)) if some.lo is not None else loop.lo
    hi = extremum("min", (loop.hi, some.hi)) if some.hi is not None else loop.hi
    return TileRange(
        lo,
        hi,
        gap=some.gap,
        full_lo=full.lo if full.lo is not None else lo,
        full_hi=full.hi if full.hi is not None else hi,
        has_edge_below=full.lo is not None,
        has_edge_above=full.hi is not None,
        edge_above=None if None in edges else max((e for e in edges if e is not None), default=0),
    )


def _live_rows(program: Program, scope: Scope) -> Expr | None:
    """min over what one block can keep: rows of the tile, and rows left in the matrix that it is stored to."""
    kept: list[Expr] = []
    for s in walk_statements(program.code):
        if isinstance(s, Copy) and s.into_level == "global" and scope.tiles.get(s.source):
            rows = scope.tiles[s.source][0]
            left = sum_of(program.allocations[s.into].shape[0], Op("neg", (sum_of(Op("*", (s.coordinate[0], Num(rows)))),)))
            kept.append(extremum("min", (left, Num(rows))))
    grid = {a.name for a in program.axes}
    if not kept or any(isinstance(x, Var) and x.name not in grid | set(program.arguments) for e in kept for x in walk(e)):
        return None
    return extremum("max", tuple(kept))


def _plain_loop(p: LoopPlan) -> dict[str, Any]:
    def statements(positions: tuple[int, ...]) -> list[str]:
        return [_short(p.loop.body[i]) for i in positions]

    r = p.range
    return {
        "loop": f"{p.loop.var} = {show(p.loop.lo)}:{show(p.loop.hi)}" + (" reversed" if p.loop.reversed else ""),
        "carried": list(p.carried),
        "masks": [{"test": show(m.expr), "skippable": m.skippable} for m in p.masks],
        "split": [show(e) for e in p.split],
        "range": [show(r.lo), show(r.hi)],
        "gap": [show(e) for e in r.gap] if r.gap else None,
        "full": [show(r.full_lo), show(r.full_hi)],
        "edge_above": r.edge_above,
        "schedule": p.schedule.kind,
        "first": statements(p.schedule.first),
        "early": statements(p.schedule.early),
        "late": statements(p.schedule.late),
        "second": statements(p.schedule.second),
        "deferred": list(p.schedule.deferred),
        "covered": p.covered,
        "dead_first": statements(p.dead_first),
        "columns": [show(e) for e in p.columns],
        "column_tiles": sorted(p.column_tiles),
        **({"kept": [_short(s) for s in p.kept.code]} if p.kept is not None else {}),
        "notes": list(p.notes),
    }


def _short(s: Stmt) -> str:
    name = type(s).__name__
    return f"{name} {getattr(s, 'into', getattr(s, 'var', ''))}"


__all__ = ["Analysis", "Interval", "LoopPlan", "Mask", "TileRange", "analyze"]
