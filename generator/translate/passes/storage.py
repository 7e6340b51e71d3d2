"""Which tiles may share registers: one made element by element from another that is dead afterwards. Allocates nothing."""

from __future__ import annotations

from generator.tl.ir import Compute, For, Gemm, If, Program, Stmt, names
from generator.translate.passes.scope import Scope, defs, exposed, flatten, uses


def shared_storage(program: Program, scope: Scope) -> dict[str, str]:
    """Tile -> the tile whose place it takes. Chains are followed to their root."""
    out: dict[str, str] = {}
    flat = list(flatten(program.code))
    for i, s in enumerate(flat):
        if not isinstance(s, Compute) or len(scope.tiles.get(s.into, ())) != 2 or s.into in out:
            continue
        for x in sorted(names(s.value)):
            if _may_take(program, scope, flat, i, s.into, x) and x not in out.values():
                out[s.into] = out.get(x, x)
                break
    return out


def _may_take(program: Program, scope: Scope, flat: list[Stmt], i: int, y: str, x: str) -> bool:
    a, d = program.allocations.get(x), program.allocations.get(y)
    if (
        x == y
        or a is None
        or d is None
        or a.level != "register"
        or scope.tiles[x] != scope.tiles[y]
        or a.init is not None
        or d.init is not None
    ):
        return False
    if any(y in uses(s) | defs(s) for s in flat[:i]):
        return False
    return not _read_again(program.code, flat, i, x)


def _read_again(code: tuple[Stmt, ...], flat: list[Stmt], i: int, x: str) -> bool:
    """Whether x's value after statement i of the flat order may still be read: later in the text, or in the next iteration."""
    for s in flat[i + 1 :]:
        if x in uses(s):
            return True
        if x in defs(s) and not (isinstance(s, Gemm) and s.accumulate):
            break
    return any(x in exposed(s.body) for s in _enclosing(code, flat[i]))


def _enclosing(body: tuple[Stmt, ...], target: Stmt) -> list[For]:
    """The loops around a statement, outermost first."""
    for s in body:
        if s is target:
            return []
        match s:
            case For():
                if any(x is target for x in flatten(s.body)):
                    return [s, *_enclosing(s.body, target)]
            case If():
                for branch in (s.then, s.otherwise):
                    if any(x is target for x in flatten(branch)):
                        return _enclosing(branch, target)
    return []
