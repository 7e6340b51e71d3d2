"""A GPU that is not there: a stand-in for driver and management library, and the hand-made kernels built for it. No tests.

The stand-in's "cubins" are the hand-made CUDA source as C++, one thread a block, in ordinary memory with the same mappings.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from generator.canonical import digest_bytes
from verifier import gpu, gpu_health, nursery
from verifier.records import Binary
from verifier.selftest_check import SPEC
from verifier.traps.cuda import cuda_kernel

FAKE = Path(__file__).parent / "fake_cuda"
HALF = replace(SPEC, dtype="fp16", num_heads=2, num_kv_heads=1, head_dim=16, head_dim_v=16, batch=1, seqlen_q=20, seqlen_k=20)

PRELUDE = """
#include <cmath>
#include <cstdint>
#include <cstring>
#define __global__
#define __device__ static
#define __grid_constant__
#define __launch_bounds__(n)
#define __shared__ static
#define __syncthreads()
struct Dim { long x; };
static Dim blockIdx, threadIdx, gridDim;
static long clock64() { static long t; return t += 16; }
static float __uint_as_float(uint32_t b) { float f; memcpy(&f, &b, 4); return f; }
static uint32_t __float_as_uint(float f) { uint32_t b; memcpy(&b, &f, 4); return b; }
#define __int_as_float __uint_as_float
"""
RUN = """
extern "C" void launch_attention_kernel(const Params* p, int64_t blocks) {
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) attention_kernel(*p);
}
"""


def fake_binary(name: str, folder: Path, more: str = "") -> tuple[Binary, object]:
    """The hand-made kernel of that name for the stand-in."""
    translated = cuda_kernel(HALF, "sm_90", name)
    source = translated.source.replace("THREADS = 64", "THREADS = 1")
    source = re.sub(r'float f; asm\("cvt.f32.f16.*?; return f;', "_Float16 h; memcpy(&h, &x, 2); return (float)h;", source)
    source = re.sub(r'T h; asm\("cvt.rn.*?; return h;', "_Float16 h = (_Float16)x; T b; memcpy(&b, &h, 2); return b;", source)
    source = source.replace('asm volatile("trap;");', "__builtin_trap();")
    text, out = folder / f"{name}.cpp", folder / f"{name}.so"
    text.write_text(PRELUDE + source + RUN + more)
    command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-msse2", "-o", str(out), str(text)]
    subprocess.run(command, check=True, timeout=120)
    data = out.read_bytes()
    binary = Binary(str(out), digest_bytes(data), translated.hash, translated.target, "g++", (), 0.0)
    return binary, translated.launch


class FakeNvml:
    """What `verifier.gpu` asks of NVML, with a number for the memory in use."""

    NVMLError = RuntimeError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    used, processes = 1 << 30, ()

    def __init__(self) -> None:
        self.nvmlDeviceGetHandleByIndex = lambda n: f"index {n}"
        self.nvmlDeviceGetHandleByUUID = lambda u: u
        self.nvmlDeviceGetUUID = lambda h: "GPU-fake"
        self.nvmlDeviceGetMemoryInfo = lambda h: SimpleNamespace(total=2 << 30, used=self.used)
        self.nvmlDeviceGetComputeRunningProcesses = lambda h: list(self.processes)
        self.nvmlDeviceGetCudaComputeCapability = lambda h: (9, 0)
        self.nvmlDeviceGetName = lambda h: "NVIDIA H200"
        self.nvmlDeviceGetNumGpuCores = lambda h: 132 * 128
        self.nvmlDeviceGetPowerManagementLimit = lambda h: 700_000
        self.nvmlSystemGetDriverVersion = lambda: "580.159.04"
        self.nvmlDeviceGetClockInfo = lambda h, kind: {1: 1980, 2: 3201}[kind]
        self.nvmlDeviceGetPowerUsage = lambda h: 612_300
        self.nvmlDeviceGetTemperature = lambda h, kind: 44
        self.nvmlDeviceGetCurrentClocksEventReasons = lambda h: 0x4 | 0x20

    def nvmlDeviceGetAttributes(self, handle: str) -> None:
        raise RuntimeError("not supported")

    nvmlDeviceGetMigMode = nvmlDeviceGetAttributes


def _forget() -> None:
    """What this process remembers of devices, and the processes that start children with the packages of the last test."""
    gpu.uuid_of.cache_clear()
    gpu_health._OUT.clear()
    for key in [k for k in nursery._nurseries if k[1] == "verifier.cuda_child"]:
        nursery._nurseries.pop(key).close()


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    fake = FakeNvml()
    monkeypatch.setattr(gpu, "library", lambda: fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    _forget()
    yield fake
    _forget()


@pytest.fixture
def fake_driver(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    monkeypatch.setattr(sys, "path", [str(FAKE), *sys.path])
    return nvml
