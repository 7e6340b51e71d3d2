"""A model's recorded CUDA answer: its device code unchanged, its host part as launch descriptions written by hand."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
#: Headers of the host part; our launcher does what it did.
_HOST_HEADERS = ("<cuda_runtime.h>", "<atomic>")
_ARGUMENTS = ", ".join(f"const __grid_constant__ {kind}" for kind in (*["CUtensorMap"] * 3, "fa::Params"))
_KERNELS = f"""
template __global__ void fa::attn_kernel<128, true, 1>({_ARGUMENTS});
template __global__ void fa::attn_kernel<144, false, 2>({_ARGUMENTS});
"""


def device_source() -> str:
    """Everything before the answer's host part, and the two kernels that the host part launched."""
    text = (FOLDER / "cuda_direct.answer.cu").read_text()
    device = text[: text.index("// Host side")].rsplit("\n", 2)[0]
    lines = [line for line in device.split("\n") if not any(name in line for name in _HOST_HEADERS)]
    return "\n".join([*lines, "}  // namespace fa", _KERNELS])


def launch_text(causal: bool) -> str:
    return (FOLDER / f"cuda_direct.{'causal' if causal else 'full'}.launch.json").read_text()
