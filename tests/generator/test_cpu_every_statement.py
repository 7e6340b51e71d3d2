"""Without any one of its statements a program's CPU kernel does what the interpreter does, or the checker refuses it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cpu_kernels import assert_agrees, widest
from test_every_statement_counts import EXAMPLES, SIZES, deletions, inputs

from generator.tl.checker import check
from generator.tl.diagnostics import has_errors
from generator.tl.fill import fill, hole_choices
from generator.tl.parser import parse_or_raise

#: A kernel is compiled for every statement: seconds a program. `make soak` runs the rest.
MARKS = {"gemm.tl": (), "retention.tl": (), "causal.tl": (pytest.mark.slow,)}


@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS.get(n, (pytest.mark.soak,))) for n in SIZES])
def test_a_kernel_without_one_of_its_statements(name: str) -> None:
    program = parse_or_raise((EXAMPLES / name).read_text())
    program = fill(program, next(iter(hole_choices(program))))
    arrays, sizes = inputs(program, SIZES[name]), SIZES[name]
    tried = 0
    for _, rest in deletions(program.body):
        shorter = replace(program, body=rest)
        if not has_errors(check(shorter)):
            read = [a.name for a in shorter.allocations.values() if a.level == "global" and a.name not in shorter.outputs]
            assert_agrees(shorter, {n: np.asarray(arrays[n]) for n in read}, sizes, widest(), rtol=1e-4)
            tried += 1
    assert tried
