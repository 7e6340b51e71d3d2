"""The kernels, inputs and rivals of the GPU checks and benchmarks, as data and small functions. Runs nothing by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import gpu_flex

from generator.authors.rules import RuleAuthor
from generator.spec import AttentionSpec, Rule
from generator.targets import TARGETS
from generator.tl.ir import Constant, Hint, Program
from generator.tl.parser import parse_or_raise
from generator.tl.printer import print_program
from generator.translate import translate
from generator.translate.records import Translated, Untranslatable


@dataclass(frozen=True)
class Build:
    """One kernel: a spec's program by the rule author with tile sizes and hints, for a target.

    edits: replacements in the program's text, to try another form of a statement. `arch` is what the cubin is built for: the
    card that checks it.
    """

    spec: AttentionSpec
    target: str
    tiles: tuple[tuple[str, int], ...]
    hints: tuple[tuple[str, str], ...] = ()
    edits: tuple[tuple[str, str], ...] = ()

    @property
    def arch(self) -> str:
        return "sm_90a" if self.target == "sm_90a" else "sm_90"

    @property
    def name(self) -> str:
        s, rules = self.spec, [r.name for r in self.spec.masks + self.spec.scores]
        dims = f"d{s.head_dim}" + (f"v{s.head_dim_v}" if s.head_dim != s.head_dim_v else "")
        tail = (
            [f"{k}{v}" for k, v in self.tiles]
            + [f"{k}={v}" for k, v in self.hints]
            + [f"edit{len(self.edits)}"] * bool(self.edits)
        )
        return "_".join([self.target, s.dtype, dims, *(rules or ["full"]), *tail])

    def program(self) -> Program:
        program = RuleAuthor().code(self.spec, self.target)
        tiles = dict(self.tiles)
        body = [Constant(s.name, (tiles.get(s.name, s.choices[0]),)) if isinstance(s, Constant) else s for s in program.body]
        hinted = Program(program.name, program.stage, (*(Hint(k, v) for k, v in self.hints), *body))
        text = print_program(hinted)
        for old, new in self.edits:
            if old not in text:
                raise ValueError(f"{self.name}: no {old!r} in the program")
            text = text.replace(old, new)
        return parse_or_raise(text)

    def translated(self) -> Translated | Untranslatable:
        return translate(self.program(), TARGETS[self.target])


def build(spec: AttentionSpec, target: str, m: int, n: int, edits: tuple[tuple[str, str], ...] = (), **hints: str) -> Build:
    return Build(spec, target, (("BM", m), ("BN", n)), tuple(sorted(hints.items())), edits)


CAUSAL = (Rule.make("causal"),)


def spec(
    dtype: str = "bf16", d: int = 128, dv: int = 0, masks: tuple[Rule, ...] = (), scores: tuple[Rule, ...] = (),
    shape: tuple[int, int, int, int, int] = (1, 4, 2, 256, 256),
) -> AttentionSpec:  # fmt: skip
    """shape: batch, query heads, key heads, queries, keys."""
    b, h, hk, sq, sk = shape
    return AttentionSpec(h, hk, d, dv or d, b, sq, sk, dtype, masks, scores)  # type: ignore[arg-type]


def sized(s: AttentionSpec, b: int, h: int, hk: int, sq: int, sk: int) -> AttentionSpec:
    return replace(s, batch=b, num_heads=h, num_kv_heads=hk, seqlen_q=sq, seqlen_k=sk)


#: Name -> masks and scores.
VARIANTS: dict[str, tuple[tuple[Rule, ...], tuple[Rule, ...]]] = {
    "full": ((), ()),
    "causal": (CAUSAL, ()),
    "causal_top_left": ((Rule.make("causal", align="top_left"),), ()),
    "window": ((Rule.make("window", left=99),), ()),
    "window_both": ((Rule.make("window", left=70, right=33),), ()),
    "sink_window": ((Rule.make("sink_window", sink=5, left=80),), ()),
    "prefix": ((Rule.make("prefix", length=60),), ()),
    "document": ((Rule.make("document"),), ()),
    "padding": ((Rule.make("padding"),), ()),
    "softcap": (CAUSAL, (Rule.make("softcap", cap=20.0),)),
    "alibi": (CAUSAL, (Rule.make("alibi"),)),
    "alibi_full": ((), (Rule.make("alibi"),)),
    "sink_logit": (CAUSAL, (Rule.make("sink_logit"),)),
    "all_of_it": (
        (Rule.make("causal"), Rule.make("document"), Rule.make("window", left=150)),
        (Rule.make("softcap", cap=15.0), Rule.make("alibi"), Rule.make("sink_logit")),
    ),
}

#: Shapes that the checks run: batch, heads, key heads, queries, keys. Ragged, one row, more queries than keys, GQA.
SHAPES = (
    (1, 1, 1, 1, 1), (2, 4, 4, 128, 128), (1, 2, 1, 1, 777), (2, 3, 3, 113, 203), (1, 8, 1, 257, 1000), (1, 4, 4, 1000, 333),
    (1, 4, 2, 333, 1000), (3, 5, 5, 191, 1057), (2, 40, 8, 150, 300), (1, 2, 2, 2048, 2048),
)  # fmt: skip


def default_tiles(target: str, d: int, dv: int) -> tuple[int, int, dict[str, str]]:
    """Tile sizes that fit, for checks rather than for speed."""
    widest = max(d, dv)
    match target:
        case "sm_75":
            return (64, 32, {}) if widest > 128 else (128, 32, {})
        case "sm_80":
            return (64, 32, {}) if widest > 192 else (64, 64, {}) if widest > 128 else (128, 64, {})
    return (128, 80, {}) if widest > 192 else (128, 112, {}) if widest > 128 else (128, 128, {})


def check_builds(quick: bool = False) -> list[Build]:
    """A cover of variant x head size x dtype for all three instruction families."""
    dims = [(40, 40), (64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (160, 160), (192, 128), (256, 256)]
    out = []
    for target in ("sm_90a", "sm_80", "sm_75"):
        for i, (masks, scores) in enumerate(VARIANTS.values()):
            dtype = "fp16" if target == "sm_75" or i % 3 == 2 else "bf16"
            d, dv = dims[5] if i < 2 else dims[(2 * i + (target == "sm_80")) % len(dims)]
            m, n, hints = default_tiles(target, d, dv)
            out.append(build(spec(dtype, d, dv, masks, scores), target, m, n, **hints))
        for d, dv in dims if not quick else dims[::3]:
            m, n, hints = default_tiles(target, d, dv)
            out.append(build(spec("fp16" if target == "sm_75" else "bf16", d, dv, CAUSAL), target, m, n, **hints))
    return list(dict.fromkeys(out))


def flops(s: AttentionSpec, pairs: float) -> float:
    return 2.0 * pairs * (s.head_dim + s.head_dim_v)


def visible_pairs(s: AttentionSpec) -> float:
    """Query-key pairs that the benchmarks' masks leave, over batch and heads."""
    sq, sk = s.seqlen_q, s.seqlen_k
    heads = s.batch * s.num_heads
    for rule in s.masks:
        options = dict(rule.parameters)
        match rule.name:
            case "causal":
                return heads * (sq * sk - sq * (sq - 1) / 2 if sk >= sq else sk * (sk + 1) / 2)
            case "window":
                left = int(options["left"])
                return heads * float(sum(min(i, left) + 1 for i in range(sq)))
            case "prefix":
                length = int(options["length"])
                return heads * float(sum(max(i + 1, min(length, sk)) for i in range(sq)))
            case "document":
                return heads * 8 * (sk / 8) ** 2
    return float(heads * sq * sk)


