"""Plans: good ones become frozen objects, every wrong field is named with its path and line."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from farm.flags import changed_plan
from farm.plan_file import PlanError, load_plan, read_plan
from farm.search import Versions
from generator.spec import AttentionSpec

GOOD = """
models:
  - name: Llama-3-8B
    num_heads: 32
    num_kv_heads: 8
    head_dim: 128
    masks: [causal]
    seqlens: [128, 777]
dtypes: [fp32, bf16]
targets: [cpu, sm_80]
"""


def problems(text: str) -> list[str]:
    with pytest.raises(PlanError) as caught:
        read_plan(text, "p.yaml")
    return str(caught.value).splitlines()


def test_default_plan_has_problems_for_this_machine() -> None:
    plan = load_plan()
    assert {target for _, target in plan.problems()} == {"cpu"}
    assert len({spec.hash for spec in plan.specs()}) >= 4


def test_a_plan_is_every_dtype_shape_and_target() -> None:
    plan = read_plan(GOOD, "p.yaml")
    assert [(s.dtype, s.seqlen_q, t) for s, t in plan.problems()] == [
        (dtype, n, t) for dtype in ("fp32", "bf16") for n in (128, 777) for t in ("cpu", "sm_80")
    ]
    spec = next(plan.specs())
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim_v) == (32, 8, 128, 128)
    assert str(spec.masks[0]) == "causal(align=bottom_right)"  # defaults are written out, so that equal rules have equal hashes


def test_rivals_that_are_named_are_part_of_what_an_attempt_is() -> None:
    plan = read_plan(GOOD + "rivals: [torch-eager, torch-sdpa, torch-eager]\n", "p.yaml")
    assert plan.rivals == ("torch-eager", "torch-sdpa") and read_plan(GOOD, "p.yaml").rivals is None
    assert read_plan(GOOD + "rivals: []\n", "p.yaml").rivals == (), "our own time alone"
    versions, spec = Versions("t", "h"), next(plan.specs())
    keys = {versions.key(spec, "cpu", "program", rung, r) for rung in (0, 1) for r in (None, (), plan.rivals)}
    assert len(keys) == 6


def test_the_same_problem_twice_is_one_problem() -> None:
    assert len(list(read_plan(GOOD.replace("[128, 777]", "[128, 128, 777]"), "p").problems())) == 8


BILLION_LAUGHS = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "\n".join(
    f"{name}: &{name} [{','.join(['*' + before] * 10)}]" for before, name in zip("abcde", "bcdef", strict=True)
)

SPEC = "{num_heads: 4, head_dim: 64, batch: 1, seqlen_q: 0, seqlen_k: 8}"

WRONG = [
    ("seqlens: [128, 777]", "seqlens: [128, x]", "p.yaml:8: models[0].seqlens[1]: expected a whole number of at least 1, found 'x'"),  # noqa: E501
    ("seqlens: [128, 777]", "seqlens: [0]", "p.yaml:8: models[0].seqlens[0]: expected a whole number of at least 1, found 0"),
    ("seqlens: [128, 777]", "seqlens: 128", "p.yaml:8: models[0].seqlens: expected a list, found 128"),
    ("    num_kv_heads: 8", "    num_kv_heds: 8", "p.yaml:5: models[0].num_kv_heds: unknown field; did you mean 'num_kv_heads'?"),
    ("num_kv_heads: 8", "num_kv_heads: 5", "p.yaml:5: models[0].num_kv_heads: expected a divisor of num_heads = 32, found 5"),
    ("num_heads: 32", "num_heads: true", "p.yaml:4: models[0].num_heads: expected a whole number of at least 1, found true"),
    ("    head_dim: 128\n", "", "p.yaml:3: models[0]: head_dim is missing"),
    ("masks: [causal]", "masks: [casual]", "p.yaml:7: models[0].masks[0]: expected a mask rule of"),
    ("[causal]", "[{window: {right: 0}}]", "p.yaml:7: models[0].masks[0]: window needs left: a whole number of at least -1"),
    ("[causal]", "[{window: {left: 1.5}}]", "p.yaml:7: models[0].masks[0].window.left: expected a whole number of at least -1, found 1.5"),
    ("[causal]", "[{causal: {alin: top_left}}]", "p.yaml:7: models[0].masks[0].causal.alin: unknown field; did you mean 'align'?"),
    ("[causal]", "[causal]\n    scores: [{softcap: {cap: 0}}]", "p.yaml:8: models[0].scores[0].softcap.cap: expected a finite number above 0, found 0"),
    ("fp32, bf16", "fp32, bf61", "p.yaml:9: dtypes[1]: expected one of fp32, fp16, bf16, found 'bf61'; did you mean 'bf16'?"),
    ("num_heads: 32", "num_heads: 99999999999", "p.yaml:4: models[0].num_heads: expected a whole number from 1 to 2147483647, found 99999999999"),
    ("[fp32, bf16]", "[]", "p.yaml:9: dtypes: expected at least one of fp32, fp16, bf16, found none"),
    ("[cpu, sm_80]", "[]", "p.yaml:10: targets: expected at least one of cpu, sm_75, "),
    ("cpu, sm_80", "cpu, sm_8", "p.yaml:10: targets[1]: expected one of"),
    ("targets:", "author: gpt\ntargets:", "p.yaml:10: author: expected one of rules, llm, llm-direct, found 'gpt'"),
    ("targets:", "tuning: {keep: 1}\ntargets:", "p.yaml:10: tuning.keep: expected a share above 0 and below 1, found 1"),
    ("targets:", "budget: {minutes: soon}\ntargets:", "p.yaml:10: budget.minutes: expected minutes, at least 0, found 'soon'"),
    ("targets:", "rivals: [torch-sdp]\ntargets:", "p.yaml:10: rivals[0]: expected one of torch-sdpa, torch-eager, flex-attention, found 'torch-sdp'; did you mean 'torch-sdpa'?"),
    ("targets:", "rivals: torch-sdpa\ntargets:", "p.yaml:10: rivals: expected a list, found 'torch-sdpa'"),
    ("masks: [causal]", "masks: [causal, causal]", "p.yaml:7: models[0].masks: expected each mask rule once, found causal 2 times"),
    ("masks: [causal]", "softmax_scale: 1.0e+60", "p.yaml:7: models[0].softmax_scale: expected a finite number that fp32 holds, found 1e+60"),
    ("masks: [causal]", "scores: [{softcap: {cap: 1.0e-60}}]", "p.yaml:3: models[0]: softcap.cap: expected a finite number that fp32 holds, found 1e-60"),
    ("targets:", "variants: nowhere.py\ntargets:", "p.yaml:10: variants: "),
    ("masks: [causal]", f"masks: [{'y' * 9000}]", "p.yaml:7: models[0].masks[0]: expected a mask rule of causal, window, sink_window, prefix, document, padding, found 'yyyy"),
    ("targets:", 'name: "a\\nb"\ntargets:', r"p.yaml:10: name: expected a text on one line, of characters that can be seen, found 'a\nb'"),
    ("targets:", 'name: "\\e[31mred"\ntargets:', r"p.yaml:10: name: expected a text on one line, of characters that can be seen, found '\x1b[31mred'"),
    ("targets:", f"name: {'y' * 201}\ntargets:", "p.yaml:10: name: expected a text of at most 200 characters, found 201"),
    ("targets:", "tuning: {measure_s: 1.0e+30}\ntargets:", "p.yaml:10: tuning.measure_s: expected seconds, from 0.01 to 3600, found 1e+30"),
    ("targets:", "specs: [causal]\ntargets:", "p.yaml:10: specs[0]: expected a mapping (num_heads, head_dim, batch, seqlen_q, seqlen_k, ...), found 'causal'"),
    ("targets:", f"specs: [{SPEC[:-1]}, dtype: [fp32]}}]\ntargets:", "p.yaml:10: specs[0].dtype: expected one of fp32, fp16, bf16, found a list"),
    ("targets:", f"specs: [{SPEC[:-1]}, mask: [causal]}}]\ntargets:", "p.yaml:10: specs[0].mask: unknown field; did you mean 'masks'?"),
    ("targets:", f"specs: [{SPEC[:-1]}, masks: !!binary x}}]\ntargets:", "p.yaml:10: specs[0].masks: expected a plain value, found 'x'"),
    ("targets:", f"specs: [{SPEC[:-1]}, softmax_scale: true}}]\ntargets:", "p.yaml:10: specs[0].softmax_scale: expected a finite number, found true"),
    ("targets:", f"specs: [{SPEC[:-1]}, num_kv_heads: 3}}]\ntargets:", "p.yaml:10: specs[0].num_kv_heads: expected a divisor of num_heads = 4, found 3"),
    ("targets:", f"specs: [{SPEC.replace('seqlen_q: 0', 'seqlen_q: 99999999999')}]\ntargets:", "p.yaml:10: specs[0].seqlen_q: expected a whole number from 0 to 2147483647, found 99999999999"),
]  # fmt: skip
# ruff: noqa: E501


@pytest.mark.parametrize(("old", "new", "message"), WRONG)
def test_every_wrong_field_is_named(old: str, new: str, message: str) -> None:
    assert old in GOOD
    (line,) = problems(GOOD.replace(old, new))
    assert line.startswith(message)


def test_a_target_or_dtype_that_is_named_twice_is_one() -> None:
    twice = read_plan(GOOD.replace("cpu, sm_80", "cpu, sm_80, cpu").replace("fp32, bf16", "fp32, bf16, fp32"), "p.yaml")
    assert list(twice.problems()) == list(read_plan(GOOD, "p.yaml").problems())
    assert changed_plan(twice, targets="cpu, cpu").targets == ("cpu",)


def test_a_problem_may_be_given_field_by_field() -> None:
    (spec,) = read_plan(f"specs: [{SPEC}]", "p.yaml").specs()
    assert spec == AttentionSpec(4, 4, 64, 64, 1, 0, 8)


def test_of_a_thousand_wrong_fields_a_screen_is_told() -> None:
    with pytest.raises(PlanError) as caught:
        read_plan("\n".join(f"field{n}: 1" for n in range(1000)), "p.yaml")
    lines = str(caught.value).splitlines()
    assert len(caught.value.problems) == 1000 and len(lines) == 21 and lines[-1] == "p.yaml: 980 more wrong fields"


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 100_000, "a: [" + "1," * 500_000 + "]", "- " * 500_000])
def test_a_hostile_document_is_refused_in_a_moment(text: str) -> None:
    began = time.process_time()
    assert len(problems(text)) == 1 and time.process_time() - began < 2.0


def test_all_wrong_fields_come_at_once_in_order() -> None:
    lines = problems(GOOD.replace("128, 777", "0, x").replace("fp32, bf16", "f32"))
    assert [line.split(": ")[1] for line in lines] == ["models[0].seqlens[0]", "models[0].seqlens[1]", "dtypes[0]"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("models: [", "p.yaml:1: not YAML"),
        ("- 1\n- 2", "p.yaml:1: expected a mapping (models, targets, ...), found a list"),
        ("models: []", "expected at least one entry in models or specs, found none"),
        ("models: &a [*a]", "nested deeper than 50 levels"),
        ("a: 1\na: 2\nmodels: []", "p.yaml:2: a: the field is given twice"),
        ("x: " + "y" * (1 << 21), "expected at most 1048576 characters"),
        (BILLION_LAUGHS, "more than 50000"),
        ("a: !!python/object/apply:os.system [true]", "a: "),
    ],
)  # fmt: skip
def test_documents_that_are_no_plan(text: str, message: str) -> None:
    assert any(message in line for line in problems(text))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    binary = tmp_path / "rubbish.yaml"
    binary.write_bytes(bytes(range(256)))
    cases = ((binary, "expected a YAML text in UTF-8"), (tmp_path, "is a directory"), (tmp_path / "no.yaml", "no such file"))
    for path, message in cases:
        with pytest.raises(PlanError, match=message):
            load_plan(path)


def test_every_example_is_a_plan_that_cites_its_source() -> None:
    examples = sorted((Path(__file__).parents[2] / "examples/plans").glob("*.yaml"))
    assert len(examples) >= 9
    for path in examples:
        specs = list(load_plan(path).specs())
        assert all(spec.name for spec in specs), path
        assert any(spec.seqlen_k % 64 for spec in specs), f"{path}: no odd length"
        assert "config.json" in path.read_text(), f"{path}: cites no source"
