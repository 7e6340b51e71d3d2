"""Runs emitted CUDA on the CPU: the kernel's own text, with `cuda_emulator/emulator.h` in place of the runtime's PTX.

For tests of what a kernel computes; says nothing about speed, and nothing about races that the emulator's turns do not show.
"""

from __future__ import annotations

import ctypes
import re
import struct
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from generator.canonical import digest_text
from generator.translate.cuda import HEADERS
from generator.translate.cuda.wgmma_instructions import BEGIN, END
from generator.translate.records import Translated
from verifier.cuda_arguments import entry_for, make_call

EMULATOR = Path(__file__).parent / "cuda_emulator"
REPLACED = ("ptx.cuh", "ptx_mma.cuh", "ptx_wgmma.cuh", "ptx_narrow.cuh")
PRODUCT = re.compile(r"wgmma_(ss|rs)_(\d+)_([nt])_(\w+)\(")


NUM_SMS = 3  # few, so that persistent blocks run several tiles


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
    text = re.sub(f"{BEGIN}.*{END}", "", text, flags=re.DOTALL)
    text = PRODUCT.sub(lambda m: f"wgmma_{m[1]}<{m[2]}, {str(m[3] == 't').lower()}, {m[4].upper()}>(", text)
    entry, second = translated.launch.entry, translated.launch.target_facts["unaligned"]
    block = "ParamsUnaligned" if "parameters" in second else "Params"
    return "\n".join(
        [
            '#include "emulator.h"',
            text,
            _exported("", entry, "Params"),
            _exported("_unaligned", second["entry"], block),
            REPACK,
            "",
        ]
    )


REPACK = (
    'extern "C" void emulate_repack(const void* p, unsigned blocks, unsigned threads) '
    "{ emulate_grid(blocks, threads, 1, [=] { farm_repack(*(const Repack*)p); }); }"
)


def _exported(suffix: str, entry: str, block: str) -> str:
    return (
        f'extern "C" void emulate{suffix}(const void* p, unsigned blocks, unsigned threads, unsigned seed) '
        f"{{ emulate_grid(blocks, threads, seed, [=] {{ {entry}(*(const {block}*)p); }}); }}"
    )


def build(translated: Translated, folder: Path) -> ctypes.CDLL:
    source = emulated_source(translated)
    stem = folder / digest_text(source)[:16]
    if not stem.with_suffix(".so").exists():
        stem.with_suffix(".cpp").write_text(source)
        command = ["g++", "-std=c++20", "-Og", "-w", "-fPIC", "-shared", f"-I{EMULATOR}", "-o", f"{stem}.so", f"{stem}.cpp"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(f"{stem}.so")


def run_emulated(
    translated: Translated, tensors: Mapping[str, np.ndarray], scalars: Mapping[str, int | float], folder: Path, seed: int = 1
) -> None:
    """Runs the kernel on arrays (16-bit dtypes as uint16) in place."""
    counter = np.zeros(2, np.int32)
    addresses = [Address(tensors[t.name]) for t in translated.launch.tensors]
    launch = entry_for(translated.launch, addresses)
    call = make_call(
        launch, addresses, [scalars[s.name] for s in launch.scalars], counter.ctypes.data, NUM_SMS, counter.ctypes.data
    )
    for m in call.maps:
        values = (m.address, *m.extents, *m.strides, *m.box)
        struct.pack_into("<Q5Q4Q5I", call.block, m.offset, *values)
    block = (ctypes.c_char * len(call.block)).from_buffer(call.block)
    library = build(translated, folder)
    run = library.emulate if launch is translated.launch else library.emulate_unaligned
    run(block, call.grid[0], launch.target_facts["threads"], seed)
    assert not counter.any(), "the queue's counter is left as it was found"
