"""What the passes prove and what they must refuse; schedules of loops as records."""

from __future__ import annotations

import dataclasses

import pytest
from passes_samples import BM, BN, CAUSAL, IN_KEYS, KV, SCALE, ZERO, Q, attention, op, softmax_body, var, with_hint, with_option

from generator.tl.ir import NEG_INF, ROWS, Compute, Expr, For, Num, Op, Program, Stmt
from generator.translate.passes import analyze

S, P, ACC = var("S"), var("P"), var("acc")
BOTH = op("and", IN_KEYS, CAUSAL)


def changed(old: Stmt, new: Stmt | None, body: tuple[Stmt, ...] = softmax_body(BOTH)) -> tuple[Stmt, ...]:
    assert old in body
    return tuple(x for s in body if (x := new if s == old else s) is not None)


def proven(program: Program) -> bool:
    (plan,) = analyze(program).loops
    return plan.covered and all(m.skippable for m in plan.masks)


def sigmoid(test: Expr) -> tuple[Stmt, ...]:
    return (
        Compute("S", op("where", test, S, NEG_INF)),
        Compute("P", op("/", 1.0, op("+", 1.0, op("exp2", op("neg", op("+", op("*", S, SCALE), var("Window"))))))),
    )


def plain_softmax(test: Expr) -> tuple[Stmt, ...]:
    """As many write it: the maximum scaled first, with no lazy reference."""
    mx, base, corr = var("row_max"), var("base"), var("corr")
    return (
        Compute("S", op("where", test, S, NEG_INF)),
        Compute("new_max", op("max", mx, op("rowmax", S))),
        Compute("base", op("where", op(">", var("new_max"), NEG_INF), op("*", var("new_max"), SCALE), ZERO)),
        Compute("corr", op("exp2", op("-", op("*", mx, SCALE), var("base")))),
        Compute("P", op("exp2", op("-", op("*", S, SCALE), base))),
        Compute("row_sum", op("+", op("*", var("row_sum"), corr), op("rowsum", P))),
        Compute("acc", op("*", ACC, corr)),
        Compute("row_max", var("new_max")),
    )


KEEPS: dict[str, tuple[Stmt, ...]] = {
    "softmax": softmax_body(BOTH),
    "softmax, plain": plain_softmax(BOTH),
    "sigmoid": sigmoid(BOTH),
    "no softmax": (Compute("P", op("where", BOTH, op("*", S, op("exp2", op("*", var("scale"), op("-", KV, Q)))), ZERO)),),
    "added mask": (
        Compute("S", op("+", S, op("where", BOTH, 0.0, NEG_INF))),
        *softmax_body(BOTH)[1:],
    ),
    "masked twice": (Compute("S", op("where", IN_KEYS, op("where", CAUSAL, S, NEG_INF), NEG_INF)), *softmax_body(BOTH)[1:]),
    "turned round": (
        Compute("S", op("where", op("or", op(">", KV, Q), op(">=", KV, var("SeqK"))), NEG_INF, S)),
        *softmax_body(BOTH)[1:],
    ),
}


@pytest.mark.parametrize("name", KEEPS)
def test_masked_tiles_are_identities(name: str) -> None:
    assert proven(attention(body=KEEPS[name])), analyze(attention(body=KEEPS[name])).to_plain()


