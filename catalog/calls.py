"""One attention call as data: sizes, strides and rules in one form for every function. Holds no tensors.

`AttentionCall` is what decisions are made on, what `explain` shows and what a plan is bound to. Sizes are always (batch, heads,
seqlen, head_dim), whatever the function's own layout.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from catalog.reasons import Reason, reason
from generator.spec import AttentionSpec, Rule

#: torch's dtype -> its name in specs and in the catalog; others have no kernels.
SPEC_DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

Strides = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Sizes and rules of one call.

    strides: of query, key, value in elements, in the order (batch, heads, seqlen, head_dim).
    mask_forms: conjunctions of mask rules, each of which says the same for this call's lengths; a kernel of any of them fits.
    address_bits: the low six bits of the three addresses, or-ed. captured: names of rule tensors that the call brings ("slopes").
    blockers: reasons that rule out every kernel; the sizes may be zero then.
    """

    function: str
    device: str
    dtypes: tuple[str, str, str]
    batch: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    seqlen_q: int = 0
    seqlen_k: int = 0
    head_dim: int = 0
    head_dim_v: int = 0
    strides: tuple[Strides, Strides, Strides] = ((0, 0, 0, 1),) * 3
    scale: float = 1.0
    mask_forms: tuple[tuple[Rule, ...], ...] = ((),)
    scores: tuple[Rule, ...] = ()
    captured: tuple[str, ...] = ()
    need_lse: bool = False
    address_bits: int = 0
    blockers: tuple[Reason, ...] = ()
    layout: str = field(default="bhsd", compare=False)

    def specs(self) -> tuple[AttentionSpec, ...]:
        """The specs that state this call, one for each form of its masks. Only for calls without blockers."""
        return tuple(
            AttentionSpec(
                self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim_v, self.batch, self.seqlen_q, self.seqlen_k,
                self.dtypes[0], masks,  # type: ignore[arg-type]
                self.scores, "prefill", self.scale,
            )
            for masks in self.mask_forms
        )  # fmt: skip

    def __str__(self) -> str:
        rules = " or ".join(" & ".join(map(str, form)) or "full" for form in self.mask_forms)
        scores = "".join(f" {s}" for s in self.scores)
        dims = f"d{self.head_dim}" + ("" if self.head_dim == self.head_dim_v else f"/{self.head_dim_v}")
        sizes = f"{self.batch}x{self.num_heads}/{self.num_kv_heads} {self.seqlen_q}x{self.seqlen_k} {dims}"
        return f"{self.function} {self.device} {sizes} {self.dtypes[0]} {rules}{scores}" + (" +lse" if self.need_lse else "")


#: Types whose operations are torch's own. A Parameter under no_grad is a plain tensor.
PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})


def tensor_blockers(*named: tuple[str, Tensor]) -> tuple[Reason, ...]:
    """Why raw kernels cannot read these tensors as they are: not plain, wanting gradients, or in a transformed context."""
    found: list[Reason] = []
    for name, x in named:
        if type(x) not in PLAIN_TYPES:
            found.append(reason("tensor_subclass", f"{name} is a {type(x).__name__}, not a plain tensor"))
        elif x.layout != torch.strided or x.is_nested:
            found.append(reason("tensor_layout", f"{name} is {'nested' if x.is_nested else x.layout}, not strided"))
        elif x.is_neg() or x.is_conj() or x._is_zerotensor():
            found.append(
                reason("tensor_view", f"{name} is lazily negated, conjugated or zero: its memory does not hold its values")
            )
        elif x.is_meta:
            found.append(reason("device", f"{name} is a meta tensor"))
    if torch.is_grad_enabled() and any(x.requires_grad for _, x in named):
        found.append(reason("requires_grad", "an input wants gradients; kernels are inference only (use torch.no_grad())"))
    return tuple(found) + context_blockers()


def context_blockers() -> tuple[Reason, ...]:
    """Why the code around the call forbids raw kernels: autocast, functorch, modes and traces that watch operations, tangents."""
    found = []
    if torch._C._is_tracing():
        found.append(reason("compiling", "torch.jit.trace has to see torch's operations"))
    if forward_ad._current_level >= 0:
        found.append(
            reason("requires_grad", "inside forward_ad.dual_level() tensors may carry tangents; kernels are inference only")
        )
    if torch._C._is_any_autocast_enabled():
        found.append(reason("autocast", "autocast is on and would change the dtypes"))
    if torch._C._functorch.peek_interpreter_stack() is not None:
        found.append(reason("functorch", "the call is inside vmap, grad or another functorch transform"))
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        found.append(reason("torch_mode", "a TorchFunctionMode or TorchDispatchMode is active and has to see torch's operations"))
    return tuple(found)


