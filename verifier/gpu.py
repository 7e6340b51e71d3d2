"""What NVIDIA's management library tells of a GPU: identity, memory in use, processes, clocks, why it is slowed down. Needs no
CUDA context and makes none; changes nothing on the device.

Devices are named "cuda:N" (counted as CUDA counts them in this process's environment) or by UUID. Raises NoDevice.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: CUDA cores of one multiprocessor by compute capability: NVML tells the cores only.
_CORES_PER_SM = {(7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
_CORES_PER_NEWER_SM = 128

#: Bits of NVML's "clocks event reasons" -> name.
REASONS = {
    0x1: "idle", 0x2: "application clocks", 0x4: "power cap", 0x8: "hardware slowdown", 0x10: "sync boost",
    0x20: "thermal slowdown", 0x40: "hardware thermal slowdown", 0x80: "power brake", 0x100: "display clocks",
}  # fmt: skip
#: Reasons that make a timing worthless. The power cap is how a large GPU runs dense products: it is told, and no fault.
HARD_REASONS = frozenset({"hardware slowdown", "thermal slowdown", "hardware thermal slowdown", "power brake"})


class NoDevice(ValueError):
    """The device that was named is not on this machine, cannot be asked, or may not be used."""


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Memory in use on the whole device, and the compute processes that NVML lists: (pid, bytes)."""

    used_bytes: int
    processes: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Conditions:
    """Clocks, power, temperature and reasons at a moment; 0 where a board does not tell."""

    sm_mhz: int
    memory_mhz: int
    power_w: float
    temperature_c: int
    reasons: tuple[str, ...]


@functools.lru_cache(maxsize=1)
def _library(pid: int) -> Any:
    """NVML, started once in a process; a forked child starts its own."""
    try:
        import pynvml
    except ImportError:
        raise NoDevice("a GPU needs NVIDIA's management library; install it with `pip install nvidia-ml-py`") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoDevice(f"no GPU can be asked here: {error}") from None
    return pynvml


def library() -> Any:
    """pynvml, ready for questions."""
    return _library(os.getpid())


def _ask(question: Callable[[Any, Any], Any], device: str) -> Any:
    try:
        nvml = library()
    except NoDevice as error:
        raise NoDevice(f"device: {device!r}: {error}") from None
    try:
        return question(nvml, gpu_handle(nvml, device))
    except nvml.NVMLError as error:
        raise NoDevice(f"device: {device!r} cannot be asked: {error}") from None


def _or(nvml: Any, ask: Callable[[], Any], otherwise: Any) -> Any:
    """Some boards answer "not supported" to some questions; that is a fact too."""
    try:
        return ask()
    except nvml.NVMLError:
        return otherwise


def gpu_handle(nvml: Any, device: str) -> Any:
    """NVML ignores CUDA_VISIBLE_DEVICES: a number is looked up in it first."""
    if device.startswith(("GPU-", "MIG-")):
        return nvml.nvmlDeviceGetHandleByUUID(device)
    number = int(device.partition(":")[2] or 0)
    visible = [v for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v]
    if visible:
        if number >= len(visible):
            raise NoDevice(f"device: {device!r} is not among CUDA_VISIBLE_DEVICES={','.join(visible)}")
        if not visible[number].isdigit():
            return nvml.nvmlDeviceGetHandleByUUID(visible[number])
        number = int(visible[number])
    return nvml.nvmlDeviceGetHandleByIndex(number)


