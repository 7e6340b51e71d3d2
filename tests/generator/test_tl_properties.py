"""Law 1 over random programs, and that no text whatever gets more than diagnostics out of the parser and the checker."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tl_strategies import EXPRESSIONS, codes, sketches

from generator.tl.checker import check, parse_and_check
from generator.tl.diagnostics import TLError, render
from generator.tl.expand import expand
from generator.tl.expressions import expression
from generator.tl.fold import substitute
from generator.tl.parser import parse
from generator.tl.printer import print_expression, print_program

QUICK = settings(max_examples=150, suppress_health_check=list(HealthCheck))


@QUICK
@given(EXPRESSIONS)
def test_expressions_round_trip(e):
    assert expression(print_expression(e)) == e


@QUICK
@given(st.one_of(codes(), sketches()))
def test_programs_round_trip(program):
    text = print_program(program)
    parsed = parse(text)
    assert parsed.program == program, render(parsed.diagnostics, text)
    assert print_program(parsed.program) == text


@QUICK
@given(codes())
def test_the_checker_never_raises_and_expansion_only_what_it_says(program):
    check(program)
    try:
        core = expand(program)
    except TLError:
        return
    assert expand(core) == core


@QUICK
@given(EXPRESSIONS)
def test_folding_twice_changes_nothing(e):
    folded = substitute(e, {})
    assert substitute(folded, {}) == folded


@QUICK
@given(st.text(max_size=300) | st.binary(max_size=300))
def test_any_text_gives_diagnostics_only(text):
    parsed = parse_and_check(text)
    assert parsed.program is not None or parsed.diagnostics
    render(parsed.diagnostics, text if isinstance(text, str) else text.decode("utf-8", "replace"))


VOCABULARY = """Kernel Argument Constant Let Grid Allocate Hint Copy Compute GEMM Reshape for if else end in global shared
register from to and get accumulate into with offset coordinate reversed positive S K 0 1.5 inf -inf ( ) [ ] { } , : = ^T <=
+ - * / // % not or max f32 # where"""
WORDS = st.sampled_from([*VOCABULARY.split(), "\n", "\n"])


@QUICK
@given(st.lists(WORDS, max_size=60).map(" ".join))
def test_words_in_any_order_give_diagnostics_only(text):
    parsed = parse_and_check(text)
    assert parsed.program is not None or parsed.diagnostics
    if parsed.program is not None:
        assert parse(print_program(parsed.program)).program == parsed.program
