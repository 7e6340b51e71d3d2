"""Rules that somebody wrote: the ones of the package and of the examples are sound, and each fault has its own sentence."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dense_attention import random_call

from generator.authors.rules import RuleAuthor
from generator.binding import bind
from generator.masks import MASKS, MaskRule
from generator.rule_check import rule_problems
from generator.rule_parts import Captured, Parameter, Scalar
from generator.scores import SCORES, ScoreRule
from generator.spec import AttentionSpec, Rule
from generator.tl.checker import check
from generator.tl.fill import fill
from generator.tl.interpreter import run

EXAMPLES = Path(__file__).parents[2] / "examples" / "variants"
USES = {
    "dilated": ("masks", Rule.make("dilated", reach=14, step=3)),
    "log_decay": ("scores", Rule.make("log_decay", rate=0.75)),
}


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("rule", [*MASKS.values(), *SCORES.values()], ids=lambda rule: rule.name)
def test_the_rules_of_the_package_are_sound(rule: MaskRule | ScoreRule) -> None:
    assert rule_problems(rule) == []


def test_the_documentation_names_every_rule_as_it_is() -> None:
    text = (EXAMPLES.parents[1] / "docs" / "rules.md").read_text()
    for rule in (*MASKS.values(), *SCORES.values()):
        line = next(line for line in text.splitlines() if line.startswith(f"| `{rule.name}` |"))
        said = rule.visible if isinstance(rule, MaskRule) else rule.extra_logit or rule.value
        assert f"`{said}`" in line and all(f"`{p.name}`" in line for p in rule.parameters)
        assert all(f"`{c.name}`" in line for c in rule.captured)


@pytest.mark.parametrize("name", [p.stem for p in sorted(EXAMPLES.glob("*.py"))])
def test_examples_give_kernels_that_agree_with_their_dense_functions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, (kind, use) = example(name), USES[name]
    registry, rules = (MASKS, module.MASKS) if kind == "masks" else (SCORES, module.SCORES)
    assert [p for rule in rules.values() for p in rule_problems(rule)] == []
    monkeypatch.setitem(registry, name, rules[name])
    sizes = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "head_dim_v": 8, "batch": 1, "seqlen_q": 40, "seqlen_k": 43}
    spec = AttentionSpec(**sizes, **{kind: (use,)})
    code = RuleAuthor().code(spec)
    assert check(code) == ()
    call = random_call(spec)
    program = fill(code, {"BM": 32, "BN": 64})
    found = run(program, {n: call[n] for n in "QKV"}, bind(program, spec).values, precision="exact")["O"]
    np.testing.assert_allclose(found, dense(spec, call, kind, use, module.REFERENCES[name]), atol=1e-12)


def dense(spec: AttentionSpec, call: dict[str, np.ndarray], kind: str, use: Rule, reference: Any) -> np.ndarray:
    """Attention by the example's dense function alone."""
    rows, keys = torch.arange(spec.seqlen_q)[None, :, None], torch.arange(spec.seqlen_k)[None, None, :]
    block = SimpleNamespace(rows=rows, keys=keys, position=lambda rule: rows + spec.seqlen_k - spec.seqlen_q)
    q, k, v = (torch.from_numpy(call[n]).double() for n in "QKV")
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * spec.scale
    judged = torch.where(reference(use, block), scores, -torch.inf) if kind == "masks" else reference(use, block, scores)
    return torch.softmax(judged, -1).matmul(v).numpy()


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        (MaskRule("a b", "", "kv <= q"), "masks.a b: expected a name of letters, digits and _, found 'a b'"),
        (MaskRule("mine", "", "kv <= "), "masks.mine.visible: expected "),
        (MaskRule("mine", "", "kv <= p + x"), "masks.mine.visible: p, x means nothing here; known are "),
        (MaskRule("mine", "", "kv <= q", key_extent="n"), "masks.mine.key_extent: n means nothing here; known are "),
        (MaskRule("mine", "", "h[kv] > 0"), "masks.mine.visible: h is no captured tensor of this rule"),
        (
            MaskRule("mine", "", "kv <= q", captured=(Captured("Slopes", "f32", "", ("Heads",)),)),
            "masks.mine: 'Slopes' cannot name a scalar or tensor of this rule",
        ),
        (
            MaskRule("mine", "", "kv <= q", scalars=(Scalar("acc", "i32", "", len),)),
            "masks.mine: 'acc' cannot name a scalar or tensor of this rule",
        ),
        (
            MaskRule("mine", "", "kv <= q", captured=(Captured("T", "f32", "", ("Pages",)),)),
            "masks.mine.captured.T: expected axes out of Batch, Heads, KvHeads, SeqK, SeqQ, b, found Pages",
        ),
        (
            ScoreRule("mine", "", "x", parameters=(Parameter("a", "int", "", 0, minimum=1),)),
            "scores.mine.a.default: expected a whole number of at least 1, found 0",
        ),
        (
            ScoreRule("mine", "", "x", parameters=(Parameter("a", "choice", ""),)),
            "scores.mine.a: expected choices for a parameter of kind choice",
        ),
    ],
)
def test_each_fault_has_its_sentence(rule: MaskRule | ScoreRule, problem: str) -> None:
    assert [p[: len(problem)] for p in rule_problems(rule)] == [problem]
