"""What the parameters of a program stand for in an attention call. Holds no tensors: only names, shapes and numbers.

Names are the project's: `Q, K, V, O, LSE`, `scale`, sizes, and what the spec's rules name. docs/architecture.md lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Literal

from generator.masks import MaskRule, mask_parameters, mask_rule
from generator.rule_parts import Captured, Number, Scalar
from generator.scores import ScoreRule, score_parameters, score_rule
from generator.spec import TL_DTYPES, AttentionSpec, SpecError
from generator.tl.ir import DType, Program
from generator.translate.records import Launch, ScalarParameter, TensorParameter, scalar_parameters, tensor_parameters

Role = Literal["q", "k", "v", "o", "lse", "captured"]
View = Literal["standard", "grouped"]


class BindingError(ValueError):
    """A parameter that stands for nothing in this attention call, or for something of another kind: names it."""


@dataclass(frozen=True, slots=True)
class BoundTensor:
    """One tensor parameter.

    role: which tensor of the call; a captured one goes by `name`. shape: of that tensor in the call's own axes, for this spec:
    (batch, heads, seqlen, head_dim) for q, k, v, o, (batch, heads, seqlen) for lse. view: `standard` hands it over as it is;
    `grouped` as (batch, kv heads, group, ...): seqlen_q is 1 and dropped, the heads are split.
    """

    name: str
    role: Role
    view: View
    dtype: DType
    shape: tuple[int, ...]
    written: bool

    def parameter_shape(self, spec: AttentionSpec) -> tuple[int, ...]:
        """The shape as the kernel addresses it."""
        if self.view == "standard":
            return self.shape
        return (self.shape[0], spec.num_kv_heads, spec.group, *self.shape[3:])


@dataclass(frozen=True, slots=True)
class BoundScalar:
    """One scalar parameter. source: `spec.FIELD`, or `masks.RULE` / `scores.RULE` whose parameters give the value."""

    name: str
    dtype: DType
    positive: bool
    source: str
    value: Number


@dataclass(frozen=True, slots=True)
class Binding:
    """Every parameter of a kernel, in its launch order, for one spec."""

    tensors: tuple[BoundTensor, ...]
    scalars: tuple[BoundScalar, ...]

    @property
    def values(self) -> dict[str, Number]:
        """Scalar name -> number."""
        return {s.name: s.value for s in self.scalars}

    @property
    def captured(self) -> tuple[BoundTensor, ...]:
        """What the caller gives besides q, k and v."""
        return tuple(t for t in self.tensors if t.role == "captured")


#: Scalars that every program may name -> the field of the spec, and its value.
SPEC_SCALARS: dict[str, tuple[str, DType, Callable[[AttentionSpec], Number]]] = {
    "scale": ("softmax_scale", "f32", lambda s: s.scale),
    "SeqQ": ("seqlen_q", "i32", lambda s: s.seqlen_q),
    "SeqK": ("seqlen_k", "i32", lambda s: s.seqlen_k),
    "Heads": ("num_heads", "i32", lambda s: s.num_heads),
    "KvHeads": ("num_kv_heads", "i32", lambda s: s.num_kv_heads),
    "Group": ("group", "i32", lambda s: s.group),
    "Batch": ("batch", "i32", lambda s: s.batch),
}

_ROLES: dict[str, Role] = {"Q": "q", "K": "k", "V": "v", "O": "o", "LSE": "lse"}


def bind(kernel: Launch | Program, spec: AttentionSpec) -> Binding:
    """What each parameter stands for in `spec`. Raises BindingError naming the parameter, SpecError for a wrong rule.

    For a Launch, `target_facts["view"]` says how a decode kernel takes Q, O and LSE; for a Program, `Hint view`.
    """
    tensors, scalars, view = _parameters(kernel)
    if view not in ("standard", "grouped"):
        raise BindingError(f"view: expected standard or grouped, found {view!r}")
    if view == "grouped" and spec.seqlen_q != 1:
        raise BindingError(f"seqlen_q: a kernel for one query token (view = grouped) needs 1, found {spec.seqlen_q}")
    return Binding(
        tuple(_bind_tensor(t, spec, "grouped" if view == "grouped" else "standard") for t in tensors),
        tuple(_bind_scalar(s, spec) for s in scalars),
    )


def _parameters(kernel: Launch | Program) -> tuple[tuple[TensorParameter, ...], tuple[ScalarParameter, ...], str]:
    if isinstance(kernel, Launch):
        return kernel.tensors, kernel.scalars, str(kernel.target_facts.get("view", "standard"))
    return tensor_parameters(kernel), scalar_parameters(kernel), kernel.hints.get("view", "standard")


def rule_uses(spec: AttentionSpec) -> list[tuple[str, MaskRule | ScoreRule, dict[str, Number | str]]]:
    """The spec's rules as (`masks.NAME` or `scores.NAME`, definition, parameters). SpecError for unknown or repeated ones."""
    uses: list[tuple[str, MaskRule | ScoreRule, dict[str, Number | str]]] = []
    uses += [(f"masks.{r.name}", mask_rule(r.name), mask_parameters(r)) for r in spec.masks]
    uses += [(f"scores.{r.name}", score_rule(r.name), score_parameters(r)) for r in spec.scores]
    sources = [source for source, _, _ in uses]
    for source in sources:
        if sources.count(source) > 1:
            raise SpecError(f"{source}: expected each rule once, found it {sources.count(source)} times")
    return uses


