"""Ranks, kinds, names and arities inside one expression. Knows no statement: the caller says which rank and kind are due."""

from __future__ import annotations

from generator.tl.checks.names import Scope
from generator.tl.checks.report import name_list
from generator.tl.expressions import did_you_mean
from generator.tl.ir import FUNCTIONS, Expr, Index, Num, Op, Span, Var
from generator.tl.types import (
    INTEGER_FUNCTIONS,
    LOGIC,
    REDUCTIONS,
    Kind,
    Rank,
    Typing,
    join,
    kind_of_dtype,
    operation,
)

_KIND_WORDS = {Kind.INT: "an integer", Kind.FLOAT: "a float", Kind.BOOL: "a test"}
_RANK_WORDS = {
    Rank.SCALAR: "one value for the block",
    Rank.ROW: "one value a row",
    Rank.COL: "one value a column",
    Rank.ELEMENT: "one value an element",
}


def check_expression(e: Expr, scope: Scope) -> Typing | None:
    """The typing of an expression, every mistake in it reported; None where a mistake hides the typing."""
    match e:
        case Num():
            return Typing(Rank.SCALAR, Kind.INT if isinstance(e.value, int) else Kind.FLOAT)
        case Var():
            return _name(e, scope)
        case Index():
            return _index(e, scope)
        case Op():
            return _operation(e, scope)


def check_scalar(e: Expr, scope: Scope, kind: Kind, what: str) -> None:
    """An expression that has to be the same for the whole block, of one kind: an extent, an offset, a bound, a test."""
    typing = check_expression(e, scope)
    if typing is None:
        return
    if typing.rank is not Rank.SCALAR:
        hint = "use arguments, constants, grid axes and loop variables only"
        if what.startswith("the test"):
            hint = "choose element by element with where(test, a, b)"
        scope.report.error(
            "rank",
            f"{what} has to be one value for the block, found {_RANK_WORDS[typing.rank]}",
            e.span,
            hint,
            _RANK_WORDS[Rank.SCALAR],
            _RANK_WORDS[typing.rank],
        )
    elif typing.kind is not kind:
        hint = "write // or ceildiv for whole numbers" if kind is Kind.INT else "write a comparison" if kind is Kind.BOOL else ""
        _kind_error(scope, f"{what} has to be {_KIND_WORDS[kind]}", e.span, kind, typing.kind, hint)


def check_value(e: Expr, scope: Scope, rank: Rank, kind: Kind, into: str) -> None:
    """An expression that is stored into a tile of this rank and kind."""
    typing = check_expression(e, scope)
    if typing is None:
        return
    if typing.kind is Kind.BOOL:
        _kind_error(scope, f"{into} holds numbers, not tests", e.span, kind, typing.kind, "write where(test, 1.0, 0.0)")
    elif kind is Kind.INT and typing.kind is Kind.FLOAT:
        _kind_error(scope, f"{into} holds integers", e.span, kind, typing.kind, "write floor(...), or allocate the tile as f32")
    if typing.rank & ~rank:
        hint = f"reduce it with rowmax or rowsum, or allocate {into} with two axes" if rank is Rank.ROW else ""
        message = f"{into} keeps {_RANK_WORDS[rank]}, the expression gives {_RANK_WORDS[typing.rank]}"
        scope.report.error("rank", message, e.span, hint, _RANK_WORDS[rank], _RANK_WORDS[typing.rank])


def _kind_error(scope: Scope, message: str, span: Span, expected: Kind, found: Kind, hint: str) -> None:
    text = f"{message}, found {_KIND_WORDS[found]}"
    scope.report.error("kind", text, span, hint, _KIND_WORDS[expected], _KIND_WORDS[found])


def _name(e: Var, scope: Scope) -> Typing | None:
    if scope.knows(e.name):
        return scope.of_name(e.name)
    if e.name in scope.matrices:
        axes = len(scope.matrices[e.name].shape)
        element = f"{e.name}[{', '.join('ij'[:axes])}]"
        hint = f"copy it into a tile, or read single elements: {element}"
        scope.report.error("level", f"{e.name} is a matrix in global memory", e.span, hint, "a tile or a number", "a matrix")
        return None
    scope.unknown(e.name, e.span)
    return None


