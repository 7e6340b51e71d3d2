"""Prompts hold what the tools know, name everything a program needs, and never the answer."""

import pytest

from generator.authors.describe import declarations, task_in_words
from generator.authors.prompting import PromptTooLong, language_page, task_prompts
from generator.binding import rule_scalars, rule_tensors
from generator.masks import MASKS
from generator.scores import SCORES
from generator.spec import AttentionSpec, Rule
from generator.tl.ir import FUNCTIONS
from generator.tl.parser import parse
from generator.tl.statements import FORMS

PARAMETERS = {"window": {"left": 15}, "sink_window": {"sink": 4, "left": 15}, "prefix": {"length": 3}, "softcap": {"cap": 50.0}}


def spec(masks=(), scores=(), **fields):
    rules = [tuple(Rule.make(name, **PARAMETERS.get(name, {})) for name in names) for names in (masks, scores)]
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "head_dim_v": 64, "batch": 1, "seqlen_q": 100, "seqlen_k": 100}
    return AttentionSpec(**(sizes | fields), masks=rules[0], scores=rules[1])


SPECS = [
    spec(),
    *(spec([m]) for m in MASKS),
    *(spec((), [s]) for s in SCORES),
    spec(["causal", "document"], ["softcap", "alibi"], dtype="bf16"),
]


def prompts(s, limit=16_000):
    return task_prompts(s, "a CPU", "cpu, AVX-512.", limit)


def test_the_language_page_names_every_form_and_function_of_the_parser():
    page = language_page()
    for form in FORMS.values():
        assert f"- `{form}`" in page
    for fn in FUNCTIONS:
        assert fn == "neg" or f"`{fn}" in page


@pytest.mark.parametrize("s", SPECS, ids=str)
def test_a_task_names_all_that_its_rules_add(s):
    text = prompts(s).sketch
    for rule in s.masks + s.scores:
        assert f".{rule.name}:" in text
    for name in [*rule_scalars(s), *rule_tensors(s), "Q", "LSE", "scale", "SeqK"]:
        assert name in text


@pytest.mark.parametrize("s", SPECS, ids=str)
def test_the_declarations_are_tl(s):
    text = f"Kernel k\nGrid m = 0:1, h = 0:Heads, b = 0:Batch\n{declarations(s)}\n"
    assert [d for d in parse(text).diagnostics if d.severity == "error"] == []


@pytest.mark.parametrize("s", SPECS, ids=str)
def test_no_prompt_holds_an_attention_program(s):
    p = prompts(s)
    for text in (p.system, p.first, p.sketch, p.code):
        assert "exp2(S" not in text and "rowmax(S)" not in text and "Compute row_max" not in text


def test_nothing_is_left_unfilled():
    p = prompts(SPECS[-1])
    assert not any("$" in text for text in (p.system, p.first, p.sketch, p.code))


def test_a_scale_that_may_be_negative_is_said():
    assert "negative or zero" in task_in_words(spec(softmax_scale=-0.5))
    assert "positive" not in declarations(spec(softmax_scale=-0.5)).splitlines()[0]


def test_a_prompt_that_cannot_fit_is_refused_with_both_numbers():
    with pytest.raises(PromptTooLong, match="of 500"):
        prompts(spec(), 500)
