"""The dtypes of specs and of TL as torch's. Rounds nothing."""

from __future__ import annotations

import torch

from generator.spec import TL_DTYPES, AttentionSpec

#: Dtype in TL -> torch's.
DTYPES: dict[str, torch.dtype] = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i32": torch.int32}


def torch_dtype(spec: AttentionSpec) -> torch.dtype:
    """Of a spec's Q, K, V and O."""
    return DTYPES[TL_DTYPES[spec.dtype]]
