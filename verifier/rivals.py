"""What a user would write in torch for the same attention, on the CPU: the contestants beside which a candidate is timed.

Each is prepared outside the clock (masks and biases are built beforehand, in its favour). A rival that cannot compute a spec says
why; that is a result too. Knows nothing of candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from generator.spec import AttentionSpec
from verifier import oracle
from verifier.dtypes import torch_dtype
from verifier.flex_rival import FLEX, Call, flex
from verifier.records import Unsupported

#: Scores or biases larger than this make a rival "unsupported" rather than the machine swap.
MEMORY_BYTES = 2 << 30


def prepare(
    spec: AttentionSpec, captured: Mapping[str, Tensor], groups: Sequence[str] | None = None
) -> dict[str, Call | Unsupported]:
    """Rivals by name, ready to be called, or why they are not. groups: of `records.RIVAL_GROUPS`; None: all but FlexAttention,
    which compiles for long and seldom wins on a CPU.
    """
    wanted = ("torch-sdpa", "torch-eager") if groups is None else groups
    return {name: RIVALS[name](spec, captured) for group in wanted for name in GROUPS[group]}


def _sdpa(spec: AttentionSpec, captured: Mapping[str, Tensor]) -> Call | Unsupported:
    """torch's own function, with nothing but `is_causal`."""
    if spec.scores:
        return Unsupported(f"has no {spec.scores[0].name}")
    if len(spec.masks) > 1 or any(rule.name != "causal" for rule in spec.masks):
        return Unsupported(f"has no mask {' and '.join(r.name for r in spec.masks)} but as a tensor")
    causal = bool(spec.masks)
    if causal and spec.seqlen_q != spec.seqlen_k and oracle.option(spec.masks[0], "align", "bottom_right") != "top_left":
        if spec.seqlen_q != 1:
            return Unsupported("its is_causal aligns top-left")
        causal = False  # the one query sees every key
    grouped = spec.group > 1
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=causal, scale=spec.scale, enable_gqa=grouped)


def _sdpa_expanded(spec: AttentionSpec, captured: Mapping[str, Tensor]) -> Call | Unsupported:
    """The same on K and V expanded to all heads, as a view."""
    if spec.group == 1:
        return Unsupported("there are no groups of heads")
    plain = _sdpa(spec.with_shape(num_kv_heads=spec.num_heads), captured)
    if isinstance(plain, Unsupported):
        return plain
    return lambda q, k, v: plain(q, _expanded(k, spec), _expanded(v, spec))


def _sdpa_mask(spec: AttentionSpec, captured: Mapping[str, Tensor]) -> Call | Unsupported:
    """torch's function with the masks as a boolean tensor, or with masks, ALiBi and sinks as a bias.

    A sink is one more key and value of zeros, with its logit as bias.
    """
    names = {rule.name for rule in spec.scores}
    if not spec.masks and not spec.scores:
        return Unsupported("there is nothing to mask")
    if other := names - {"alibi", "sink_logit"}:
        return Unsupported(f"has no {sorted(other)[0]}")
    bias = _bias(spec, captured) if names else _seen(spec, captured)
    if isinstance(bias, Unsupported):
        return bias
    grouped, sink = spec.group > 1, "sink_logit" in names

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if sink:
            k, v = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=spec.scale, enable_gqa=grouped)

    return call


def _eager(spec: AttentionSpec, captured: Mapping[str, Tensor]) -> Call | Unsupported:
    """Scores, rules, softmax, product, one operation after another, in the input's dtype."""
    num_scores = spec.batch * spec.num_heads * spec.seqlen_q * spec.seqlen_k
    if num_scores * 4 > MEMORY_BYTES:
        return Unsupported(f"its scores would take {num_scores * 4 / 2**30:.1f} GiB")
    known = {"softcap", "alibi", "sink_logit"}
    if other := [r.name for r in spec.scores if r.name not in known]:
        return Unsupported(f"nobody has written {other[0]} in torch for it")
    hidden = ~_seen(spec, captured) if spec.masks else None
    alibi = _distance_bias(spec, captured) if any(r.name == "alibi" for r in spec.scores) else None
    if isinstance(alibi, Unsupported):
        return alibi

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, _expanded(k, spec).transpose(-1, -2)).mul_(spec.scale)
        sinks = None
        for rule in spec.scores:
            if rule.name == "softcap":
                cap = oracle.option(rule, "cap")
                scores = scores.div_(cap).tanh_().mul_(cap)
            elif alibi is not None and rule.name == "alibi":
                scores = scores.add_(alibi)
            else:
                sinks = captured["SinkLogit"].to(q.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        if hidden is not None:
            scores = scores.masked_fill_(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks], -1)
        weights = torch.softmax(scores, -1)[..., : spec.seqlen_k]
        return torch.matmul(weights, _expanded(v, spec))

    return call


