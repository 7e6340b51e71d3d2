"""What an attention call should give, in float64 from the definition. Shares no code with the generator's rules, and is not fast.

Every mask and score rule is defined here a second time, from its published meaning; a test compares the two definitions. Memory
stays bounded: query rows go in blocks. Conventions: positions of queries on the key axis end together with the keys
(`bottom_right`, the default) or start together (`top_left`); scale, score rules in order, masks, softmax; a row that sees nothing
gives 0 and LSE -inf; LSE is the natural log and counts a sink logit.

A user's rule registers its dense reference with `register_mask` or `register_score`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from generator.spec import AttentionSpec, Rule, SpecError

#: Elements of one block of scores: 16 MiB in float64.
BLOCK_ELEMENTS = 1 << 21


@dataclass(frozen=True, slots=True)
class Block:
    """Some query rows of the G query heads that share one key/value head, in one batch entry, against all keys.

    heads: (G, 1, 1), rows: (1, R, 1) and keys: (1, 1, Sk) are indices; together they broadcast to the scores' shape (G, R, Sk).
    tensors: the call's captured tensors, by name.
    """

    spec: AttentionSpec
    batch: int
    kv_head: int
    rows: Tensor
    keys: Tensor
    tensors: Mapping[str, Tensor]

    @property
    def heads(self) -> Tensor:
        return (torch.arange(self.spec.group) + self.kv_head * self.spec.group).view(-1, 1, 1)

    def position(self, rule: Rule) -> Tensor:
        """Where the queries stand on the key axis, (1, R, 1), under the alignment that the rule asks for."""
        align = option(rule, "align", "bottom_right")
        if align not in ("bottom_right", "top_left"):
            raise SpecError(f"{rule.name}.align: expected bottom_right or top_left, found {align!r}")
        return self.rows + (self.spec.seqlen_k - self.spec.seqlen_q if align == "bottom_right" else 0)


#: (rule, block) -> which keys each row may see: booleans that broadcast to (G, R, Sk).
DenseMask = Callable[[Rule, Block], Tensor]
#: (rule, block, scores (G, R, Sk) in float64, or float32 for a plain implementation) -> new scores in the same dtype.
DenseScore = Callable[[Rule, Block, Tensor], Tensor]
#: (rule, block) -> a logit for each row that has no key: broadcasts to (G, R, 1).
DenseLogit = Callable[[Rule, Block], Tensor]


def option(rule: Rule, name: str, default: Any = None) -> Any:
    """A parameter of the rule, or what it is where the spec leaves it out."""
    return dict(rule.parameters).get(name, default)


def _causal(rule: Rule, block: Block) -> Tensor:
    return block.keys - block.position(rule) <= 0


def _window(rule: Rule, block: Block) -> Tensor:
    """Inclusive on both sides, -1 is unbounded: FlashAttention's (left, right)."""
    left, right = int(option(rule, "left")), int(option(rule, "right", 0))
    distance = block.position(rule) - block.keys
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left != -1:
        seen &= distance <= left
    if right != -1:
        seen &= -distance <= right
    return seen


def _sink_window(rule: Rule, block: Block) -> Tensor:
    """The window, and the first keys, unless they lie after the window's right end (StreamingLLM, arXiv 2309.17453)."""
    right = option(rule, "right", 0)
    not_after = torch.ones(1, 1, 1, dtype=torch.bool) if right == -1 else block.keys <= block.position(rule) + right
    return _window(rule, block) | ((block.keys < int(option(rule, "sink"))) & not_after)


def _prefix(rule: Rule, block: Block) -> Tensor:
    """Prefix-LM (arXiv 1910.10683): full attention inside the prefix, causal after it."""
    return (block.keys < int(option(rule, "length"))) | (block.keys <= block.position(rule))


def _document(rule: Rule, block: Block) -> Tensor:
    rows = block.rows.flatten()
    start, end = (block.tensors[name][block.batch].long()[rows].view(1, -1, 1) for name in ("DocStart", "DocEnd"))
    return torch.logical_and(start <= block.keys, block.keys < end)


