"""The attention functions as torch operators `farm::sdpa` and `farm::flash`, for torch.compile and torch.export. Decides nothing.

While torch traces, `catalog.attention` puts one of these operators into the graph; what runs for it is decided at run time, as in
eager code. Their fake versions promise what torch's own function would give: the strides of the real ones are the same.
Inference only: calls whose inputs want gradients are traced as torch's own operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from catalog.flash_fallback import FlashArguments, dense
from catalog.plain_attention import torch_sdpa

_library = torch.library.Library("farm", "DEF")
_library.define(
    "sdpa(Tensor query, Tensor key, Tensor value, bool is_causal=False, float? scale=None, bool enable_gqa=False) -> Tensor",
    tags=(torch.Tag.needs_exact_strides,) if hasattr(torch.Tag, "needs_exact_strides") else (),
)
_library.define(
    "flash(Tensor q, Tensor k, Tensor v, float? softmax_scale, bool causal, int left, int right, float softcap, "
    "Tensor? alibi_slopes, Tensor? sinks, bool need_lse) -> (Tensor, Tensor)"
)


def implement(sdpa: Callable[..., Tensor], flash_attn_func: Callable[..., Any]) -> None:
    """What runs for the operators: the functions that eager code calls. Once a process."""

    def run_sdpa(
        query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False
    ) -> Tensor:
        return sdpa(query, key, value, None, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)

    def run_flash(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None,
        causal: bool,
        left: int,
        right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
        need_lse: bool,
    ) -> tuple[Tensor, Tensor]:
        rules = {"learnable_sink": sinks, "return_lse": need_lse}
        found = flash_attn_func(q, k, v, 0.0, softmax_scale, causal, (left, right), softcap, alibi_slopes, **rules)
        return found if need_lse else (found, q.new_empty(0, dtype=torch.float32))

    _library.impl("sdpa", run_sdpa, "CompositeExplicitAutograd")
    _library.impl("flash", run_flash, "CompositeExplicitAutograd")


@torch.library.register_fake("farm::sdpa", lib=_library)  # type: ignore[untyped-decorator]
def _fake_sdpa(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False
) -> Tensor:
    return torch_sdpa(query, key, value, None, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)


@torch.library.register_fake("farm::flash", lib=_library)  # type: ignore[untyped-decorator]
def _fake_flash(q: Tensor, k: Tensor, v: Tensor, *rules: Any) -> tuple[Tensor, Tensor]:
    """Shapes and strides of `run_flash`, whose arguments it takes; the last of them says whether the LSE is wanted."""
    need_lse = rules[-1]
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse_shape = (q.shape[0], q.shape[2], q.shape[1]) if need_lse else (0,)
    return out, q.new_empty(lse_shape, dtype=torch.float32)


def _traceable(*tensors: Tensor | None) -> bool:
    """Whether our operators may stand in the graph: they have no gradients and no autocast rules."""
    given = [x for x in tensors if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return False
    return not torch.is_autocast_enabled(given[0].device.type)


def traced_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """What a traced call becomes: our operator, or torch's where no kernel could answer anyway."""
    if attn_mask is not None or dropout_p or not _traceable(query, key, value):
        return torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return torch.ops.farm.sdpa(query, key, value, is_causal, scale, enable_gqa)


def traced_flash(q: Tensor, k: Tensor, v: Tensor, arguments: FlashArguments, need_lse: bool) -> tuple[Tensor, Tensor | None]:
    """What a traced call becomes: our operator, or the fallback's own operators. Output and LSE."""
    if arguments.dropout_p or not _traceable(q, k, v, *arguments.captured.values()):
        return dense(q, k, v, arguments)
    left, right = (-1 if x is None else x for x in arguments.window_size or (None, None))
    softcap, slopes, sinks = float(arguments.softcap), arguments.alibi_slopes, arguments.sinks
    return torch.ops.farm.flash(q, k, v, arguments.softmax_scale, arguments.causal, left, right, softcap, slopes, sinks, need_lse)
