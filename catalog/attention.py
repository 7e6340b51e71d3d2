"""The attention functions that serving code calls: torch's and FlashAttention's, with their names, argument order and semantics.

Each finds a frame for the exact shapes (one dictionary lookup when warm) and runs it: a kernel of the catalog, or the fallback
in torch with the reason counted. What is decided, and by what, is in `catalog.server`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, compiler

from catalog import flash, kvcache, serving
from catalog.cache_arguments import CacheArguments
from catalog.calls import AttentionCall
from catalog.decisions import Decision
from catalog.describe import describe_flash, describe_kvcache, describe_sdpa, describe_varlen, packed_arguments
from catalog.flash_checks import check_numbers, flash_arguments, lse_wanted
from catalog.flash_fallback import FlashArguments, Window, dense, dense_output, varlen
from catalog.frames import bound_kernel
from catalog.loader import LoadedKernel
from catalog.operands import check_out, may_be_written, sdpa_output
from catalog.plain_attention import torch_sdpa
from catalog.plainness import is_plain, torch_reads
from catalog.reasons import RunFailed
from catalog.server import Frame, Server, per_thread
from catalog.settings import override as _override
from catalog.torch_ops import implement, traced_flash, traced_sdpa
from generator.spec import AttentionSpec

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_math_way, _flash_way = torch._C._get_math_sdp_enabled, torch._C._get_flash_sdp_enabled
_empty_like = torch.empty_like  # a sixth fewer instructions than new_empty_strided
_deterministic = torch.are_deterministic_algorithms_enabled


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, answered by a kernel of the catalog where one is fit and faster.

    query (..., H, L, E), key (..., Hkv, S, E), value (..., Hkv, S, Ev) -> (..., H, L, Ev). Causal is aligned top-left. Errors are
    torch's own; strict mode adds NoKernelError.
    """
    if _is_dynamo_compiling() or compiler._is_compiling_flag:  # torch.compiler.is_compiling() at a third of its cost
        return traced_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    server = serving.server()
    if server.off:
        return torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    frame, usual = None, is_causal.__class__ is enable_gqa.__class__ is bool and dropout_p.__class__ is float
    if usual and (scale is None or scale.__class__ is float):
        takes_kernels = attn_mask is None and dropout_p == 0.0
    else:  # 1 == True and Fraction(1, 4) == 0.25, but not to torch
        takes_kernels = attn_mask is None and torch_reads(is_causal, enable_gqa, scale, dropout_p) and float(dropout_p) == 0.0
        scale = float(scale) if takes_kernels and scale is not None else scale
    if takes_kernels and _math_way() and _flash_way():  # as torch_may_choose()
        frame, options = server.latest, (is_causal, scale, enable_gqa, _override(), _deterministic())
        if frame is None or frame.options != options or not frame.check(query, key, value):
            frame = _sdpa_frame(server, query, key, value, options)
    if frame is not None:
        if frame.run is None:
            per_thread.decision = frame.decision
            frame.outcome.tick()
        else:
            try:
                out: Tensor = frame.run(query, key, value)
            except RunFailed as failure:
                server.failed(frame, failure.reason, failure.broken)
            else:
                per_thread.decision = frame.decision
                frame.outcome.tick()
                return out
    elif isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor):  # torch says so otherwise
        with torch._C.DisableTorchFunction():  # subclasses and modes see torch's function, not what is asked of tensors here
            call = describe_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        server.miss(call, _override())
    if scale is None and enable_gqa is False:  # keywords cost a microsecond
        return torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal)
    return torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _sdpa_frame(server: Server, query: Tensor, key: Tensor, value: Tensor, options: tuple[Any, ...]) -> Frame | None:
    """The frame for these tensors and options, found or made; None where no key describes them."""
    if not is_plain(query, key, value):
        return None
    identity = (
        query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(), query.dtype, key.dtype, value.dtype,
        query.device, key.device, value.device, options,
    )  # fmt: skip
    try:
        frame = server.frames.get(identity)
    except TypeError:  # an option such as a list: torch has its own words for it
        return None
    if frame is None:
        is_causal, scale, enable_gqa, override, _ = options
        call = describe_sdpa(query, key, value, None, 0.0, is_causal, scale, enable_gqa)
        frame = server.frame(identity, call, override, partial(_bind_sdpa, call, query))
    server.remember(frame, options, query, key, value)
    return frame


