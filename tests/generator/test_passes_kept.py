"""Which loops may leave row maxima out (`passes.kept`), and what is left of their code."""

from __future__ import annotations

from dataclasses import replace

import pytest
from passes_samples import IN_KEYS, attention, op, softmax_body, var, with_option

from generator.tl.ir import COLS, NEG_INF, Compute, Num, Reshape, Stmt
from generator.tl.printer import print_expression
from generator.translate.passes import analyze
from generator.translate.passes.kept import Kept

STEP = softmax_body(IN_KEYS)


def kept(body: tuple[Stmt, ...] = STEP, option: str = "on_demand") -> Kept | None:
    (plan,) = analyze(with_option(attention(body=body), "row_maxima", option)).loops
    return plan.kept


def changed(into: str, nth: int, value: object) -> tuple[Stmt, ...]:
    at = [i for i, s in enumerate(STEP) if isinstance(s, Compute) and s.into == into][nth]
    return tuple(replace(s, value=value) if i == at else s for i, s in enumerate(STEP))  # type: ignore[type-var]


def test_what_is_left_of_a_softmax_whose_references_stay() -> None:
    found = kept()
    assert found is not None and (found.reference, found.operand, found.sums) == ("row_max", "PA", ("row_sum",))
    values = {s.into: print_expression(s.value) for s in found.code if isinstance(s, Compute)}
    assert values["P"] == "exp2(S * (scale * 1.4426950408889634) - row_max * (scale * 1.4426950408889634))"
    assert values["row_sum"] == "row_sum + rowsum(P)" and set(values) == {"S", "P", "row_sum"}
    assert isinstance(found.code[-1], Reshape)


def test_only_where_the_program_says_so() -> None:
    assert kept(option="each_tile") is None


def test_the_reference_is_taken_off_what_is_added_to_the_scores() -> None:
    biased = (Compute("S", op("+", op("*", var("S"), var("scale")), op("*", var("scale"), COLS))), *STEP)
    natural = {
        "corr": op("exp2", op("-", var("row_max"), var("base"))),
        "P": op("exp2", op("-", var("S"), var("base"))),
    }
    body = tuple(replace(s, value=natural[s.into]) if isinstance(s, Compute) and s.into in natural else s for s in biased)
    found = kept(body)
    assert found is not None
    values = [print_expression(s.value) for s in found.code if isinstance(s, Compute)]
    assert values[0] == "S * scale + (scale * cols - row_max)" and values[2] == "exp2(S)"


@pytest.mark.parametrize(
    "body",
    [
        changed("acc", 0, op("*", var("acc"), 0.5)),  # what was added up before is not rescaled
        changed("row_sum", 0, op("+", var("row_sum"), op("rowsum", var("P")))),
        changed("row_sum", 0, op("+", op("*", var("row_sum"), var("row_max")), op("rowsum", var("P")))),  # reads a reference
        changed("corr", 0, op("exp2", op("-", var("row_max"), var("base")))),  # by another scale than the weights
        changed("base", 0, var("new_max")),
        changed("base", 0, op("where", op("==", var("new_max"), NEG_INF), Num(1.0), var("new_max"))),
        changed("new_max", 0, op("rowmax", var("S"))),  # forgets the reference of before
        changed("new_max", 1, op("where", op("<=", var("new_max"), 3.0), var("base"), var("new_max"))),
        changed("P", 0, op("+", var("S"), var("base"))),  # may be negative
        changed("row_max", 0, op("+", var("new_max"), 1.0)),
        (*STEP[:1], STEP[5], *STEP[1:5], *STEP[6:]),  # the reference moves before it is looked at
        tuple(s for s in STEP if not (isinstance(s, Compute) and s.into == "acc")),
        (*STEP, Compute("acc", op("+", var("acc"), var("row_max")))),
    ],
)  # fmt: skip
def test_what_is_no_softmax_step_is_left_alone(body: tuple[Stmt, ...]) -> None:
    assert kept(body) is None
