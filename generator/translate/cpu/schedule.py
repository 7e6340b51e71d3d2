"""The schedule of one kernel as plain values: which layouts, forms and passes were chosen, for people and for golden tests."""

from __future__ import annotations

from generator.tl.ir import Gemm
from generator.translate.cpu.frame import longest_first
from generator.translate.cpu.layouts import is_dot
from generator.translate.cpu.ops import Product, every
from generator.translate.cpu.unit import Unit


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
            f"{a.name}: {'longest first' if longest_first(unit, i) else 'in order'}" for i, a in enumerate(unit.program.axes)
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
