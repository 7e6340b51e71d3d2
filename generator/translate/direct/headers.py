"""Headers of ours that foreign source may include, as files for a compiler's folder. Changes no source.

Standard names that NVRTC lacks, the entry point of CPU kernels, and the translators' own device code by instruction family.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from generator.canonical import digest

FOLDER = Path(__file__).parent / "runtime"
_CPU, _CUDA = (Path(__file__).parents[1] / family / "runtime" for family in ("cpu", "cuda"))

#: What NVRTC, which has no C library, gets in its place.
STANDARD_NAMES = ("stdint.h", "cstdint", "math.h", "cmath", "float.h", "cfloat", "cuda.h")
#: Header of the translators -> headers that it needs before it.
CPU_RUNTIME: dict[str, tuple[str, ...]] = {
    "simd.h": (),
    "call.h": ("simd.h", "farm_call.h"),
    "farm_limits.h": ("call.h",),
    "tiles.h": ("farm_limits.h",),
}
#: Where the name of the file would hide a system header.
_FILES = {"farm_limits.h": "limits.h"}
CUDA_RUNTIME: dict[str, tuple[str, ...]] = {
    "ptx.cuh": (),
    "ptx_mma.cuh": ("ptx.cuh",),
    "ptx_wgmma.cuh": ("ptx.cuh",),
    "common.cuh": ("ptx.cuh",),
    "shared_tile.cuh": ("ptx_mma.cuh", "common.cuh"),
    "mma.cuh": ("shared_tile.cuh",),
    "copy_async.cuh": ("shared_tile.cuh",),
    "copy_staged.cuh": ("shared_tile.cuh",),
    "wgmma.cuh": ("ptx_wgmma.cuh", "common.cuh"),
}
#: Family of instructions -> its headers. Source takes one family's: names of the two overlap.
CUDA_FAMILIES: dict[str, tuple[str, ...]] = {
    "mma.sync": ("ptx_mma.cuh", "shared_tile.cuh", "mma.cuh", "copy_async.cuh", "copy_staged.cuh"),
    "wgmma": ("ptx_wgmma.cuh", "wgmma.cuh"),
}
CPU_HEADERS = ("farm_call.h", *CPU_RUNTIME)
CUDA_HEADERS = (*STANDARD_NAMES, *CUDA_RUNTIME)
#: Put before every foreign CUDA source: what the launcher needs of the module besides the kernel.
COPIES = "farm_copies.cuh"


@cache
def cpu_files() -> dict[str, str]:
    """Name -> text, of every header for C++."""
    call = (_CPU / "call.h").read_text()
    entry_point, rest = call[: call.index("namespace {")], call[call.index("namespace {") :]
    texts = {name: (_CPU / _FILES.get(name, name)).read_text() for name in CPU_RUNTIME} | {"call.h": rest}
    return {"farm_call.h": _once(entry_point, "<stdint.h>")} | {
        name: _once(texts[name], *(f'"{n}"' for n in needs)) for name, needs in CPU_RUNTIME.items()
    }


@cache
def cuda_files(standard_names: bool) -> dict[str, str]:
    """Name -> text, of every header for CUDA. standard_names: for a compiler that has no C library (NVRTC)."""
    types = _once((FOLDER / "device_types.cuh").read_text())
    standard = {"device_types.cuh": types, **dict.fromkeys(STANDARD_NAMES, _once("", '"device_types.cuh"'))}
    runtime = {name: _once((_CUDA / name).read_text(), *(f'"{n}"' for n in needs)) for name, needs in CUDA_RUNTIME.items()}
    return {COPIES: (FOLDER / "copies.cuh").read_text(), **(standard if standard_names else {}), **runtime}


def _once(text: str, *includes: str) -> str:
    return "\n".join(["#pragma once", *(f"#include {name}" for name in includes), text])


def write_headers(files: dict[str, str], folder: Path) -> None:
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)


def headers_hash(files: dict[str, str]) -> str:
    """What a compile depends on besides the source."""
    return digest(files)


def functions_in(files: dict[str, str], name: str) -> list[str]:
    """The first lines of a header's functions and templates, for prompts: what can be called, and with what."""
    lines = [line.strip() for line in files[name].split("\n")]
    found = [re.sub(r"\s*\{.*", "", line) for line in lines if re.search(r"\b(DEVICE|INLINE|MEMBER|struct|enum)\b", line)]
    kept = [line.rstrip(";") for line in found if "#define" not in line and not line.startswith("//")]
    return list(dict.fromkeys(kept))
