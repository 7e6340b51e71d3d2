"""Whether verdicts of this machine can be trusted: a known good kernel has to pass and every trap has to be refused for its
reason.

A machine writes rows only after this passed; `ensure_selftest` remembers that it did, for this code on this machine. Judges no
candidate of anybody.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, replace
from pathlib import Path

from generator.canonical import digest, digest_bytes
from generator.spec import AttentionSpec, TensorDType
from verifier.benchmark import measure
from verifier.binary_cache import write_atomically
from verifier.compile import NoCompiler, compile_translated, find_compiler
from verifier.cuda_selftest import gpu_checks
from verifier.environment import device_key, package_version
from verifier.judge import judge
from verifier.patience import Patience
from verifier.records import CompileFailed, Failed, Measurement, Passed, Verdict
from verifier.sandbox import SandboxLimits
from verifier.selftest_check import SPEC, Check, since, words
from verifier.traps import TRAPS, Trap, kernel

#: The fences of a sandbox, and what is lost where one is missing.
FENCES = {
    "no_network": "a candidate may reach the network while it is loaded",
    "no_new_privileges": "a candidate may gain rights through programs that grant them",
    "no_files": "a candidate may read files, and the memory of processes, of this user while it is loaded",
    "few_system_calls": "a candidate may start threads and processes",
}


def selftest(
    cache_dir: str | os.PathLike[str],
    *,
    quick: bool = False,
    progress: Callable[[Check], None] | None = None,
    device: str = "cpu",
) -> tuple[Check, ...]:
    """Every check of a device, in order; `progress` is told each as it ends. quick: a third of the traps, no timing.

    Raises NoDevice for one that is not there.
    """
    checks = []
    for check in _checks_of(device, cache_dir, quick):
        checks.append(check)
        if progress is not None:
            progress(check)
    return tuple(checks)


def passed(checks: tuple[Check, ...]) -> bool:
    return bool(checks) and all(check.ok for check in checks)


def ensure_selftest(
    cache_dir: str | os.PathLike[str], progress: Callable[[Check], None] | None = None, device: str = "cpu"
) -> tuple[Check, ...]:
    """The quick self-test, run once for this code on this device: a pass is remembered in the cache folder, a failure is not."""
    path = Path(cache_dir) / "selftest" / f"{selftest_key(device)}.json"
    try:
        return tuple(Check(**plain) for plain in json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        pass
    checks = selftest(cache_dir, quick=True, progress=progress, device=device)
    if passed(checks):
        write_atomically(path, json.dumps([asdict(check) for check in checks]).encode())
    return checks


@functools.cache
def selftest_key(device: str = "cpu") -> str:
    """Changes with the verifier's own code, the device, the kernel, the compiler, torch and Python."""
    folder = Path(__file__).parent
    sources = sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".cpp", ".cu", ".h"))
    code = {str(p.relative_to(folder)): digest_bytes(p.read_bytes()) for p in sources}
    try:
        compiler = find_compiler().version
    except NoCompiler:
        compiler = ""
    packages = [package_version(name) for name in ("torch", "pycuda", "cuda-bindings")]
    return digest([code, device_key(device).hash, os.uname().release, compiler, *packages, sys.version])


def _checks_of(device: str, cache_dir: str | os.PathLike[str], quick: bool) -> Iterator[Check]:
    if device == "cpu":
        return _checks(cache_dir, quick)
    return gpu_checks(cache_dir, device, quick)


def _checks(cache_dir: str | os.PathLike[str], quick: bool) -> Iterator[Check]:
    try:
        yield Check("compiler", "one that works", find_compiler().version, True, 0.0)
    except NoCompiler as error:
        yield Check("compiler", "one that works", str(error), False, 0.0)
        return
    fences = yield from _good_kernels(cache_dir, ("fp32",) if quick else ("fp32", "bf16", "fp16"))
    for trap in TRAPS:
        if quick and not trap.quick:
            continue
        if trap.check == "system call" and not fences.get("few_system_calls"):
            yield Check(
                f"trap {trap.name}", "refused where system calls can be filtered", "not tried: they cannot be here", True, 0.0
            )
        else:
            yield _timed_trap(cache_dir, trap) if trap.caught_by == "measure" else _trap(cache_dir, trap)
    if not quick:
        yield _clock(cache_dir)


def _good_kernels(cache_dir: str | os.PathLike[str], dtypes: tuple[TensorDType, ...]) -> Generator[Check, None, dict[str, bool]]:
    """The good kernel passes, and the fences that were up when it ran are told, as facts: a missing one fails nothing."""
    fences: dict[str, bool] = {}
    for dtype in dtypes:
        started = time.monotonic()
        verdict = _verdict(cache_dir, "good", replace(SPEC, dtype=dtype))
        yield Check(f"known good kernel, {dtype}", "ok", words(verdict), isinstance(verdict, Passed), since(started))
        if isinstance(verdict, Passed):
            fences = verdict.fences
    for fence, loss in FENCES.items():
        state = "up" if fences.get(fence) else f"missing: {loss}"
        yield Check(f"fence {fence.replace('_', ' ')}", "up, where the system has it", state, True, 0.0)
    return fences


def _trap(cache_dir: str | os.PathLike[str], trap: Trap) -> Check:
    started = time.monotonic()
    verdict = _verdict(cache_dir, trap.name, SPEC)
    right = isinstance(verdict, Failed) and verdict.reason == trap.reason and trap.check in ("", verdict.witness.check)
    return Check(f"trap {trap.name}", f"{trap.reason} ({trap.check or 'any check'})", words(verdict), right, since(started))


def _verdict(cache_dir: str | os.PathLike[str], name: str, spec: AttentionSpec) -> Verdict | str:
    translated = kernel(spec, name)
    binary = compile_translated(translated, cache_dir)
    if isinstance(binary, CompileFailed):
        return f"{binary.reason}: {binary.log.splitlines()[0] if binary.log else ''}"
    return judge(binary, translated.launch, spec, num_threads=2, limits=SandboxLimits(run_s=1.5))


def _timed_trap(cache_dir: str | os.PathLike[str], trap: Trap) -> Check:
    started = time.monotonic()
    result = _measured(cache_dir, trap.name)
    right = isinstance(result, Failed) and (result.reason, result.witness.check) == (trap.reason, trap.check)
    return Check(f"trap {trap.name}", f"{trap.reason} ({trap.check}) in a timed call", words(result), right, since(started))


def _clock(cache_dir: str | os.PathLike[str]) -> Check:
    """A kernel that needs at least 10 ms and stops its process's clocks is timed all the same."""
    started = time.monotonic()
    result = _measured(cache_dir, "slow_and_patched_clock")
    right = isinstance(result, Measurement) and result.ours.p50_s > 0.005
    found = f"{result.ours.p50_s * 1e3:.1f} ms" if isinstance(result, Measurement) else words(result)
    return Check("a stopped clock", "at least 5 ms a call", found, right, since(started))


def _measured(cache_dir: str | os.PathLike[str], name: str) -> Measurement | Failed | str:
    translated = kernel(SPEC, name)
    binary = compile_translated(translated, cache_dir)
    if isinstance(binary, CompileFailed):
        return f"{binary.reason}: {binary.log.splitlines()[0] if binary.log else ''}"
    return measure(binary, translated.launch, SPEC, num_threads=2, patience=Patience(min_rounds=4, max_rounds=6, budget_s=1.0))
