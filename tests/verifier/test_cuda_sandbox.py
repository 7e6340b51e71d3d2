"""The judge's way to a GPU and back, on a stand-in for the driver: every fault costs one child and gets its reason.

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
from verifier.cuda_child import FAR_STEP, pieces_of, place_of, spans_of
from verifier.cuda_sandbox import device_facts, is_alive
from verifier.gpu import NoDevice
from verifier.judge import judge
from verifier.records import Binary, Failed, Passed
from verifier.sandbox import SandboxLimits
from verifier.sandbox_child import FAR_BASE
from verifier.selftest import SPEC
from verifier.traps.cuda import CUDA_TRAPS, cuda_kernel

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


LIMITS = SandboxLimits(run_s=3.0)


def verdict_on(name: str, folder: Path, seed: int = 5) -> Passed | Failed:
    binary, launch = fake_binary(name, folder)
    return judge(binary, launch, HALF, limits=LIMITS, seed=seed, device="cuda:0")


def test_a_good_kernel_passes_and_tells_its_fences(fake_driver: FakeNvml, tmp_path: Path) -> None:
    verdict = verdict_on("good", tmp_path)
    assert isinstance(verdict, Passed), verdict
    assert verdict.fences["device_code_only"] and len(verdict.shapes) > 3


#: Those that need no real device.
STOOD_IN = (
    "partial", "mutates_inputs", "racy", "writes_past_end", "reads_past_end",
    "endless", "illegal_access", "too_much_shared",
)  # fmt: skip


@pytest.mark.parametrize("trap", [t for t in CUDA_TRAPS if t.name in STOOD_IN], ids=lambda t: t.name)
def test_every_fault_has_its_reason(fake_driver: FakeNvml, tmp_path: Path, trap) -> None:
    verdict = verdict_on(trap.name, tmp_path)
    assert isinstance(verdict, Failed) and (verdict.reason, verdict.witness.check) == (trap.reason, trap.check), verdict
    gpu_health.check_in_service("cuda:0")


def test_what_the_driver_says_of_a_launch_is_the_witness(fake_driver: FakeNvml, tmp_path: Path) -> None:
    binary, launch = fake_binary("good", tmp_path, 'extern "C" int refused_by_the_driver() { return 1; }')
    verdict = judge(binary, launch, HALF, limits=LIMITS, seed=5, device="cuda:0")
    assert isinstance(verdict, Failed) and verdict.reason == "crash", verdict
    assert "stopped by the device: CudaError: attention_kernel: launch: invalid argument" in verdict.witness.message


def test_a_device_that_keeps_the_memory_is_out_of_service(fake_driver: FakeNvml, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(gpu_health, "CLEAN_S", 0.3)
    monkeypatch.setattr(gpu_health, "recover", lambda *a: _recover(fake_driver, *a))
    assert verdict_on("illegal_access", tmp_path).reason == "crash"
    with pytest.raises(NoDevice, match="out of service.*1024 MiB more are in use"):
        verdict_on("good", tmp_path)
    gpu_health.put_back("cuda:0")
    gpu_health.check_in_service("cuda:0")


def _recover(fake: FakeNvml, device: str, before, ours, alive) -> str:
    fake.used = 2 << 30
    return _real_recover(device, before, ours, alive, limit_s=0.2)


_real_recover = gpu_health.recover


def test_a_health_check_runs_a_tiny_kernel_in_a_child(fake_driver: FakeNvml) -> None:
    assert is_alive("cuda:0") == ""
    assert device_facts("cuda:0")["sm_count"] == 4


def test_without_pycuda_the_device_is_to_blame_not_the_kernel(nvml: FakeNvml, tmp_path: Path) -> None:
    if "pycuda" in sys.modules or any((Path(p) / "pycuda").exists() for p in sys.path if p):
        pytest.skip("PyCUDA is installed here")
    binary, launch = fake_binary("good", tmp_path)
    with pytest.raises(NoDevice, match="pip install pycuda"):
        judge(binary, launch, HALF, limits=LIMITS, seed=5, device="cuda:0")


# ------------------------------------------------------------------------------------------------------------ pure parts


def test_bands_are_left_without_memory_or_become_memory() -> None:
    page = 2 << 20
    segments = [[0, page, "guard", 0], [page, page, "in", page], [2 * page, page, "guard", 2 * page], [3 * page, page, "out", 0]]
    assert [(p.offset, p.written) for p in pieces_of(segments, guards=True)] == [(page, False), (3 * page, True)]
    assert [p.offset for p in pieces_of(segments, guards=False)] == [0, page, 2 * page, 3 * page]


def test_far_rows_lie_in_ranges_of_their_own() -> None:
    page, step = 2 << 20, 1 << 31
    segments = [[i * page, page, "in", FAR_BASE + FAR_STEP + i * step] for i in range(3)]
    pieces = pieces_of(segments, guards=True)
    assert [(p.place, p.at) for p in pieces] == [(2, 0), (2, step), (2, 2 * step)]
    assert spans_of(pieces, 3 * page) == {0: 3 * page, 2: 2 * step + 2 * page}
    assert place_of(12345) == (0, 12345)


def test_nvml_facts_make_the_device_key_and_the_conditions(nvml: FakeNvml) -> None:
    from verifier.environment import device_key

    key = device_key("cuda:0")
    assert (key.name, key["sm_count"], key["compute_capability"], key["mig"]) == ("NVIDIA H200", 132, "9.0", 0)
    assert key["power_limit_w"] == 700 and key["driver_major"] == 580
    now = gpu.conditions_of("cuda:0")
    assert (now.sm_mhz, now.power_w, now.temperature_c, now.reasons) == (1980, 612.3, 44, ("power cap", "thermal slowdown"))
    assert set(now.reasons) & gpu.HARD_REASONS == {"thermal slowdown"}
    assert gpu.reason_names(0x1000) == ("0x1000",)


def use(used: int, *processes: tuple[int, int]) -> gpu.GpuUse:
    return gpu.GpuUse(used << 20, tuple((pid, size << 20) for pid, size in processes))


@pytest.mark.parametrize(
    ("before", "now", "clean"),
    [
        (use(500), use(510), True),  # the driver keeps a little
        (use(500), use(900), False),  # nobody's memory
        (use(500), use(500, (41, 0)), False),  # the dead child is still listed
        (use(500, (7, 100)), use(900, (7, 500)), True),  # a neighbour took it
        (use(500, (7, 100)), use(900, (7, 100)), False),
    ],
)
def test_health_is_judged_by_memory_and_processes(before, now, clean) -> None:
    assert isinstance(gpu_health.judge_use(before, now, [41]), gpu_health.Clean) is clean


def test_a_device_is_given_time_to_come_clean() -> None:
    looks = iter([use(900), use(900, (41, 3)), use(500)])
    assert isinstance(gpu_health.wait_clean(use(500), lambda: next(looks), [41], 5, 0.001), gpu_health.Clean)
    found = gpu_health.wait_clean(use(500), lambda: use(900), [41], 0.01, 0.001)
    assert isinstance(found, gpu_health.NotYet) and "400 MiB" in found.why