def _padding(rule: Rule, block: Block) -> Tensor:
    return block.keys < int(block.tensors["KvLen"][block.batch])


DENSE_MASKS: dict[str, DenseMask] = {
    "causal": _causal,
    "window": _window,
    "sink_window": _sink_window,
    "prefix": _prefix,
    "document": _document,
    "padding": _padding,
}


def _softcap(rule: Rule, block: Block, scores: Tensor) -> Tensor:
    cap = as_f32(rule["cap"])
    return torch.tanh(scores / cap) * cap


def _alibi(rule: Rule, block: Block, scores: Tensor) -> Tensor:
    """A penalty that grows with the distance (arXiv 2108.12409), by the slope of the head."""
    slopes = block.tensors["Slopes"][block.heads].to(scores.dtype)
    return scores - slopes * (block.position(rule) - block.keys).abs().to(scores.dtype)


def _sink_logit(rule: Rule, block: Block) -> Tensor:
    return block.tensors["SinkLogit"][block.heads].double()


DENSE_SCORES: dict[str, DenseScore] = {"softcap": _softcap, "alibi": _alibi}
DENSE_LOGITS: dict[str, DenseLogit] = {"sink_logit": _sink_logit}


def register_mask(name: str, dense: DenseMask) -> None:
    """A user's mask rule. Raises SpecError for a name that stands for another definition already."""
    _register(DENSE_MASKS, "masks", name, dense)


def register_score(name: str, dense: DenseScore) -> None:
    """A user's score rule. Raises SpecError for a name that stands for another definition already."""
    if name in DENSE_LOGITS:
        raise SpecError(f"scores.{name}: another rule has this name already; choose a new one")
    _register(DENSE_SCORES, "scores", name, dense)


def _register(table: dict[str, Any], where: str, name: str, dense: Any) -> None:
    if name in table and table[name] is not dense:
        raise SpecError(f"{where}.{name}: another rule has this name already; choose a new one")
    table[name] = dense


def has_references(spec: AttentionSpec) -> str:
    """ "" when every rule of the spec has a dense reference, else one sentence that names the rule."""
    for rule in spec.masks:
        if rule.name not in DENSE_MASKS:
            return f"masks.{rule.name}: no dense reference is registered; known are {', '.join(DENSE_MASKS)}"
    for rule in spec.scores:
        if rule.name not in DENSE_SCORES and rule.name not in DENSE_LOGITS:
            return f"scores.{rule.name}: no dense reference is registered; known are {', '.join((*DENSE_SCORES, *DENSE_LOGITS))}"
    return ""


@dataclass(frozen=True, slots=True)
class Reference:
    """out (B, H, R, Dv), lse (B, H, R), magnitude (B, H, R, Dv): the sum of |p v|, the scale that errors of a sum have."""

    out: Tensor
    lse: Tensor
    magnitude: Tensor


#: Some (sequence, key head) of a call. What is given for them has their number for B, and the heads of a group for H.
Pairs = Sequence[tuple[int, int]]


def heads_of(x: Tensor, spec: AttentionSpec, pairs: Pairs | None) -> Tensor:
    """Of x (B, H, ...), the heads of the pairs (n, G, ...); all of it for None."""
    if pairs is None:
        return x
    batch, kv_head = zip(*pairs, strict=True)
    return x.view(len(x), spec.num_kv_heads, spec.group, *x.shape[2:])[list(batch), list(kv_head)]


def attention(
    spec: AttentionSpec, tensors: Mapping[str, Tensor], rows: Tensor | None = None, pairs: Pairs | None = None
) -> Reference:
    """The float64 answer for the query rows asked for (all by default), R of them, in order; of some pairs, or of all.

    tensors: "q" (B, H, Sq, D), "k" (B, Hkv, Sk, D), "v" (B, Hkv, Sk, Dv) of any dtype and strides, and the captured ones by name.
    What lies beyond a sequence's own length (KvLen) is never read. Raises SpecError for a rule without a reference.
    """
    if problem := has_references(spec):
        raise SpecError(problem)
    rows = torch.arange(spec.seqlen_q) if rows is None else rows
    shape = (spec.batch, spec.num_heads, len(rows))
    out, magnitude = (torch.zeros(*shape, spec.head_dim_v, dtype=torch.float64) for _ in range(2))
    lse = torch.full(shape, -torch.inf, dtype=torch.float64)
    for block, at in blocks(spec, tensors, rows, pairs):
        where = (block.batch, block.heads.flatten(), at)
        out[where], lse[where], magnitude[where] = _attend(block, tensors)
    return Reference(*(heads_of(x, spec, pairs) for x in (out, lse, magnitude)))


