"""The tutorial programs and a model's recorded answers on the CPU: the translated kernel gives what the interpreter gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cpu_kernels import assert_agrees, widest
from test_examples import CODE, FOLDER, cases
from test_recorded_answers import ANSWERS, program_of

from generator.tl.expand import expand
from generator.tl.fill import fill, hole_choices
from generator.tl.ir import Program
from generator.tl.memory import matrix_shapes
from generator.tl.parser import parse_or_raise


def check(program: Program, inputs: dict[str, np.ndarray], scalars: dict[str, int | float]) -> None:
    matrices = [a.name for a in program.allocations.values() if a.level == "global" and a.name not in program.outputs]
    assert_agrees(program, {n: np.asarray(inputs[n]) for n in matrices}, scalars, widest())


@pytest.mark.parametrize("name", CODE)
def test_example(name: str) -> None:
    program = parse_or_raise((FOLDER / name).read_text())
    program = fill(program, next(iter(hole_choices(program))))
    for inputs, scalars, _ in cases(name, program):
        check(program, inputs, scalars)


@pytest.mark.parametrize("name", sorted(p.name.removesuffix(".answer.md") for p in Path(ANSWERS).glob("*.answer.md")))
def test_recorded_answer(name: str) -> None:
    program = program_of(name)
    for rows, keys in ((150, 200), (200, 130), (1, 65)):
        sizes = {"SeqQ": rows, "SeqK": keys, "Heads": 4, "KvHeads": 2, "Batch": 1, "Prefix": 40, "Window": 33}
        shapes = matrix_shapes(expand(program), sizes | {"scale": 0.1, "cap": 3.0})
        rng = np.random.default_rng(rows)
        check(program, {n: rng.standard_normal(shape) for n, shape in shapes.items()}, sizes | {"scale": 0.1, "cap": 3.0})
