"""What this machine can build, verify and load, what is missing, and the command that mends it. Changes nothing."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any, Literal

from farm.config import Config
from farm.devices import devices_here
from generator.targets import TARGETS

State = Literal["ok", "missing", "limited"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact. `missing` stops something that a plan may ask for, `limited` works worse; `cure` is a command."""

    name: str
    state: State
    detail: str
    cure: str = ""


@dataclass(frozen=True, slots=True)
class Examination:
    findings: tuple[Finding, ...]
    can_build: tuple[str, ...]
    can_verify: tuple[str, ...]
    can_load: tuple[str, ...]

    @property
    def well(self) -> bool:
        """Whether a sweep of the default plan would work here."""
        return "cpu" in self.can_build and "cpu" in self.can_verify

    def plain(self) -> dict[str, Any]:
        return asdict(self) | {"well": self.well}


def examine(config: Config, catalog: str | None = None) -> Examination:
    """Looks at everything that a sweep and a loader need here; asks no network and starts no kernel."""
    findings = tuple(
        finding
        for look in (
            _python,
            _compiler,
            _cpu,
            _space,
            _torch,
            _ray,
            _cuda_compiler,
            _gpu,
            _sanitizer,
            lambda: _places(config, catalog),
        )
        for finding in look()
    )
    states = {f.name: f.state for f in findings}
    cpu = ("cpu",) if states["C++ compiler"] == "ok" and platform.machine() == "x86_64" else ()
    cuda = tuple(t.name for t in TARGETS.values() if t.family == "cuda") if states["CUDA compiler"] == "ok" else ()
    devices = devices_here()
    judging = [d for d in devices if d.device == "cpu" or states.get("PyCUDA") == "ok"]
    verified = dict.fromkeys("cpu" if d.device == "cpu" else t for d in judging for t in d.targets)
    loaded = dict.fromkeys("cpu" if d.device == "cpu" else t for d in devices for t in d.targets if t not in d.borrowed)
    return Examination(findings, (*cpu, *cuda), tuple(t for t in verified if t in (*cpu, *cuda)), tuple(loaded))


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    fits = (3, 11) <= sys.version_info[:2] <= (3, 12)
    yield Finding(
        "Python", "ok" if fits else "missing", f"{version} at {sys.executable}", "" if fits else "make PYTHON=python3.11"
    )


def _compiler() -> Iterator[Finding]:
    from verifier.compile import NoCompiler, find_compiler

    try:
        found = find_compiler()
        yield Finding("C++ compiler", "ok", f"{' '.join(found.command)}: {found.version}")
    except NoCompiler as error:
        yield Finding("C++ compiler", "missing", str(error), "apt install g++   (or: pip install ziglang)")


def _cpu() -> Iterator[Finding]:
    from verifier.environment import cache_bytes, cores_given, cpu_name, isa_levels

    levels = [level for level in isa_levels() if level != "baseline"]
    caches = ", ".join(f"{name.upper()} {size >> 10} KiB" for name, size in cache_bytes().items() if size)
    detail = f"{cpu_name()}, {cores_given()} cores, {', '.join(levels) or 'no vector extension that is used'}, {caches}"
    if platform.machine() != "x86_64":
        yield Finding("CPU", "missing", f"{platform.machine()}: the cpu target is written for x86-64")
    elif not levels:
        yield Finding("CPU", "limited", detail + "; kernels will be slow without AVX2")
    else:
        yield Finding("CPU", "ok", detail)


def _space() -> Iterator[Finding]:
    import psutil

    memory = psutil.virtual_memory().available
    free = shutil.disk_usage(tempfile.gettempdir()).free
    few = memory < 4 << 30
    yield Finding("memory", "limited" if few else "ok", f"{memory / 2**30:.1f} GiB free" + ("; 4 GiB are advised" if few else ""))
    full = free < 2 << 30
    yield Finding("disk", "limited" if full else "ok", f"{free / 2**30:.1f} GiB free in {tempfile.gettempdir()}")


def _torch() -> Iterator[Finding]:
    if find_spec("torch") is None:
        yield Finding("torch", "missing", "not installed", "pip install torch")
        return
    import torch

    yield Finding("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} threads")


def _ray() -> Iterator[Finding]:
    from verifier.environment import package_version

    version = package_version("ray")
    if version:
        yield Finding("Ray", "ok", version)
    else:
        yield Finding("Ray", "limited", "not installed; `farm sweep --executor local` works", "pip install ray")


def _cuda_compiler() -> Iterator[Finding]:
    from verifier.compile_cuda import NoCudaCompiler, find_cuda_compiler
    from verifier.foreign import toolkit_headers

    try:
        found = find_cuda_compiler()
        where = f"nvcc at {found.path}" if found.kind == "nvcc" else "through cuda-bindings"
        yield Finding("CUDA compiler", "ok", f"{found.version} {where}: builds for every card, no GPU needed")
        folders, version = toolkit_headers()
        if not folders:
            yield Finding(
                "CUDA headers", "limited", "none: a model's source that includes one is not built", "pip install '.[cuda]'"
            )
        else:
            yield Finding("CUDA headers", "ok", f"{version}, for source that a model wrote")
    except NoCudaCompiler as error:
        yield Finding("CUDA compiler", "limited", f"no CUDA target can be built: {error}", "pip install '.[cuda]'")


def _gpu() -> Iterator[Finding]:
    from verifier.environment import NoDevice, device_key, package_version
    from verifier.gpu import driver_version, gpus_here

    try:
        keys = [device_key(device) for device in gpus_here() or ("cuda:0",)]
        yield Finding("GPU", "ok", "; ".join(f"{key}, device key {key.hash[:12]}" for key in keys))
        yield Finding("GPU driver", "ok", driver_version())
        if version := package_version("pycuda"):
            yield Finding("PyCUDA", "ok", f"{version}: candidates run in children of their own")
        else:
            yield Finding("PyCUDA", "missing", "not installed: nothing can be judged on the GPU", "pip install '.[gpu]'")
    except NoDevice as error:
        detail = str(error).removeprefix("device: ")
        yield Finding("GPU", "limited", f"none that can be used ({detail}); CUDA rows will say compiled_unverified")


def _sanitizer() -> Iterator[Finding]:
    """Only where there is a GPU: without one it has nothing to look at."""
    from verifier.cuda_sanitize import CURE, NoSanitizer, find_sanitizer
    from verifier.gpu import gpus_here

    if not gpus_here():
        return
    try:
        yield Finding("compute-sanitizer", "ok", f"{find_sanitizer()}: `--sanitize` runs kernels under it")
    except NoSanitizer:
        yield Finding("compute-sanitizer", "limited", "not found: `--sanitize` cannot be used", CURE)


def _places(config: Config, catalog: str | None) -> Iterator[Finding]:
    folder = config.cache
    while not folder.exists():
        folder = folder.parent
    writable = os.access(folder, os.W_OK)
    cure = "" if writable else "export FARM_CACHE=/a/folder/of/yours"
    yield Finding("binary cache", "ok" if writable else "missing", str(config.cache), cure)
    where = config.catalog if catalog is None else catalog
    from catalog.locations import Location

    local = Location.of(where).local
    if local is not None and not local.exists():
        yield Finding("catalog", "limited", f"{where}: none there yet", f"farm sweep --catalog {where}")
        return
    from catalog import store

    try:
        opened = store.open(where, recover=False)
        yield Finding("catalog", "ok", f"{opened.uri}: {opened.count()} rows, {opened.count({'status': 'ok'})} verified")
    except ValueError as error:
        yield Finding("catalog", "missing", str(error))
