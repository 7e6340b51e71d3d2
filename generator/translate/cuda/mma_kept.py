"""Iterations of mma.sync loops that take no row maximum: each row keeps its reference while its weights stay below 2.

Whether they do is seen in the operand that they become: none has the exponent's highest bit. Where one has, the warp makes the
tile's scores again, from operands that still lie in shared memory, and runs the whole of the code. Which orders of copies leave
them there, the orders say (`Loop.repeats`). Without a reference, a row's weights are infinity, or NaN where it sees nothing.
"""

from __future__ import annotations

from generator.translate.cuda import names
from generator.translate.cuda.element_code import Setting
from generator.translate.cuda.mma_loop import Loop
from generator.translate.passes import LoopPlan


def keeps(loop: Loop, setting: Setting) -> bool:
    """Whether this part of a loop is run so: not its edges, whose tests would stand in the code twice."""
    return _has_state(loop) and (bool(setting.visible) or not loop.plan.split)


def _has_state(loop: Loop) -> bool:
    """Not in code for rows that begin anywhere, which is to be small."""
    return loop.plan.kept is not None and loop.repeats and not loop.kernel.u.narrow


def between(plan: LoopPlan) -> tuple[int, ...]:
    """Positions of the code between the products."""
    return tuple(sorted((*plan.schedule.early, *plan.schedule.late)))


def settled(k: int) -> str:
    """C: whether all rows of the warp have a reference."""
    return f"settled{k}"


def write_settled(loop: Loop) -> None:
    """Behind code that may have moved references."""
    kept, w = loop.plan.kept, loop.kernel.u.w
    if kept is None or not _has_state(loop) or not loop.remembers:
        return
    x = loop.kernel.u.code.temporary()
    w(f"bool {x} = false;", f"FOR_ROWS {x} |= {names.tile(kept.reference)}[t][r] == -INF;")
    w(f"{settled(loop.k)} = !__any_sync(0xffffffffu, {x});")


def write_kept(loop: Loop, setting: Setting) -> None:
    """The code between the products, without maxima; then, where that will not do, first products and code once more.

    What is remembered of the rows saves no work here: the branch keeps the code behind the products in front of it, where it is
    faster, and the compiler would mix them.
    """
    x, w = loop.kernel.u.code.temporary(), loop.kernel.u.w
    w("// whether a reference has to move", f"bool {x} = true;", f"if ({settled(loop.k)}) {{")
    _write_without_maxima(loop, setting, x)
    w("}", f"if ({x}) {{")
    _restore_sums(loop)
    loop.run(loop.plan.schedule.first, setting)
    _write_whole(loop, setting)
    w("}")


def write_tried(loop: Loop, setting: Setting) -> None:
    """First products and the code behind them, at most twice: without maxima, then, where that will not do, the whole of it.

    One copy of the products in the text: what they hold has not to be kept for a second one. A loop begins with the whole.
    """
    x, w = loop.kernel.u.code.temporary(), loop.kernel.u.w
    w("// whether a reference has to move", f"bool {x} = it{loop.k} == 0;", "#pragma unroll 1", "while (true) {")
    loop.run(loop.plan.schedule.first, setting)
    w(f"if ({x}) {{")
    _write_whole(loop, setting)
    w("break;", "}")
    _write_without_maxima(loop, setting, x)
    w(f"if (!{x}) break;")
    _restore_sums(loop)
    w("}")


def _write_whole(loop: Loop, setting: Setting) -> None:
    loop.run(between(loop.plan), setting)
    write_settled(loop)


def _write_without_maxima(loop: Loop, setting: Setting, moves: str) -> None:
    kernel, kept = loop.kernel, loop.plan.kept
    assert kept is not None
    for name in kept.sums:
        kernel.u.w(f"FOR_ROWS {_before(name, loop.k)}[t][r] = {names.tile(name)}[t][r];")
    for s in kept.code:
        kernel.pending = set()
        kernel.statement(s, setting)
    kernel.u.w(f"{moves} = __any_sync(0xffffffffu, reaches_two({names.tile(kept.operand)}));")


def _restore_sums(loop: Loop) -> None:
    """Row sums that the weights were added to already."""
    kept = loop.plan.kept
    assert kept is not None
    for name in kept.sums:
        x = names.tile(name)
        loop.kernel.u.w(f"FOR_ROWS {x}[t][r] = {_before(name, loop.k)}[t][r];")


def write_state(loop: Loop) -> None:
    """In front of the loop: what goes from one iteration into the next."""
    kept, w = loop.plan.kept, loop.kernel.u.w
    if kept is not None and _has_state(loop):
        if loop.remembers:
            w(f"bool {settled(loop.k)} = false;  // whether all rows of the warp have a reference")
        for name in kept.sums:
            w(f"float {_before(name, loop.k)}[MT][2];")


def _before(name: str, k: int) -> str:
    return f"{names.tile(name)}_before{k}"
