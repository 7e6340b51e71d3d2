"""Programs at the edges of TL: what checks runs alike interpreted and translated, what does not is told once, with a cure."""

from __future__ import annotations

import numpy as np
import pytest
from cpu_kernels import assert_agrees

from generator.targets import TARGETS, find_target
from generator.tl.checker import parse_and_check
from generator.tl.expand import expand
from generator.tl.ir import Program
from generator.tl.memory import matrix_shapes
from generator.translate import translate
from generator.translate.records import Translated, Untranslatable

FRAME = """Argument M, N i32
Constant BM = 16, BN = 8
Grid m = 0:ceildiv(M, BM)
Allocate X in global (M, N) f32
Allocate Y in global (M, BN) f32
Allocate A in register (BM, BN) f32 = 0
Copy X (BM, BN) in coordinate [L = m, D = 0] from global to shared
Compute A = A + X
{}
Copy A into Y (BM, BN) in coordinate [L = m] from register to global
"""
SOUND = {
    "loops": """for j = 0:2
end
for j = 3:3
Compute A = A + 1.0
end
for j = 5:2
Compute A = A + 1.0
end
for j = -3:2 reversed
Compute A = A * 0.5 + j
end
for j = 4294967296:4294967298
Compute A = A + (j - 4294967296)
end
for a = 0:2
for b = 0:a + 1
for c = b:3
if c > a
for d = N // 5:ceildiv(N * 3, 7)
if d < c + N * N
Compute A = A + a - b * c + d % 3
end
end
else
end
end
end
end""",
    "numbers": """Compute A = A + (rows - 7) % 3 + (rows - 7) // 3 + (cols - 5) // -2 + 1e-46
Compute A = min(A + 1e39, 1e38) * 1e-37 + 9223372036854775807 * 1e-19
Compute A = A + where(inf - inf != 0.0, 3.0, 4.0) + where(sqrt(-1.0 - abs(A)) == sqrt(-1.0), 1.0, 2.0)
Compute A = A + X[rows - 5, cols - 100] + X[rows * 1000000, cols] + X[rows * 67108864, cols]
for j = 0:2
Copy X into T (BM, BN) in coordinate [L = m, D = j * 536870912] from global to shared
Compute A = A + T
end""",
    "names": """Argument class, long i32
Let int = 1
Let double = int + 1
Allocate float in register (BM, BN) f32 = 0
Allocate memset in register (BM) f32 = 1
Allocate Block in register (BM) f32 = 2
Allocate INFINITY in register (BM) f32 = 1
Allocate ROW in register (BM) f32 = 2
for call = 0:2
Compute float = A * INFINITY + memset * Block * ROW + call
end
\tCompute\tA\t=\tfloat + class\x0c- long + double\x0b  # \u00e9 \u4e2d \u202e""",
}


SOUND["signs"] = """Allocate c in register (BM) i32 = -(-3)
Compute c = c + -(-(rows - -2)) - -(-4)
Compute A = A - -1.25 + -(-(A)) * -(-1.5) + abs(-(-0.5)) - -(-(2)) + c + where(-(-m) > -(-1), 1.0, 0.0)
Compute A = A + -(-(-cols)) + -(-(1.0 / -(-4)))
for j = -(-1):N + -(-2)
Compute A = A + j * -(-3)
end"""


def core_of(body: str) -> Program:
    parsed = parse_and_check(FRAME.format(body))
    assert parsed.program is not None and not any(d.severity == "error" for d in parsed.diagnostics), parsed.diagnostics
    return expand(parsed.program)


@pytest.mark.parametrize("name", SOUND)
def test_what_checks_runs_alike(name: str) -> None:
    core = core_of(SOUND[name])
    for m, n in ((0, 5), (1, 1), (33, 7), (20, 19)):
        scalars = {"M": m, "N": n, "class": 3, "long": 5}
        numbers, shapes = np.random.default_rng(m), matrix_shapes(core, scalars)
        tensors = {name: (numbers.integers(-16, 17, shapes[name]) / 8).astype(np.float32) for name in ("X", "Y")}
        assert_agrees(core, tensors, scalars)


