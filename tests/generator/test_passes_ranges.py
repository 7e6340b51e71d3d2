"""Tile ranges against enumeration: nothing visible is left out, and what is called fully visible is."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from passes_samples import BM, BN, CAUSAL, COLS, IN_KEYS, KV, SEQ_K, SEQ_Q, J, M, Q, attention, evaluate, op, var

from generator.tl.ir import ROWS, Allocate, Expr, Index, Num
from generator.translate.passes import LoopPlan, analyze

WINDOW, PREFIX = var("Window"), var("Prefix")
IN_WINDOW = op(">", KV, op("-", Q, WINDOW))
TESTS: dict[str, Expr] = {
    "keys": IN_KEYS,
    "causal": op("and", IN_KEYS, CAUSAL),
    "window": op("and", op("and", IN_KEYS, CAUSAL), IN_WINDOW),
    "prefix by max": op("and", IN_KEYS, op("<", KV, op("max", PREFIX, op("+", Q, 1)))),
    "prefix by or": op("and", IN_KEYS, op("or", op("<", KV, PREFIX), CAUSAL)),
    "sink and window": op("and", IN_KEYS, op("and", CAUSAL, op("or", op("<", KV, PREFIX), IN_WINDOW))),
    "two sides in one": op("and", IN_KEYS, op("==", op("//", KV, 6), op("//", Q, 6))),
    "distance": op("and", IN_KEYS, op("<", op("-", op("max", Q, 3), KV), op("min", WINDOW, 9))),
    "negated": op("and", IN_KEYS, op("not", op("or", op(">", KV, Q), op("<=", KV, op("-", Q, WINDOW))))),
}


def intervals(
    plan: LoopPlan, env: dict[str, int], tables: dict[str, list[int]], first: int, last: int
) -> tuple[list[int], list[int]]:
    """(iterations run, iterations called fully visible) for rows first..last."""
    env = {**env, "@row_first": first, "@row_last": last}

    def at(e: Expr) -> int:
        return evaluate(e, env, tables)

    r = plan.range
    run = list(range(at(r.lo), at(r.hi)))
    if r.gap is not None:
        run = [j for j in run if not at(r.gap[0]) <= j < at(r.gap[1])]
    return run, [j for j in run if at(r.full_lo) <= j < at(r.full_hi)]


def check_ranges(
    plan: LoopPlan, test: Expr, env: dict[str, int], tables: dict[str, list[int]], first: int = 0, last: int = BM - 1
) -> int:
    """Compares with every element of every tile; returns how many tiles were left out."""
    every = range(evaluate(plan.loop.lo, env), evaluate(plan.loop.hi, env))
    run, full = intervals(plan, env, tables, first, last)
    for j in every:
        elements = [{**env, "j": j, "rows": r, "cols": c} for r, c in product(range(first, last + 1), range(BN))]
        assert j in run or not any(evaluate(test, e, tables) for e in elements), (env, j, "sees something but is not run")
        if j in full:
            assert all(evaluate(t, e, tables) for e in elements for t in plan.split), (
                env,
                j,
                "is called fully visible but is not",
            )
    return len(every) - len(run)


@pytest.mark.parametrize("name", TESTS)
@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 12), st.integers(0, 20), st.integers(0, 3))
@settings(max_examples=60)
def test_ranges_agree_with_enumeration(name: str, seqlen_q: int, seqlen_k: int, window: int, prefix: int, m: int) -> None:
    (plan,) = analyze(attention(TESTS[name])).loops
    assert plan.covered, plan.notes
    check_ranges(plan, TESTS[name], {"SeqQ": seqlen_q, "SeqK": seqlen_k, "Window": window, "Prefix": prefix, "m": m}, {})


@pytest.mark.parametrize(
    "name, least", [("causal", 7), ("window", 13), ("sink and window", 11), ("negated", 13), ("two sides in one", 11)]
)
def test_most_masked_tiles_are_left_out(name: str, least: int) -> None:
    (plan,) = analyze(attention(TESTS[name])).loops
    env = {"SeqQ": 64, "SeqK": 64, "Window": 3, "Prefix": 2, "m": 3}
    assert check_ranges(plan, TESTS[name], env, {}) >= least, analyze(attention(TESTS[name])).to_plain()


def test_edge_tiles_above_are_bounded() -> None:
    (plan,) = analyze(attention(TESTS["causal"])).loops
    for seqlen_q, seqlen_k, m in product(range(1, 20), range(1, 20), range(3)):
        run, full = intervals(plan, {"SeqQ": seqlen_q, "SeqK": seqlen_k, "m": m}, {}, 0, BM - 1)
        above = [j for j in run if not full or j > full[-1]] if full else []
        assert len(above) <= (plan.range.edge_above or 0)


integers = st.deferred(lambda: leaves | binary)
leaves = st.sampled_from([ROWS, COLS, KV, Q, WINDOW, SEQ_K, op("*", M, 3)]) | st.integers(-5, 9).map(Num)
binary = st.builds(lambda fn, a, b: op(fn, a, b), st.sampled_from(["+", "-", "max", "min"]), leaves, leaves)
comparisons = st.builds(lambda fn, a, b: op(fn, a, b), st.sampled_from(["<", "<=", ">", ">=", "=="]), binary, binary)
tests = st.deferred(
    lambda: comparisons | st.builds(lambda fn, a, b: op(fn, a, b), st.sampled_from(["and", "or"]), comparisons, comparisons)
)


@given(tests, st.integers(1, 20), st.integers(1, 20), st.integers(0, 6), st.integers(0, 2))
@settings(max_examples=300)
def test_ranges_of_random_tests(test: Expr, seqlen_q: int, seqlen_k: int, window: int, m: int) -> None:
    (plan,) = analyze(attention(test)).loops
    check_ranges(plan, test, {"SeqQ": seqlen_q, "SeqK": seqlen_k, "Window": window, "m": m}, {}, first=2, last=5)


DOCUMENTS = tuple(Allocate(n, "global", (SEQ_Q,), "i32") for n in ("DocStart", "DocEnd"))
Q_INDEX = op("+", op("*", M, BM), ROWS)
DOCUMENT = op("and", op("<=", Index("DocStart", (Q_INDEX,)), KV), op("<", KV, Index("DocEnd", (Q_INDEX,))))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 3))
@settings(max_examples=60)
def test_row_captured_bounds(lengths: list[int], m: int) -> None:
    """Documents: the block's smallest start and largest end bound its tiles."""
    total = sum(lengths)
    ends = [sum(lengths[: i + 1]) for i, n in enumerate(lengths) for _ in range(n)]
    starts = [e - n for e, n in zip(ends, [n for n in lengths for _ in range(n)], strict=True)]
    analysis = analyze(attention(op("and", IN_KEYS, DOCUMENT), extra=DOCUMENTS))
    (plan,) = analysis.loops
    assert plan.covered and len(plan.split) == 3
    env = {"SeqQ": total, "SeqK": total, "m": min(m, (total - 1) // BM)}
    live = evaluate(analysis.live_rows, env) if analysis.live_rows is not None else BM
    tables = {"DocStart": starts, "DocEnd": ends}
    check_ranges(plan, op("and", IN_KEYS, DOCUMENT), env, tables, last=live - 1)
    run, _ = intervals(plan, env, tables, 0, live - 1)
    rows = range(env["m"] * BM, min(total, env["m"] * BM + BM))
    assert run and run[0] == min(starts[r] for r in rows) // BN and run[-1] == (max(ends[r] for r in rows) - 1) // BN


def test_own_loop_bounds_are_kept() -> None:
    bounds = (
        op("//", op("max", 0, WINDOW), BN),
        op("min", op("ceildiv", SEQ_K, BN), op("ceildiv", op("max", op("+", op("*", M, BM), BM), 0), BN)),
    )
    (plan,) = analyze(attention(bounds=bounds)).loops
    env = {"SeqQ": 40, "SeqK": 40, "Window": 5, "m": 1}
    run, _ = intervals(plan, env, {}, 0, BM - 1)
    assert run == [1, 2, 3]
    assert J.name == plan.loop.var
