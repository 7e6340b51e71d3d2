"""From sketch to code for sketches that nobody's template foresaw, and what is said of those that cannot be sized by rules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from dense_attention import attention, random_call

from generator.authors.problem import Cut, Problem, ReasoningError
from generator.authors.reasoning import erase, reason
from generator.authors.rules import RuleAuthor, problem
from generator.binding import bind
from generator.spec import AttentionSpec, Rule
from generator.tl.checker import check
from generator.tl.expressions import expression
from generator.tl.fill import fill
from generator.tl.interpreter import run
from generator.tl.ir import Allocate, Argument, Axis, Constant, Grid, Num, Program, Reshape, Var, walk_statements
from generator.tl.parser import parse_or_raise
from generator.tl.printer import print_program

SPEC = AttentionSpec(
    num_heads=2, num_kv_heads=1, head_dim=8, head_dim_v=4, batch=2, seqlen_q=21, seqlen_k=70, masks=(Rule.make("causal"),)
)
COPIES = "Copy K from global to shared\nCopy V from global to shared"
STORE = "Copy acc into O from register to global"
MACRO = f"""
Copy Q from global to shared
for j = 0:tiles
{COPIES}
Compute GEMM Q, K^T and get S
Compute S = where(kv < SeqK and kv <= q, S, -inf)
Compute Softmax S, scale and get P with row_max, row_sum, acc
Compute GEMM P, V and accumulate acc
end
Compute acc = where(row_sum > 0.0, acc / row_sum, 0.0)
{STORE}
"""
TWO_PASS = f"""
Copy Q from global to shared
for j = 0:tiles
Copy K from global to shared
Compute GEMM Q, K^T and get S
Compute top = max(top, rowmax(where(kv < SeqK and kv <= q, S, -inf)))
end
Compute base = where(top == -inf, 0.0, top)
for j = 0:tiles reversed
{COPIES}
Compute GEMM Q, K^T and get S
Compute P = where(kv < SeqK and kv <= q, exp2((S - base) * c), 0.0)
Compute total = total + rowsum(P)
Compute GEMM P, V and accumulate acc
end
Compute acc = where(total > 0.0, acc / total, 0.0)
{STORE}
"""


def sketch(text: str) -> Program:
    return parse_or_raise("Kernel mine\n" + text, "sketch")


@pytest.mark.parametrize("text", [MACRO, TWO_PASS], ids=["macro", "two passes"])
def test_a_sketch_of_ones_own_becomes_code_that_computes_it(text: str) -> None:
    mine = sketch(text)
    code = reason(mine, problem(SPEC, "cpu"))
    assert check(code) == ()
    assert erase(code).body == mine.body
    program = fill(code, {"BM": 32, "BN": 64})
    call = random_call(SPEC)
    found = run(program, {n: call[n] for n in "QKV"}, bind(program, SPEC).values, precision="exact")["O"]
    np.testing.assert_allclose(found, attention(SPEC, call)[0], atol=1e-12)


def test_only_what_the_sketch_uses_is_declared() -> None:
    code = reason(sketch(MACRO), problem(SPEC, "cpu"))
    assert "LSE" not in code.allocations and "Group" not in code.arguments
    assert "Group" in RuleAuthor().code(replace(SPEC, seqlen_q=1, phase="decode")).arguments


def test_reshape_stands_only_before_a_gemm_fed_by_another() -> None:
    code = reason(sketch(TWO_PASS), problem(replace(SPEC, dtype="bf16"), "cpu"))
    assert [(s.source, s.into, s.dtype) for s in walk_statements(code.body) if isinstance(s, Reshape)] == [("P", "PA", "bf16")]


def test_state_starts_at_what_leaves_it_unchanged() -> None:
    code = reason(sketch(TWO_PASS), problem(SPEC, "cpu"))
    initial = {name: a.init for name, a in code.allocations.items() if a.level == "register"}
    assert initial == {"S": None, "top": expression("-inf"), "base": None, "P": None, "total": Num(0), "acc": Num(0)}


def test_a_problem_that_is_no_attention() -> None:
    """C = A B^T, sized by a problem of its own."""
    m, n, k = (Var(v) for v in "mnk")
    tile = {name: (Var(rows), Var("BK" if name != "C" else "BN")) for name, rows in {"A": "BM", "B": "BN", "C": "BM"}.items()}
    gemm = Problem(
        name="product",
        arguments=(Argument(("M", "N", "K"), "i32"),),
        constants=(Constant("BM", (4,)), Constant("BN", (8,)), Constant("BK", (2, 4))),
        grid=Grid((Axis("m", expression("ceildiv(M, BM)")), Axis("n", expression("ceildiv(N, BN)")))),
        matrices=tuple(Allocate(x, "global", (Var(rows), Var(columns)), "f32") for x, rows, columns in ("AMK", "BNK", "CMN")),
        cuts={"A": Cut(tile["A"], (m, k)), "B": Cut(tile["B"], (n, k)), "C": Cut(tile["C"], (m, n))},
        loops={"k": (Num(0), expression("ceildiv(K, BK)"))},
        lets={},
        row_axis=Var("BM"),
        column_axis=Var("BN"),
        operand_dtype="f32",
    )  # fmt: skip
    text = "Copy A from global to shared\nCopy B from global to shared\nCompute GEMM A, B^T and accumulate acc\n"
    code = reason(sketch(f"for k = 0:tiles\n{text}end\nCopy acc into C from register to global"), gemm)
    assert check(code) == () and "in coordinate [L = n, D = k]" in print_program(code)
    a, b = np.random.default_rng(0).standard_normal((2, 5, 7))
    found = run(fill(code, {"BK": 4}), {"A": a, "B": b}, {"M": 5, "N": 5, "K": 7}, precision="exact")["C"]
    np.testing.assert_allclose(found, a @ b.T, atol=1e-12)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Copy X from global to shared", "X: no matrix of this problem; known are Q, K, V, O, LSE"),
        (f"for i = 0:tiles\n{COPIES}\nend", "i: no loop of this problem; known are j"),
        ("Compute S = scale * 2.0", "S: its shape does not follow from the sketch"),
        ("Compute the softmax of S", "Prose: this statement of the sketch cannot be turned into code by rules"),
        ("Compute Attention Q, K, V and get S", "S: its shape does not follow|Named: this statement"),
    ],
)
def test_sketches_that_rules_cannot_size(text: str, message: str) -> None:
    with pytest.raises(ReasoningError, match=message):
        reason(sketch(text + "\nCopy Q from global to shared"), problem(SPEC, "cpu"))
