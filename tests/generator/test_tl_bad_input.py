"""Bad input: every error at once, readable, in a moment, whatever the text is."""

import json
import random
import time
from pathlib import Path

import pytest

from generator.tl.checker import parse_and_check
from generator.tl.diagnostics import Diagnostic, TLError, render, to_plain
from generator.tl.ir import Span
from generator.tl.parser import parse, parse_or_raise

PROGRAMS = Path(__file__).parents[1] / "programs"
ATTENTION = (PROGRAMS / "valid" / "attention.tl").read_text()
GOLDEN = Path(__file__).parents[1] / "golden" / "tl_diagnostics.txt"
LOOPS = "".join(f"for k{i} = 0:2\n" for i in range(5)), "end\n" * 5
MANY = "{" + ", ".join(map(str, range(1, 900))) + "}"

BAD = {
    "a line of 10 MB": "a" * 10_000_000,
    "an expression of 10 MB": "Compute S = " + "a + " * 2_500_000,
    "10 MB that are not text": b"\xff" * 10_000_000,
    "a line of 900 kB": "x " * 450_000,
    "half a million lines": "a\n" * 499_000,
    "misspelled keywords": "Copmute S = x\n" * 70_000,
    "rubbish": random.Random(1).randbytes(900_000),
    "null bytes": "\0\n" * 100_000,
    "parentheses": "Compute S = " + "(" * 4000,
    "closed parentheses": "Compute S = " + "(" * 2000 + "x" + ")" * 2000,
    "minus signs": "Compute S = " + "-" * 4900 + "x",
    "calls": "Compute S = " + "exp(" * 1200,
    "a long sum": "Compute S = " + "a+" * 2000 + "a",
    "blocks": "for i = 0:2\n" * 5000,
    "ends": "end\n" * 100_000,
    "a thousand errors": ATTENTION + "".join(f"Compute acc = acc + missing{i}\n" for i in range(1000)),
    "a thousand syntax errors": ATTENTION + "Compute acc = acc +\n" * 1000,
    "lone surrogate": "\ud800\n",
    "a Copy of everything": "Copy " * 190_000,
}
CODES_OF = {
    "a line of 10 MB": "text-too-long",
    "a line of 900 kB": "line-too-long",
    "misspelled keywords": "unknown-statement",
    "rubbish": "not-text",
    "null bytes": "bad-character",
    "parentheses": "too-deep",
    "a thousand errors": "unknown-name",
    "a thousand syntax errors": "syntax",
}
SLOW_BUT_SOUND = {
    "many statements": ATTENTION.replace("  Compute acc = acc * corr\n", "  Compute acc = acc * corr\n" * 1900),
    "many names": ATTENTION + "".join(f"Let n{i} = m + {i}\n" for i in range(1900)),
    "nested loops": ATTENTION.replace(
        "Copy acc into O", LOOPS[0] + "Compute acc = acc + acc\n" * 1500 + LOOPS[1] + "Copy acc into O"
    ),
    "a million choices": ATTENTION.replace("BM = 128", f"BM in {MANY}"),
}


@pytest.mark.parametrize("name", [*BAD, *SLOW_BUT_SOUND])
def test_every_text_comes_back_in_a_moment(name):
    text = BAD.get(name) or SLOW_BUT_SOUND[name]
    start = time.process_time()
    parsed = parse_and_check(text)
    shown = render(parsed.diagnostics, text if isinstance(text, str) else "", "bad.tl")
    assert time.process_time() - start < 2.0
    assert len(shown) < 20_000
    assert all(len(line) < 500 for line in shown.splitlines())
    if name in BAD:
        assert parsed.program is None
        assert f"error[{CODES_OF.get(name, '')}" in shown


@pytest.mark.parametrize(
    "text",
    [
        ATTENTION.replace("\n", "\r\n"),
        ATTENTION.replace("\n", "\r"),
        "\ufeff" + ATTENTION,
        ATTENTION.encode("utf-8-sig"),
        ATTENTION.encode(),
        ATTENTION.replace("\n", "   \n\t\n"),
        ATTENTION.replace("  ", "\t"),
        ATTENTION.rstrip("\n"),
    ],
)
def test_harmless_encodings_are_the_same_program(text):
    assert parse_or_raise(text) == parse_or_raise(ATTENTION)


