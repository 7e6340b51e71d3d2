"""Programs of the tutorial folder through the CPU translator, compared with the interpreter."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from cpu_kernels import assert_agrees, available, program_of

PROGRAMS = Path(__file__).parents[1] / "programs" / "valid"
TARGETS = [
    pytest.param(t, marks=pytest.mark.skipif(not available(t), reason="this CPU lacks it")) for t in ("cpu-avx2", "cpu-avx512")
]


def source(name: str, dtype: str = "f32", **constants: int) -> str:
    text = (PROGRAMS / f"{name}.tl").read_text().replace("bf16", dtype)
    for constant, value in constants.items():
        text = re.sub(rf"\b{constant} = \d+", f"{constant} = {value}", text, count=1)
    return text


def attention_call(rows: int, keys: int, dim: int, dim_v: int, heads: int = 4, kv_heads: int = 2) -> tuple[dict, dict]:
    rng = np.random.default_rng(rows * keys + dim)

    def values(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    tensors = {
        "Q": values(1, heads, rows, dim), "K": values(1, kv_heads, keys, dim), "V": values(1, kv_heads, keys, dim_v),
        "O": values(1, heads, rows, dim_v), "LSE": values(1, heads, rows),
    }  # fmt: skip
    scalars = {"scale": dim**-0.5, "SeqQ": rows, "SeqK": keys, "Heads": heads, "KvHeads": kv_heads, "Batch": 1}
    return tensors, scalars | {"cap": 5.0, "Window": 50, "bias": -1.0}


def agrees(text: str, call: tuple[dict, dict], target: str) -> None:
    program = program_of(text)
    tensors, scalars = call
    assert_agrees(program, {n: x for n, x in tensors.items() if n in program.allocations}, scalars, target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["attention", "variant", "sigmoid", "two_pass"])
def test_attention_programs(name: str, target: str) -> None:
    """Rows that see nothing, ragged ends, grouped heads; one tile size, several lengths."""
    text = source(name, BM=32, BN=48, D=64, DV=64)
    for rows, keys in ((77, 133), (33, 500), (200, 129), (1, 1), (5, 48)):
        agrees(text, attention_call(rows, keys, 64, 64), target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dims", [(40, 40), (80, 24), (192, 128)])
def test_odd_head_dims_and_tiles(dims: tuple[int, int], target: str) -> None:
    dim, dim_v = dims
    agrees(source("attention", BM=48, BN=40, D=dim, DV=dim_v), attention_call(100, 150, dim, dim_v), target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_sixteen_bit_tensors(dtype: str, target: str) -> None:
    agrees(source("variant", dtype, BM=32, BN=48, D=64, DV=64), attention_call(90, 200, 64, 64), target)


@pytest.mark.parametrize("target", TARGETS)
def test_few_rows(target: str) -> None:
    """Four rows do not fill a vector: the tiles keep their columns in lanes."""
    agrees(source("attention", BM=4, BN=32, D=64, DV=64), attention_call(6, 100, 64, 64), target)


@pytest.mark.parametrize("target", TARGETS)
def test_plain_gemm(target: str) -> None:
    program = program_of(source("gemm", BM=32, BN=48, BK=16))
    rng = np.random.default_rng(0)
    for m, n, k in ((64, 96, 64), (33, 50, 23), (1, 1, 1)):
        a, b = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((n, k)).astype(np.float32)
        assert_agrees(program, {"A": a, "B": b, "C": np.zeros((m, n), np.float32)}, {"M": m, "N": n, "Kdim": k}, target)


@pytest.mark.parametrize("target", TARGETS)
def test_strided_views(target: str) -> None:
    """(batch, seqlen, heads, dim) memory seen as (batch, heads, seqlen, dim), rows 2 KiB apart, and an expanded K."""
    tensors, scalars = attention_call(70, 90, 64, 64, heads=8, kv_heads=8)
    turned = {n: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) if x.ndim == 4 else x for n, x in tensors.items()}
    assert turned["K"].strides[2] == 2048
    agrees(source("attention", BM=32, BN=48, D=64, DV=64), (turned, scalars), target)
