"""Zeros that are only a flag, scalings and maxima that stores and products take on the way: alike to the interpreter."""

from __future__ import annotations

import re

import numpy as np
import pytest
from cpu_kernels import assert_agrees, available, program_of, translated
from test_cpu_programs import source
from test_cpu_schedule import kernel_text

TARGETS = [
    pytest.param(t, marks=pytest.mark.skipif(not available(t), reason="this CPU has no such vectors"))
    for t in ("cpu-avx2", "cpu-avx512bf16", "cpu-amx-emulated")
]

# A block of products with a row factor; `Parts` of them, so that none may run. Placeholders: {before} and {after} the product.
PRODUCTS = """
Argument M, N, K, Parts i32
Constant BM = 32, BN = 32, BK = 32
Grid m = 0:ceildiv(M, BM)
Allocate A in global (M, K) bf16
Allocate B in global (K, N) bf16
Allocate R in global (M) f32
Allocate C in global (M, N) f32
Allocate acc in register (BM, BN) f32 = 0
Copy R (BM) in coordinate [L = m] from global to shared
for k = 0:Parts
  Copy A (BM, BK) in coordinate [L = m, D = k] from global to shared
  Copy B (BK, BN) in coordinate [L = k, D = 0] from global to shared
  {before}
  Compute GEMM A, B and accumulate acc
  {after}
end
{end}
Copy acc into C (BM, BN) in coordinate [L = m, D = 0] from register to global
"""


def text_of(before: str = "", after: str = "", end: str = "") -> str:
    text = PRODUCTS.replace("{before}", before).replace("{after}", after).replace("{end}", end)
    return "\n".join(line for line in text.splitlines() if line.strip())


BODIES = {
    "plain": text_of(),
    "scaled": text_of(before="Compute acc = acc * R"),
    "read first": text_of(before="Compute acc = acc + R"),
    "read last": text_of(after="Compute acc = acc - R", end="Compute acc = acc * (R + 1.0)"),
    "zero again": text_of(after="Compute acc = 0.0"),
    "scaled and stored": text_of(end="Compute acc = acc * where(R > 0.0, 1.0 / R, 0.0)"),
    "stored twice": text_of(
        end="Compute acc = acc * R\nCopy acc into C (BM, BN) in coordinate [L = m, D = 0] from register to global"
    ),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("parts", [0, 1, 3])
def test_agrees_with_the_interpreter(name: str, target: str, parts: int) -> None:
    rng = np.random.default_rng(0)
    rows, cols, depth = 45, 32, 96
    factors = rng.standard_normal(rows).astype(np.float32)
    if name == "scaled":
        factors[[3, 40]] = np.inf  # 0 times infinity is no zero, whatever stands for it
    tensors = {
        "A": rng.standard_normal((rows, depth)).astype(np.float32),
        "B": rng.standard_normal((depth, cols)).astype(np.float32),
        "R": factors,
        "C": np.zeros((rows, cols), np.float32),
    }
    assert_agrees(program_of(BODIES[name]), tensors, {"M": rows, "N": cols, "K": depth, "Parts": parts}, target)


def test_where_zeros_are_a_flag_and_stores_scale() -> None:
    """The first product starts from zero; what is stored last is scaled on the way, unless it is read again."""
    once = translated(program_of(BODIES["scaled and stored"])).source
    assert "zero_acc = true;" in once and "t_scale_at_0);" in once
    assert "scale_at" not in translated(program_of(BODIES["stored twice"])).source


def test_products_run_the_pass_behind_them_block_by_block() -> None:
    """Of bf16 tiles, where it only changes the result in place and takes maxima; in edge tiles it runs on the whole tile."""
    text = source("attention", "bf16", BM=64, BN=96, D=64, DV=64)
    by_block = (
        r"product_bf16<64, false>\(.*, \[&\]\(int64_t lane, int64_t n0, int64_t n1\) \{ (nest\d)<32 / VL, EDGE>\(lane, n0, n1\)"
    )
    assert re.search(by_block, kernel_text(text, "cpu-amx"))
    scaled = text.replace(
        "  Compute new_max = max(row_max, rowmax(S))", "  Compute S = S * 2.0\n  Compute new_max = max(row_max, rowmax(S))"
    )
    assert scaled != text and re.search(by_block, kernel_text(scaled, "cpu-amx"))
    summed = text.replace(
        "  Compute new_max = max(row_max, rowmax(S))", "  Compute new_max = max(row_max, rowmax(S) + 0.0 * rowsum(S))"
    )
    assert summed != text and not re.search(by_block, kernel_text(summed, "cpu-amx"))
    assert "product_lanes<64, false, NONE>" in kernel_text(text, "cpu-avx512")