def visible(block: Block) -> Tensor:
    """Which keys each row of the block sees, (1 or G, R, Sk): every mask of the spec holds."""
    seen = torch.ones(1, block.rows.numel(), block.keys.numel(), dtype=torch.bool)
    for rule in block.spec.masks:
        seen = seen & DENSE_MASKS[rule.name](rule, block)
    return seen


def visible_pairs(spec: AttentionSpec, tensors: Mapping[str, Tensor]) -> int:
    """The number of (query, key) pairs that the masks leave, over batch and query heads: what a kernel has to compute."""
    pairs = 0
    for block, _ in blocks(spec, tensors, torch.arange(spec.seqlen_q)):
        seen = visible(block)
        pairs += int(seen.sum()) * (spec.group // seen.shape[0])
    return pairs


def blocks(
    spec: AttentionSpec, tensors: Mapping[str, Tensor], rows: Tensor, pairs: Pairs | None = None
) -> Iterator[tuple[Block, slice]]:
    """All (batch entry, key/value head, some rows) in turn, or those of some pairs; the slice says which of `rows` they are."""
    keys = torch.arange(spec.seqlen_k).view(1, 1, -1)
    step = max(1, BLOCK_ELEMENTS // max(1, spec.seqlen_k * spec.group))
    every = itertools.product(range(spec.batch), range(spec.num_kv_heads))
    for batch, kv_head in every if pairs is None else pairs:
        for start in range(0, len(rows), step):
            at = slice(start, start + step)
            yield Block(spec, batch, kv_head, rows[at].view(1, -1, 1), keys, tensors), at


def _attend(block: Block, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    spec = block.spec
    seen = visible(block)
    used = seen.any(0).any(0)  # keys that nobody sees may hold anything, NaN included
    k, v = (tensors[name][block.batch, block.kv_head][used].double() for name in ("k", "v"))
    q = tensors["q"][block.batch, block.heads.flatten()][:, block.rows.flatten()].double()
    narrow = replace(block, keys=block.keys[:, :, used])
    scores, logits = apply_scores(narrow, q @ k.T * as_f32(spec.scale))
    scores = scores.masked_fill(~seen[:, :, used], -torch.inf)
    logits = logits.expand(*scores.shape[:2], -1)
    top = torch.cat([scores, logits], 2).amax(2, keepdim=True)
    base = top.masked_fill(top == -torch.inf, 0)
    weights = torch.exp(scores - base)
    total = weights.sum(2, keepdim=True) + torch.exp(logits - base).sum(2, keepdim=True)
    weights = torch.where(total > 0, weights / total, 0)
    return weights @ v, (base + torch.log(total)).squeeze(2), weights @ v.abs()


def apply_scores(block: Block, scores: Tensor) -> tuple[Tensor, Tensor]:
    """The spec's score rules in their order. Returns the new scores and the logits without a key, (G or 1, R or 1, their
    number).
    """
    logits = [torch.full((1, 1, 1), -torch.inf, dtype=scores.dtype)]
    for rule in block.spec.scores:
        if rule.name in DENSE_LOGITS:
            logits.append(DENSE_LOGITS[rule.name](rule, block).to(scores.dtype))
        else:
            scores = DENSE_SCORES[rule.name](rule, block, scores)
    return scores, torch.cat(torch.broadcast_tensors(*logits), 2)


def as_f32(value: Any) -> float:
    """Numbers reach a kernel as float32; the call that is judged is the one with that number."""
    return float(np.float32(value))