#: What is wrong -> the body's line, the code, and a word of the cure.
UNSOUND = {
    "Let a = a + 1\nCompute A = A + a": (9, "use-before-definition", "cannot be defined by itself"),
    "for j = 0:j\nCompute A = A + 1.0\nend": (9, "use-before-definition", "cannot be defined by itself"),
    "Let a = b\nLet b = a\nCompute A = A + a": (9, "use-before-definition", "move the definition up"),
    "Compute M = 2": (9, "kind", "with Let"),
    "for j = 0:2\nCompute j = 1\nend": (10, "kind", "with Let"),
    "for N = 0:2\nCompute A = A + N\nend": (9, "shadowing", "choose another"),
    "Constant Z in {2, 2}\nCompute A = A + Z": (9, "duplicate-name", "once"),
    "Compute A = A + \uff11.0": (9, "bad-character", "ASCII"),
    "Compute A = A + 1.0\u2028Compute A = A + 2.0": (9, "bad-character", "ASCII"),
    "".join(f"for {name} = 0:2\n" for name in "abcdefg") + "Compute A = A + 1.0\n" + "end\n" * 7: (15, "too-deep", "join"),
}


@pytest.mark.parametrize("body", UNSOUND)
def test_what_does_not_check_is_told_once_with_a_cure(body: str) -> None:
    (found,) = [d for d in parse_and_check(FRAME.format(body)).diagnostics if d.severity == "error"]
    line, code, cure = UNSOUND[body]
    assert (found.span.line, found.code) == (line, code) and cure in (found.hint or ""), found
    assert found.span.end_column > found.span.column > 0


@pytest.mark.parametrize(
    "value",
    ["A + rows * 2000000000", "A + where(rows * 3000000000 > 6000000000, 1.0, 0.0)", "where(rows < 4294967296, A, 0.0)",
     "A + where(rows * 4294967296 + cols < 3, 1.0, 0.0)", "A + rowmax(A + cols * 500000000)"],
)  # fmt: skip
def test_whole_numbers_that_do_not_fit_are_refused_not_wrapped(value: str) -> None:
    core = core_of(f"Compute A = {value}")
    for target in (find_target("cpu-avx2"), TARGETS["sm_80"], TARGETS["sm_90a"]):
        out = translate(core, target)
        assert isinstance(out, Untranslatable) and "32 bits" in out.message and out.line == 9, out


def test_where_a_block_counts_in_32_bits_its_bounds_have_to_fit() -> None:
    core = core_of("for j = 4294967296:4294967298\nCompute A = A + (j - 4294967296)\nend")
    assert isinstance(translate(core, find_target("cpu-avx2")), Translated), "64 bits there"
    out = translate(core, TARGETS["sm_80"])
    assert isinstance(out, Untranslatable) and "32 bits" in out.message and out.line == 9


def test_float_literals_beyond_float32_are_what_they_round_to() -> None:
    text = FRAME.replace("(M, N) f32", "(M, N) f16").format("Compute A = min(A + 1e39, 1e38) * 1e-37 - 1e-46 + 1e-45 - -1e-50")
    parsed = parse_and_check(text)
    assert parsed.program is not None
    out = translate(expand(parsed.program), TARGETS["sm_80"])
    assert isinstance(out, Translated)
    assert "+ INF)" in out.source and "1e-46f" not in out.source and "1e-50f" not in out.source and "1e-45f" in out.source


def test_whole_numbers_that_fit_are_not_refused() -> None:
    core = core_of("Compute A = A + rows * 143165576 + where(rows * M < 4 and cols + N * 70000 > -2147483648, 1.0, 0.0)")
    assert isinstance(translate(core, find_target("cpu-avx2")), Translated)