def _bind_sdpa(call: AttentionCall, query: Tensor, loaded: LoadedKernel, spec: AttentionSpec) -> Callable[..., Tensor]:
    output = sdpa_output(query, call.head_dim_v)
    kernel = bound_kernel(loaded.entry, call, spec, output, {})
    shape, strides, is_like_query = output.shape, output.strides, output.is_like_query

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = _empty_like(query) if is_like_query else query.new_empty_strided(shape, strides)
        kernel.run(query, key, value, out)
        return out

    return run


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    return_softmax_lse: bool = False,
    learnable_sink: Tensor | None = None,
    out: Tensor | None = None,
) -> Any:
    """FlashAttention's function: q (B, Sq, H, D), k and v (B, Sk, Hkv, D) -> (B, Sq, H, Dv). Causal is aligned bottom-right.

    window_size: (left, right), inclusive, -1 or None unbounded. alibi_slopes: (H) or (B, H) fp32. deterministic: forward passes
    always are. return_attn_probs: (out, lse, None), as FlashAttention gives without dropout; return_lse or return_softmax_lse:
    (out, lse). LSE is (B, H, Sq) fp32, natural log, -inf for a row that sees no key. out: written and returned.
    learnable_sink: (H), a logit without a key in each row's softmax.
    """
    arguments = flash_arguments(softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p, learnable_sink)
    need_lse = lse_wanted(return_attn_probs, return_lse, return_softmax_lse)
    if _is_dynamo_compiling() or compiler._is_compiling_flag:
        result, lse = traced_flash(q, k, v, arguments, need_lse)
    else:
        written = None if out is None else _written_by_kernels(out, q, k, v)
        answered = flash.answer(q, k, v, arguments, need_lse, written)
        if answered is None:
            answered = dense(q, k, v, arguments) if need_lse else (dense_output(q, k, v, arguments), None)
        result, lse = answered
    return _flash_result(_into(out, result), lse, need_lse, return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    page_table: Tensor | None = None,
    return_lse: bool = False,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
) -> Any:
    """FlashAttention's function on packed sequences: q (total_q, H, D), k and v (total_k, Hkv, D), cu_seqlens (B + 1) int32.

    With block_table (or page_table, the same) k and v are pages (blocks, page, Hkv, D). LSE is (H, total_q). The rest as
    `flash_attn_func`. Rows of q behind the last sequence give 0 and LSE -inf. Raises ValueError for bounds that do not fit.
    """
    arguments = flash_arguments(softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p)
    check_numbers(arguments)
    need_lse = lse_wanted(return_attn_probs, return_lse, return_softmax_lse)
    table = _one_of(block_table, page_table, "block_table", "page_table")
    packed = packed_arguments(q, k, v, cu_seqlens_q, cu_seqlens_k, arguments, table)
    if packed is not None:
        written = None if out is None else _written_by_kernels(out, q, k, v)
        given = None if written is None else written[None]
        answered = flash.answer(q[None], k[None], v[None], packed, need_lse, given, "flash_attn_varlen_func")
        if answered is not None:
            result, lse = answered
            filled = _into(out, result[0]) if out is None or given is None else out
            return _flash_result(filled, lse if lse is None else lse[0], need_lse, return_attn_probs)
    else:
        _count_miss(describe_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, arguments, need_lse, table))
    result, lse = varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, arguments, table)
    return _flash_result(_into(out, result), lse, need_lse, return_attn_probs)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Any:
    """FlashAttention's function on a key/value cache: q (B, Sq, H, D), caches (Bc, Sc, Hkv, D) or pages with block_table.

    Only when k and v are given are the caches written, in place, after the cache_seqlens tokens that they hold. num_splits is a
    hint about speed: any number gives the same result. Raises ValueError for arguments that contradict each other.
    """
    arguments = flash_arguments(softmax_scale, causal, window_size, softcap, alibi_slopes)
    check_numbers(arguments)
    table = _one_of(block_table, page_table, "block_table", "page_table")
    cache = CacheArguments(k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, table, rotary_interleaved)
    need_lse = lse_wanted(False, return_lse, return_softmax_lse)
    queries, lengths = kvcache.update(q, k_cache, v_cache, arguments, cache)
    answered, written = None, None if out is None else _written_by_kernels(out, queries, k_cache, v_cache)
    if (same := kvcache.as_dense(queries, k_cache, v_cache, lengths, arguments, cache)) is not None:
        answered = flash.answer(queries, *same, need_lse, written, "flash_attn_with_kvcache")
    else:
        _count_miss(describe_kvcache(q, k_cache, v_cache, arguments, cache, need_lse))
    if answered is None:
        answered = kvcache.attend(queries, k_cache, v_cache, lengths, arguments, cache)
    result, lse = answered
    return _flash_result(_into(out, result), lse, need_lse, False)


