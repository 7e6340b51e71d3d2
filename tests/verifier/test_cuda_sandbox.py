"""The judge's way to a GPU and back, on a stand-in for the driver: every fault costs one child and gets its reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fake_gpu import HALF, FakeNvml, fake_binary

from verifier import gpu, gpu_health
from verifier.cuda_child import FAR_STEP, pieces_of, place_of, spans_of
from verifier.cuda_sandbox import device_facts, is_alive
from verifier.gpu import NoDevice
from verifier.judge import judge
from verifier.records import Failed, Passed
from verifier.sandbox import SandboxLimits
from verifier.sandbox_child import FAR_BASE
from verifier.traps.cuda import CUDA_TRAPS

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