def _index(e: Index, scope: Scope) -> Typing | None:
    typings = [check_expression(i, scope) for i in e.indices]
    for i, typing in zip(e.indices, typings, strict=True):
        if typing is not None and typing.kind is not Kind.INT:
            _kind_error(scope, f"an index of {e.tensor} has to be an integer", i.span, Kind.INT, typing.kind, "write floor(...)")
    matrix = scope.matrices.get(e.tensor)
    if matrix is None:
        if e.tensor in scope.tiles:
            hint = f"write {e.tensor}: every element of the result reads the element at its own place"
            scope.report.error("level", f"{e.tensor} is a tile, not a matrix", e.span, hint, "a matrix", "a tile")
        else:
            scope.unknown(e.tensor, e.span, "matrix")
        return None
    if len(e.indices) != len(matrix.shape):
        message = f"{e.tensor} has {len(matrix.shape)} axes behind its offset, found {len(e.indices)} indices"
        scope.report.error("shape", message, e.span, "", str(len(matrix.shape)), str(len(e.indices)))
    known = [t for t in typings if t is not None]
    return Typing(join(*(t.rank for t in known)), kind_of_dtype(matrix.dtype))


def _operation(e: Op, scope: Scope) -> Typing | None:
    args = [check_expression(a, scope) for a in e.args]
    if e.fn not in FUNCTIONS:
        known = [f for f in FUNCTIONS if f.isidentifier()]
        hint = _FOREIGN.get(e.fn.lower()) or did_you_mean(e.fn, known) or f"functions: {name_list(known, 30)}"
        scope.report.error("unknown-function", f"{e.fn} is no function of TL", e.span, hint, found=e.fn)
        return None
    if len(e.args) != FUNCTIONS[e.fn]:
        _arity(e, scope)
        return None
    if any(a is None for a in args):
        return None
    known_args = [a for a in args if a is not None]
    if e.fn in REDUCTIONS:
        return _reduction(e, known_args[0], scope)
    _kinds(e, known_args, scope)
    return operation(e.fn, known_args)


_FOREIGN = {
    "maximum": "did you mean max?",
    "minimum": "did you mean min?",
    "sum": "did you mean rowsum?",
    "ln": "log is the natural logarithm",
    "pow": "write exp2(y * log2(x)), or x * x",
    "int": "write floor(...) or //",
    "float": "an integer turns into a float where it meets one",
    "sigmoid": "write 1.0 / (1.0 + exp(-x))",
    "select": "did you mean where?",
    "cdiv": "did you mean ceildiv?",
    "fmax": "did you mean max?",
    "fmin": "did you mean min?",
    "expf": "did you mean exp?",
}


def _arity(e: Op, scope: Scope) -> None:
    needed = FUNCTIONS[e.fn]
    hint = f"nest them: {e.fn}(a, {e.fn}(b, c))" if e.fn in ("max", "min") and len(e.args) > 2 else ""
    if e.fn == "where":
        hint = "where(test, value if true, value if false)"
    message = f"{e.fn} takes {needed} argument{'s' * (needed > 1)}, found {len(e.args)}"
    scope.report.error("arity", message, e.span, hint, str(needed), str(len(e.args)))


def _reduction(e: Op, arg: Typing, scope: Scope) -> Typing:
    if arg.kind is Kind.BOOL:
        hint = "count by rowsum(where(test, 1.0, 0.0))"
        _kind_error(scope, f"{e.fn} reduces numbers", e.args[0].span, Kind.FLOAT, arg.kind, hint)
    if not arg.rank & Rank.COL:
        message = f"{e.fn} reduces over columns, but its argument is {_RANK_WORDS[arg.rank]} already"
        scope.report.error("rank", message, e.span, "leave it out", _RANK_WORDS[Rank.ELEMENT], _RANK_WORDS[arg.rank])
    return operation(e.fn, [arg])


def _kinds(e: Op, args: list[Typing], scope: Scope) -> None:
    def expect(at: int, kind: Kind, what: str, hint: str) -> None:
        if args[at].kind is not kind:
            _kind_error(scope, what, e.args[at].span, kind, args[at].kind, hint)

    for i, arg in enumerate(args):
        if e.fn in LOGIC:
            expect(i, Kind.BOOL, f"{e.fn} joins tests", "write a comparison")
        elif e.fn in INTEGER_FUNCTIONS:
            expect(i, Kind.INT, f"{e.fn} divides integers", "write / for floats, floor(...) for an integer")
        elif arg.kind is Kind.BOOL and e.fn != "where":
            _kind_error(scope, f"{e.fn} takes numbers", e.args[i].span, Kind.FLOAT, arg.kind, "write where(test, 1.0, 0.0)")
    if e.fn == "where":
        expect(0, Kind.BOOL, "the first argument of where is a test", "where(test, value if true, value if false)")
        if (args[1].kind is Kind.BOOL) != (args[2].kind is Kind.BOOL):
            at = 1 if args[1].kind is Kind.BOOL else 2
            _kind_error(scope, "where chooses between values of one kind", e.args[at].span, Kind.FLOAT, Kind.BOOL, "")
    if e.fn in ("/", "//", "%", "ceildiv") and isinstance(e.args[1], Num) and e.args[1].value == 0:
        scope.report.error("division-by-zero", "this divides by zero", e.span, "a divisor is another number than 0")
