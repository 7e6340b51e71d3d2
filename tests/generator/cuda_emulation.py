"""Runs emitted CUDA on the CPU: the kernel's own text, with `cuda_emulator/emulator.h` in place of the runtime's PTX.

For tests of what a kernel computes; says nothing about speed, and nothing about races that the emulator's turns do not show.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from generator.canonical import digest_text
from generator.translate.cuda import HEADERS
from generator.translate.records import Translated
from verifier.cuda_arguments import make_call

EMULATOR = Path(__file__).parent / "cuda_emulator"
REPLACED = ("ptx.cuh", "ptx_mma.cuh")


@dataclass(frozen=True)
class Address:
    """An array as a launcher sees a tensor."""

    array: np.ndarray

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def stride(self) -> tuple[int, ...]:
        return tuple(s // self.array.itemsize for s in self.array.strides)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape


def emulated_source(translated: Translated) -> str:
    text = translated.source
    for name in REPLACED:
        body = (HEADERS / name).read_text().rstrip("\n")
        assert body in text or name != "ptx.cuh", name
        text = text.replace(body, "")
    call = f"{translated.launch.entry}(*(const Params*)p)"
    return (
        '#include "emulator.h"\n'
        + text
        + '\nextern "C" void emulate(const void* p, unsigned blocks, unsigned threads, unsigned seed) '
        + f"{{ emulate_grid(blocks, threads, seed, [=] {{ {call}; }}); }}\n"
    )


def build(translated: Translated, folder: Path) -> ctypes.CDLL:
    source = emulated_source(translated)
    stem = folder / digest_text(source)[:16]
    if not stem.with_suffix(".so").exists():
        stem.with_suffix(".cpp").write_text(source)
        command = ["g++", "-std=c++20", "-O1", "-w", "-fPIC", "-shared", f"-I{EMULATOR}", "-o", f"{stem}.so", f"{stem}.cpp"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(f"{stem}.so")


def run_emulated(
    translated: Translated, tensors: Mapping[str, np.ndarray], scalars: Mapping[str, int | float], folder: Path, seed: int = 1
) -> None:
    """Runs the kernel on arrays (16-bit dtypes as uint16) in place."""
    launch = translated.launch
    call = make_call(launch, [Address(tensors[t.name]) for t in launch.tensors], [scalars[s.name] for s in launch.scalars])
    block = (ctypes.c_char * len(call.block)).from_buffer(call.block)
    build(translated, folder).emulate(block, call.grid[0], launch.target_facts["threads"], seed)
