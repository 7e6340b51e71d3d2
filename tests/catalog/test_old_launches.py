"""Launches as the first catalogs hold them: every later start reads them and launches by them. Runs nothing on a device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from catalog.cuda_frames import CudaEntry
from generator.canonical import digest_bytes, to_plain
from generator.occupancy import occupancy_of
from generator.translate.records import Launch, launch_from_plain
from verifier.cuda_arguments import entry_for, make_call, misaligned, too_narrow, unaligned_entry
from verifier.launch import LaunchError, RawTensor

#: Target -> the launch column of a row that the first CUDA translator wrote: no second entry point, no `compact`, no `block`.
OLD: dict[str, Any] = json.loads((Path(__file__).parent / "old_launches.json").read_text())


@pytest.mark.parametrize("target", OLD)
def test_an_old_launch_is_read_and_its_call_is_made(target: str) -> None:
    launch = launch_from_plain(OLD[target])
    assert to_plain(launch) == OLD[target], "and the column stays what it was"
    m, n, k = 256, 512, 64
    tensors = [RawTensor(1 << 20, (k, 1), (m, k)), RawTensor(2 << 20, (k, 1), (n, k)), RawTensor(3 << 20, (n, 1), (m, n))]
    call = make_call(launch, tensors, [m, n, k], workspace=4 << 20, num_sms=132)
    assert len(call.block) == OLD[target]["target_facts"]["parameters"]["bytes"] and call.grid == (4, 1, 1)
    assert [t.address for t in call.maps] == ([1 << 20, 2 << 20] if target == "sm_90a" else [])
    odd = [RawTensor((1 << 20) + 2, (k, 1), (m, k)), *tensors[1:]]
    assert misaligned(launch, odd) == too_narrow(launch, odd) == [0], "with no other entry point, it is copied first"
    assert unaligned_entry(launch) is None and entry_for(launch, odd) is launch
    CudaEntry(launch, b"cubin", digest_bytes(b"cubin"))
    assert occupancy_of(target, 80 if target == "sm_80" else 90, launch.target_facts, {"registers": 168}) is not None


def test_a_launch_of_another_kind_is_named() -> None:
    """A row whose target and launch do not belong together: not a missing key somewhere in the launcher."""
    wrong = Launch("farm_causal", (), (), {"isa": "avx512"})
    with pytest.raises(LaunchError, match="expected those of a CUDA kernel, found farm_causal for avx512 without aligned_16"):
        CudaEntry(wrong, b"", digest_bytes(b""))
    with pytest.raises(LaunchError, match="found an empty launch for no target"):
        make_call(Launch("", (), ()), [], [])
