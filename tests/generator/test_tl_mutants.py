"""What the checker accepts has a meaning: programs altered at random are refused, or the interpreter runs them to the end."""

import random
import re
from pathlib import Path

import numpy as np
import pytest

from generator.tl.checker import parse_and_check
from generator.tl.diagnostics import render
from generator.tl.expand import expand
from generator.tl.interpreter import CallError, run
from generator.tl.ir import Program

VALID = Path(__file__).parents[1] / "programs" / "valid"
#: Small tiles, so that a run takes milliseconds.
SMALL = {
    "softmax_macro": ("BM = 64, BN = 32, D = 64, DV = 128", "BM = 8, BN = 4, D = 8, DV = 6"),
    "two_pass": ("BM = 128, BN = 128, D = 128, DV = 128", "BM = 8, BN = 4, D = 8, DV = 8"),
    "captured": ("BM in {32, 64}, BN = 64, D = 64", "BM = 4, BN = 8, D = 8"),
    "gemm": ("BM = 128, BN = 256, BK = 64", "BM = 8, BN = 4, BK = 4"),
}
MUTANTS = 120
SIZES = {"SeqQ": 9, "SeqK": 7, "Heads": 2, "KvHeads": 2, "Batch": 1, "M": 9, "N": 10, "Kdim": 7}
WORD = re.compile(r"[A-Za-z_0-9.]+|[^\sA-Za-z_0-9.]")


def small(name: str) -> str:
    text = (VALID / f"{name}.tl").read_text()
    assert SMALL[name][0] in text
    return text.replace(*SMALL[name])


def mutate(text: str, chance: random.Random) -> str:
    """One line gone, doubled or moved, or one word of it replaced or gone."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    i, j = chance.randrange(len(lines)), chance.randrange(len(lines))
    words = WORD.findall(lines[i])
    at = chance.randrange(len(words))
    match chance.randrange(5):
        case 0:
            del lines[i]
        case 1:
            lines.insert(j, lines[i])
        case 2:
            lines[i], lines[j] = lines[j], lines[i]
        case 3:
            lines[i] = " ".join([*words[:at], *words[at + 1 :]])
        case 4:
            lines[i] = " ".join([*words[:at], chance.choice(WORD.findall(lines[j])), *words[at + 1 :]])
    return "\n".join(lines) + "\n"


def inputs(core: Program, chance: random.Random):
    """Arrays that are large enough for any sensible extents, and every scalar."""
    rng = np.random.default_rng(chance.randrange(2**32))
    scalars = {n: SIZES.get(n, 5) if a.dtype == "i32" else 0.3 for n, a in core.arguments.items()}
    sizes = {"D": 8, "DV": 8} | scalars
    tensors = {}
    for name, a in core.allocations.items():
        if a.level == "global" and name not in core.outputs:
            shape = (4,) * len(a.offset) + tuple(getattr(e, "value", sizes.get(getattr(e, "name", ""), 3)) for e in a.shape)
            tensors[name] = rng.integers(1, 4, shape) if a.dtype == "i32" else rng.standard_normal(shape)
    return tensors, scalars


@pytest.mark.parametrize("name", SMALL)
def test_accepted_mutants_run(name):
    chance = random.Random(name)
    original = small(name)
    accepted = ran = 0
    for _ in range(MUTANTS):
        text = mutate(original, chance)
        parsed = parse_and_check(text)
        if parsed.program is None or parsed.program.stage == "sketch":
            assert parsed.diagnostics
            continue
        accepted += 1
        core = expand(parsed.program)
        tensors, scalars = inputs(core, chance)
        try:
            run(core, tensors, scalars)
            ran += 1
        except CallError:  # an array that does not suit the altered extents
            pass
        except Exception as error:
            pytest.fail(f"{error!r} of an accepted program:\n{text}\n{render(parsed.diagnostics, text)}")
    assert 3 < accepted < MUTANTS * 0.7
    assert ran > accepted * 0.6
