"""Programs that compute something else are told apart from right ones, with the first wrong line, before anything is compiled."""

import time

import pytest

from generator.authors.rules import RuleAuthor
from generator.masks import MASKS
from generator.scores import SCORES
from generator.spec import AttentionSpec, Rule
from generator.tl.fill import fill, hole_choices
from generator.tl.parser import parse_or_raise
from generator.tl.printer import print_program
from verifier.children import Limits
from verifier.review import review
from verifier.reviewer import review_apart

PARAMETERS = {"window": {"left": 15}, "sink_window": {"sink": 4, "left": 15}, "prefix": {"length": 30}, "softcap": {"cap": 3.0}}


def spec(masks=("causal",), scores=(), **fields):
    rules = [tuple(Rule.make(name, **PARAMETERS.get(name, {})) for name in names) for names in (masks, scores)]
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "head_dim_v": 32, "batch": 1, "seqlen_q": 256, "seqlen_k": 256}
    return AttentionSpec(**(sizes | fields), masks=rules[0], scores=rules[1])


def text_of(s):
    program = RuleAuthor().code(s, "cpu")
    return print_program(fill(program, next(iter(hole_choices(program)))))


RIGHT = [
    *(spec((m,)) for m in MASKS),
    spec(()),
    *(spec(("causal",), (name,)) for name in SCORES),
    spec(("causal", "document"), ("softcap", "alibi"), dtype="bf16"),
    spec(("causal",), dtype="fp16", head_dim=48, head_dim_v=16, softmax_scale=-0.3),
    spec((), phase="decode", seqlen_q=1),
]


@pytest.mark.parametrize("s", RIGHT, ids=str)
def test_right_programs_are_right(s):
    assert review(parse_or_raise(text_of(s)), s) is None


#: altered text -> what has to be said about it; each kind of mistake that models make.
WRONG = {
    "off by one": ("kv <= q", "kv < q", "key 0 is hidden for query 0 but has to be visible"),
    "the other way round": ("kv <= q", "kv >= q", "is visible for query 0 but has to be hidden"),
    "top-left for bottom-right": (" + SeqK - SeqQ", "", "but has to be visible"),
    "wrong tile of V": ("Copy V (BN, DV) in coordinate [L = j]", "Copy V (BN, DV) in coordinate [L = m]", "coordinates differ"),
    "first tile left out": ("0:ceildiv(SeqK, BN)", "1:ceildiv(SeqK, BN)", "no tile of K with it is ever copied"),
    "accumulator not rescaled": ("  Compute acc = acc * corr\n", "", "rescaled by the same factor"),
    "row sum not rescaled": ("row_sum * corr", "row_sum", "rescaled by the same factor"),
    "natural exponent": (" * 1.4426950408889634", "", "O[0, 0, 1, 0] is"),
    "log of the wrong base": ("log(row_sum)", "log2(row_sum)", "LSE["),
    "wrong key head": ("h // (Heads // KvHeads)", "h % KvHeads", "O[0, 1, 0, 0] is"),
    "masked with a finite number": ("S, -inf)", "S, -30000.0)", ""),
    "a name that nothing stands for": ("Argument scale f32", "Argument scale, slope f32", "slope"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_programs_are_found_and_named(name):
    before, after, said = WRONG[name]
    s = spec()
    text = text_of(s)
    assert before in text
    altered = text.replace(before, after)
    wrong = review(parse_or_raise(altered), s)
    assert wrong is not None and said in wrong.message and wrong.input_name
    if wrong.line:
        around = altered.splitlines()[wrong.line - 1]
        assert around.strip().startswith(("Compute", "Copy", "for")), around


def test_the_line_of_a_wrong_mask_is_the_mask():
    s = spec()
    text = text_of(s).replace("kv <= q", "kv < q")
    wrong = review(parse_or_raise(text), s)
    assert "kv < q" in text.splitlines()[wrong.line - 1]


def test_a_program_for_another_problem_is_wrong():
    assert review(parse_or_raise(text_of(spec(()))), spec(("causal",))) is not None
    assert review(parse_or_raise(text_of(spec(("causal",), ("alibi",)))), spec(("causal",))) is not None


def test_it_takes_about_a_second_at_full_head_dims():
    s = spec(head_dim=128, head_dim_v=128, num_heads=32, num_kv_heads=8)
    start = time.process_time()
    assert review(parse_or_raise(text_of(s)), s) is None
    assert time.process_time() - start < 10


def test_a_program_from_a_stranger_is_reviewed_in_a_child():
    s = spec()
    assert review_apart(text_of(s), s) is None
    assert "has to be visible" in review_apart(text_of(s).replace("kv <= q", "kv < q"), s).message


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("for j = 0:ceildiv(SeqK, BN) reversed", "for j = 0:100000000000000 reversed", "did not finish within 1.5 s"),
        ("Grid m = 0:ceildiv(SeqQ, BM)", "Grid m = 0:1000000000000", "grid: expected at most"),
    ],
)
def test_an_endless_program_costs_its_limit_and_no_more(before, after, said):
    s = spec()
    text = text_of(s)
    assert before in text and review_apart(text, s) is None, "the program that forks the children is up"
    start = time.monotonic()
    assert said in review_apart(text.replace(before, after), s, Limits(wall_s=1.5, memory_bytes=8 << 30)).message
    assert time.monotonic() - start < 15
