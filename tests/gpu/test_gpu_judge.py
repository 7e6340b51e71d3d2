"""The judge on a real GPU: good programs of every instruction family pass; every fault costs one child and gets its reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from gpu_programs import build, spec

from farm.devices import device_for
from verifier import gpu_health
from verifier.cuda_sandbox import device_facts, is_alive
from verifier.cuda_selftest import gpu_verdict
from verifier.environment import device_key
from verifier.gpu import gpus_here, use_of
from verifier.judge import judge
from verifier.records import Failed, Passed
from verifier.selftest_check import SPEC
from verifier.traps.cuda import CUDA_TRAPS

pytestmark = pytest.mark.gpu
HALF = replace(SPEC, dtype="fp16")


def test_the_device_key_is_what_the_driver_says(device: str) -> None:
    key, told = device_key(device), device_facts(device)
    assert (key.name, key["sm_count"], key["compute_capability"]) == (told["name"], told["sm_count"], told["compute_capability"])
    assert key["driver_major"] and key["memory_bytes"] >= told["memory_bytes"]
    assert is_alive(device) == "" and len(gpus_here()) >= 1


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_a_hand_made_kernel_passes(device: str, cache: Path, dtype: str) -> None:
    verdict = gpu_verdict(cache, device, "good", replace(SPEC, dtype=dtype))
    assert isinstance(verdict, Passed), verdict
    assert verdict.fences["device_code_only"]


@pytest.mark.parametrize("trap", CUDA_TRAPS, ids=lambda t: t.name)
def test_a_fault_has_its_reason_and_leaves_the_device_well(device: str, cache: Path, trap) -> None:
    before = use_of(device).used_bytes
    verdict = gpu_verdict(cache, device, trap.name, HALF)
    assert isinstance(verdict, Failed) and verdict.reason == trap.reason, verdict
    assert trap.check in ("", verdict.witness.check), verdict
    gpu_health.check_in_service(device)
    assert use_of(device).used_bytes < before + (256 << 20)


def test_after_all_faults_a_good_kernel_passes(device: str, cache: Path) -> None:
    assert isinstance(gpu_verdict(cache, device, "good", HALF), Passed)


@pytest.mark.parametrize(
    ("target", "dtype", "dim"),
    [("sm_75", "fp16", 64), ("sm_80", "bf16", 64), ("sm_80", "fp16", 128), ("sm_90a", "bf16", 128), ("sm_90a", "fp16", 64)],
)
def test_programs_of_every_family_pass(device: str, cache: Path, target: str, dtype: str, dim: int) -> None:
    if device_for(target) is None:
        pytest.skip(f"no device here runs {target}")
    of = spec(dtype, dim)
    binary, launch = build(of, target, cache)
    verdict = judge(binary, launch, of, device=device)
    assert isinstance(verdict, Passed), verdict