BASE = Compute("base", op("where", op("==", var("new_max"), NEG_INF), ZERO, var("new_max")))
CHANGES: dict[str, Program] = {
    "masked elements are 0, not -inf": attention(body=softmax_body(BOTH, fill=ZERO)),
    "no guard on -inf": attention(body=changed(BASE, Compute("base", var("new_max")))),
    "counts tiles": attention(body=(*softmax_body(BOTH), Compute("row_sum", op("+", var("row_sum"), 1.0)))),
    "scales by a constant": attention(body=changed(Compute("acc", op("*", ACC, var("corr"))), Compute("acc", op("*", ACC, 0.5)))),
    "a scale of unknown sign": attention(positive=False),
    "keeps the largest score of a masked tile": attention(
        body=(*softmax_body(BOTH), Compute("row_sum", op("max", var("row_sum"), op("rowmax", op("where", BOTH, S, 3.0)))))
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_tiles_that_change_the_state_are_not_skipped(name: str) -> None:
    (plan,) = analyze(CHANGES[name]).loops
    assert not plan.covered and any("no tile is skipped" in note for note in plan.notes)


def test_a_second_loop_starts_from_what_the_first_left() -> None:
    """Two passes over the keys: that `total` is finite follows from the statements before the second loop."""
    program = two_pass(op("where", op(">", var("row_sum"), 0.0), op("*", var("lse"), 1.5), ZERO))
    assert [p.covered for p in analyze(program).loops] == [True, True]
    unguarded = two_pass(op("*", var("lse"), 1.5))  # -inf for a row that saw nothing
    assert [p.covered for p in analyze(unguarded).loops] == [True, False]


def two_pass(total: Expr) -> Program:
    base = attention()
    code = list(base.body)
    at = next(i for i, s in enumerate(code) if isinstance(s, For))
    loop = code[at]
    assert isinstance(loop, For)
    first = dataclasses.replace(loop, body=tuple(s for s in loop.body[:-2] if s != Compute("acc", op("*", ACC, var("corr")))))
    masked, weights = (
        Compute("S", op("where", BOTH, S, NEG_INF)),
        Compute("P", op("exp2", op("-", op("*", S, SCALE), var("base")))),
    )
    second = dataclasses.replace(loop, body=(*loop.body[:3], masked, weights, *loop.body[-2:]))
    lse = code[at + 1]
    return dataclasses.replace(base, body=(*code[:at], first, lse, Compute("base", total), second, *code[at + 3 :]))


def test_attention_is_rotated() -> None:
    (plan,) = analyze(attention()).loops
    order, body = plan.schedule, plan.loop.body
    assert order.kind == "rotated" and not order.why
    assert [body[i].into for i in order.first] == ["S"] and [body[i].into for i in order.second] == ["acc"]  # type: ignore[union-attr]
    assert [body[i].into for i in order.late] == ["acc", "PA"]  # type: ignore[union-attr]
    assert order.deferred == ()  # not without the program's leave
    (free,) = analyze(with_option(attention(), "row_sums", "deferred")).loops
    assert free.schedule.deferred == ("row_sum",)
    assert [body[i].into for i in plan.dead_first] == ["acc"]  # type: ignore[union-attr]
    assert set(plan.carried) == {"row_max", "row_sum", "acc"}
    assert analyze(attention()).storage == {"P": "S"}


@pytest.mark.parametrize(
    "body, why",
    [
        (None, "the program's hint"),
        ((*softmax_body(BOTH)[:-1], Compute("P", op("*", P, ACC))), ""),
    ],
)
def test_reasons_for_program_order(body: tuple[Stmt, ...] | None, why: str) -> None:
    program = with_hint(attention(body=body), "rotate", "off") if why else attention(body=body)
    (plan,) = analyze(program).loops
    assert plan.schedule.why == why
    assert plan.schedule.kind == ("plain" if why else "rotated")


def test_code_behind_the_second_product_is_not_rotated() -> None:
    base = attention()
    loop = next(s for s in base.body if isinstance(s, For))
    longer = dataclasses.replace(loop, body=(*loop.body, Compute("acc", op("*", ACC, 0.5))))
    (plan,) = analyze(dataclasses.replace(base, body=tuple(longer if s is loop else s for s in base.body))).loops
    assert plan.schedule.why == "code stands after the second matrix product"


def test_hints_turn_single_rules_off() -> None:
    for hint, attribute in (("skip", "covered"), ("split", "split")):
        (plan,) = analyze(with_hint(attention(), hint, "off")).loops
        assert not getattr(plan, attribute) and any("hint" in n for n in plan.notes)


def test_score_rules_by_position_do_not_stop_skipping() -> None:
    """A `where` that chooses between two finite scores is no mask: it is neither skipped for nor split at."""
    near = op(">", KV, op("-", Q, 2))
    body = (Compute("S", op("where", near, op("*", S, 2.0), S)), *softmax_body(BOTH))
    (plan,) = analyze(attention(body=body)).loops
    assert plan.covered and near not in plan.split and len(plan.split) == 2


def test_live_rows_follow_the_outputs() -> None:
    rows = analyze(attention()).live_rows
    assert rows == op("min", op("-", var("SeqQ"), op("*", BM, var("m"))), BM)
    assert isinstance(rows, Op) and BN != BM and ROWS not in rows.args and Num(BM) in rows.args
