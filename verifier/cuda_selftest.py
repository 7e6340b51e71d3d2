"""The self-test of a GPU: a known good kernel passes, every trap is refused for its reason, and the device is well after each.

`verifier.selftest` runs and remembers it. Judges no candidate of anybody.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from generator.spec import AttentionSpec, TensorDType
from generator.targets import TARGETS
from verifier.compile import compile_translated
from verifier.compile_cuda import NoCudaCompiler, find_cuda_compiler
from verifier.cuda_benchmark import measure_cuda
from verifier.cuda_sandbox import device_facts
from verifier.environment import cores_given, device_key
from verifier.gpu import NoDevice, capability_of
from verifier.judge import judge
from verifier.patience import Patience
from verifier.records import CompileFailed, Failed, Measurement, Passed, Verdict
from verifier.sandbox import CannotStart, SandboxLimits
from verifier.selftest_check import SPEC, Check, since, words
from verifier.traps.cuda import CUDA_TRAPS, CudaTrap, cuda_kernel

#: An endless kernel is stopped after this; every good one takes milliseconds.
LIMITS = SandboxLimits(run_s=3.0)


def gpu_checks(cache_dir: str | os.PathLike[str], device: str, quick: bool) -> Iterator[Check]:
    """Every check in order. quick: half of the traps, no timing."""
    try:
        yield Check("CUDA compiler", "one that works", find_cuda_compiler().version, True, 0.0)
    except NoCudaCompiler as error:
        yield Check("CUDA compiler", "one that works", str(error), False, 0.0)
        return
    facts = _facts(device)
    yield facts
    if not facts.ok:
        return
    traps, dtypes = tuple(trap for trap in CUDA_TRAPS if trap.quick or not quick), _dtypes(device, quick)
    _compile_ahead(cache_dir, device, [*(("good", dtype) for dtype in dtypes), *((trap.name, "fp16") for trap in traps)])
    for dtype in dtypes:
        started = time.monotonic()
        verdict = gpu_verdict(cache_dir, device, "good", replace(SPEC, dtype=dtype))
        yield Check(f"known good kernel, {dtype}", "ok", words(verdict), isinstance(verdict, Passed), since(started))
    for trap in traps:
        yield _trap(cache_dir, device, trap)
    started = time.monotonic()
    verdict = gpu_verdict(cache_dir, device, "good", replace(SPEC, dtype="fp16"))
    yield Check("known good kernel after all of them", "ok", words(verdict), isinstance(verdict, Passed), since(started))
    if not quick:
        yield _timed(cache_dir, device)


def _dtypes(device: str, quick: bool) -> tuple[TensorDType, ...]:
    if quick:
        return ("fp16",)
    return ("fp16", "bf16", "fp32") if capability_of(device) >= (8, 0) else ("fp16", "fp32")


def _facts(device: str) -> Check:
    """The driver, asked through PyCUDA in a child, has to say what NVML says, and a tiny kernel has to be right."""
    started, key = time.monotonic(), device_key(device)
    expected = f"{key.name}, {key['sm_count']} multiprocessors, {key['compute_capability']}"
    try:
        told = device_facts(device)
    except (CannotStart, NoDevice) as error:
        return Check("tiny kernel", expected, str(error), False, since(started))
    found = f"{told['name']}, {told['sm_count']} multiprocessors, {told['compute_capability']}"
    return Check("tiny kernel and facts", expected, found, found == expected, since(started))


def _trap(cache_dir: str | os.PathLike[str], device: str, trap: CudaTrap) -> Check:
    started = time.monotonic()
    verdict = gpu_verdict(cache_dir, device, trap.name, replace(SPEC, dtype="fp16"))
    right = isinstance(verdict, Failed) and verdict.reason == trap.reason and trap.check in ("", verdict.witness.check)
    return Check(f"trap {trap.name}", f"{trap.reason} ({trap.check or 'any check'})", words(verdict), right, since(started))


def _compile_ahead(cache_dir: str | os.PathLike[str], device: str, kernels: Sequence[tuple[str, TensorDType]]) -> None:
    """(name, dtype) into the cache, several at a time: one after another they take longer than all that is judged by them."""
    arch = "sm_{}{}".format(*capability_of(device))

    def one(kernel: tuple[str, TensorDType]) -> None:
        compile_translated(cuda_kernel(replace(SPEC, dtype=kernel[1]), arch, kernel[0]), cache_dir, arch=arch)

    with ThreadPoolExecutor(cores_given()) as pool:
        list(pool.map(one, dict.fromkeys(kernels)))


def gpu_verdict(cache_dir: str | os.PathLike[str], device: str, name: str, spec: AttentionSpec) -> Verdict | str:
    """What is said of the hand-made kernel of that name."""
    arch = "sm_{}{}".format(*capability_of(device))
    translated = cuda_kernel(spec, arch, name)
    binary = compile_translated(translated, cache_dir, arch=arch)
    if isinstance(binary, CompileFailed):
        return f"{binary.reason}: {binary.log.splitlines()[0] if binary.log else ''}"
    assert binary.target in TARGETS
    return judge(binary, translated.launch, spec, limits=LIMITS, device=device)


def _timed(cache_dir: str | os.PathLike[str], device: str) -> Check:
    """The good kernel is timed, and its two clocks agree."""
    started, spec = time.monotonic(), replace(SPEC, dtype="fp16")
    arch = "sm_{}{}".format(*capability_of(device))
    translated = cuda_kernel(spec, arch)
    binary = compile_translated(translated, cache_dir, arch=arch)
    assert not isinstance(binary, CompileFailed), binary
    patience = Patience(min_rounds=4, max_rounds=6, budget_s=1.0, near=100.0)
    result = measure_cuda(binary, translated.launch, spec, device=device, patience=patience)
    right = isinstance(result, Measurement) and result.ours.p50_s > result.floor_s and bool(result.rivals)
    found = f"{result.ours.p50_s * 1e6:.1f} us a call" if isinstance(result, Measurement) else words(result)
    return Check("timing", "a time beside a rival's", found, right, since(started))
