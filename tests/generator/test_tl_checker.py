"""Law 5: what the checker finds, where, and that it finds everything at once. And law 4's half of it: no statement is idle."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from generator.tl.checker import Limits, check, parse_and_check
from generator.tl.diagnostics import TLError, render
from generator.tl.expand import expand
from generator.tl.fill import fill, hole_choices
from generator.tl.ir import For, Hint, If, Program
from generator.tl.parser import parse_or_raise
from generator.tl.printer import print_program

PROGRAMS = Path(__file__).parents[1] / "programs"
VALID = sorted((PROGRAMS / "valid").glob("*.tl"))
INVALID = sorted((PROGRAMS / "invalid").glob("*.tl"))
RESPONSES = sorted((Path(__file__).parents[1] / "responses").glob("*.answer.md"))


@pytest.mark.parametrize("path", VALID, ids=lambda p: p.stem)
def test_valid_programs_have_no_findings(path):
    text = path.read_text()
    assert render(parse_and_check(text).diagnostics, text, path.name) == ""


@pytest.mark.parametrize("path", VALID, ids=lambda p: p.stem)
def test_core_code_of_valid_programs_is_valid(path):
    program = parse_or_raise(path.read_text())
    if program.stage == "code":
        core = expand(fill(program, next(hole_choices(program))))
        assert render(check(core), print_program(core)) == ""


@pytest.mark.parametrize("path", RESPONSES, ids=lambda p: p.stem)
def test_recorded_answers_check_as_they_stand(path):
    sketch, code = (re.search(rf"```{kind}\n(.*?)```", path.read_text(), re.S).group(1) for kind in ("sketch", "tl"))
    assert parse_and_check(sketch).program is not None
    assert render(parse_and_check(code).diagnostics, code) == ""


@pytest.mark.parametrize("path", INVALID, ids=lambda p: p.stem)
def test_invalid_programs_say_what_and_where(path):
    text = path.read_text()
    expected = {(code, int(line)) for code, line in re.findall(r"^# expect (\S+) (\d+)$", text, re.M)}
    found = parse_and_check(text).diagnostics
    assert expected
    assert {(d.code, d.span.line) for d in found} == expected, render(found, text, path.name)
    assert all(d.message and d.span.column >= 1 and d.span.end_column > d.span.column for d in found)
    assert all(d.hint or (d.expected and d.found) or d.code == "division-by-zero" for d in found), render(found, text)


def without_each_statement(program: Program):
    """The program with one statement left out, for every statement; loops and ifs go with all that they hold, and without it."""

    def bodies(body):
        for i, s in enumerate(body):
            rest = (body[:i], body[i + 1 :])
            yield s, rest[0] + rest[1]
            if isinstance(s, For):
                for gone, inner in bodies(s.body):
                    yield gone, (*rest[0], replace(s, body=inner), *rest[1])
            elif isinstance(s, If):
                for gone, inner in bodies(s.then):
                    yield gone, (*rest[0], replace(s, then=inner), *rest[1])

    for gone, body in bodies(program.body):
        yield gone, replace(program, body=body)


@pytest.mark.parametrize("path", VALID, ids=lambda p: p.stem)
def test_every_statement_counts(path):
    program = parse_or_raise(path.read_text())
    if program.stage != "code" or program.holes:
        pytest.skip("only filled code has core code")
    core = expand(program)
    for gone, altered in without_each_statement(program):
        if isinstance(gone, Hint):
            continue
        refused = any(d.severity == "error" for d in check(altered))
        assert refused or expand(altered) != core, f"nothing changes without line {gone.span.line}"


def test_deletions_of_an_attention_program_are_mostly_refused():
    program = parse_or_raise((PROGRAMS / "valid" / "attention.tl").read_text())
    refused = [any(d.severity == "error" for d in check(altered)) for _, altered in without_each_statement(program)]
    assert sum(refused) > len(refused) / 2


def test_shared_memory_and_registers_over_the_limit():
    program = parse_or_raise((PROGRAMS / "valid" / "attention.tl").read_text())
    # Q, K and V of 128 x 128 bf16; acc and S of 128 x 128 f32 together, and rows
    assert check(program, Limits("a card", 3 * 128 * 128 * 2, 2 * 128 * 128 * 4 + 16 * 128 * 4)) == ()
    found = check(program, Limits("a card", 3 * 128 * 128 * 2 - 1, 2 * 128 * 128 * 4))
    assert {d.code for d in found} == {"shared-memory", "registers"}
    assert {d.expected for d in found} == {str(3 * 128 * 128 * 2 - 1), str(2 * 128 * 128 * 4)}


def test_holes_are_errors_where_filled_code_is_due():
    text = (PROGRAMS / "valid" / "gemm.tl").read_text().replace("BK = 64", "BK in {32, 64}")
    program = parse_or_raise(text)
    assert check(program) == ()
    assert [d.code for d in check(program, filled=True)] == ["hole"]
    with pytest.raises(TLError, match="BK left to choose"):
        expand(program)


def test_every_choice_of_a_hole_is_checked():
    text = (PROGRAMS / "valid" / "softmax_macro.tl").read_text().replace("DV = 128", "DV in {64, 128}")
    assert check(parse_or_raise(text)) == ()
    wrong = text.replace("Allocate acc in register (BM, DV)", "Allocate acc in register (BM, 64)")
    found = check(parse_or_raise(wrong))
    assert {d.code for d in found if "with DV = 128" in d.message} >= {"gemm-shape"}
    assert not any("with DV = 64" in d.message for d in found)
    for_all = check(parse_or_raise(text.replace(" = -inf", "")))  # no choice mends this, so none is named
    assert [(d.code, d.message) for d in for_all] == [("no-value", "row_max has no value yet")]


CODE = """Argument N i32
Grid m = 0:ceildiv(N, 64)
Allocate X in global (N, 64) f32
Allocate Y in global (N, 64) f32
Allocate t in register (64, 64) f32 = 0
Copy X (64, 64) in coordinate [L = m] from global to shared
{}
Copy t into Y (64, 64) in coordinate [L = m] from register to global
"""


def codes(lines: str) -> list[str]:
    return [d.code for d in parse_and_check(CODE.format(lines)).diagnostics]


def test_a_let_ends_with_its_block():
    loop = "for j = 0:2\n  Let x = j + 1\n  Compute t = t + X * x\nend\n"
    assert codes(loop + loop) == []
    assert codes(loop + "Compute t = t + x") == ["use-before-definition"]
    assert codes("Let x = 1\n" + loop) == ["shadowing"]


def test_chained_lets_that_explode_are_refused_quickly():
    lets = "\n".join(f"Let x{i + 1} = x{i} * x{i}" for i in range(60))
    assert "too-large" in codes(f"Let x0 = m + 1\n{lets}\nCompute t = x60 * 1.0")
    many = "\n".join(f"Compute t = t + {' + '.join(['X'] * 50)}" for _ in range(1500))
    assert codes(many) == ["too-large"]


def test_operands_in_place_follow_the_paths():
    reshape = "Reshape t from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new) and get t f32\n"
    product = "Compute GEMM t, X and get u\n"
    tail = "Compute t = u"
    allocated = "Allocate u in register (64, 64) f32\n"
    assert codes(allocated + reshape + product + tail) == []
    assert codes(allocated + reshape + product + "Compute t = t + u") == ["reshape"]
    assert codes(allocated + f"if N > 5\n{reshape}end\n" + product + tail) == ["reshape"]
    looped = f"for j = 0:3\n  Compute u = t\n  {reshape}end\nCompute t = u"
    assert "reshape" in codes(allocated + looped)


def test_positive_arguments_prove_that_a_loop_runs():
    allocate, loop = "Allocate u in register (64, 64) f32\n", "for j = 0:ceildiv(N, 64)\n  Compute u = X\nend\nCompute t = u"
    assert codes(allocate + loop) == ["no-value"]
    text = CODE.format(allocate + loop).replace("Argument N i32", "Argument N i32 positive")
    assert parse_and_check(text).diagnostics == ()


def test_a_name_is_reported_once():
    assert codes("Compute t = t + nothing\nCompute t = t * nothing") == ["unknown-name"]


def test_programs_without_text_are_checked_too():
    program = parse_or_raise(CODE.format("Compute t = max(t, X)"))
    assert check(program) == ()
    broken = replace(program, body=program.body[:-1])
    assert {d.code for d in check(broken)} == {"no-output", "output-not-written"}
    assert "line" in str(check(broken)[0]) and parse_or_raise(print_program(program)) == program


def test_settings_are_stated_once_and_known():
    assert codes("Option functions = fast\nCompute t = t + X") == []
    assert codes("Option functions = fast\nOption functions = accurate\nCompute t = t + X") == ["duplicate-name"]
    assert codes("Option functions = quick\nCompute t = t + X") == ["unknown-name"]
    assert codes("Hint warps = 4\nHint warps = 8\nCompute t = t + X") == ["duplicate-name"]
    assert codes("Constant BK in {32, 32}\nCompute t = t + X * BK") == ["duplicate-name"]


def test_what_nobody_uses_is_said():
    assert codes("Allocate u in register (64) f32\nCompute t = t + X") == ["unused"]
    assert codes("Constant BK = 3\nCompute t = t + X") == ["unused"]


def test_a_sketch_declares_nothing():
    found = parse_and_check("Argument N i32\nCopy Q (64, 64) from global to shared\nCompute S = max(a)", "sketch").diagnostics
    assert [(d.code, d.severity) for d in found] == [("stage", "error"), ("stage", "error"), ("arity", "warning")]


def test_a_pool_of_whole_pages_has_no_ragged_end():
    text = (Path(__file__).parents[2] / "examples" / "tl" / "paged.tl").read_text()
    assert parse_and_check(text).diagnostics == ()
    found = parse_and_check(text.replace("NumPages * BN", "NumPages")).diagnostics
    assert {d.code for d in found} == {"ragged"}
