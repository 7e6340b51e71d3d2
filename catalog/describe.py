"""From the arguments of the attention functions to `AttentionCall`, for serving, planning and explaining. Runs nothing.

Every argument that no kernel implements becomes a blocker with its reason; none is ignored.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from catalog.cache_arguments import CacheArguments
from catalog.calls import AttentionCall, causal_forms, size_blockers, sizes, tensor_blockers, window_forms
from catalog.flash_checks import check_packed
from catalog.flash_fallback import FlashArguments, documents_of, window_limits
from catalog.kvcache import as_dense, totals
from catalog.operands import sdpa_output
from catalog.plainness import torch_may_choose, torch_reads
from catalog.reasons import Reason, reason
from generator.spec import Rule, held_by_fp32


def describe_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    """torch's function: (..., L, E) with three or four dimensions; causal is aligned top-left."""
    name = "scaled_dot_product_attention"
    blockers = [*tensor_blockers(("query", query), ("key", key), ("value", value))]
    if attn_mask is not None:
        blockers.append(reason("mask_tensor", "attn_mask is a tensor; kernels compute their masks from rules such as is_causal"))
    if not torch_reads(is_causal, enable_gqa, scale, dropout_p):  # torch, to which such a call goes, refuses it
        found = f"is_causal {is_causal!r}, enable_gqa {enable_gqa!r}, scale {scale!r}, dropout_p {dropout_p!r}"
        return _without_sizes(name, query, [*blockers, reason("argument", f"torch does not take these types: {found}")])
    if dropout_p:
        blockers.append(reason("dropout", f"dropout_p is {dropout_p}"))
    if not torch_may_choose():
        blockers.append(
            reason("torch_backend", "sdpa_kernel(...), or a switch in torch.backends.cuda, leaves out a way of torch's")
        )
    if unreadable := _unreadable(blockers):
        return _without_sizes(name, query, unreadable)
    if not query.dim() == key.dim() == value.dim() or query.dim() not in (3, 4):
        blockers.append(reason("rank", f"expected 3 or 4 dimensions in each, found {query.dim()}, {key.dim()}, {value.dim()}"))
        return _without_sizes(name, query, blockers)
    q, k, v = (x if x.dim() == 4 else x.unsqueeze(0) for x in (query, key, value))
    blockers += size_blockers(q, k, v)
    if not enable_gqa and q.shape[1] != k.shape[1]:
        blockers.append(reason("broadcast", f"{q.shape[1]} query heads and {k.shape[1]} key heads without enable_gqa"))
    out = sdpa_output(query, value.shape[-1])
    if out.shape[-1] > 1 and out.strides[-1] != 1:  # torch's rule for a query whose rows overlap
        blockers.append(reason("layout", f"torch would give an output with stride {out.strides[-1]} in its last dimension"))
    forms = causal_forms(q.shape[2], k.shape[2], "top_left") if is_causal else ((),)
    return _call(name, (q, k, v), blockers, scale, forms)


def describe_flash(
    query: Tensor, key: Tensor, value: Tensor, arguments: FlashArguments, need_lse: bool, *, name: str = "flash_attn_func"
) -> AttentionCall:
    """FlashAttention's function: (B, S, H, D); causal and windows are aligned bottom-right."""
    blockers = [*tensor_blockers(("q", query), ("k", key), ("v", value))]
    if arguments.dropout_p:
        blockers.append(reason("dropout", f"dropout_p is {arguments.dropout_p}"))
    if unreadable := _unreadable(blockers):
        return _without_sizes(name, query, unreadable)
    if not query.dim() == key.dim() == value.dim() == 4:
        blockers.append(reason("rank", f"expected (B, S, H, D), found {query.dim()}, {key.dim()} and {value.dim()} dimensions"))
        return _without_sizes(name, query, blockers)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    blockers += size_blockers(q, k, v, ("q", "k", "v"))
    slopes = arguments.alibi_slopes
    if slopes is not None:
        blockers += _slope_blockers(slopes, q)
    if arguments.sinks is not None:
        blockers += tensor_blockers(("learnable_sink", arguments.sinks))
    if not held_by_fp32(arguments.softcap):
        blockers.append(reason("argument", f"softcap is {arguments.softcap!r}, which fp32 does not hold"))
    left, right = window_limits(arguments.window_size, arguments.causal)
    scores: tuple[Rule, ...] = (Rule.make("softcap", cap=arguments.softcap),) if arguments.softcap else ()
    scores += (Rule.make("alibi", align="bottom_right"),) if slopes is not None else ()
    scores += (Rule.make("sink_logit"),) if arguments.sinks is not None else ()
    forms = window_forms(q.shape[2], k.shape[2], left, right)
    forms = tuple((*form, *_row_rules(arguments)) for form in forms)
    return _call(
        name, (q, k, v), blockers, arguments.softmax_scale, forms,
        scores=scores, captured=tuple(arguments.captured), need_lse=need_lse, layout="bshd",
    )  # fmt: skip


