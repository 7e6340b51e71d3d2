"""The kernel that copies operands into compact form, in the emulator: every width, orders of axes, long and empty rows."""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from cuda_emulation import EMULATOR, REPACK

from generator.translate.cuda import HEADERS

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")

#: Extents, strides in elements, elements between a multiple of 16 bytes and the first row.
CASES = {
    "16 bytes": ((2, 3, 37, 72), (9000, 80, 240, 1), 0),
    "8 bytes": ((2, 3, 37, 72), (9000, 84, 252, 1), 4),
    "4 bytes": ((2, 2, 19, 40), (4000, 42, 84, 1), 2),
    "2 bytes": ((1, 3, 67, 64), (1, 67 * 65, 65, 1), 1),
    "rows begin aligned, their pitch is odd": ((1, 2, 9, 128), (9, 1161, 129, 1), 0),
    "an odd number of elements": ((2, 1, 33, 7), (264, 5, 8, 1), 0),
    "extents of one decide nothing": ((1, 1, 300, 16), (3, 1, 16, 1), 0),
    "the outermost axis is the longest": ((70, 3, 2, 8), (48, 16, 8, 1), 0),
    "the second axis is the longest": ((2, 70, 3, 24), (5041, 72, 24, 1), 1),
    "expanded heads": ((2, 4, 50, 64), (3200, 0, 64, 1), 0),
    "rows of more than a tile": ((1, 1, 3, 4500), (0, 0, 4504, 1), 0),
    "odd rows of more than a tile": ((2, 1, 1, 2601), (2603, 0, 0, 1), 1),
    "the last axis is not dense": ((2, 2, 5, 40), (1000, 500, 100, 2), 0),
    "columns of one element": ((4, 5, 6, 1), (60, 12, 2, 9), 0),
    "nothing": ((2, 0, 6, 8), (96, 8, 16, 1), 0),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernel alone, which ends its process where it reads or writes a piece at an address that is no multiple of its size."""
    stem = tmp_path_factory.mktemp("repack") / "repack"
    stem.with_suffix(".cpp").write_text("\n".join(['#include "emulator.h"', (HEADERS / "repack.cuh").read_text(), REPACK, ""]))
    strict = ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
    command = ["g++", "-std=c++20", "-O1", "-w", "-fPIC", "-shared", *strict, f"-I{EMULATOR}", "-o", f"{stem}.so", f"{stem}.cpp"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    return stem.with_suffix(".so")


def copied(library: Path, shape: tuple[int, ...], strides: tuple[int, ...], lead: int, blocks: int) -> None:
    """Runs it on numbered elements. Asserts that the copy holds them in order and that nothing beside it was written."""
    reach = lead + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n) + 1
    room = np.arange(reach + 16, dtype=np.uint16)
    room = room[(-room.ctypes.data % 16) // 2 :]
    source = np.lib.stride_tricks.as_strided(room[lead:], shape, [2 * s for s in strides])
    size = int(np.prod(shape))
    target = np.full(size + 32, 0xABCD, np.uint16)
    start = (-target.ctypes.data % 16) // 2 + 8
    block = (ctypes.c_int64 * 10)(source.ctypes.data, target[start:].ctypes.data, *shape, *strides)
    ctypes.CDLL(str(library)).emulate_repack(ctypes.byref(block), blocks, 256)
    np.testing.assert_array_equal(target[start : start + size], source.ravel())
    assert (target[:start] == 0xABCD).all() and (target[start + size :] == 0xABCD).all()


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_a_copy_is_compact_whatever_the_rows_allow(library: Path, name: str, blocks: int) -> None:
    shape, strides, lead = CASES[name]
    child = mp.get_context("fork").Process(target=copied, args=(library, shape, strides, lead, blocks))
    child.start()
    child.join()
    assert child.exitcode == 0
