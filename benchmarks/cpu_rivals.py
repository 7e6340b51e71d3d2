"""The cases of the CPU benchmark, and how torch computes each of them. Times nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from generator.scores import alibi_slopes
from generator.spec import AttentionSpec, Rule

CAUSAL = Rule.make("causal")


@dataclass(frozen=True, slots=True)
class Case:
    """documents: equal packed sequences, where the spec has a document mask."""

    name: str
    spec: AttentionSpec
    documents: int = 0

    def with_dtype(self, dtype: str) -> Case:
        return replace(self, spec=replace(self.spec, dtype=dtype))  # type: ignore[arg-type]

    @property
    def visible_pairs(self) -> int:
        """(query, key) pairs of one head that the masks let through."""
        s = self.spec
        reach = next((int(r["left"]) + 1 for r in s.masks if r.name == "window"), s.seqlen_k)
        if self.documents:
            reach = s.seqlen_k // self.documents
            return self.documents * sum(min(i + 1, reach) for i in range(reach))
        return sum(min(i + 1 + s.seqlen_k - s.seqlen_q, reach) for i in range(s.seqlen_q)) if s.masks else s.seqlen_q * s.seqlen_k

    @property
    def flop(self) -> int:
        s = self.spec
        return 2 * s.batch * s.num_heads * (s.head_dim + s.head_dim_v) * self.visible_pairs

    @property
    def bytes_of_kv(self) -> int:
        s = self.spec
        return s.batch * s.num_kv_heads * s.seqlen_k * (s.head_dim + s.head_dim_v) * (4 if s.dtype == "fp32" else 2)


def _llama(*masks: Rule, scores: tuple[Rule, ...] = (), seqlen: int = 2048) -> AttentionSpec:
    return AttentionSpec(32, 8, 128, 128, 1, seqlen, seqlen, masks=masks, scores=scores)


CASES = (
    Case("causal 512 d128", _llama(CAUSAL, seqlen=512)),
    Case("causal 2048 d128", _llama(CAUSAL)),
    Case("full 1024 d64", AttentionSpec(32, 32, 64, 64, 1, 1024, 1024)),
    Case("full 1024 d128", AttentionSpec(16, 16, 128, 128, 1, 1024, 1024)),
    Case("window 256", _llama(Rule.make("window", left=255, right=0))),
    Case("window 1024", _llama(Rule.make("window", left=1023, right=0))),
    Case("softcap 30", _llama(CAUSAL, scores=(Rule.make("softcap", cap=30.0),))),
    Case("alibi", _llama(CAUSAL, scores=(Rule.make("alibi"),))),
    Case("8 documents of 256", _llama(Rule.make("document"), CAUSAL), documents=8),
    Case("decode 8 x 4096", AttentionSpec(32, 8, 128, 128, 8, 1, 4096, phase="decode")),
)


@dataclass(slots=True)
class Inputs:
    """Tensors of one case. captured: what the rules read besides Q, K and V."""

    q: Any
    k: Any
    v: Any
    captured: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def random(spec: AttentionSpec, documents: int = 8) -> Inputs:
        import torch

        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[spec.dtype]
        q = torch.randn(spec.batch, spec.num_heads, spec.seqlen_q, spec.head_dim).to(dtype)
        k = torch.randn(spec.batch, spec.num_kv_heads, spec.seqlen_k, spec.head_dim).to(dtype)
        v = torch.randn(spec.batch, spec.num_kv_heads, spec.seqlen_k, spec.head_dim_v).to(dtype)
        captured = {"Slopes": torch.tensor(alibi_slopes(spec.num_heads), dtype=torch.float32)}
        length = max(1, spec.seqlen_k // documents)
        start = (torch.arange(spec.seqlen_q, dtype=torch.int32) // length * length).expand(spec.batch, -1).contiguous()
        captured |= {"DocStart": start, "DocEnd": start + length}
        return Inputs(q, k, v, captured)


def rivals(case: Case, inputs: Inputs, flex: bool) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Name -> call, and those that cannot take part with their reason."""
    out: dict[str, Callable[[], Any]] = {_torch_name(case): _torch_way(case, inputs)}
    unsupported: dict[str, str] = {}
    if flex:
        try:
            out["flex"] = _flex(case, inputs)
        except Exception as error:  # noqa: BLE001 - a rival that does not compile is a finding
            unsupported["flex"] = str(error).splitlines()[0][:200]
    return out, unsupported