RIVALS: dict[str, Callable[[AttentionSpec, Mapping[str, Tensor]], Call | Unsupported]] = {
    "torch sdpa": _sdpa,
    "torch sdpa, expanded heads": _sdpa_expanded,
    "torch sdpa with a mask": _sdpa_mask,
    "torch eager": _eager,
    FLEX: lambda spec, captured: flex(spec, captured, "cpu"),
}
#: What a plan's `rivals` may name -> contestants here.
GROUPS = {
    "torch-sdpa": tuple(name for name in RIVALS if name.startswith("torch sdpa")),
    "torch-eager": ("torch eager",),
    "flex-attention": (FLEX,),
}


def _expanded(x: Tensor, spec: AttentionSpec) -> Tensor:
    """(B, Hkv, S, D) seen as (B, H, S, D); nothing is copied as long as the caller can use strides of 0."""
    if spec.group == 1:
        return x
    batch, heads, seqlen, dim = x.shape
    return x.unsqueeze(2).expand(batch, heads, spec.group, seqlen, dim).reshape(batch, heads * spec.group, seqlen, dim)


def _seen(spec: AttentionSpec, captured: Mapping[str, Tensor]) -> Tensor:
    """Which pairs the masks leave: (1 or B, 1, Sq, Sk) booleans."""
    per_batch = any(rule.name in ("document", "padding") for rule in spec.masks)
    rows, keys = torch.arange(spec.seqlen_q).view(1, -1, 1), torch.arange(spec.seqlen_k).view(1, 1, -1)
    blocks = [oracle.Block(spec, b, 0, rows, keys, captured) for b in range(spec.batch if per_batch else 1)]
    return torch.stack([oracle.visible(block) for block in blocks])


def _distance_bias(spec: AttentionSpec, captured: Mapping[str, Tensor]) -> Tensor | Unsupported:
    """ALiBi as a tensor: (1, H, Sq, Sk) in the input's dtype."""
    empty = _no_bias(spec)
    if isinstance(empty, Unsupported):
        return empty
    rule = next(r for r in spec.scores if r.name == "alibi")
    block = oracle.Block(
        spec, 0, 0, torch.arange(spec.seqlen_q).view(1, -1, 1), torch.arange(spec.seqlen_k).view(1, 1, -1), captured
    )
    distance = (block.position(rule) - block.keys).abs().float()
    return -(captured["Slopes"].float().view(1, -1, 1, 1) * distance).to(empty.dtype)


def _bias(spec: AttentionSpec, captured: Mapping[str, Tensor]) -> Tensor | Unsupported:
    """What is added to the scores: (1 or B, H, Sq, Sk), one key more where there is a sink."""
    names = {rule.name for rule in spec.scores}
    bias = _distance_bias(spec, captured) if "alibi" in names else _no_bias(spec)
    if isinstance(bias, Unsupported):
        return bias
    if spec.masks:
        bias = bias.masked_fill(~_seen(spec, captured), -torch.inf)
    if "sink_logit" in names:
        sinks = captured["SinkLogit"].to(bias.dtype).view(1, -1, 1, 1).expand(*bias.shape[:3], 1)
        bias = torch.cat([bias, sinks], -1)
    return bias


def _no_bias(spec: AttentionSpec) -> Tensor | Unsupported:
    dtype = torch_dtype(spec)
    size = spec.num_heads * spec.seqlen_q * spec.seqlen_k * dtype.itemsize
    if size > MEMORY_BYTES:
        return Unsupported(f"its bias would take {size / 2**30:.1f} GiB")
    return torch.zeros(1, spec.num_heads, spec.seqlen_q, spec.seqlen_k, dtype=dtype)
