"""Law 3: translators see the program and the target, nothing else. Programs that print the same translate the same."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from generator.authors.rules import RuleAuthor
from generator.spec import AttentionSpec, Rule
from generator.targets import CPU_TARGETS, TARGETS
from generator.tl.fill import fill, hole_choices
from generator.tl.parser import parse_or_raise
from generator.tl.printer import print_program
from generator.translate import translate
from generator.translate.records import Translated

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(p for p in (ROOT / "examples/tl").glob("*.tl") if p.name != "sketch.tl")
FORBIDDEN = (
    "generator.spec",
    "generator.authors",
    "generator.masks",
    "generator.scores",
    "generator.binding",
    "generator.variants",
)
TRIED = {"cpu": list(CPU_TARGETS.values())[-1], **{name: t for name, t in TARGETS.items() if t.family != "cpu"}}


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_no_translator_imports_specs_rules_or_authors() -> None:
    """But for translate/direct, which translates nothing: it reads device code that somebody else wrote, for one spec."""
    modules = sorted(m for m in (ROOT / "generator/translate").rglob("*.py") if m.parent.name != "direct")
    assert len(modules) > 20
    reaching = {
        str(m.relative_to(ROOT)): names for m in modules if (names := {n for n in imported(m) if n.startswith(FORBIDDEN)})
    }
    assert not reaching
    assert not any(n.startswith("generator.translate.direct") for m in modules for n in imported(m))


@pytest.mark.parametrize("target", TRIED)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_programs_that_print_the_same_translate_the_same(path: Path, target: str) -> None:
    """A text with comments and its own line breaks, and its canonical form: other spans, one source."""
    written = parse_or_raise(path.read_text())
    written = fill(written, next(iter(hole_choices(written))))
    read_back = parse_or_raise("\n\n# another author\n" + print_program(written))
    first, second = (translate(program, TRIED[target]) for program in (written, read_back))
    if isinstance(first, Translated):
        assert first == second
    else:  # refused, at another line
        assert not isinstance(second, Translated) and first.reason == second.reason


def test_who_wrote_a_program_makes_no_difference() -> None:
    """Of two specs with one text come one source; of a hand-written copy too."""
    short, long = (AttentionSpec(4, 2, 64, 64, 1, n, n, masks=(Rule.make("causal"),)) for n in (64, 4096))
    texts = {print_program(fill(code, next(iter(hole_choices(code))))) for code in map(RuleAuthor().code, (short, long))}
    assert len(texts) == 1
    by_hand = translate(parse_or_raise(texts.pop()), next(iter(CPU_TARGETS.values())))
    code = RuleAuthor().code(long)
    by_rules = translate(fill(code, next(iter(hole_choices(code)))), next(iter(CPU_TARGETS.values())))
    assert isinstance(by_hand, Translated) and by_hand.source == by_rules.source
