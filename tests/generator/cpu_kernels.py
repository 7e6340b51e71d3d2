"""Translates, compiles and calls CPU kernels on NumPy arrays, for the tests of the CPU translator."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from generator.targets import cpu_targets, find_target
from generator.tl.fill import fill
from generator.tl.interpreter import run as interpret
from generator.tl.ir import Program
from generator.tl.numerics import round_bf16
from generator.tl.parser import parse
from generator.translate import translate
from generator.translate.records import Translated
from verifier.compile import compile_translated
from verifier.environment import cpu_flags
from verifier.launch import CpuKernel, RawTensor, load_cpu
from verifier.records import Binary

CACHE = Path(os.environ.get("FARM_TEST_CACHE", tempfile.gettempdir())) / f"farm-test-kernels-{os.getuid()}"
STORED = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "i32": np.int32}


def program_of(text: str, **constants: int) -> Program:
    """Code with its holes filled."""
    parsed = parse(text)
    assert parsed.program is not None, parsed.diagnostics
    return fill(parsed.program, constants) if constants else parsed.program


def available(target: str) -> bool:
    return find_target(target.replace("amx-emulated", "avx512bf16")) in cpu_targets(cpu_flags())


def translated(program: Program, target: str = "cpu-avx2") -> Translated:
    out = translate(program, find_target(target))
    assert isinstance(out, Translated), out
    return out


def emulated(program: Program) -> Translated:
    """AMX code whose tile instructions are carried out in software, for processors with AVX-512 and bf16 but without AMX."""
    out = translated(program, "cpu-amx")
    launch = replace(out.launch, target_facts={**out.launch.target_facts, "isa": "avx512bf16"})
    return replace(out, source="#define FARM_EMULATE_AMX\n" + out.source, launch=launch)


@functools.lru_cache(maxsize=256)
def kernel(program: Program, target: str = "cpu-avx2", threads: int = 2) -> CpuKernel:
    out = emulated(program) if target == "cpu-amx-emulated" else translated(program, target)
    binary = compile_translated(out, CACHE)
    assert isinstance(binary, Binary), binary.log
    return load_cpu(Path(binary.path).read_bytes(), out.launch, num_threads=threads)


def stored(x: np.ndarray, dtype: str) -> np.ndarray:
    """The array as the kernel finds it in memory; its strides are kept."""
    out = np.empty_like(x, dtype=STORED[dtype], subok=False)
    out[...] = (round_bf16(x.astype(np.float32)).view(np.uint32) >> 16).astype(np.uint16) if dtype == "bf16" else x
    return out


def loaded(x: np.ndarray, dtype: str) -> np.ndarray:
    return (
        (x.astype(np.uint32) << 16).view(np.float32) if dtype == "bf16" else x.astype(np.int32 if dtype == "i32" else np.float32)
    )


def strides(a: np.ndarray) -> tuple[int, ...]:
    """In elements; NumPy gives an array without elements strides of zero."""
    return tuple(s // a.itemsize for s in (a if a.size else np.empty([max(1, n) for n in a.shape], a.dtype)).strides)


def call(
    program: Program,
    tensors: Mapping[str, np.ndarray],
    scalars: Mapping[str, int | float],
    target: str = "cpu-avx2",
    threads: int = 2,
) -> dict[str, np.ndarray]:
    """The kernel's outputs by name. Every matrix has to be given; outputs lend their shape and strides and start as NaN."""
    k = kernel(program, target, threads)
    arrays = {}
    for p in k.launch.tensors:
        arrays[p.name] = stored(tensors[p.name], p.dtype)
        if p.written:
            arrays[p.name][...] = {"f32": np.nan, "f16": np.nan, "bf16": 0x7FC0, "i32": -(2**31)}[p.dtype]
    raw = [RawTensor(a.ctypes.data, strides(a)) for a in arrays.values()]
    k.call(raw, [scalars[s.name] for s in k.launch.scalars])
    return {p.name: loaded(arrays[p.name], p.dtype) for p in k.launch.tensors if p.written}


def assert_agrees(
    program: Program,
    tensors: Mapping[str, np.ndarray],
    scalars: Mapping[str, int | float],
    target: str = "cpu-avx2",
    rtol: float = 2e-5,
) -> dict[str, np.ndarray]:
    """The translated kernel gives what the interpreter gives: errors are relative to the largest finite value of each output."""
    want = interpret(program, {n: tensors[n] for n in tensors if n not in program.outputs}, scalars)
    got = call(program, {**want, **tensors}, scalars, target)
    dtypes = {a.name: a.dtype for a in program.allocations.values()}
    for name, expected in want.items():
        found, tolerance = got[name], max(rtol, {"bf16": 1.6e-2, "f16": 2e-3}.get(dtypes[name], 0.0))
        finite = np.isfinite(expected)
        assert np.array_equal(np.isnan(expected), np.isnan(found)), (
            f"{name}: NaN where the interpreter has none, or the other way"
        )
        assert np.array_equal(expected[~finite & ~np.isnan(expected)], found[~finite & ~np.isnan(expected)]), name
        scale = max(1e-30, float(np.abs(expected[finite]).max(initial=0)))
        error = float(np.abs(expected[finite] - found[finite]).max(initial=0)) / scale
        assert error <= tolerance, f"{name}: relative error {error:.2e}, allowed {tolerance:.1e}"
    return got


def widest() -> str:
    """The name of the widest form of `cpu` that this processor runs."""
    return f"cpu-{cpu_targets(cpu_flags())[0].isa}"
