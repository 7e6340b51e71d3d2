"""What is to be computed: one attention problem as data. Not how: a spec knows no tile, target or author.

Conventions: tensors are (batch, heads, seqlen, head_dim) whatever their strides; LSE is natural log, fp32, includes a sink logit
where there is one; a row with nothing to see gives output 0 and LSE -inf. Order of operations: scale * Q K^T, score rules in
their order, masks, softmax, P V.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from generator.canonical import canonical_json, digest

Phase = Literal["prefill", "decode"]
TensorDType = Literal["fp32", "fp16", "bf16"]
Layout = Literal["bhsd", "bshd"]

_LEAST_FP32, _LARGEST_FP32 = 2.0**-126, (2 - 2.0**-23) * 2.0**127

#: The name of a dtype in specs, plans and the catalog -> its name in TL.
TL_DTYPES = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}


def held_by_fp32(number: float) -> bool:
    """Whether a kernel, which gets its numbers as fp32, is given this one: finite, and not flushed to 0."""
    return number == 0 or _LEAST_FP32 <= abs(number) <= _LARGEST_FP32


class SpecError(ValueError):
    """A spec that no attention has: names the field, what was found and what is allowed."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One use of a mask or score rule: its name in the registry and its parameters, sorted by name.

    `Rule.make("window", left=4095, right=0)`. Integer and float parameters are run-time arguments of a kernel; string parameters
    (alignment) choose another kernel.
    """

    name: str
    parameters: tuple[tuple[str, int | float | str], ...] = ()

    @staticmethod
    def make(name: str, **parameters: int | float | str) -> Rule:
        return Rule(name, tuple(sorted(parameters.items())))

    def __getitem__(self, key: str) -> int | float | str:
        return dict(self.parameters)[key]

    def __str__(self) -> str:
        return self.name + (f"({', '.join(f'{k}={v}' for k, v in self.parameters)})" if self.parameters else "")


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention problem, shapes included.

    masks: rules that must all hold (a conjunction); empty means that every key is visible.
    scores: rules applied to the scaled scores in order.
    softmax_scale: None means 1 / sqrt(head_dim).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    batch: int
    seqlen_q: int
    seqlen_k: int
    dtype: TensorDType = "fp32"
    masks: tuple[Rule, ...] = ()
    scores: tuple[Rule, ...] = ()
    phase: Phase = "prefill"
    softmax_scale: float | None = None
    layout: Layout = "bhsd"
    name: str = field(default="", compare=False)  # for people: the model or the test that asks

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim", "head_dim_v", "batch", "seqlen_q", "seqlen_k"):
            value = getattr(self, name)
            least = 0 if name in ("batch", "seqlen_q", "seqlen_k") else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise SpecError(f"{name}: expected a whole number of at least {least}, found {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise SpecError(f"num_kv_heads: expected a divisor of num_heads = {self.num_heads}, found {self.num_kv_heads}")
        for name, allowed in (("dtype", tuple(TL_DTYPES)), ("phase", get_args(Phase)), ("layout", get_args(Layout))):
            if (value := getattr(self, name)) not in allowed:
                raise SpecError(f"{name}: expected one of {', '.join(allowed)}, found {value!r}")
        scale = self.softmax_scale
        if scale is not None and not (isinstance(scale, int | float) and held_by_fp32(scale)):
            raise SpecError(f"softmax_scale: expected a finite number that fp32 holds, found {self.softmax_scale!r}")
        for rule in (*self.masks, *self.scores):
            for name, value in rule.parameters:
                if isinstance(value, float) and not held_by_fp32(value):
                    raise SpecError(f"{rule.name}.{name}: expected a finite number that fp32 holds, found {value!r}")

    @property
    def scale(self) -> float:
        return self.softmax_scale if self.softmax_scale is not None else self.head_dim**-0.5

    @property
    def group(self) -> int:
        """Query heads for each key/value head: 1 is MHA, num_heads is MQA."""
        return self.num_heads // self.num_kv_heads

    @property
    def head_layout(self) -> str:
        if self.head_dim != self.head_dim_v:
            return "mla"
        return "mha" if self.group == 1 else "mqa" if self.num_kv_heads == 1 else "gqa"

    @property
    def hash(self) -> str:
        return digest(self)

    @property
    def family(self) -> dict[str, Any]:
        """What decides which program and which binary fit, shapes and run-time numbers left out.

        Two specs of one family differ only in lengths, batch, head counts, the numbers of their rules and the softmax scale (by
        its sign only).
        """

        def shape_of(rule: Rule) -> dict[str, Any]:
            return {"name": rule.name, "choices": {k: v for k, v in rule.parameters if isinstance(v, str)}}

        return {
            "head_dim": self.head_dim,
            "head_dim_v": self.head_dim_v,
            "dtype": self.dtype,
            "masks": [shape_of(r) for r in self.masks],
            "scores": [shape_of(r) for r in self.scores],
            "phase": self.phase,
            "positive_scale": self.scale > 0,
        }

    @property
    def family_hash(self) -> str:
        return digest(self.family)

    def with_shape(self, **shape: int) -> AttentionSpec:
        """The same problem at another batch, length or head count."""
        sizes: dict[str, Any] = dict(shape)
        return replace(self, **sizes)

    def to_json(self) -> str:
        return canonical_json(self)

    def __str__(self) -> str:
        rules = " ".join(str(r) for r in self.masks + self.scores) or "full"
        dims = f"d{self.head_dim}" + ("" if self.head_dim == self.head_dim_v else f"/{self.head_dim_v}")
        return f"{self.batch}x{self.num_heads}/{self.num_kv_heads} {self.seqlen_q}x{self.seqlen_k} {dims} {self.dtype} {rules}"


def spec_from_plain(plain: dict[str, Any]) -> AttentionSpec:
    """The inverse of `to_json` after json.loads. Raises SpecError for unknown or missing fields."""
    known = {f: plain[f] for f in AttentionSpec.__dataclass_fields__ if f in plain}
    if unknown := set(plain) - set(known):
        raise SpecError(f"unknown field {', '.join(sorted(unknown))}: expected {', '.join(AttentionSpec.__dataclass_fields__)}")
    for name in ("masks", "scores"):
        known[name] = tuple(Rule(r["name"], tuple((k, v) for k, v in r["parameters"])) for r in known.get(name, ()))
    try:
        return AttentionSpec(**known)
    except TypeError as error:
        raise SpecError(str(error)) from None
