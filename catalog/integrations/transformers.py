"""Attention for transformers under the name `farm`: `register()`, then `attn_implementation="farm"`. Changes no model.

Where a model's mask is a rule (causal, a sliding window) and nothing is padded, no mask tensor is made and the call may get
a kernel; otherwise the mask is made as for `sdpa`, and torch answers. Softcap and sink logits are applied in either case.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from catalog.attention import flash_attn_func, scaled_dot_product_attention
from catalog.plain_attention import PlainRules, plain_attention

NAME = "farm"


def register() -> None:
    """Make `attn_implementation="farm"` known. May be called again. Raises ImportError for transformers before version 5."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    if "q_length" not in inspect.signature(sdpa_mask).parameters:
        raise ImportError("transformers: expected version 5 or later, whose mask functions are given q_length; update it")
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **more: Any,
) -> Tensor | None:
    """None where `attention` computes the mask itself: bottom-right causal or sliding, nothing padded. Else a tensor."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    mask_function = causal_mask_function if mask_function is None else mask_function
    is_rule = mask_function is causal_mask_function or _window_of(mask_function) == local_size is not None
    if allow_is_causal_skip and is_rule and _nothing_hidden(q_length, kv_length, q_offset, kv_offset, attention_mask):
        return None
    return sdpa_mask(
        batch_size, q_length, kv_length, q_offset,  # type: ignore[arg-type]  # of a static cache it is a tensor
        kv_offset, mask_function=mask_function, attention_mask=attention_mask, local_size=local_size, allow_is_causal_skip=False,
        **more,
    )  # fmt: skip


def _window_of(mask_function: Callable[..., Any]) -> int | None:
    """The window of transformers' sliding causal mask; None for any other function (chunks, packed sequences, user overlays)."""
    from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

    model = sliding_window_causal_mask_function(1)
    parts = _closure(mask_function).get("mask_functions", ())
    expected = _closure(model).get("mask_functions", ())
    if getattr(mask_function, "__code__", None) is not model.__code__ or len(parts) != len(expected) or not expected:
        return None
    overlay, expected_overlay = parts[0], expected[0]
    if parts[1:] != (causal_mask_function,) or getattr(overlay, "__code__", None) is not expected_overlay.__code__:
        return None
    return _closure(overlay).get("sliding_window")


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    """Names and values that a function closes over."""
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def _nothing_hidden(q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int, attention_mask: Tensor | None) -> bool:
    """Whether the last query sees the last key, and no key is padding. Values are not read while torch traces."""
    if torch.compiler.is_compiling():
        return attention_mask is None and not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
    if int(q_offset) + q_length != kv_offset + kv_length:
        return False
    if attention_mask is None:
        return True
    seen = attention_mask[:, kv_offset : kv_offset + kv_length]
    return seen.shape[1] == kv_length and bool(seen.all())


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """query (B, H, Sq, D), key and value (B, Hkv, Sk, D) -> output (B, Sq, H, Dv), and None for the weights.

    sliding_window: keys that a query sees, itself among them. softcap, s_aux (sink logits (H)), position_bias: the model's.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and position_bias is None:
        window = (sliding_window - 1, 0) if causal and sliding_window is not None else (-1, -1)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = flash_attn_func(
            q, k, v, dropout, scaling, causal, window, softcap or 0.0, learnable_sink=None if s_aux is None else s_aux.flatten()
        )
        return out, None
    masks = _together(attention_mask, position_bias, causal, query, key)
    if softcap or s_aux is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        sinks = None if s_aux is None else s_aux.flatten()
        rules = PlainRules(scale, softcap=softcap or 0.0, sinks=sinks, mask=masks, dropout=dropout)
        return plain_attention(query, key, value, rules)[0].transpose(1, 2).contiguous(), None
    gqa = query.shape[1] != key.shape[1]
    out = scaled_dot_product_attention(query, key, value, masks, dropout, False, scale=scaling, enable_gqa=gqa)
    return out.transpose(1, 2).contiguous(), None


def _together(
    attention_mask: Tensor | None, position_bias: Tensor | None, causal: bool, query: Tensor, key: Tensor
) -> Tensor | None:
    """One mask of what the model gives: booleans, or numbers to add with -inf where nothing may be seen."""
    if position_bias is None:
        return attention_mask
    if attention_mask is None and causal:
        seqlen_q, seqlen_k = query.shape[2], key.shape[2]
        attention_mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=query.device).tril(seqlen_k - seqlen_q)
    if attention_mask is None:
        return position_bias
    if attention_mask.dtype == torch.bool:
        return position_bias.masked_fill(~attention_mask, float("-inf"))
    return position_bias + attention_mask
