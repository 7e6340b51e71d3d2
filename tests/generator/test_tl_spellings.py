"""The paper's looser spellings, and what people and models write: the same IR as the canonical form, or a hint towards it."""

import pytest

from generator.tl.diagnostics import TLError
from generator.tl.expressions import expression
from generator.tl.ir import Allocate, Compute, Copy, Gemm, Named, Num, Op, Prose, Reshape, Var
from generator.tl.parser import parse, parse_or_raise
from generator.tl.printer import print_expression, print_program

SAME = [
    ("Copy K from global to shared", "copy  K FROM Global TO Shared"),
    ("Compute S = S * scale", "Compute Multiply S, scale and get new S"),
    ("Compute S = S * scale", "Compute multiply S, scale"),
    ("Compute P = S + 1.0", "Compute Add S, 1.0 and get P"),
    ("Compute P = S - row_max", "Compute Subtract S, row_max and get new P"),
    ("Compute O = O / row_sum", "Compute Divide O, row_sum and get new O"),
    ("Compute m = max(m, rowmax(S))", "Compute Max m, rowmax(S) and get m"),
    ("Compute m = min(m, 3.0)", "Compute Minimum m, 3.0"),
    ("Compute P = exp(S)", "Compute Exp S and get P"),
    ("Compute P = exp2(S - m)", "Compute Exp2 S - m and get new P"),
    ("Compute m = rowmax(S)", "Compute RowMax S and get m"),
    ("Compute S = tanh(S)", "compute TANH S"),
    ("Compute Softmax S", "Compute softmax S"),
    ("for i = 0:N\nend", "FOR i in 0:N\nEnd For"),
    ("if a < b\nelse\nend", "IF (a < b)\nELSE\nEND IF"),
    ("Compute GEMM Q, K^T and get S", "compute gemm Q , K ^ t and get new S"),
    ("Compute S = a + b * c", "Compute S=((a)+(b*c))   # so it is"),
    ("Compute S = max(a, b)", "Compute S = MAX(a, b)"),
]


@pytest.mark.parametrize(("canonical", "loose"), SAME)
def test_loose_spellings_of_sketches(canonical, loose):
    program = parse_or_raise(loose)
    assert program == parse_or_raise(canonical)
    assert print_program(program) == canonical.replace("if a < b\nelse", "if a < b") + "\n"


CODE = """Kernel k
Argument SeqQ, SeqK i32
Argument q_off i32
Constant BM = 64, BN = 64, D = 64
Allocate Q in global (SeqQ, D) bf16 with offset [q_off]
Allocate K in global (SeqK, D) bf16
Allocate V in global (SeqK, D) bf16
Allocate O in global (SeqQ, D) bf16
Allocate S in register (BM, BN) f32
Allocate acc in register (BM, D) f32 = 0
Copy Q (BM, D) in coordinate [L = 0] from global to shared
for i = 0:SeqK // BN
  Copy K (BN, D) in coordinate [L = i] from global to shared
  Copy V (BN, D) in coordinate [L = i] from global to shared
  Compute GEMM Q, K^T and get S
  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new) and get S bf16
  Compute GEMM S, V and accumulate acc
end
Copy acc into O (BM, D) in coordinate [L = 0] from register to global
"""


@pytest.mark.parametrize(
    ("canonical", "loose"),
    [
        ("bf16 with offset [q_off]", "bfloat16 with offset q_off"),
        ("(BM, BN) f32\n", "(BM, BN)\n"),
        ("Argument SeqQ, SeqK i32\nArgument q_off i32", "Argument SeqQ, SeqK int, q_off int32"),
        ("Copy Q (BM, D) in coordinate [L = 0]", "Copy Q (BM, D)"),
        ("Copy Q (BM, D) in coordinate [L = 0]", "Copy Q (BM, D,) in coordinate [0, 0]"),
        ("Copy K (BN, D) in coordinate [L = i]", "Copy K (BN, D) in coordinate [D = 0, l = i]"),
        ("from register to global", "from registers to GLOBAL"),
        ("(MMA_A, MMA_M, MMA_N_new) and get S bf16", "(MMA_A, MMA_M, MMA_N_new)"),
        ("(MMA_A, MMA_M, MMA_N_new) and get S bf16", "(MMA_A, MMA_M, MMA_N_new) and get new S"),
    ],
)
def test_loose_spellings_of_code(canonical, loose):
    parsed = parse(CODE.replace(canonical, loose))
    assert parsed.diagnostics == ()
    assert parsed.program == parse_or_raise(CODE)


def test_a_transposed_operand_is_inferred_by_name_and_said():
    parsed = parse(CODE.replace("K^T", "K"))
    assert parsed.program == parse_or_raise(CODE)
    assert [(d.code, d.severity, d.hint) for d in parsed.diagnostics] == [("inferred", "warning", "write Q, K^T")]


def test_no_transposition_is_inferred_where_names_do_not_decide():
    square = CODE.replace("K^T", "K").replace("(BN, D)", "(D, D)").replace("(BM, BN)", "(BM, D)")
    assert not any(s.b_transposed for s in _all(parse_or_raise(square), Gemm))


