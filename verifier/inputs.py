"""The inputs on which a candidate is judged, as recipes: shapes, kinds of values and layouts for a spec, from secret seeds.

`verifier.input_values` makes a recipe's tensors, `verifier.input_layout` says how they lie in memory. Cases come smallest first,
so that the first failure is also the smallest evidence.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from generator.binding import rule_tensors
from generator.spec import AttentionSpec, Rule
from verifier.arena import Place
from verifier.dtypes import torch_dtype

#: Tiles of kernels begin at multiples of this.
TILE_EDGE = 16

Values = Literal["random", "large", "negative", "dominant", "equal", "ramp", "nan_beyond_length"]
#: plain: contiguous. bshd: (batch, seqlen, heads, dim) in memory. sliced: rows with gaps, odd pitch, odd base; sliced_4,
#: sliced_8: the same in multiples of 4 and of 8 bytes, and of no more. expanded: K and V without memory of their own for each
#: batch entry and head. far: rows so far apart that offsets need more than 31 bits.
Layout = Literal["plain", "bshd", "sliced", "sliced_4", "sliced_8", "expanded", "far"]
#: Bytes that rows of a sliced layout begin at multiples of, where that is more than an element.
ROW_BYTES: dict[Layout, int] = {"sliced_4": 4, "sliced_8": 8}


@dataclass(frozen=True, slots=True)
class Case:
    """One input. `rows`: how many query rows are compared (0: all).

    like: the seed of an input of the same shape, which this one equals but for `new`: one of q, k, v and "rules" (what rules
    capture); 0: all of it is new.
    """

    name: str
    spec: AttentionSpec
    values: Values = "random"
    layout: Layout = "plain"
    place: Place = "end"
    rows: int = 0
    seed: int = 0
    like: int = 0
    new: Literal["", "q", "k", "v", "rules"] = ""

    def seed_of(self, part: str) -> int:
        """The seed of q, k, v or "rules"."""
        return self.like if self.like and part != self.new else self.seed

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.spec.batch, self.spec.seqlen_q, self.spec.seqlen_k)

    def row_indices(self) -> Tensor:
        """The query rows to compare: all, or the first, the last, rows on both sides of tile edges, and any rows between."""
        total = self.spec.seqlen_q
        if not self.rows or total <= self.rows:
            return torch.arange(total)
        generator = generator_of(self.seed, 7)
        edges = torch.arange(TILE_EDGE, max(TILE_EDGE, total - 1), TILE_EDGE)
        edges = edges[torch.randperm(len(edges), generator=generator)][: self.rows // 4]
        chosen = torch.cat([torch.tensor([0, total - 1]), edges, edges - 1])
        others = torch.randperm(total, generator=generator)
        others = others[~torch.isin(others, chosen)][: self.rows - len(chosen)]
        return torch.cat([chosen, others]).sort().values


def fresh_seed() -> int:
    """A seed that no candidate can have known."""
    return secrets.randbits(48)


def generator_of(seed: int, stream: int) -> torch.Generator:
    """Random numbers of a seed; different streams of one seed have nothing in common."""
    return torch.Generator().manual_seed((seed * 1000003 + stream) % (1 << 62))


def bucket(length: int) -> tuple[int, int]:
    """The lengths that share a bucket with this one: (2^(n-1), 2^n], as (smallest, largest). 0 and 1 stand alone."""
    if length <= 1:
        return (length, length)
    top = 1 << math.ceil(math.log2(length))
    return (top // 2 + 1, top)


def bucket_corners(spec: AttentionSpec, seed: int) -> tuple[tuple[int, int], ...]:
    """(seqlen_q, seqlen_k) at the corners of the spec's bucket, and two points inside: one with odd lengths, one with even ones
    that are no multiple of 16.
    """
    (q_low, q_high), (k_low, k_high) = bucket(spec.seqlen_q), bucket(spec.seqlen_k)
    generator = generator_of(seed, 11)

    def inside(low: int, high: int) -> int:
        """An odd length that is no corner, where there is one: high is even, so what comes out stays below it."""
        return int(torch.randint(low + 1, high, (), generator=generator)) | 1 if high - low > 2 else high

    def even(low: int, high: int) -> int:
        """An even length in the lower half, no multiple of a tile's edge, where there is one."""
        found = int(torch.randint(low, (low + high) // 2 + 1, (), generator=generator)) & -2
        found += 0 if found % TILE_EDGE else 2
        return found if low <= found <= high else high

    ragged = (inside(q_low, q_high), inside(k_low, k_high))
    evens = (even(q_low, q_high), even(k_low, k_high))
    corners = [(q_low, k_low), (q_high, k_high), (q_low, k_high), (q_high, k_low), ragged, evens]
    return tuple(dict.fromkeys(corners))


def with_lengths(spec: AttentionSpec, batch: int, seqlen_q: int, seqlen_k: int, kv_heads: int, group: int) -> AttentionSpec:
    """The same problem at another size; the numbers of its masks shrink with it, so that they still mask something."""
    masks = tuple(_shrunk(rule, seqlen_k, spec.seqlen_k) for rule in spec.masks)
    sized = spec.with_shape(batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads=kv_heads * group, num_kv_heads=kv_heads)
    return replace(sized, masks=masks, softmax_scale=spec.scale)


def _shrunk(rule: Rule, seqlen_k: int, of: int) -> Rule:
    bound = max(1, seqlen_k // 3)
    shrinks = {"window": ("left", "right"), "sink_window": ("left", "right", "sink"), "prefix": ("length",)}.get(rule.name, ())
    if seqlen_k >= of:
        return rule
    return Rule(rule.name, tuple((k, min(v, bound) if k in shrinks and isinstance(v, int) else v) for k, v in rule.parameters))


def suite(spec: AttentionSpec, seed: int) -> tuple[Case, ...]:
    """The cases for a spec, smallest first. Sizes follow from the spec: seconds of judging, not minutes."""
    small = _small_cases(spec)
    large = [c for c in _bucket_cases(spec, seed) if c.shape not in {s.shape for s in small}]
    cases: list[Case] = []
    for i, case in enumerate(small + large, 1):
        like = next((c.seed for c in reversed(cases) if not c.new), 0) if case.new else 0
        cases.append(replace(case, seed=seed + i, like=like))
    return tuple(cases)


def _small_cases(spec: AttentionSpec) -> list[Case]:
    group = spec.group
    kv = min(2, spec.num_kv_heads)
    decode = spec.phase == "decode"

    def at(batch: int, seqlen_q: int, seqlen_k: int, kv_heads: int = kv) -> AttentionSpec:
        return with_lengths(spec, batch, 1 if decode else seqlen_q, seqlen_k, kv_heads, group)

    one, odd, wide = at(1, 1, 1, 1), at(2, 37, 53), at(1, 70, 33)
    tiles = at(1, 130, 257) if group * kv <= 16 else at(1, 70, 261, 1)
    cases = [Case("length 1", one), Case("odd lengths", odd, place="start"), *_almost_the_same(odd)]
    cases += [Case("another scale", _scaled(odd))]
    cases += [Case("more queries than keys", wide)] * (not decode)
    cases += [Case("few queries", at(1, 3, 200))] * (not decode)
    cases += [
        Case("batch and heads interleaved", odd, layout="bshd"),
        Case("gaps between rows", odd, layout="sliced"),
        *_wider_slices(odd),
        Case("expanded keys and values", odd, layout="expanded", place="start"),
        Case("offsets beyond 31 bits", at(1, 3, 3, 1), layout="far"),
    ]
    if any(rule.name == "padding" for rule in spec.masks):
        cases.append(Case("NaN beyond the valid length", odd, values="nan_beyond_length"))
    kinds: tuple[Values, ...] = ("random", "random", "large", "negative", "dominant", "equal", "ramp")
    names = ("several tiles", "new values in the same memory", "large logits", "very negative logits", "one dominant key",
             "equal keys", "growing keys")  # fmt: skip
    return cases + [Case(name, tiles, values=kind) for name, kind in zip(names, kinds, strict=True)]


def _scaled(spec: AttentionSpec) -> AttentionSpec:
    """With other numbers of the kinds that one kernel serves: the softmax scale, and the cap of scores."""
    scores = tuple(
        Rule.make("softcap", cap=0.75 * float(rule["cap"])) if rule.name == "softcap" else rule for rule in spec.scores
    )
    return replace(spec, softmax_scale=0.75 * spec.scale, scores=scores)


def _almost_the_same(spec: AttentionSpec) -> list[Case]:
    """The input before, with one part new: for kernels that know a call again by less than all of it."""
    parts: list[tuple[str, Literal["q", "k", "v", "rules"]]] = [("queries", "q"), ("keys", "k"), ("values", "v")]
    if rule_tensors(spec):
        parts.append(("captured tensors", "rules"))
    return [Case(f"other {words}, all else the same", spec, place="start", new=part) for words, part in parts]


def _wider_slices(spec: AttentionSpec) -> list[Case]:
    """Rows that can be read by 4 or 8 bytes at a time: kernels choose by address and pitch. Elements of 4 bytes are in steps of 4
    wherever they lie.
    """
    layouts: tuple[Layout, ...] = ("sliced_4", "sliced_8")
    least = torch_dtype(spec).itemsize
    return [Case(f"rows at multiples of {ROW_BYTES[x]} bytes", spec, layout=x) for x in layouts if ROW_BYTES[x] > least]


def _bucket_cases(spec: AttentionSpec, seed: int) -> list[Case]:
    cases = []
    for seqlen_q, seqlen_k in bucket_corners(spec, seed):
        flops = 2 * seqlen_q * seqlen_k * (spec.head_dim + spec.head_dim_v)
        kv_heads, group = (1, spec.group) if flops * spec.group < 2e10 else (1, 1)
        sized = with_lengths(spec, min(spec.batch, 2) if flops < 1e9 else 1, seqlen_q, seqlen_k, kv_heads, group)
        name = f"{seqlen_q} queries, {seqlen_k} keys"
        cases.append(Case(name, sized, rows=max(16, min(256, (1 << 19) // max(1, seqlen_k * group)))))
    return sorted(cases, key=lambda c: c.spec.seqlen_q * c.spec.seqlen_k)
