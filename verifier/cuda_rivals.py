"""What a user would call in torch on a GPU for the same attention: each backend of SDPA by itself, FlexAttention compiled, and
plain operations. Knows nothing of candidates.

Prepared outside the clock, as on the CPU (`verifier.rivals`). What a rival cannot compute, or has no memory for, is a result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from generator.spec import AttentionSpec
from verifier.flex_rival import FLEX, Call, flex
from verifier.records import Unsupported
from verifier.rivals import RIVALS

#: Name -> torch's backend. On CUDA, `flash` is FlashAttention-2 as torch builds it.
BACKENDS = {
    "torch cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch flash-attention-2": SDPBackend.FLASH_ATTENTION,
    "torch memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
MASKED, EAGER = "torch sdpa with a mask", "torch eager"
NAMES = (*BACKENDS, MASKED, EAGER, FLEX)
#: Said of a rival for which the device had no room: another time it may have.
OUT_OF_MEMORY = "out of memory"
#: What a plan's `rivals` may name -> contestants here.
GROUPS = {"torch-sdpa": (*BACKENDS, MASKED), "torch-eager": (EAGER,), "flex-attention": (FLEX,)}


def prepare_cuda(spec: AttentionSpec, captured: Mapping[str, Tensor], wanted: tuple[str, ...] = NAMES) -> dict[str, Any]:
    """Name -> a call on (q, k, v), or Unsupported. captured: by name, on the device that is current."""
    out: dict[str, Call | Unsupported] = {}
    with torch.device("cuda"):
        plain = RIVALS["torch sdpa"](spec, captured)
        for name in wanted:
            if name in BACKENDS:
                out[name] = plain if isinstance(plain, Unsupported) else _on(BACKENDS[name], plain)
            elif name == FLEX:
                out[name] = flex(spec, captured, "cuda")
            else:
                out[name] = RIVALS[name](spec, captured)
    return out


def _on(backend: SDPBackend, call: Call) -> Call:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return call(q, k, v)

    return run