def _count_miss(call: AttentionCall) -> None:
    serving.server().miss(call, _override())


def _flash_result(out: Tensor, lse: Tensor | None, need_lse: bool, attn_probs: bool) -> Any:
    if not need_lse:
        return out
    return (out, lse, None) if attn_probs else (out, lse)


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    if out is None or out is result:
        return result
    check_out(out, tuple(result.shape), result)
    return out.copy_(result)


def _written_by_kernels(out: Tensor, *inputs: Tensor) -> Tensor | None:
    """`out` where a kernel may write it; None where its result has to be copied there."""
    are_tensors = all(isinstance(x, Tensor) for x in (out, *inputs))
    return out if are_tensors and may_be_written(out, *inputs) else None


def _one_of(first: Tensor | None, second: Tensor | None, *names: str) -> Tensor | None:
    if first is not None and second is not None:
        raise ValueError(f"{names[0]}, {names[1]}: two names of one argument; expected one of them")
    return second if first is None else first


def _flash_arguments(a: dict[str, Any]) -> FlashArguments:
    return flash_arguments(
        a["softmax_scale"], a["causal"], a["window_size"], a["softcap"], a["alibi_slopes"], a.get("dropout_p", 0.0),
        a.get("learnable_sink"),
    )  # fmt: skip


def captured_of(arguments: dict[str, Any]) -> dict[str, Tensor]:
    """What a kernel reads besides q, k and v, of the keywords of `flash_attn_func`."""
    slopes, sinks = arguments.get("alibi_slopes"), arguments.get("learnable_sink")
    return flash_arguments(None, False, None, 0.0, slopes, sinks=sinks).captured


def _wants_lse(a: dict[str, Any]) -> bool:
    return lse_wanted(a.get("return_attn_probs", False), a["return_lse"], a["return_softmax_lse"])


def _cache_arguments(a: dict[str, Any]) -> CacheArguments:
    names = (*CacheArguments.__dataclass_fields__,)
    return CacheArguments(**{name: a[name] for name in names if name != "block_table"}, block_table=_table(a))


def _table(a: dict[str, Any]) -> Tensor | None:
    return _one_of(a["block_table"], a["page_table"], "block_table", "page_table")


_DESCRIBE: dict[str, tuple[Callable[..., Any], Callable[[dict[str, Any]], AttentionCall]]] = {
    "scaled_dot_product_attention": (scaled_dot_product_attention, lambda a: describe_sdpa(**a)),
    "flash_attn_func": (flash_attn_func, lambda a: describe_flash(a["q"], a["k"], a["v"], _flash_arguments(a), _wants_lse(a))),
    "flash_attn_varlen_func": (
        flash_attn_varlen_func,
        lambda a: describe_varlen(
            a["q"], a["k"], a["v"], a["cu_seqlens_q"], a["cu_seqlens_k"], _flash_arguments(a), _wants_lse(a), _table(a)
        ),
    ),
    "flash_attn_with_kvcache": (
        flash_attn_with_kvcache,
        lambda a: describe_kvcache(a["q"], a["k_cache"], a["v_cache"], _flash_arguments(a), _cache_arguments(a), _wants_lse(a)),
    ),
}


def describe(function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> AttentionCall:
    """The call that `function(*args, **kwargs)` would be. Nothing runs. function: one of this module, or its name.

    Raises ValueError for other functions, TypeError for arguments that the function does not take.
    """
    name = function if isinstance(function, str) else getattr(function, "__name__", repr(function))
    if name not in _DESCRIBE:
        raise ValueError(f"function: expected one of {', '.join(_DESCRIBE)}, found {name}")
    signature, build = inspect.signature(_DESCRIBE[name][0]), _DESCRIBE[name][1]
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return build(dict(bound.arguments))


def explain(function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Decision:
    """Which kernel `function(*args, **kwargs)` would get here and now, and why every other was turned down. Nothing is launched.

    Kernels that fail only when they are loaded (a changed file, a failed golden case) are known as such from then on.
    """
    return serving.server().decide(describe(function, *args, **kwargs), _override())


implement(scaled_dot_product_attention, flash_attn_func)
