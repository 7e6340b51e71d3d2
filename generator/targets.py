"""Hardware fact sheets: what translators and plans may know of a target. Holds no facts of one machine (cache sizes, core counts are measured).

A CPU target is an instruction set; the same kernel text style serves all of them, and the loader picks by the CPU's own flags.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from generator.tl.ir import DType

Family = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Target:
    """What code is written for.

    isa: the instruction set, as `Launch.target_facts` and the compiler know it ("avx512", "sm_90a"). instructions: what the
    translator emits, for people. dtypes: of matrices. cpu_flags: what /proc/cpuinfo has to list (CPU only). compute_capability,
    shared_bytes (of a block), registers (of a thread): CUDA only, 0 on CPUs.
    """

    name: str
    family: Family
    isa: str
    hardware: tuple[str, ...]
    instructions: tuple[str, ...]
    dtypes: tuple[DType, ...]
    cpu_flags: tuple[str, ...] = ()
    compute_capability: int = 0
    shared_bytes: int = 0
    registers: int = 0


_ALL: tuple[DType, ...] = ("f32", "f16", "bf16", "i32")
_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")

#: Name -> target, weakest instruction set first.
CPU_TARGETS: dict[str, Target] = {
    "cpu-avx2": Target("cpu-avx2", "cpu", "avx2", ("x86-64 with AVX2 and FMA",), ("256-bit FMA",), _ALL, _AVX2),
    "cpu-avx512": Target("cpu-avx512", "cpu", "avx512", ("x86-64 with AVX-512",), ("512-bit FMA",), _ALL, _AVX512),
    "cpu-amx": Target(
        "cpu-amx", "cpu", "amx", ("Xeon with AMX (Sapphire Rapids and later)",), ("512-bit FMA", "TDPBF16PS tiles"), _ALL,
        (*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16"),
    ),
}  # fmt: skip

TARGETS: dict[str, Target] = dict(CPU_TARGETS)


def cpu_targets(flags: Iterable[str]) -> tuple[Target, ...]:
    """The CPU targets that a processor with these flags runs, strongest first."""
    present = set(flags)
    return tuple(t for t in reversed(CPU_TARGETS.values()) if present.issuperset(t.cpu_flags))


def find_target(name: str, flags: Iterable[str] = ()) -> Target:
    """The target of a plan's name; `cpu` is the strongest instruction set among `flags`. Raises ValueError that lists the known names."""
    if name == "cpu":
        if not (found := cpu_targets(flags)):
            raise ValueError(
                f"targets: cpu needs a processor with {', '.join(_AVX2)}; this one lists {len(set(flags))} flags without them"
            )
        return found[0]
    if name not in TARGETS:
        raise ValueError(f"targets: expected one of cpu, {', '.join(TARGETS)}, found {name!r}")
    return TARGETS[name]
