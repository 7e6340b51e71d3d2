"""The program that compute-sanitizer watches: a cubin called once on each input of a folder. Compares nothing.

    python -m verifier.cuda_sanitize_child FOLDER

Every tensor is an allocation of exactly its bytes, so that the tool sees the first byte beyond it. FOLDER/done is written when
all calls have come back.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from generator.translate.records import launch_from_plain
from verifier.cuda_arguments import PlacedTensor
from verifier.cuda_child import first_device


def call(cuda: Any, kernel: Any, folder: Path, facts: dict[str, Any], stream: Any) -> None:
    """One input: uploaded, run, and its memory given back."""
    held, placed = [], []
    for tensor in facts["tensors"]:
        data = (folder / tensor["file"]).read_bytes()
        memory = cuda.mem_alloc(max(1, len(data)))
        if data:
            cuda.memcpy_htod(memory, data)
        held.append(memory)
        placed.append(PlacedTensor(int(memory) + tensor["offset"], tuple(tensor["shape"]), tuple(tensor["strides"])))
    prepared = kernel.prepare(placed, facts["scalars"])
    cuda.Context.synchronize()
    prepared.run(stream.handle)
    stream.synchronize()
    held.clear()  # PyCUDA gives back what nobody holds


def main(folder: Path) -> None:
    from verifier.launch_cuda import CudaKernel

    job = json.loads((folder / "job.json").read_text())
    cuda, _device, context = first_device()
    kernel = CudaKernel(launch_from_plain(job["launch"]), (folder / "kernel.cubin").read_bytes())
    stream = cuda.Stream()
    for facts in job["calls"]:
        call(cuda, kernel, folder, facts, stream)
    (folder / "done").write_text(f"{len(job['calls'])}")
    context.pop()  # left pushed, it would abort the process at its end


if __name__ == "__main__":
    main(Path(sys.argv[1]))