def size_blockers(q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str, str] = ("query", "key", "value")) -> tuple[Reason, ...]:
    """Why sizes, dtypes or devices of (B, H, S, D) views do not make a call that kernels exist for."""
    found = []
    if not q.device == k.device == v.device:
        found.append(reason("device", f"tensors lie on {q.device}, {k.device} and {v.device}"))
    if not q.dtype == k.dtype == v.dtype:
        found.append(reason("dtype", f"dtypes differ: {q.dtype}, {k.dtype}, {v.dtype}"))
    elif q.dtype not in SPEC_DTYPES:
        found.append(reason("dtype", f"{q.dtype} has no kernels; fp32, fp16 and bf16 have"))
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        found.append(reason("broadcast", f"batch sizes differ: {q.shape[0]}, {k.shape[0]}, {v.shape[0]}"))
    if k.shape[1] != v.shape[1] or k.shape[2] != v.shape[2] or q.shape[3] != k.shape[3]:
        found.append(reason("broadcast", f"sizes differ: query {tuple(q.shape)}, key {tuple(k.shape)}, value {tuple(v.shape)}"))
    elif k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        found.append(reason("gqa", f"{k.shape[1]} key heads do not divide {q.shape[1]} query heads"))
    if 0 in (*q.shape, *k.shape, *v.shape):
        found.append(reason("empty", "a tensor has no elements"))
    for name, x in zip(names, (q, k, v), strict=True):
        if x.stride(3) != 1 and x.shape[3] != 1:
            found.append(
                reason("layout", f"{name} has stride {x.stride(3)} in its last dimension; kernels need 1: make it contiguous")
            )
        if x.numel() and x.data_ptr() == 0:
            found.append(reason("tensor_view", f"{name} has no memory"))
    return tuple(found)


def sizes(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    """The size fields of an AttentionCall from (B, H, S, D) views."""
    return {
        "device": str(q.device),
        "dtypes": tuple(SPEC_DTYPES.get(x.dtype, str(x.dtype)) for x in (q, k, v)),
        "batch": q.shape[0],
        "num_heads": q.shape[1],
        "num_kv_heads": k.shape[1],
        "seqlen_q": q.shape[2],
        "seqlen_k": k.shape[2],
        "head_dim": q.shape[3],
        "head_dim_v": v.shape[3],
        "strides": tuple(x.stride() for x in (q, k, v)),
        "address_bits": (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 63,
    }


def causal_forms(seqlen_q: int, seqlen_k: int, aligned: str) -> tuple[tuple[Rule, ...], ...]:
    """Every rule that means "causal, aligned so" at these lengths. aligned: "top_left" or "bottom_right"."""
    other = "bottom_right" if aligned == "top_left" else "top_left"
    if seqlen_q == 1 and aligned == "bottom_right":
        return (), (causal(aligned),)  # the only query sees every key
    if seqlen_q == seqlen_k:
        return (causal(aligned),), (causal(other),)
    return ((causal(aligned),),)


def causal(aligned: str) -> Rule:
    return Rule.make("causal", align=aligned)


def window_forms(seqlen_q: int, seqlen_k: int, left: int | None, right: int | None) -> tuple[tuple[Rule, ...], ...]:
    """FlashAttention's bottom-right aligned window as rules. None is unbounded; a bound no row reaches is dropped."""
    asked_right = right
    if left is not None and left >= seqlen_k - 1:
        left = None
    if right is not None and right >= seqlen_q - 1:  # the first query's position is seqlen_k - seqlen_q
        right = None
    if left is None and (right == 0 or asked_right == 0):
        return causal_forms(seqlen_q, seqlen_k, "bottom_right")
    if left is None and right is None:
        return ((),)
    bounds = {"left": -1 if left is None else left, "right": -1 if right is None else right}
    return ((Rule.make("window", align="bottom_right", **bounds),),)
