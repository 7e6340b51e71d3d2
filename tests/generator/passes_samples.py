"""Attention programs as IR for tests of the passes, and an exact evaluator of integer expressions. No parser is involved."""

from __future__ import annotations

from collections.abc import Mapping

from generator.tl.ir import (
    COLS,
    NEG_INF,
    ROWS,
    Allocate,
    Argument,
    Axis,
    Compute,
    Copy,
    Expr,
    For,
    Gemm,
    Grid,
    Hint,
    Index,
    Num,
    Op,
    Option,
    Program,
    Reshape,
    Stmt,
    Var,
)


def op(fn: str, *args: Expr | int | float) -> Op:
    return Op(fn, tuple(Num(a) if isinstance(a, int | float) else a for a in args))


def var(name: str) -> Var:
    return Var(name)


BM, BN, D = 8, 4, 16
J, M, SEQ_Q, SEQ_K, ZERO = var("j"), var("m"), var("SeqQ"), var("SeqK"), Num(0.0)
KV = op("+", op("*", J, BN), COLS)
Q = op("-", op("+", op("+", op("*", M, BM), ROWS), SEQ_K), SEQ_Q)
SCALE = op("*", var("scale"), 1.4426950408889634)
IN_KEYS = op("<", KV, SEQ_K)
CAUSAL = op("<=", KV, Q)


def softmax_body(test: Expr, fill: Expr = NEG_INF) -> tuple[Stmt, ...]:
    """S to PA with a running maximum that is kept while it is close."""
    new_max, row_max, base, corr, s = var("new_max"), var("row_max"), var("base"), var("corr"), var("S")
    return (
        Compute("S", op("where", test, s, fill)),
        Compute("new_max", op("max", row_max, op("rowmax", s))),
        Compute("new_max", op("where", op("<=", op("*", op("-", new_max, row_max), SCALE), 8), row_max, new_max)),
        Compute("base", op("where", op("==", new_max, NEG_INF), ZERO, new_max)),
        Compute("corr", op("exp2", op("*", op("-", row_max, base), SCALE))),
        Compute("row_max", new_max),
        Compute("P", op("exp2", op("-", op("*", s, SCALE), op("*", base, SCALE)))),
        Compute("row_sum", op("+", op("*", var("row_sum"), corr), op("rowsum", var("P")))),
        Compute("acc", op("*", var("acc"), corr)),
    )


def attention(
    test: Expr = op("and", IN_KEYS, CAUSAL),
    body: tuple[Stmt, ...] | None = None,
    positive: bool = True,
    extra: tuple[Stmt, ...] = (),
    reversed_: bool = True,
    bounds: tuple[Expr, Expr] = (Num(0), op("ceildiv", SEQ_K, BN)),
) -> Program:
    """A whole program around `softmax_body(test)`, or around another body; `extra` are more declarations."""
    lead = (var("b"), var("h"))

    def tile(name: str, columns: int | None, init: Expr | None = None) -> Allocate:
        return Allocate(name, "register", (Num(BM),) if columns is None else (Num(BM), Num(columns)), "f32", (), init)

    def matrix(name: str, rows: Expr, columns: int | None) -> Allocate:
        return Allocate(name, "global", (rows,) if columns is None else (rows, Num(columns)), "bf16" if columns else "f32", lead)

    def load(name: str, rows: int, at: Expr) -> Copy:
        return Copy(name, name, (Num(rows), Num(D)), (at, Num(0)), "global", "shared")

    row_sum = var("row_sum")
    has_sum = op(">", row_sum, 0.0)
    loop = For(
        "j",
        *bounds,
        reversed_,
        (
            load("K", BN, J),
            load("V", BN, J),
            Gemm("Q", False, "K", True, "S", False),
            *(softmax_body(test) if body is None else body),
            Reshape("P", ("MMA_C", "MMA_M", "MMA_N"), ("MMA_A", "MMA_M", "MMA_N_new"), "PA", "bf16"),
            Gemm("PA", False, "V", False, "acc", True),
        ),
    )
    return Program(
        "attention",
        "code",
        (
            Argument(("scale",), "f32", positive),
            Argument(("SeqQ", "SeqK", "Heads", "KvHeads", "Batch", "Window", "Prefix"), "i32"),
            Grid((Axis("m", op("ceildiv", SEQ_Q, BM)), Axis("h", var("Heads")), Axis("b", var("Batch")))),
            matrix("Q", SEQ_Q, D),
            matrix("K", SEQ_K, D),
            matrix("V", SEQ_K, D),
            matrix("O", SEQ_Q, D),
            matrix("LSE", SEQ_Q, None),
            *extra,
            tile("S", BN),
            tile("P", BN),
            tile("acc", D, Num(0)),
            tile("row_max", None, NEG_INF),
            tile("row_sum", None, Num(0)),
            *(tile(n, None) for n in ("new_max", "base", "corr", "lse")),
            load("Q", BM, M),
            loop,
            Compute("lse", op("where", has_sum, op("+", op("*", var("row_max"), var("scale")), op("log", row_sum)), NEG_INF)),
            Compute("acc", op("*", var("acc"), op("where", has_sum, op("/", 1.0, row_sum), ZERO))),
            Copy("acc", "O", (Num(BM), Num(D)), (M, Num(0)), "register", "global"),
            Copy("lse", "LSE", (Num(BM),), (M, Num(0)), "register", "global"),
        ),
    )


def with_hint(program: Program, name: str, value: str) -> Program:
    return Program(program.name, program.stage, (*program.body, Hint(name, value)))


def with_option(program: Program, name: str, value: str) -> Program:
    return Program(program.name, program.stage, (*program.body, Option(name, value)))


def evaluate(e: Expr, env: Mapping[str, int], tables: Mapping[str, list[int]] | None = None) -> int:
    """The exact value of an integer expression or test; `tables` are captured tensors, zero outside."""
    tables = tables or {}
    match e:
        case Num(value):
            return int(value)
        case Var(name):
            return env[name]
        case Index(tensor, (i,)):
            at = evaluate(i, env, tables)
            return tables[tensor][at] if 0 <= at < len(tables[tensor]) else 0
        case Op("rows_min" | "rows_max" as fn, (inner, first, last)):
            rows = range(evaluate(first, env, tables), evaluate(last, env, tables) + 1)
            return (min if fn == "rows_min" else max)(evaluate(inner, {**env, "rows": r}, tables) for r in rows)
        case Op(fn, args):
            return int(FUNCTIONS[fn](*(evaluate(a, env, tables) for a in args)))
    raise TypeError(e)


FUNCTIONS = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "//": lambda a, b: a // b, "%": lambda a, b: a % b,
    "neg": lambda a: -a, "max": max, "min": min, "ceildiv": lambda a, b: -(-a // b), "where": lambda t, a, b: a if t else b,
    "<": lambda a, b: a < b, "<=": lambda a, b: a <= b, ">": lambda a, b: a > b, ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b, "!=": lambda a, b: a != b,
    "and": lambda *a: all(a), "or": lambda *a: any(a), "not": lambda a: not a,
}  # fmt: skip