def packed_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    arguments: FlashArguments,
    table: Tensor | None,
) -> FlashArguments | None:
    """Packed self-attention as one sequence of documents; None where the document rule cannot say it.

    Raises ValueError for bounds that do not fit the rows.
    """
    check_packed(query, key, value, cu_seqlens_q, cu_seqlens_k, table)
    slopes = arguments.alibi_slopes
    if table is not None or (slopes is not None and slopes.dim() == 2) or query.device.type != "cpu":
        return None
    if cu_seqlens_q is not cu_seqlens_k and not torch.equal(cu_seqlens_q, cu_seqlens_k):
        return None
    if not int(cu_seqlens_q[-1]) == query.shape[0] == key.shape[0]:
        return None  # rows behind the last sequence
    if len(cu_seqlens_q) == 2:
        return arguments  # one sequence: no rule needed
    return arguments._replace(documents=documents_of(cu_seqlens_q))


def describe_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    arguments: FlashArguments,
    need_lse: bool,
    table: Tensor | None,
) -> AttentionCall:
    """FlashAttention's function on packed sequences: as documents, or with the reason why not."""
    name = "flash_attn_varlen_func"
    packed = packed_arguments(query, key, value, cu_seqlens_q, cu_seqlens_k, arguments, table)
    if packed is not None:
        return describe_flash(query[None], key[None], value[None], packed, need_lse, name=name)
    why = "packed queries and keys with bounds of their own, or pages, have no kernels; torch goes through them one by one"
    return _without_sizes(name, query, [*tensor_blockers(("q", query), ("k", key), ("v", value)), reason("argument", why)])


def describe_kvcache(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, arguments: FlashArguments, cache: CacheArguments, need_lse: bool
) -> AttentionCall:
    """FlashAttention's function on a key/value cache: as a call without one, or with the reason why not. Writes nothing."""
    name = "flash_attn_with_kvcache"
    same = as_dense(query, k_cache, v_cache, totals(query, k_cache, cache), arguments, cache)
    if same is not None:
        return describe_flash(query, *same, need_lse, name=name)
    why = "pages, chosen rows, padding on the left, or unequal lengths with causal rows, windows or slopes have no kernels"
    return _without_sizes(name, query, [*tensor_blockers(("q", query), ("k_cache", k_cache)), reason("argument", why)])


def _row_rules(arguments: FlashArguments) -> tuple[Rule, ...]:
    padding: tuple[Rule, ...] = () if arguments.lengths is None else (Rule.make("padding"),)
    return padding if arguments.documents is None else (*padding, Rule.make("document"))


def _unreadable(blockers: list[Reason]) -> list[Reason]:
    """The blockers, if among them is one of a tensor whose sizes cannot even be read safely."""
    return (
        blockers
        if any(b.code in ("tensor_subclass", "tensor_layout", "functorch", "torch_mode", "compiling") for b in blockers)
        else []
    )


def _without_sizes(name: str, query: Tensor, blockers: list[Reason]) -> AttentionCall:
    dtype = str(query.dtype)
    return AttentionCall(name, str(query.device), (dtype, dtype, dtype), blockers=tuple(blockers))


def _slope_blockers(slopes: Tensor, q: Tensor) -> list[Reason]:
    found = [*tensor_blockers(("alibi_slopes", slopes))]
    if slopes.dtype != torch.float32:
        found.append(reason("dtype", f"alibi_slopes is {slopes.dtype}; kernels take float32"))
    if tuple(slopes.shape) not in ((q.shape[1],), tuple(q.shape[:2])):
        found.append(reason("argument", f"alibi_slopes has shape {tuple(slopes.shape)}; expected (H) or (B, H)"))
    elif slopes.dim() == 2:
        found.append(reason("argument", "alibi_slopes of each batch row has no kernels; (H) has"))
    return found


def _number(scale: Any) -> float:
    """NaN for what is no number: torch, to which such a call goes, has its own words for it."""
    try:
        return float(scale)
    except (TypeError, ValueError):
        return math.nan


def _call(
    name: str,
    views: tuple[Tensor, Tensor, Tensor],
    blockers: list[Reason],
    scale: float | None,
    forms: tuple[tuple[Rule, ...], ...],
    **more: Any,
) -> AttentionCall:
    """The call of (B, H, S, D) views."""
    resolved = _number(views[0].shape[3] ** -0.5 if scale is None and views[0].shape[3] else 1.0 if scale is None else scale)
    if not held_by_fp32(resolved):
        blockers.append(reason("scale", f"the softmax scale is {scale!r}"))
    return AttentionCall(name, **sizes(*views), scale=resolved, mask_forms=forms, blockers=tuple(blockers), **more)
