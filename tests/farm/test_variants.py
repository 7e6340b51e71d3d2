"""A user's own rules: the example works as it stands, and every way of getting one wrong is a sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from farm.plan_file import PlanError, load_plan
from farm.tl_run import _attention
from farm.variants import VariantsError, calls_to_load, load_variants
from generator.authors.rules import RuleAuthor
from generator.binding import bind
from generator.spec import AttentionSpec, Rule
from generator.tl.fill import fill, hole_choices
from generator.tl.printer import print_program
from verifier.reviewer import review_apart

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/variants/dilated.py"


def test_the_example_plan_names_the_rule_of_its_own_file() -> None:
    spec = next(load_plan(ROOT / "examples/plans/own_variant.yaml").specs())
    assert str(spec.masks[0]) == "dilated(align=bottom_right, reach=256, step=2)"


def test_the_two_definitions_of_the_example_agree() -> None:
    load_variants(EXAMPLE)
    spec = AttentionSpec(2, 1, 16, 16, 1, 40, 70, masks=(Rule.make("dilated", reach=20, step=3, align="bottom_right"),))
    code = RuleAuthor().code(spec, "cpu")
    assert _attention(fill(code, next(hole_choices(code))), spec, np.random.default_rng(0))["agrees"]


def test_a_model_s_program_for_a_rule_of_one_s_own_is_reviewed_by_a_child_that_knows_the_rule() -> None:
    load_variants(EXAMPLE)
    spec = AttentionSpec(2, 1, 16, 16, 1, 40, 70, masks=(Rule.make("dilated", reach=20, step=3, align="bottom_right"),))
    text = print_program(RuleAuthor().code(spec, "cpu"))
    assert review_apart(text, spec, first=calls_to_load()) is None
    assert "has to be hidden" in str(review_apart(text.replace("% Step == 0", "% Step >= 0"), spec, first=calls_to_load()))
    assert "dilated" in str(review_apart(text, spec))  # without it the program would be blamed for the rule's name


GOOD = """
from generator.masks import MaskRule
MASKS = {"mine": MaskRule("mine", "every second key", "kv % 2 == 0")}
REFERENCES = {"mine": lambda rule, block: block.keys % 2 == 0}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("REFERENCES = ", "OTHER = ", "mine: REFERENCES has no dense definition of it"),
        ('"mine"', '"causal"', "causal: a rule of this name is there already"),
        ("MASKS = ", "MASKES = ", "expected a dict MASKS or SCORES with at least one rule"),
        ('{"mine": MaskRule(', '{"other": MaskRule(', r"MASKS\['other'\]: expected a MaskRule of that name"),
        ("lambda rule, block: block.keys % 2 == 0", "7", r"REFERENCES\['mine'\]: expected a function"),
        ("from generator.masks", "from generator.maskes", "rules.py:2: ModuleNotFoundError"),
        ("REFERENCES", "REFERENCES = 1 = ", "SyntaxError"),
        ("REFERENCES", "raise SystemExit\nREFERENCES", "SystemExit"),
    ],
)
def test_wrong_files_are_one_sentence(tmp_path: Path, old: str, new: str, message: str) -> None:
    file = tmp_path / "rules.py"
    file.write_text(GOOD.replace(old, new))
    with pytest.raises(VariantsError, match=message):
        load_variants(file)
    plan = tmp_path / "plan.yaml"
    plan.write_text("variants: rules.py\nmodels: [{name: a, num_heads: 1, head_dim: 8, seqlens: [8]}]")
    with pytest.raises(PlanError, match=message) as caught:
        load_plan(plan)
    assert len(str(caught.value).splitlines()) == 1


def test_a_loop_of_links_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "rules.py").symlink_to("rules.py")
    with pytest.raises(VariantsError, match="rules.py: cannot be read: too many levels of symbolic links"):
        load_variants(tmp_path / "rules.py")


def test_a_file_that_changed_under_a_process_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rules.py"
    file.write_text(GOOD.replace("mine", "changing"))
    assert load_variants(file).masks == ("changing",) and load_variants(file).masks == ("changing",)
    file.write_text(GOOD.replace("mine", "changing").replace("% 2", "% 3"))
    with pytest.raises(VariantsError, match="changed since"):
        load_variants(file)


def test_own_rules_go_all_the_way_to_a_binding(tmp_path: Path) -> None:
    file = tmp_path / "rules.py"
    file.write_text(GOOD.replace("mine", "second_keys"))
    load_variants(file)
    (tmp_path / "plan.yaml").write_text(
        "variants: rules.py\nmodels: [{name: a, num_heads: 1, head_dim: 8, masks: [second_keys], seqlens: [8]}]"
    )
    spec = next(load_plan(tmp_path / "plan.yaml").specs())
    code = RuleAuthor().code(spec, "cpu")
    assert bind(fill(code, next(hole_choices(code))), spec).tensors[0].role == "q"
