"""bf16 products on the CPU: VDPBF16PS here, and AMX with its tile instructions carried out in software, on the same layouts."""

from __future__ import annotations

import numpy as np
import pytest
from cpu_kernels import assert_agrees, available, call, program_of, translated
from test_cpu_programs import attention_call, source

TARGETS = [
    pytest.param(t, marks=pytest.mark.skipif(not available(t), reason="this CPU has no AVX-512 with bf16"))
    for t in ("cpu-avx512bf16", "cpu-amx-emulated")
]


def agrees(text: str, target: str, rows: int, keys: int, dim: int, dim_v: int) -> None:
    program = program_of(text)
    tensors, scalars = attention_call(rows, keys, dim, dim_v)
    assert_agrees(program, {n: x for n, x in tensors.items() if n in program.allocations}, scalars, target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["attention", "variant", "two_pass"])
def test_attention_programs(name: str, target: str) -> None:
    text = source(name, "bf16", BM=64, BN=96, D=64, DV=64)
    for rows, keys in ((77, 133), (33, 500), (200, 129), (1, 1)):
        agrees(text, target, rows, keys, 64, 64)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dims", [(40, 40), (80, 24)])
def test_dims_that_do_not_fill_chunks(dims: tuple[int, int], target: str) -> None:
    """32 columns are one chunk of the contraction: what is missing is zero."""
    agrees(source("attention", "bf16", BM=32, BN=64, D=dims[0], DV=dims[1]), target, 100, 150, *dims)


def test_which_products_multiply_sixteen_bits() -> None:
    """Both GEMMs of attention where tiles come in chunks of 32; none where rows do not, or where the target cannot."""
    in_chunks = program_of(source("attention", "bf16", BM=64, BN=96, D=64, DV=64))
    forms = translated(in_chunks, "cpu-amx").schedule["products"]
    assert forms == ["S = Q K^T: bf16 chunks, rows in lanes", "acc += PA V: bf16 chunks, rows in lanes"]
    assert not any("bf16" in form for form in translated(in_chunks, "cpu-avx512").schedule["products"])
    odd = program_of(source("attention", "bf16", BM=48, BN=96, D=64, DV=64))
    assert not any("bf16" in form for form in translated(odd, "cpu-amx").schedule["products"])


def test_packed_copies_are_shared_by_the_blocks_of_a_head() -> None:
    """V has its columns made rows once for all blocks; K is read in place. Without bf16 products both are widened once."""
    program = program_of(source("attention", "bf16", BM=64, BN=96, D=64, DV=64))
    key = "packed once for all blocks of a head"
    assert translated(program, "cpu-amx").schedule[key] == ["V: turned16"]
    assert translated(program, "cpu-avx2").schedule[key] == ["K: rows", "V: rows"]


@pytest.mark.parametrize("target", TARGETS)
def test_what_no_row_sees_may_be_anything(target: str) -> None:
    """NaN in keys and values in front of every row's window, and in those behind it, inside the chunks that are multiplied."""
    text = source("variant", "bf16", BM=32, BN=64, D=32, DV=32)
    program = program_of(text)
    tensors, scalars = attention_call(20, 110, 32, 32)
    tensors["K"][:, :, :40] = tensors["V"][:, :, :40] = np.nan  # the first row's window starts at key 110 - 20 + 1 - 50
    got = call(program, {**tensors}, scalars, target)
    tensors["K"][:, :, :40] = tensors["V"][:, :, :40] = 0
    want = call(program, {**tensors}, scalars, target)
    assert np.array_equal(got["O"], want["O"]) and np.isfinite(got["O"]).all()


@pytest.mark.parametrize("threads", [1, 2, 3, 9])
def test_threads_share_slots_of_blocks(threads: int) -> None:
    """Five KV heads: more slots than threads, as many, and fewer; who finds none left helps with another's."""
    target = "cpu-avx512bf16" if available("cpu-avx512bf16") else "cpu-avx2"
    program = program_of(source("attention", "bf16", BM=32, BN=64, D=32, DV=32))
    tensors, scalars = attention_call(150, 200, 32, 32, heads=10, kv_heads=5)
    expected = call(program, tensors, scalars, target, threads=1)
    for _ in range(20):
        for name, out in call(program, tensors, scalars, target, threads=threads).items():
            np.testing.assert_array_equal(out, expected[name])
