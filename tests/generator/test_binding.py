"""What a program's parameters stand for, by name, and the errors for those that stand for nothing."""

from dataclasses import replace

import pytest

from generator.binding import BindingError, bind
from generator.rule_parts import UNBOUNDED
from generator.spec import AttentionSpec, Rule, SpecError
from generator.translate.records import Launch, ScalarParameter, TensorParameter

SPEC = AttentionSpec(
    num_heads=8, num_kv_heads=2, head_dim=64, head_dim_v=32, batch=3, seqlen_q=5, seqlen_k=7, dtype="bf16",
    masks=(Rule.make("window", left=-1, right=2), Rule.make("document"), Rule.make("padding")),
    scores=(Rule.make("softcap", cap=30), Rule.make("alibi")),
)  # fmt: skip


def launch(*parameters: TensorParameter | ScalarParameter, **facts: str) -> Launch:
    tensors = tuple(p for p in parameters if isinstance(p, TensorParameter))
    return Launch("entry", tensors, tuple(p for p in parameters if isinstance(p, ScalarParameter)), facts)


def tensor(name: str, dtype: str = "bf16", offset_axes: int = 2, axes: int = 2, written: bool = False) -> TensorParameter:
    return TensorParameter(name, dtype, offset_axes, axes, written)


def test_call_tensors_and_captured_ones() -> None:
    lse, slopes = tensor("LSE", "f32", 2, 1, True), tensor("Slopes", "f32", 0, 1)
    found = bind(launch(tensor("Q"), tensor("V"), lse, slopes, tensor("DocEnd", "i32", 1, 1), tensor("KvLen", "i32", 0, 1)), SPEC)
    assert [(t.name, t.role, t.shape) for t in found.tensors] == [
        ("Q", "q", (3, 8, 5, 64)), ("V", "v", (3, 2, 7, 32)), ("LSE", "lse", (3, 8, 5)),
        ("Slopes", "captured", (8,)), ("DocEnd", "captured", (3, 5)), ("KvLen", "captured", (3,)),
    ]  # fmt: skip
    assert [t.name for t in found.captured] == ["Slopes", "DocEnd", "KvLen"]


def test_scalars_and_where_they_come_from() -> None:
    names = {"scale": "f32", "SeqK": "i32", "Group": "i32", "WindowLeft": "i32", "WindowRight": "i32", "cap": "f32"}
    found = bind(launch(*(ScalarParameter(n, d, False) for n, d in names.items())), SPEC)
    assert found.values == {"scale": 0.125, "SeqK": 7, "Group": 4, "WindowLeft": UNBOUNDED, "WindowRight": 2, "cap": 30.0}
    assert [s.source for s in found.scalars] == [
        "spec.softmax_scale", "spec.seqlen_k", "spec.group", "masks.window", "masks.window", "scores.softcap",
    ]  # fmt: skip


def test_grouped_view_of_one_query_token() -> None:
    decode = replace(SPEC, seqlen_q=1, phase="decode")
    found = bind(launch(tensor("Q"), tensor("K"), tensor("LSE", "f32", 2, 1, True), view="grouped"), decode)
    assert [(t.view, t.parameter_shape(decode)) for t in found.tensors] == [
        ("grouped", (3, 2, 4, 64)), ("standard", (3, 2, 7, 64)), ("grouped", (3, 2, 4)),
    ]  # fmt: skip
    with pytest.raises(BindingError, match="seqlen_q: a kernel for one query token"):
        bind(launch(tensor("Q"), view="grouped"), SPEC)


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (tensor("Bias"), "Bias: no tensor of the call or of a rule has this name; known are Q, K, V, O, LSE, DocStart"),
        (tensor("Q", "f16"), "Q: expected a tensor of bf16, found f16"),
        (tensor("Q", axes=1), "Q: expected 4 axes in all, found 3"),
        (tensor("O"), "O: expected it to be written, found the opposite"),
        (tensor("DocEnd", "f32", 1, 1), "DocEnd: expected a tensor of i32, found f32"),
        (ScalarParameter("Prefix", "i32", False), "Prefix: no size, scale or rule of this spec has this name"),
        (ScalarParameter("scale", "i32", False), r"scale: expected an argument of f32 \(spec.softmax_scale\), found i32"),
        (ScalarParameter("WindowRight", "i32", True), ""),
    ],
)
def test_errors_name_the_parameter(parameter: TensorParameter | ScalarParameter, message: str) -> None:
    if not message:
        assert bind(launch(parameter), SPEC).scalars[0].positive
        return
    with pytest.raises(BindingError, match=message):
        bind(launch(parameter), SPEC)


def test_a_broken_promise_is_refused() -> None:
    with pytest.raises(BindingError, match="scale: the program promises a positive number, found -1.0"):
        bind(launch(ScalarParameter("scale", "f32", True)), replace(SPEC, softmax_scale=-1.0))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule.make("windows"), "masks: expected one of causal, window, .* found 'windows'"),
        (Rule.make("window"), "masks.window.left: expected a whole number of at least -1, found nothing"),
        (Rule.make("window", left=-2), "masks.window.left: expected a whole number of at least -1, found -2"),
        (Rule.make("window", left=1.5), "masks.window.left: expected a whole number of at least -1, found 1.5"),
        (Rule.make("causal", align="left"), "masks.causal.align: expected one of bottom_right, top_left, found 'left'"),
        (Rule.make("causal", window=3), "masks.causal.window: causal has no such parameter: expected align"),
    ],
)
def test_wrong_rules_are_named(rule: Rule, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        bind(launch(ScalarParameter("WindowLeft", "i32", False)), replace(SPEC, masks=(rule,)))