def torch_dtype(torch: Any, dtype: str) -> Any:
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]


def random_qkv(torch: Any, s: AttentionSpec, seed: int = 3) -> tuple[Any, Any, Any, Any]:
    """q, k, v, out on the device as (B, H, S, D) views of (B, S, H, D)."""
    g = torch.Generator(device="cuda")
    g.manual_seed(seed)
    kind = torch_dtype(torch, s.dtype)

    def make(rows: int, heads: int, d: int) -> Any:
        return torch.randn((s.batch, rows, heads, d), device="cuda", generator=g).to(kind).transpose(1, 2)

    q, k, v = (
        make(s.seqlen_q, s.num_heads, s.head_dim),
        make(s.seqlen_k, s.num_kv_heads, s.head_dim),
        make(s.seqlen_k, s.num_kv_heads, s.head_dim_v),
    )
    out = torch.full((s.batch, s.seqlen_q, s.num_heads, s.head_dim_v), float("nan"), device="cuda", dtype=kind).transpose(1, 2)
    return q, k, v, out


def captured(torch: Any, s: AttentionSpec) -> dict[str, Any]:
    """Captured tensors of the benchmarks: eight equal documents, published ALiBi slopes, no padding."""
    length = -(-s.seqlen_k // 8)
    start = (torch.arange(s.seqlen_q, device="cuda") // length * length).int().expand(s.batch, -1).contiguous()
    slopes = torch.exp2(-8.0 * (torch.arange(s.num_heads, device="cuda") + 1) / s.num_heads).float()
    return {
        "DocStart": start,
        "DocEnd": (start + length).clamp(max=s.seqlen_k).int(),
        "Slopes": slopes,
        "SinkLogit": torch.linspace(-1, 1, s.num_heads, device="cuda"),
        "KvLen": torch.full((s.batch,), s.seqlen_k, device="cuda", dtype=torch.int32),
    }


FLEX = {"flex": gpu_flex.as_compiled, "flex-mma": gpu_flex.on_mma_sync}


@dataclass
class Rivals:
    """Other implementations of a spec as calls; `unsupported`: why one could not take part."""

    calls: dict[str, Callable[[], Any]] = field(default_factory=dict)
    unsupported: dict[str, str] = field(default_factory=dict)


def rivals(torch: Any, s: AttentionSpec, q: Any, k: Any, v: Any, wanted: tuple[str, ...]) -> Rivals:
    """cudnn, flash, efficient, flex, flex-mma (see `gpu_flex`): each tried once."""
    out = Rivals()
    for name in wanted:
        try:
            flex = FLEX.get(name)
            call = flex(torch, s, q, k, v, captured(torch, s)) if flex else _sdpa(torch, s, q, k, v, name)
            call()
            torch.cuda.synchronize()
            out.calls[name] = call
        except Exception as error:  # noqa: BLE001 - a rival that cannot run is a result
            out.unsupported[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    return out


def _sdpa(torch: Any, s: AttentionSpec, q: Any, k: Any, v: Any, name: str) -> Callable[[], Any]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if s.scores or any(r.name != "causal" for r in s.masks) or (s.masks and s.seqlen_q != s.seqlen_k):
        raise ValueError("no such mask or score in SDPA")
    backend = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }[name]
    causal, grouped = bool(s.masks), s.group > 1
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def call() -> Any:
        with sdpa_kernel(backend):
            return sdpa(q, k, v, is_causal=causal, **({"enable_gqa": True} if grouped else {}))

    return call


def scale_of(s: AttentionSpec) -> float:
    return 1 / math.sqrt(s.head_dim)
