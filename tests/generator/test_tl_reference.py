"""docs/language.md says what the tables of the code say. `--update-golden` writes the tables anew."""

import re
from pathlib import Path

import pytest

from generator.tl.checker import parse_and_check
from generator.tl.diagnostics import CODES
from generator.tl.fill import fill
from generator.tl.grammar import ARITHMETIC, DTYPE_WORDS, FORMS, LEVEL_WORDS, RESERVED
from generator.tl.ir import DTYPES, FUNCTIONS, HINTS, LEVELS, OPTIONS
from generator.tl.lexer import MAX_LINE, MAX_TEXT
from generator.tl.parser import MAX_BLOCKS, MAX_STATEMENTS, parse
from generator.tl.printer import print_program
from generator.tl.statements import KEYWORDS

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "language.md"


def table(head, rows):
    return "\n".join([f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)])


TABLES = {
    "statements": table(["statement", "form"], [(f"`{k}`", f"`{v}`".replace("|", "\\|")) for k, v in FORMS.items()]),
    "arithmetic": table(["word", "function"], [(f"`{k.capitalize()}`", f"`{v}`") for k, v in ARITHMETIC.items()]),
    "options": table(
        ["option", "values, the default first"], [(f"`{k}`", ", ".join(f"`{x}`" for x in v)) for k, v in OPTIONS.items()]
    ),
    "hints": table(["hint", "says"], [(f"`{k}`", v) for k, v in HINTS.items()]),
    "codes": table(["code", "says"], [(f"`{k}`", v) for k, v in CODES.items()]),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_those_of_the_code(name, update_golden):
    text = REFERENCE.read_text()
    pattern = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.S)
    current = pattern.sub(lambda m: m[1] + TABLES[name] + "\n" + m[2], text, count=1)
    if update_golden:
        REFERENCE.write_text(current)
    assert name in text and text == current or update_golden, f"the table {name} is old: run pytest with --update-golden"


def test_every_function_stands_in_the_reference_with_its_arguments():
    section = re.search(r"<!-- table: functions -->(.*?)<!-- end -->", REFERENCE.read_text(), re.S)[1]
    documented = {}
    for text in re.findall(r"`([^`]*)`", "".join(row.split("|")[1] for row in section.splitlines() if row.startswith("|"))):
        program = parse(f"Compute t = {text}", "sketch").program
        operation = program.body[0].value
        documented["neg" if text == "-a" else operation.fn] = len(operation.args)
    assert documented == FUNCTIONS


def test_every_keyword_has_a_form():
    assert {form for form, _ in KEYWORDS.values()} | {"Compute GEMM", "Compute OPERATOR"} == set(FORMS)
    assert all(form.lower() == keyword for keyword, (form, _) in KEYWORDS.items())
    assert set(LEVEL_WORDS.values()) == set(LEVELS) and set(DTYPE_WORDS.values()) == set(DTYPES)
    assert {f for f in FUNCTIONS if f.isidentifier()} <= RESERVED


def test_limits_are_those_of_the_code():
    text = " ".join(REFERENCE.read_text().split())
    assert f"{MAX_TEXT:,} characters, a line {MAX_LINE:,}" in text
    assert f"a program {MAX_STATEMENTS:,} statements and {MAX_BLOCKS} blocks" in text


def test_the_first_program_of_the_reference_is_sound_and_canonical_but_for_comments():
    text = "\n".join(line[4:] for line in REFERENCE.read_text().split("## 1.")[0].splitlines() if line.startswith("    "))
    parsed = parse_and_check(text)
    assert parsed.diagnostics == ()
    assert print_program(parsed.program) == re.sub(r" *#.*", "", text) + "\n"
    assert parse_and_check(print_program(fill(parsed.program, {"BM": 64})), filled=True).diagnostics == ()


def test_loose_spellings_of_the_reference_parse():
    section = REFERENCE.read_text().split("## 3.")[1].split("Words for arithmetic")[0]
    spellings = [row.split("|")[1].strip().strip("`") for row in section.splitlines() if row.startswith(("| `C", "| `Al"))]
    assert len(spellings) >= 5
    for text in spellings:
        assert parse(text).program is not None


def test_every_code_is_used():
    source = "".join(path.read_text() for path in (ROOT / "generator" / "tl").rglob("*.py") if path.name != "diagnostics.py")
    assert [code for code in CODES if f'"{code}"' not in source] == []
