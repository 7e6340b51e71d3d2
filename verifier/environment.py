"""What this machine is: the device key that decides what a catalog row may be used for, and the environment as provenance.
Measures no time.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import math
import os
import platform
import re
import socket
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from generator.canonical import digest
from verifier.gpu import NoDevice, identity

__all__ = ["DeviceKey", "NoDevice", "device_key", "environment"]

#: CPU flags that decide which code runs and how fast; /proc/cpuinfo's spelling.
_ISA_FLAGS = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_bf16", "amx_int8",
)  # fmt: skip
_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
#: Instruction set levels of `verifier.compile.ISA_FLAGS` -> the CPU flags that they need.
ISA_NEEDS: dict[str, frozenset[str]] = {
    "baseline": frozenset(),
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512bf16": _AVX512 | {"avx512_bf16"},
    "amx": _AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"},
}


@dataclass(frozen=True, slots=True)
class DeviceKey:
    """Two machines with equal keys may share rows; a difference in any fact forbids it.

    facts of a CPU: isa, cores, cache_l1d, cache_l2, cache_l3 (bytes, one instance of each). facts of a GPU:
    compute_capability, sm_count, memory_bytes, power_limit_w, mig, driver_major.
    """

    kind: Literal["cpu", "cuda"]
    name: str
    facts: tuple[tuple[str, int | str], ...]

    @property
    def hash(self) -> str:
        return digest(self)

    def __getitem__(self, fact: str) -> int | str:
        return dict(self.facts)[fact]

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(f'{k}={v}' for k, v in self.facts)})"


def device_key(device: str = "cpu") -> DeviceKey:
    """The key of "cpu", or of a GPU by its number or UUID ("cuda:0", "GPU-..."). Raises NoDevice."""
    if device == "cpu":
        return _cpu_key()
    if not re.fullmatch(r"cuda(:\d+)?|(GPU|MIG)-[\w/-]+", device):
        raise NoDevice(f"device: expected cpu, a GPU such as cuda:0, or a GPU's UUID, found {device!r}")
    return _gpu_key(device)


@functools.cache
def _cpuinfo() -> dict[str, str]:
    """The first processor's block of /proc/cpuinfo."""
    block = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    return {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in block.splitlines())}


def cpu_flags() -> frozenset[str]:
    """The CPU's flags, of those that matter here."""
    return frozenset(_cpuinfo().get("flags", "").split()) & frozenset(_ISA_FLAGS)


def isa_levels() -> tuple[str, ...]:
    """Instruction set levels that this CPU can run, the widest first."""
    return tuple(level for level in reversed(ISA_NEEDS) if ISA_NEEDS[level] <= cpu_flags())


def cores_given() -> int:
    """CPUs that this process may use: its affinity, cut by the control group's quota (rounded up)."""
    cores = len(os.sched_getaffinity(0))
    quota = _cgroup_quota()
    return max(1, min(cores, math.ceil(quota))) if quota else cores


def worker_threads() -> int:
    """Threads that compute best on the CPUs given: one for each physical core among them, as torch counts."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        cores.add((_first_line(f"{topology}/physical_package_id") or "0", _first_line(f"{topology}/core_id") or str(cpu)))
    return min(len(cores), cores_given())


def _cgroup_quota() -> float:
    """CPUs by the control group's quota; 0 where there is none."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return 0.0 if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text())
        return max(0.0, quota_us / int(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text()))
    except (OSError, ValueError, ZeroDivisionError):
        return 0.0


def cache_bytes() -> dict[str, int]:
    """Sizes of one L1 data, L2 and L3 cache that the first CPU uses; 0 where the system does not say."""
    sizes = {"l1d": 0, "l2": 0, "l3": 0}
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, kind, size = ((index / f).read_text().strip() for f in ("level", "type", "size"))
        except OSError:
            continue
        name = f"l{level}" + ("d" if level == "1" else "")
        if kind in ("Data", "Unified") and name in sizes:
            sizes[name] = int(size[:-1]) * units[size[-1]] if size[-1] in units else int(size)
    return sizes


def cpu_name() -> str:
    """The model's name; virtual machines give a vague one, so family, model and stepping stand with it."""
    info = _cpuinfo()
    numbers = "/".join(info.get(field, "?") for field in ("cpu family", "model", "stepping"))
    return f"{info.get('model name', platform.machine())} [{numbers}]"


def _cpu_key() -> DeviceKey:
    facts: dict[str, int | str] = {"isa": " ".join(f for f in _ISA_FLAGS if f in cpu_flags()), "cores": cores_given()}
    facts |= {f"cache_{level}": size for level, size in cache_bytes().items()}
    return DeviceKey("cpu", cpu_name(), tuple(sorted(facts.items())))


def _gpu_key(device: str) -> DeviceKey:
    name, facts = identity(device)
    return DeviceKey("cuda", name, tuple(sorted(facts.items())))


def environment() -> dict[str, Any]:
    """What a row was made with, as plain JSON values: recorded, shown, able to demote a row, not part of the key."""
    return {
        **_static_environment(),
        "created_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "load_average": round(os.getloadavg()[0], 2),
        "cores_given": cores_given(),
    }


@functools.cache
def _static_environment() -> dict[str, Any]:
    return {
        "os": platform.platform(),
        "libc": "-".join(platform.libc_ver()),
        "python": platform.python_version(),
        "torch": package_version("torch"),
        "numpy": package_version("numpy"),
        "farm": package_version("kernel-farm"),
        "compiler": _compiler_version(),
        "host_hash": hashlib.sha256(socket.gethostname().encode()).hexdigest()[:16],
        "cpu": cpu_name(),
        "hypervisor": "hypervisor" in _cpuinfo().get("flags", "").split(),
        "governor": _first_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "transparent_hugepages": _first_line("/sys/kernel/mm/transparent_hugepage/enabled"),
    }


def package_version(name: str) -> str:
    """The installed version of a distribution; "" when it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _compiler_version() -> str:
    from verifier.compile import NoCompiler, find_compiler

    try:
        return find_compiler().version
    except NoCompiler:
        return ""


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