def test_a_matrix_without_dtype_is_f32_and_said():
    parsed = parse(CODE.replace("(SeqK, D) bf16", "(SeqK, D)"))
    assert {d.code for d in parsed.diagnostics} == {"missing-dtype"}
    assert {a.dtype for a in _all(parsed.program, Allocate) if a.name in "KV"} == {"f32"}


def test_a_reshape_without_dtype_needs_a_gemm_that_decides():
    text = CODE.replace(" and get S bf16", "").replace("  Compute GEMM S, V and accumulate acc\n", "")
    assert [d.code for d in parse(text).diagnostics] == ["missing-dtype"]


def _all(program, kind):
    from generator.tl.ir import walk_statements

    return [s for s in walk_statements(program.body) if isinstance(s, kind)]


def test_the_stage_is_what_the_text_holds_or_what_is_asked():
    assert parse_or_raise("Copy Q from global to shared").stage == "sketch"
    assert parse_or_raise("Constant BM in {64, 128}\nCopy Q from global to shared").stage == "sketch"
    assert parse_or_raise("Copy Q (64, 64) from global to shared").stage == "code"
    assert parse_or_raise("Argument N i32").stage == "code"
    assert parse_or_raise("Copy Q from global to shared", "code").stage == "code"
    assert parse_or_raise("this is what I would do", "sketch").body == (Prose("this is what I would do"),)


def test_prose_belongs_to_sketches():
    text = "Copy Q from global to shared\nthen hide the masked keys\n"
    parsed = parse(text)
    assert parsed.program.body[1] == Prose("then hide the masked keys")
    assert [d.code for d in parsed.diagnostics] == ["prose"]
    assert parse(text, "code").program is None
    assert parse("I am no program\nat all").program is None


def test_names_of_a_kernel():
    assert parse_or_raise("Argument N i32").name == "kernel"
    assert parse_or_raise("Copy Q from global to shared").name == ""
    assert parse_or_raise("Kernel a\nArgument N i32").name == "a"


def test_what_one_statement_holds():
    program = parse_or_raise(CODE)
    copy, *_ = _all(program, Copy)
    assert copy == Copy("Q", "Q", (Var("BM"), Var("D")), (Num(0), Num(0)), "global", "shared")
    assert (copy.span.line, copy.span.column) == (11, 1)
    (reshape,) = _all(program, Reshape)
    assert (reshape.into, reshape.dtype) == ("S", "bf16")
    (named,) = parse_or_raise("Compute Softmax S, scale and get P with row_max, row_sum, acc").body
    assert named == Named("Softmax", ("S", "scale"), "P", ("row_max", "row_sum", "acc"))
    (compute,) = parse_or_raise("Compute S = -3 - -x").body
    assert compute == Compute("S", Op("-", (Num(-3), Op("neg", (Var("x"),)))))


@pytest.mark.parametrize(
    "text",
    [
        "a - b - c", "a - (b - c)", "a * (b + c)", "-(a + b) * c", "-x", "-(3)", "- -3", "not a and b", "not (a and b)",
        "a or b and c", "(a or b) and c", "(a < b) == (c < d)", "a // b % c", "where(a < b, -inf, S)", "f()",
        "1.0", "1e-30", "inf", "-inf", "1e+22", "0.1", "X[]", "X[i, j + 1]", "a < b and not c > d",
    ],
)  # fmt: skip
def test_canonical_expressions_print_as_they_are(text):
    assert print_expression(expression(text)) == text.replace("- -3", "-(-3)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a < b < c", "cannot be compared again"),
        ("a +", "expected an expression, found the end of the line"),
        ("(a", "expected '\\)'"),
        ("a b", "expected the end of the line, found 'b'"),
        ("max(a b)", "expected ',' after an argument of max"),
        ("1.5f", "is not a number"),
        ("2x", "is not a number"),
        ("99999999999999999999", "does not fit into 64 bits"),
        ("1e999", "beyond the range"),
        ("a ? b", "'\\?' is no part of TL"),
        ("a && b", "write and"),
        ("a ≤ b", "write <="),
        ("+a", "leave the \\+ out"),
    ],
)
def test_expressions_that_are_none(text, message):
    with pytest.raises(TLError, match=message):
        expression(text)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("Alocate S in register (64) f32", "did you mean Allocate?"),
        ("Compte S = 1", "did you mean Compute?"),
        ("S = S * 2", "did you mean Compute S = ...?"),
        ("Compute S += 1", "write Compute S = S + ..."),
        ("elif a < b", "open an if of its own"),
        ("// a comment", "a comment starts with #"),
        ("Load Q", "did you mean Copy"),
        ("Constant BM = D * 2", "write Let BM"),
        ("Grid m = 1:4", "write m = 0:EXTENT"),
        ("Compute GEMM Q, K.T and get S", "write ^T behind a transposed operand"),
        ("Allocate S in registr (64) f32", "did you mean register?"),
        ("Argument N i23", "did you mean i32?"),
        ("Copy K (64, 64) in coordinate [R = 1] from global to shared", "the row tile is L, the column tile is D"),
    ],
)
def test_hints(line, hint):
    (found,) = [d for d in parse(f"Argument M i32\n{line}").diagnostics if d.severity == "error"]
    assert hint in found.hint
    assert found.span.line == 2
