"""Fact sheets of the cards that the CUDA targets are for: sizes and peak rates as their makers state them. Nothing measured.

A peak bounds what can be believed of a measurement and prunes a search; it is never a prediction.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card.

    target: of `generator.targets`. memory_bytes_per_s: peak. shared_bytes_per_sm, registers_per_sm: what resident blocks share.
    peak_flops: dense, by the dtype of the operands with fp32 accumulation; a dtype that is not listed has no tensor instruction.
    """

    name: str
    target: str
    num_sms: int
    memory_bytes: int
    memory_bytes_per_s: float
    l2_bytes: int
    shared_bytes_per_sm: int
    registers_per_sm: int
    peak_flops: Mapping[str, float]
    source: str


def _rates(**rates: float) -> Mapping[str, float]:
    return MappingProxyType(rates)


#: Name as the driver's product line has it -> card.
GPUS: dict[str, Gpu] = {
    "T4": Gpu(
        "T4", "sm_75", 40, 16 * GIB, 320e9, 4 * MIB, 64 * KIB, 65536,
        _rates(f16=65e12, f32=8.1e12), "NVIDIA T4 data sheet (2019); Turing architecture white paper",
    ),
    "RTX 8000": Gpu(
        "RTX 8000", "sm_75", 72, 48 * GIB, 672e9, 6 * MIB, 64 * KIB, 65536,
        _rates(f16=130.5e12, f32=16.3e12), "NVIDIA Quadro RTX 8000 data sheet (2018); Turing architecture white paper",
    ),
    "A100": Gpu(
        "A100", "sm_80", 108, 80 * GIB, 2039e9, 40 * MIB, 164 * KIB, 65536,
        _rates(f16=312e12, bf16=312e12, f32=19.5e12), "NVIDIA A100 80GB SXM data sheet; A100 architecture white paper",
    ),
    "H100": Gpu(
        "H100", "sm_90a", 132, 80 * GIB, 3350e9, 50 * MIB, 228 * KIB, 65536,
        _rates(f16=989e12, bf16=989e12, f32=67e12), "NVIDIA H100 SXM data sheet; H100 architecture white paper",
    ),
    "H200": Gpu(
        "H200", "sm_90a", 132, 141 * 10**9, 4800e9, 50 * MIB, 228 * KIB, 65536,
        _rates(f16=989e12, bf16=989e12, f32=67e12), "NVIDIA H200 SXM data sheet; H100 architecture white paper",
    ),
}  # fmt: skip


def card_named(device_name: str) -> Gpu | None:
    """The card that a driver's product name speaks of ("NVIDIA A100-SXM4-80GB"); None for one without a fact sheet."""
    words = re.split(r"[^A-Za-z0-9]+", device_name)
    known = sorted(GPUS, key=len, reverse=True)
    return next((GPUS[name] for name in known if _follow(name.split(), words)), None)


def _follow(wanted: list[str], words: list[str]) -> bool:
    return any(words[i : i + len(wanted)] == wanted for i in range(len(words)))


def cards_of(target: str) -> tuple[Gpu, ...]:
    """The cards that a target's code is for."""
    return tuple(g for g in GPUS.values() if g.target == target)
