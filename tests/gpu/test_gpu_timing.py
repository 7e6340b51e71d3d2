"""Timing on a real GPU: rivals take part or say why not, long and short kernels, rules that SDPA lacks."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_programs import build, spec

from farm.devices import device_for
from generator.spec import AttentionSpec, Rule
from verifier.cuda_benchmark import measure_cuda
from verifier.cuda_rivals import NAMES
from verifier.patience import Patience
from verifier.records import Measurement

pytestmark = pytest.mark.gpu
QUICK = Patience(min_rounds=6, max_rounds=12, budget_s=1.0)
SHAPES: dict[str, tuple[AttentionSpec, tuple[str, ...]]] = {
    "long": (spec("bf16", 128, seqlen=8192, heads=16, kv_heads=16), tuple(n for n in NAMES if n != "flex attention")),
    "short": (spec("bf16", 64, seqlen=256, heads=4, kv_heads=4), ("torch cudnn", "torch flash-attention-2", "torch eager")),
    "window": (
        spec("bf16", 64, seqlen=1024, heads=8, kv_heads=8, masks=(Rule.make("window", left=255),)),
        ("torch flash-attention-2", "torch sdpa with a mask", "flex attention"),
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_kernel_is_timed_beside_its_rivals(device: str, cache: Path, shape: str, record_property) -> None:
    target = next((t for t in ("sm_90a", "sm_80", "sm_75") if (d := device_for(t)) and t not in d.borrowed), None)
    if target is None:
        pytest.skip("no target is written for this card")
    of, rivals = SHAPES[shape]
    binary, launch = build(of, target, cache)
    result = measure_cuda(binary, launch, of, device=device, patience=QUICK, rivals=rivals)
    assert isinstance(result, Measurement), result
    told = {t.name: f"{t.p50_s * 1e6:.1f} us" for t in (result.ours, *result.rivals)}
    facts = result.environment
    print(f"\n{shape}: {of} on {target}: {told}; unsupported {result.unsupported}; graphs {facts['graphs']} of "
          f"{facts['calls_in_batch']} {facts['without_graph']}; warm {facts['warm_s']}; wall/device {facts['wall_over_device']}; "
          f"{facts['flops_per_s'] / 1e12:.0f} of {facts['matmul_flops'] / 1e12:.0f} TFLOP/s; copy "
          f"{facts['copy_bytes_per_s'] / 1e12:.2f} TB/s; floor {result.floor_s * 1e6:.1f} us; {facts['gpu']}")  # fmt: skip
    assert set(told) - {"ours"} | set(result.unsupported) == set(rivals) and result.rivals
    assert facts["graphs"] is (shape != "long") and result.ours.p50_s > result.floor_s
    assert 0.8 < result.wall_vs_device < 3.0
    if shape == "window":
        assert "flex attention" in told, result.unsupported
    else:
        assert {"torch cudnn", "torch flash-attention-2"} <= set(told), result.unsupported
