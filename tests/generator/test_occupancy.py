"""Blocks on a multiprocessor, by the numbers that NVIDIA's occupancy calculator gives for the same kernels."""

from __future__ import annotations

import pytest

from generator.gpus import GPUS
from generator.occupancy import cannot_run, not_worth_it, occupancy, occupancy_of


@pytest.mark.parametrize(
    ("card", "capability", "threads", "registers", "shared", "blocks", "limit"),
    [
        ("A100", 80, 128, 255, 48 << 10, 2, "registers"),  # 255 rounds to 256: 32,768 registers a block
        ("A100", 80, 128, 128, 82 << 10, 1, "shared memory"),  # 83 KiB with what the system takes: 164 KiB hold one
        ("A100", 80, 128, 128, 81 << 10, 2, "shared memory"),
        ("A100", 80, 256, 32, 0, 8, "registers"),
        ("A100", 80, 32, 16, 0, 32, "blocks"),
        ("T4", 75, 128, 128, 32 << 10, 2, "shared memory"),
        ("T4", 75, 256, 64, 0, 4, "registers"),
        ("H200", 90, 384, 168, 224 << 10, 1, "registers"),
        ("H200", 90, 512, 128, 100 << 10, 1, "registers"),
        ("A100", 80, 512, 255, 0, 0, "registers"),
    ],
)
def test_blocks_and_what_limits_them(card, capability, threads, registers, shared, blocks, limit) -> None:
    found = occupancy(GPUS[card], capability, threads, registers, shared)
    assert (found.blocks, found.warps) == (blocks, blocks * threads // 32)
    assert found.limit == limit


def test_what_cannot_run_and_what_is_not_worth_it() -> None:
    facts = {"threads": 512, "shared_bytes": 0}
    assert cannot_run(occupancy_of("sm_80", 80, facts, {"registers": 255})) == (
        "registers: no multiprocessor of A100 holds a block"
    )
    one_warp = occupancy_of("sm_75", 75, {"threads": 32, "shared_bytes": 60 << 10}, {"registers": 64})
    assert cannot_run(one_warp) == "" and not_worth_it(one_warp, {}).startswith("shared memory: 1 warps")
    fine = occupancy_of("sm_80", 80, {"threads": 128, "shared_bytes": 64 << 10}, {"registers": 168})
    assert not_worth_it(fine, {"spill_bytes": 8}) == "" and "spills 148 bytes" in not_worth_it(fine, {"spill_bytes": 148})


def test_nothing_is_said_of_a_processor_or_without_a_report() -> None:
    assert occupancy_of("cpu", 0, {"threads": 4}, {"registers": 16}) is None
    assert occupancy_of("sm_80", 80, {"threads": 128}, {}) is None and cannot_run(None) == not_worth_it(None, {}) == ""
