"""Hardware fact sheets: what translators and plans may know of a target. Holds no facts of one machine: those are measured.

The target `cpu` is one name with several instruction sets; a kernel is built for one of them, and the loader picks by the
processor's own flags.
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
    translator emits, for people. dtypes: of matrices. cpu_flags: what /proc/cpuinfo has to list (CPU only). compute_capability
    (major * 10 + minor), shared_bytes (of a block), registers (of a thread): CUDA only, 0 on CPUs.
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
_BF16 = (*_AVX512, "avx512_bf16")
_AMX = (*_BF16, "amx_tile", "amx_bf16")

#: Instruction set -> the target `cpu` built for it, the weakest first.
CPU_TARGETS: dict[str, Target] = {
    "avx2": Target("cpu", "cpu", "avx2", ("x86-64 with AVX2 and FMA",), ("256-bit FMA",), _ALL, _AVX2),
    "avx512": Target("cpu", "cpu", "avx512", ("x86-64 with AVX-512",), ("512-bit FMA",), _ALL, _AVX512),
    "avx512bf16": Target(
        "cpu", "cpu", "avx512bf16", ("x86-64 with AVX-512 and bf16, Zen 4 and later",), ("512-bit FMA", "VDPBF16PS"), _ALL, _BF16
    ),
    "amx": Target("cpu", "cpu", "amx", ("Xeon with AMX, Sapphire Rapids and later",), ("512-bit FMA", "TDPBF16PS"), _ALL, _AMX),
}

_TURING: tuple[DType, ...] = ("f32", "f16", "i32")

#: CUDA targets, the oldest first; `generator.gpus` holds the cards. Shared memory: what one block may have.
CUDA_TARGETS: dict[str, Target] = {
    "sm_75": Target(
        "sm_75", "cuda", "sm_75", ("Tesla T4", "Quadro RTX 8000"), ("mma.m16n8k8", "ldmatrix"), _TURING,
        compute_capability=75, shared_bytes=64 * 1024, registers=255,
    ),
    "sm_80": Target(
        "sm_80", "cuda", "sm_80", ("A100",), ("mma.m16n8k16", "ldmatrix", "cp.async"), _ALL,
        compute_capability=80, shared_bytes=163 * 1024, registers=255,
    ),
    "sm_90a": Target(
        "sm_90a", "cuda", "sm_90a", ("H100", "H200"), ("wgmma", "TMA", "mbarrier", "setmaxnreg"), _ALL,
        compute_capability=90, shared_bytes=227 * 1024, registers=255,
    ),
}  # fmt: skip

#: Name -> target. `cpu` stands here with its weakest instruction set; `find_target` picks the strongest.
TARGETS: dict[str, Target] = {"cpu": CPU_TARGETS["avx2"], **CUDA_TARGETS}


def cpu_targets(flags: Iterable[str]) -> tuple[Target, ...]:
    """The forms of `cpu` that a processor with these flags runs, the strongest first."""
    present = set(flags)
    return tuple(t for t in reversed(CPU_TARGETS.values()) if present.issuperset(t.cpu_flags))


def find_target(name: str, flags: Iterable[str] = ()) -> Target:
    """The target of a plan's name. `cpu` is its strongest form among `flags`; `cpu-avx512` and the like name a form.

    Raises ValueError that lists the known names, or says what the processor lacks.
    """
    forms = {f"cpu-{isa}": t for isa, t in CPU_TARGETS.items()}
    if name == "cpu":
        if not (found := cpu_targets(flags)):
            raise ValueError(f"targets: cpu: expected a processor with {', '.join(_AVX2)}, found one without")
        return found[0]
    if name not in forms | TARGETS:
        raise ValueError(f"targets: expected one of {', '.join([*TARGETS, *forms])}, found {name!r}")
    return (forms | TARGETS)[name]
