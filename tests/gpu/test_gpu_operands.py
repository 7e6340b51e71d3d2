"""Operands whose rows do not begin at 16 bytes: read where they lie, or copied first. Both give the kernel's own bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_programs import build, spec

from farm.devices import device_for
from generator.binding import bind
from verifier.cuda_arguments import misaligned, too_narrow
from verifier.judge import read_binary
from verifier.launch_cuda import CudaKernel

pytestmark = pytest.mark.gpu
SPEC = spec("fp16", 64)


@pytest.fixture(scope="module", params=["sm_75", "sm_80", "sm_90a"])
def kernel(request: pytest.FixtureRequest, device: str, cache: Path) -> CudaKernel:
    if device_for(request.param) is None:
        pytest.skip(f"no device here runs {request.param}")
    binary, launch = build(SPEC, request.param, cache)
    torch.zeros(1, device="cuda")  # makes the context that the launcher uses
    return CudaKernel(launch, read_binary(binary))


def placed(x: torch.Tensor, by: int) -> torch.Tensor:
    """The same values in rows that begin at multiples of `by` elements and of no more."""
    wide = torch.zeros((*x.shape[:-1], x.shape[-1] + by), dtype=x.dtype, device="cuda")
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def answer(kernel: CudaKernel, given: dict[str, torch.Tensor], seqlen: int) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Outputs of a call, and the tensors in the kernel's order."""
    q, v = given["q"], given["v"]
    out = {"o": torch.full_like(q[..., : v.shape[-1]].contiguous(), torch.nan), "lse": torch.full(q.shape[:3], torch.nan).cuda()}
    binding = bind(kernel.launch, replace(SPEC, seqlen_q=seqlen, seqlen_k=seqlen))
    order = [(given | out)[t.role] for t in binding.tensors]
    kernel.call(order, [s.value for s in binding.scalars], torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    return out, order


@pytest.mark.parametrize("by", [1, 2, 4])
@pytest.mark.parametrize("seqlen", [130, 1500])
def test_rows_that_begin_anywhere_give_the_same_bits(kernel: CudaKernel, seqlen: int, by: int) -> None:
    torch.manual_seed(seqlen)
    heads = {"q": SPEC.num_heads, "k": SPEC.num_kv_heads, "v": SPEC.num_kv_heads}
    given = {name: torch.randn(1, h, seqlen, 64, device="cuda", dtype=torch.float16) for name, h in heads.items()}
    aligned, order = answer(kernel, given, seqlen)
    assert misaligned(kernel.launch, order) == []
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.float() for x in given.values()), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(aligned["o"].float(), expected, atol=5e-3, rtol=5e-3)
    found, order = answer(kernel, {name: placed(x, by) for name, x in given.items()}, seqlen)
    assert bool(too_narrow(kernel.launch, order)) is (by == 1 or seqlen == 1500) and len(misaligned(kernel.launch, order)) == 3
    for name, x in aligned.items():
        assert torch.equal(x, found[name]), name