def _rule(case: Case, name: str) -> Rule | None:
    return next((r for r in case.spec.masks + case.spec.scores if r.name == name), None)


def _torch_name(case: Case) -> str:
    if _rule(case, "softcap"):
        return "eager"
    return "masked SDPA" if any(_rule(case, n) for n in ("window", "alibi", "document")) else "SDPA"


def _keep(case: Case, inputs: Inputs) -> Any:
    """The dense mask, True where visible; None: everything."""
    import torch

    s = case.spec
    row, key = torch.arange(s.seqlen_q)[:, None] + s.seqlen_k - s.seqlen_q, torch.arange(s.seqlen_k)[None, :]
    if not s.masks:
        return None
    keep = key <= row
    if window := _rule(case, "window"):
        keep &= key >= row - int(window["left"])
    if _rule(case, "document"):
        keep &= (key >= inputs.captured["DocStart"][0][:, None]) & (key < inputs.captured["DocEnd"][0][:, None])
    return keep


def _torch_way(case: Case, inputs: Inputs) -> Callable[[], Any]:
    """The fastest that torch has without compiling: what can be prepared once (masks) is prepared here."""
    import torch
    import torch.nn.functional as F

    s, q, k, v = case.spec, inputs.q, inputs.k, inputs.v
    grouped = s.num_heads != s.num_kv_heads
    keep = _keep(case, inputs)
    if cap := _rule(case, "softcap"):
        bound, wide_k, wide_v = float(cap["cap"]), k.repeat_interleave(s.group, 1), v.repeat_interleave(s.group, 1)

        def eager() -> Any:
            x = (q @ wide_k.transpose(-1, -2)) * s.scale
            return torch.softmax((bound * torch.tanh(x / bound)).masked_fill(~keep, float("-inf")), -1) @ wide_v

        return eager
    if _torch_name(case) == "SDPA":
        causal = bool(s.masks)
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    mask = keep
    if _rule(case, "alibi"):
        distance = torch.arange(s.seqlen_k)[None, :] - torch.arange(s.seqlen_q)[:, None] - (s.seqlen_k - s.seqlen_q)
        mask = (inputs.captured["Slopes"][:, None, None] * distance).masked_fill(~keep, float("-inf"))[None].to(q.dtype)
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def _flex(case: Case, inputs: Inputs) -> Callable[[], Any]:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    s = case.spec
    slopes, start = inputs.captured["Slopes"], inputs.captured["DocStart"][0]
    reach = next((int(r["left"]) for r in s.masks if r.name == "window"), s.seqlen_k)
    cap = next((float(r["cap"]) for r in s.scores if r.name == "softcap"), 0.0)

    def visible(b: Any, h: Any, row: Any, key: Any) -> Any:
        keep = (key <= row) & (row - key <= reach)
        return keep & (key >= start[row]) if case.documents else keep

    def score(x: Any, b: Any, h: Any, row: Any, key: Any) -> Any:
        return cap * torch.tanh(x / cap) if cap else x + slopes[h] * (key - row)

    mask = create_block_mask(visible, None, None, s.seqlen_q, s.seqlen_k, device="cpu") if s.masks else None
    torch.compiler.reset()  # what was compiled for another case would make sizes symbols
    compiled = torch.compile(flex_attention, dynamic=False)  # sizes and constants stay as they are, as in a model
    grouped = s.num_heads != s.num_kv_heads
    modifier = score if s.scores else None

    def run() -> Any:
        return compiled(inputs.q, inputs.k, inputs.v, score_mod=modifier, block_mask=mask, enable_gqa=grouped)

    run()
    return run
