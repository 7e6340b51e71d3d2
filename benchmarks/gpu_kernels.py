"""Kernels of the GPU checks and benchmarks: compiled, loaded, called; each piece of work in a child. Judges nothing."""

from __future__ import annotations

import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_cases import Build

from generator.binding import bind
from generator.spec import AttentionSpec
from generator.translate.records import Translated
from verifier.children import Limits
from verifier.compile_cuda import compile_cuda, find_cuda_compiler
from verifier.records import Binary

START = time.monotonic()
CACHE = Path(os.environ.get("FARM_CUDA_CACHE", tempfile.gettempdir())) / "farm_gpu_check"


def log(*words: object) -> None:
    print(f"[{time.monotonic() - START:6.1f}]", *words, flush=True)


def compile_one(b: Build) -> tuple[Build, dict[str, Any], Translated | None, Binary | None]:
    """The build's row: why there is no kernel, or what the compiler says of it."""
    try:
        translated = b.translated()
        if not isinstance(translated, Translated):
            return b, {"error": f"{translated.reason}: {translated.message}"}, None, None
        binary = compile_cuda(translated, CACHE, Limits(wall_s=150), arch=b.arch)
        if not isinstance(binary, Binary):
            return b, {"error": f"{binary.reason}: {binary.log[:400]}"}, translated, None
    except Exception as error:  # noqa: BLE001 - a kernel that cannot be built is a finding
        return b, {"error": f"{type(error).__name__}: {str(error)[:400]}"}, None, None
    row = {"compile_s": round(binary.compile_s, 2), **binary.resources, "notes": translated.schedule["notes"]}
    return b, row, translated, binary


def compile_all(builds: Sequence[Build]) -> dict[Build, tuple[dict[str, Any], Translated | None, Binary | None]]:
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 4) - 2)) as pool:
        done = {b: (row, t, x) for b, row, t, x in pool.map(compile_one, builds)}
    for b, (row, _, _) in done.items():
        if "error" in row or row.get("spill_bytes"):
            log("  build", b.name, row.get("error") or f"spills {row['spill_bytes']}")
    return done


class Kernel:
    """A built kernel in this process."""

    def __init__(self, translated: Translated, binary: Binary) -> None:
        import torch

        from verifier.launch_cuda import CudaKernel

        torch.zeros(1, device="cuda")  # makes the context that the launcher uses
        self.loaded = CudaKernel(translated.launch, Path(binary.path).read_bytes())

    def prepared(self, s: AttentionSpec, tensors: dict[str, Any]) -> Callable[[], None]:
        import torch

        binding = bind(self.loaded.launch, s)
        order = [tensors[{"q": "q", "k": "k", "v": "v", "o": "o", "lse": "lse"}.get(t.role, t.name)] for t in binding.tensors]
        call = self.loaded.prepare(order, [x.value for x in binding.scalars])
        stream = torch.cuda.current_stream().cuda_stream
        return lambda: call.run(stream)


def in_child(limit_s: float, work: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """The result of a function in a forked child, or why there is none."""
    here, there = mp.Pipe(False)

    def go() -> None:
        try:
            import torch

            torch.set_num_threads(2)
            result: dict[str, Any] = {"result": work(*args)}
        except BaseException as error:  # noqa: BLE001 - whatever ends the work is its result
            result = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        there.send(result)
        os._exit(0)

    child = mp.get_context("fork").Process(target=go)
    child.start()
    there.close()
    try:
        result = here.recv() if here.poll(limit_s) else {"error": f"no answer in {limit_s:g} s"}
    except EOFError:
        child.join(5)
        result = {"error": f"died with status {child.exitcode}"}
    if child.is_alive():
        child.kill()
    child.join()
    return result


def place_of(facts: dict[str, Any]) -> str:
    """The device and the software of an environment as one text, clocks and temperature apart: what times go by."""
    name, driver, *_ = [*facts["gpu"].split(", "), "no driver"]
    return f"{name}, driver {driver}, torch {facts['torch']}, CUDA {facts['cuda']}, {find_cuda_compiler().version}"


def environment() -> dict[str, Any]:
    import torch

    query = "name,driver_version,clocks.sm,clocks.max.sm,power.draw,temperature.gpu,memory.total"
    try:
        done = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True)
        card = done.stdout.strip()
    except OSError as error:
        card = f"unknown: {error}"
    return {"gpu": card, "torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0]}
