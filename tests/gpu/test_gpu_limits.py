"""Calls at the edges of what a launch can be: many blocks, rows of 8 bytes, odd groups of heads, unlike head dims."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpu_programs import build, spec

from farm.devices import device_for
from generator.binding import bind
from generator.spec import AttentionSpec
from verifier.launch_cuda import CudaKernel
from verifier.trial import trials_for

pytestmark = pytest.mark.gpu
TARGETS = ("sm_75", "sm_80", "sm_90a")
ALIKE, UNLIKE = spec("fp16", 64), replace(spec("fp16", 72), head_dim_v=40)


@pytest.fixture(params=TARGETS)
def target(request) -> str:
    if device_for(request.param) is None:
        pytest.skip(f"no device here runs {request.param}")
    return request.param


def tensors(of: AttentionSpec, pad: int = 0) -> list[torch.Tensor]:
    """q, k, v with `pad` elements between rows."""
    shapes = [
        (of.num_heads, of.seqlen_q, of.head_dim), (of.num_kv_heads, of.seqlen_k, of.head_dim),
        (of.num_kv_heads, of.seqlen_k, of.head_dim_v),
    ]  # fmt: skip
    wide = [torch.randn(of.batch, *shape[:2], shape[2] + pad, device="cuda", dtype=torch.float16) for shape in shapes]
    return [x[..., : shape[2]] for x, shape in zip(wide, shapes, strict=True)]


def called(of: AttentionSpec, target: str, cache: Path, q, k, v) -> torch.Tensor:
    """The kernel's answer, launched in this process as the loader does it."""
    binary, launch = build(of, target, cache)
    torch.zeros(1, device="cuda")  # makes the context
    out = torch.full((*q.shape[:3], v.shape[3]), float("nan"), device="cuda", dtype=q.dtype)
    lse = torch.empty(q.shape[:3], device="cuda")
    given = {"q": q, "k": k, "v": v, "o": out, "lse": lse}
    binding = bind(launch, of)
    kernel = CudaKernel(launch, Path(binary.path).read_bytes())
    call = kernel.prepare([given[t.role] for t in binding.tensors], [s.value for s in binding.scalars])
    call.run(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    return out


def matches(out: torch.Tensor, q, k, v) -> None:
    """Head by head against float32, in pieces."""
    group = q.shape[1] // k.shape[1]
    for first in range(0, q.shape[1], 4096 * group):
        heads, keys = slice(first, first + 4096 * group), slice(first // group, first // group + 4096)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[:, heads].float(), k[:, keys].float(), v[:, keys].float(), is_causal=True, enable_gqa=group > 1
        )
        torch.testing.assert_close(out[:, heads].float(), expected, atol=4e-3, rtol=4e-3)


def test_more_blocks_than_65535(target: str, cache: Path) -> None:
    of = ALIKE.with_shape(batch=2, num_heads=40_000, num_kv_heads=40_000, seqlen_q=20, seqlen_k=20)
    q, k, v = tensors(of)
    matches(called(of, target, cache, q, k, v), q, k, v)


@pytest.mark.parametrize("pad", [4, 3], ids=["rows of 8 bytes", "rows of 2 bytes"])
def test_rows_that_are_no_16_bytes_apart(target: str, cache: Path, pad: int) -> None:
    of = ALIKE.with_shape(num_heads=4, num_kv_heads=2, seqlen_q=133, seqlen_k=133)
    q, k, v = tensors(of, pad)
    assert q.stride(2) * 2 % 16 == 2 * pad % 16
    matches(called(of, target, cache, q, k, v), q, k, v)


@pytest.mark.parametrize("heads", [(14, 2), (5, 1), (9, 3)], ids=lambda h: f"{h[0]} over {h[1]}")
def test_groups_of_any_size_and_unlike_head_dims(target: str, cache: Path, heads: tuple[int, int]) -> None:
    of = UNLIKE.with_shape(num_heads=heads[0], num_kv_heads=heads[1], seqlen_q=131, seqlen_k=131)
    q, k, v = tensors(of)
    matches(called(of, target, cache, q, k, v), q, k, v)


def test_offsets_beyond_31_bits_are_among_the_judges_inputs() -> None:
    cases = [t.case for t in trials_for(spec("fp16", 64)).trials]
    assert any(case.layout == "far" and case.spec.seqlen_k >= 3 for case in cases)
