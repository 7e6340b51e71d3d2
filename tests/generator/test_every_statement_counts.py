"""No statement of a program is idle: without it the checker refuses the program, or the interpreter gives other values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from generator.tl.checker import check
from generator.tl.diagnostics import has_errors
from generator.tl.fill import fill, hole_choices
from generator.tl.interpreter import run
from generator.tl.ir import For, Hint, If, Option, Program, Stmt
from generator.tl.parser import parse_or_raise
from generator.tl.printer import print_statement

EXAMPLES = Path(__file__).parents[2] / "examples" / "tl"
SIZES: dict[str, dict[str, int | float]] = {
    "causal.tl": {"scale": 0.125, "SeqQ": 70, "SeqK": 100, "Heads": 2, "KvHeads": 1, "Batch": 1},
    "sink_logit.tl": {
        "scale": 0.125, "SeqQ": 70, "SeqK": 100, "Heads": 2, "KvHeads": 1, "Batch": 1, "WindowLeft": 9, "WindowRight": 0,
    },
    "two_pass.tl": {"scale": 0.125, "SeqQ": 70, "SeqK": 100, "Heads": 1, "KvHeads": 1, "Batch": 1},
    "retention.tl": {"scale": 0.125, "SeqQ": 70, "SeqK": 100, "Heads": 1, "KvHeads": 1, "Batch": 1},
    "block_sparse.tl": {"scale": 0.125, "SeqQ": 70, "SeqK": 100, "QTiles": 2, "KTiles": 2, "Heads": 1, "KvHeads": 1, "Batch": 1},
    "gemm.tl": {"M": 70, "N": 66, "K": 100},
}  # fmt: skip


def deletions(body: tuple[Stmt, ...]) -> Iterator[tuple[Stmt, tuple[Stmt, ...]]]:
    """Every (statement, body without it), those inside loops and branches too. Declarations of speed or freedom are let be."""
    for i, s in enumerate(body):
        if isinstance(s, Hint | Option):
            continue
        yield s, body[:i] + body[i + 1 :]
        match s:
            case For():
                yield from ((gone, (*body[:i], replace(s, body=rest), *body[i + 1 :])) for gone, rest in deletions(s.body))
            case If():
                yield from ((gone, (*body[:i], replace(s, then=rest), *body[i + 1 :])) for gone, rest in deletions(s.then))


def inputs(program: Program, sizes: dict[str, int | float]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    extent = {k: int(v) for k, v in sizes.items() if k != "scale"} | {c.name: c.choices[0] for c in program.constants.values()}
    shapes = {
        "Q": ("Batch", "Heads", "SeqQ", "D"),
        "K": ("Batch", "KvHeads", "SeqK", "D"),
        "V": ("Batch", "KvHeads", "SeqK", "DV"),
    }
    if "A" in program.allocations:
        shapes = {"A": ("M", "K"), "B": ("N", "K")}
    spread = 1 if "Keep" in program.allocations else 3  # the lazy reference moves only for large scores
    arrays = {name: spread * rng.standard_normal([extent[n] for n in shape]) for name, shape in shapes.items()}
    return arrays | {"SinkLogit": rng.standard_normal(2), "Keep": np.array([[[1, 0], [1, 1]]])}


@pytest.mark.parametrize("name", SIZES)
def test_a_program_without_one_of_its_statements(name: str) -> None:
    program = parse_or_raise((EXAMPLES / name).read_text())
    program = fill(program, next(iter(hole_choices(program))))
    arrays, sizes = inputs(program, SIZES[name]), SIZES[name]
    whole = run(program, arrays, sizes)
    idle, refused, changed = [], 0, 0
    for statement, rest in deletions(program.body):
        shorter = replace(program, body=rest)
        if has_errors(check(shorter)):
            refused += 1
            continue
        found = run(shorter, arrays, sizes)
        if found.keys() == whole.keys() and all(np.array_equal(found[n], whole[n], equal_nan=True) for n in whole):
            idle.append("\n".join(print_statement(statement)))
        else:
            changed += 1
    assert idle == []
    assert refused and changed