@pytest.mark.parametrize(
    ("text", "code", "line", "column"),
    [
        (ATTENTION.encode("utf-16"), "not-text", 1, 1),
        (b"Kernel a\nLet x = \x80\n", "not-text", 2, 9),
        ("", "empty", 1, 1),
        ("# nothing but a comment\n", "empty", 1, 1),
        ("Argument N i32\nLet x\u00a0= N", "bad-character", 2, 6),
        ("Argument N i32\nLet \u0445 = N", "bad-character", 2, 5),
        ("Argument N i32\nLet x = N \u2212 1", "bad-character", 2, 11),
    ],
)
def test_where_text_stops_being_tl(text, code, line, column):
    (found,) = parse(text).diagnostics
    assert (found.code, found.span.line, found.span.column) == (code, line, column)


def test_reading_stops_somewhere():
    assert parse("nonsense\n" * 5000).diagnostics[-1].code == "too-many"
    assert parse(ATTENTION + "Compute acc = acc + 1.0\n" * 5000).diagnostics[-1].code == "too-many"


def test_errors_of_different_lines_are_reported_together():
    parsed = parse_and_check("\n".join(f"Compute x{i} = {'1 +' if i % 2 else 'y'}" for i in range(10)), "code")
    assert [d.span.line for d in parsed.diagnostics if d.code == "syntax"] == [2, 4, 6, 8, 10]
    assert {d.span.line for d in parsed.diagnostics if d.code == "unallocated"} == {1, 3, 5, 7, 9}


def test_golden_rendering(update_golden):
    parts = []
    for path in sorted((PROGRAMS / "invalid").glob("*.tl")):
        text = path.read_text()
        parts.append(f"== {path.stem}\n{render(parse_and_check(text).diagnostics, text, path.name)}\n")
    found = "\n".join(parts)
    if update_golden:
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(found)
    assert found == GOLDEN.read_text(), "run pytest with --update-golden if the new text is right"


def test_a_thousand_findings_stay_readable():
    diagnostics = [Diagnostic("shape", "error", f"number {i}", Span(i + 1, 1, 2)) for i in range(1000)]
    shown = render(diagnostics, "a\n" * 1000, "f.tl", limit=3)
    assert shown.splitlines()[0] == "f.tl:1:1: error[shape]: number 0"
    assert shown.splitlines()[-2:] == ["... and 997 more", "1000 errors"]
    assert len(shown.splitlines()) == 3 * 3 + 2


def test_errors_are_shown_before_warnings_when_there_is_not_room_for_all():
    diagnostics = [Diagnostic("unused", "warning", "w", Span(1, 1, 2))] * 5 + [Diagnostic("shape", "error", "e", Span(9, 1, 2))]
    assert "error[shape]" in render(diagnostics, limit=2)


def test_long_lines_are_clipped_around_the_caret():
    line = "Compute S = " + " + ".join(["abcdefgh"] * 40) + " ? x"
    shown = render([Diagnostic("syntax", "error", "m", Span(1, line.index("?") + 1, line.index("?") + 2))], line)
    source, caret = shown.splitlines()[1:3]
    assert len(source) < 140 and source.startswith("    1 | ...")
    assert source[caret.index("^")] == "?"


def test_control_characters_do_not_reach_the_terminal():
    shown = render(parse("Argument N i32\nLet a = \x1b[31m").diagnostics, "Argument N i32\nLet a = \x1b[31m")
    assert "\x1b" not in shown and "U+001B" in shown


def test_plain_values_for_scripts():
    (found,) = to_plain(parse("Argument N i33").diagnostics)
    assert json.loads(json.dumps(found)) == found
    assert found == {
        "code": "syntax",
        "severity": "error",
        "message": "expected a dtype (f32, f16, bf16, i32), found 'i33'",
        "line": 1,
        "column": 12,
        "end_column": 15,
        "hint": "did you mean i32?",
        "expected": "f32, f16, bf16, i32",
        "found": "i33",
    }


def test_exceptions_carry_diagnostics():
    with pytest.raises(TLError) as caught:
        parse_or_raise("Argument N i33\nArgument M i34", filename="k.tl")
    assert [d.span.line for d in caught.value.diagnostics] == [1, 2]
    assert str(caught.value).startswith("k.tl:1:12: error[syntax]:")
