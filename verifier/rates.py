"""What a device really gives to a user of torch: bytes a second of a copy, operations a second of a product. Judges nothing.

These are not the peaks of data sheets: a peak refuses a claim, a time above the measured rate is measured again.
`python -m verifier.rates cuda:0` prints them for a GPU, in a process of its own, so that whoever asks makes no CUDA context.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from verifier.binary_cache import write_atomically
from verifier.children import Limits, run_limited
from verifier.environment import NoDevice, device_key, worker_threads

CPU_COPY_BYTES, GPU_COPY_BYTES = 128 << 20, 1 << 30
CPU_PRODUCT, GPU_PRODUCT = 1024, 4096
_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Rates:
    """copy_bytes_per_s: bytes read and written. matmul_flops_per_s: of a square product in `dtype`."""

    copy_bytes_per_s: float
    matmul_flops_per_s: float
    dtype: str

    def __str__(self) -> str:
        product = f"{self.matmul_flops_per_s / 1e12:.3g} TFLOP/s in {self.dtype} products"
        return f"{self.copy_bytes_per_s / 1e9:.3g} GB/s in copies, {product}"


def ensure_rates(cache_dir: str | os.PathLike[str], device: str = "cpu") -> Rates:
    """Measured once for a device and a cache folder. Raises NoDevice where torch cannot use the device."""
    path = Path(cache_dir) / "rates" / f"{device_key(device).hash}.json"
    try:
        return Rates(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        pass
    found = measured_rates(device)
    write_atomically(path, json.dumps(asdict(found)).encode())
    return found


def measured_rates(device: str = "cpu") -> Rates:
    """The best of a few rounds, now. On a CPU with all cores given."""
    if device == "cpu":
        return _cpu_rates()
    argv = [sys.executable, "-m", "verifier.rates", device]
    folder = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")]))
    ended = run_limited(argv, Limits(wall_s=120.0, memory_bytes=1 << 46), env=os.environ | {"PYTHONPATH": path})
    last = ended.log.strip().rpartition("\n")[2]
    if ended.how != "exited" or ended.code:
        raise NoDevice(f"device: {device!r}: its rates cannot be measured: {last or ended.how}")
    return Rates(**json.loads(last))


def _cpu_rates() -> Rates:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(worker_threads())
    try:
        source = torch.ones(CPU_COPY_BYTES // 4)
        target = torch.empty_like(source)
        a = torch.ones(CPU_PRODUCT, CPU_PRODUCT)
        copied, multiplied = _fastest(lambda: target.copy_(source)), _fastest(lambda: torch.mm(a, a))
    finally:
        torch.set_num_threads(threads)
    return Rates(2 * CPU_COPY_BYTES / copied, 2 * CPU_PRODUCT**3 / multiplied, "fp32")


def _gpu_rates(device: str) -> Rates:
    import torch

    def waited(call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            call()
            torch.cuda.synchronize()

        return run

    with torch.device(device), torch.cuda.device(device):
        source = torch.ones(GPU_COPY_BYTES // 4)
        target = torch.empty_like(source)
        a = torch.randn(GPU_PRODUCT, GPU_PRODUCT).half()
        copied, multiplied = _fastest(waited(lambda: target.copy_(source))), _fastest(waited(lambda: torch.mm(a, a)))
    return Rates(2 * GPU_COPY_BYTES / copied, 2 * GPU_PRODUCT**3 / multiplied, "fp16")


def _fastest(call: Callable[[], object]) -> float:
    """Seconds of the fastest of a few calls; the first one is left out."""
    seconds = []
    for _ in range(1 + _ROUNDS):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


if __name__ == "__main__":
    print(json.dumps(asdict(_gpu_rates(sys.argv[1]))))