def rule_scalars(spec: AttentionSpec) -> dict[str, tuple[str, Scalar, Number]]:
    """Scalars of the spec's rules: TL name -> (source, description, value). Raises SpecError for wrong parameters."""
    return {s.name: (source, s, s.value(parameters)) for source, rule, parameters in rule_uses(spec) for s in rule.scalars}


def rule_tensors(spec: AttentionSpec) -> dict[str, Captured]:
    """Captured tensors of the spec's rules by name."""
    return {c.name: c for _, rule, _ in rule_uses(spec) for c in rule.captured}


def key_extent(spec: AttentionSpec) -> str:
    """How many rows of K and V hold values, as TL text: `SeqK`, or fewer where a mask knows a sequence's own length."""
    own = [rule.key_extent for _, rule, _ in rule_uses(spec) if isinstance(rule, MaskRule) and rule.key_extent]
    return reduce(lambda least, extent: f"min({least}, {extent})", own, "SeqK")


def captured_shape(captured: Captured, spec: AttentionSpec) -> tuple[int, ...]:
    """Offset axes first: what the caller has to give."""
    sizes = {name: int(get(spec)) for name, (_, dtype, get) in SPEC_SCALARS.items() if dtype == "i32"}
    sizes |= {"b": spec.batch, "h": spec.num_heads}
    return tuple(sizes[axis] for axis in captured.offset + captured.shape)


def _bind_scalar(s: ScalarParameter, spec: AttentionSpec) -> BoundScalar:
    rules = rule_scalars(spec)
    if s.name in SPEC_SCALARS:
        field, dtype, get = SPEC_SCALARS[s.name]
        source, value = f"spec.{field}", get(spec)
    elif s.name in rules:
        source, scalar, value = rules[s.name]
        dtype = scalar.dtype
    else:
        known = ", ".join([*SPEC_SCALARS, *rules])
        raise BindingError(f"{s.name}: no size, scale or rule of this spec has this name; known are {known}")
    if s.dtype != dtype:
        raise BindingError(f"{s.name}: expected an argument of {dtype} ({source}), found {s.dtype}")
    if s.positive and not value > 0:
        raise BindingError(f"{s.name}: the program promises a positive number, found {value!r} ({source})")
    return BoundScalar(s.name, s.dtype, s.positive, source, value)


def _bind_tensor(t: TensorParameter, spec: AttentionSpec, view: View) -> BoundTensor:
    if t.name in _ROLES:
        role = _ROLES[t.name]
        return _call_tensor(t, role, spec, view if role in ("q", "o", "lse") else "standard")
    tensors = rule_tensors(spec)
    if t.name not in tensors:
        known = ", ".join([*_ROLES, *tensors])
        raise BindingError(f"{t.name}: no tensor of the call or of a rule has this name; known are {known}")
    captured = tensors[t.name]
    _expect(t, captured.dtype, len(captured.offset) + len(captured.shape), written=False)
    return BoundTensor(t.name, "captured", "standard", t.dtype, captured_shape(captured, spec), t.written)


def _call_tensor(t: TensorParameter, role: Role, spec: AttentionSpec, view: View) -> BoundTensor:
    heads = spec.num_kv_heads if role in ("k", "v") else spec.num_heads
    seqlen = spec.seqlen_k if role in ("k", "v") else spec.seqlen_q
    shape: tuple[int, ...] = (spec.batch, heads, seqlen)
    if role != "lse":
        shape += (spec.head_dim if role in ("q", "k") else spec.head_dim_v,)
    dtype: DType = "f32" if role == "lse" else TL_DTYPES[spec.dtype]  # type: ignore[assignment]
    _expect(t, dtype, len(shape), written=role in ("o", "lse"))
    return BoundTensor(t.name, role, view, t.dtype, shape, t.written)


def _expect(t: TensorParameter, dtype: DType, ndim: int, *, written: bool) -> None:
    if t.dtype != dtype:
        raise BindingError(f"{t.name}: expected a tensor of {dtype}, found {t.dtype}")
    if t.ndim != ndim:
        raise BindingError(f"{t.name}: expected {ndim} axes in all, found {t.ndim}")
    if t.written != written:
        raise BindingError(f"{t.name}: expected it to be {'written' if written else 'only read'}, found the opposite")
