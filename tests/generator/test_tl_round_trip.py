"""Law 1: parse(print(p)) == p, for sketches and code."""

import re
from pathlib import Path

import pytest

from generator.tl.expand import expand
from generator.tl.parser import parse, parse_or_raise
from generator.tl.printer import print_program, program_hash

TESTS = Path(__file__).parents[1]
PROGRAMS = sorted((TESTS / "programs" / "valid").glob("*.tl"))
ANSWERS = [
    pytest.param(kind, text, id=f"{path.name.split('.')[0]}-{kind}")
    for path in sorted((TESTS / "responses").glob("*.answer.md"))
    for kind, text in re.findall(r"```(sketch|tl)\n(.*?)```", path.read_text(), re.S)
]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: p.stem)
def test_programs_round_trip(path):
    program = parse_or_raise(path.read_text())
    again = parse_or_raise(print_program(program))
    assert again == program
    assert program_hash(again) == program_hash(program)
    if program.stage == "code" and not program.holes:
        core = expand(program)
        assert parse_or_raise(print_program(core)) == core
        assert expand(core) == core


@pytest.mark.parametrize(("kind", "text"), ANSWERS)
def test_recorded_answers_parse_as_they_stand(kind, text):
    parsed = parse(text)
    assert parsed.program is not None
    assert parsed.program.stage == {"sketch": "sketch", "tl": "code"}[kind]
    assert parse(print_program(parsed.program)).program == parsed.program
    if kind == "tl":
        assert parsed.diagnostics == ()