def gpus_here() -> tuple[str, ...]:
    """The devices that CUDA would show to this process, as "cuda:0", "cuda:1"...; none without a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(f"cuda:{i}" for i, v in enumerate(visible.split(",")) if v.strip() and v.strip() != "-1")
    try:
        nvml = library()
        return tuple(f"cuda:{i}" for i in range(nvml.nvmlDeviceGetCount()))
    except (NoDevice, OSError):
        return ()


@functools.lru_cache(maxsize=16)
def uuid_of(device: str) -> str:
    def ask(nvml: Any, handle: Any) -> str:
        found = nvml.nvmlDeviceGetUUID(handle)
        return found.decode() if isinstance(found, bytes) else str(found)

    return str(_ask(ask, device))


def capability_of(device: str) -> tuple[int, int]:
    """(major, minor) of the compute capability."""
    major, minor = _ask(lambda nvml, handle: nvml.nvmlDeviceGetCudaComputeCapability(handle), device)
    return int(major), int(minor)


def driver_version() -> str:
    nvml = library()
    found = nvml.nvmlSystemGetDriverVersion()
    return found.decode() if isinstance(found, bytes) else str(found)


def driver_cuda() -> tuple[int, int] | None:
    """The CUDA release that the driver supports; None where it does not say. Starts no driver."""
    try:
        number = int(library().nvmlSystemGetCudaDriverVersion_v2())
    except Exception:  # NVML is not there, or older than the question
        return None
    return number // 1000, number % 1000 // 10


def identity(device: str) -> tuple[str, dict[str, int | str]]:
    """The product's name, and the facts of a device key (`verifier.environment.DeviceKey`)."""

    def ask(nvml: Any, handle: Any) -> tuple[str, dict[str, int | str]]:
        capability = tuple(int(n) for n in nvml.nvmlDeviceGetCudaComputeCapability(handle))
        name = nvml.nvmlDeviceGetName(handle)
        facts: dict[str, int | str] = {
            "compute_capability": f"{capability[0]}.{capability[1]}",
            "sm_count": _sm_count(nvml, handle, (capability[0], capability[1]), device),
            "memory_bytes": int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            "power_limit_w": int(_or(nvml, lambda: nvml.nvmlDeviceGetPowerManagementLimit(handle), 0)) // 1000,
            "mig": int(_or(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle)[0], 0)),
            "driver_major": int(driver_version().split(".")[0]),
        }
        return (name.decode() if isinstance(name, bytes) else str(name)), facts

    found: tuple[str, dict[str, int | str]] = _ask(ask, device)
    return found


def _sm_count(nvml: Any, handle: Any, capability: tuple[int, int], device: str) -> int:
    """Told for MIG slices; for whole boards the cores are, and a multiprocessor has a known number of them."""
    if slices := _or(nvml, lambda: int(nvml.nvmlDeviceGetAttributes(handle).multiprocessorCount), 0):
        return int(slices)
    if cores := _or(nvml, lambda: int(nvml.nvmlDeviceGetNumGpuCores(handle)), 0):
        return int(cores) // _CORES_PER_SM.get(capability, _CORES_PER_NEWER_SM)
    torch = sys.modules.get("torch")  # the driver knows, if this process already uses it
    if torch is None or not torch.cuda.is_initialized() or not device.startswith("cuda"):
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def use_of(device: str) -> GpuUse:
    """What the device holds now, for whomever."""

    def ask(nvml: Any, handle: Any) -> GpuUse:
        used = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
        listed = _or(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle), [])
        return GpuUse(used, tuple(sorted((int(p.pid), int(p.usedGpuMemory or 0)) for p in listed)))

    found: GpuUse = _ask(ask, device)
    return found


def conditions_of(device: str) -> Conditions:
    """Clocks, power, temperature and what slows the device down, now."""

    def ask(nvml: Any, handle: Any) -> Conditions:
        def reasons() -> int:
            question = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
            return int((question or nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(handle))

        return Conditions(
            int(_or(nvml, lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM), 0)),
            int(_or(nvml, lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM), 0)),
            int(_or(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(handle), 0)) / 1000,
            int(_or(nvml, lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU), 0)),
            reason_names(int(_or(nvml, reasons, 0))),
        )

    found: Conditions = _ask(ask, device)
    return found


def reason_names(bits: int) -> tuple[str, ...]:
    """NVML's bit mask in words; unknown bits by their value."""
    known = [name for bit, name in REASONS.items() if bits & bit]
    unknown = bits & ~sum(REASONS)
    return (*known, *((f"0x{unknown:x}",) if unknown else ()))
