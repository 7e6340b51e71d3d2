"""C++ names and scalar expressions: what a TL name is called in the generated code. Vector code is in `vectors.py`."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from generator.tl.ir import Expr, Index, Num, Op, Var
from generator.tl.types import COMPARISONS
from generator.translate.cpu.ops import Refused
from generator.translate.cpu.types import Types, plain

#: TL functions on scalar floats -> C++.
FLOAT_FUNCTIONS = {
    "+": "({} + {})", "-": "({} - {})", "*": "({} * {})", "/": "({} / {})", "neg": "(-{})",
    "max": "fmax_({}, {})", "min": "fmin_({}, {})", "abs": "__builtin_fabsf({})",
    "exp": "__builtin_expf({})", "exp2": "__builtin_exp2f({})", "log": "__builtin_logf({})", "log2": "__builtin_log2f({})",
    "sqrt": "__builtin_sqrtf({})", "tanh": "__builtin_tanhf({})",
}  # fmt: skip
INTEGER_FORMS = {
    "+": "({} + {})", "-": "({} - {})", "*": "({} * {})", "neg": "(-{})", "//": "floordiv({}, {})", "%": "modulo({}, {})",
    "ceildiv": "ceildiv({}, {})", "max": "imax({}, {})", "min": "imin({}, {})", "abs": "iabs({})",
}  # fmt: skip
LOGIC = {"and": "({} && {})", "or": "({} || {})", "not": "(!{})"}


def tile_name(name: str) -> str:
    """The array of a tile; `@` marks what the translator made up."""
    return "t_" + plain(name).replace("@", "_at_")


def folded(form: str, texts: Sequence[str]) -> str:
    """A form of two places over two or more texts, from the left: `and` and `or` may have any number of arguments.

    A negative literal is put in parentheses behind a minus: C++ reads `--` as another operator.
    """
    if form.count("{}") == 1:
        return form.format(*(f"({t})" if form.startswith("(-") and t.startswith("-") else t for t in texts))
    return functools.reduce(form.format, texts)


def number(value: int | float, as_float: bool) -> str:
    """A literal of int64_t or of float."""
    if not as_float:
        return str(value)
    if math.isnan(value):
        return "NAN_"
    if math.isinf(value):
        return "INF" if value > 0 else "(-INF)"
    return f"{float(value)!r}f"


@dataclass(frozen=True, slots=True)
class Names:
    """The C++ text of scalars. `scalars`: TL name -> C++ name of arguments, grid axes and loop variables."""

    types: Types
    scalars: Mapping[str, str]

    def text(self, e: Expr, given: Mapping[Expr, str] | None = None, as_float: bool = False) -> str:
        """C++ of a scalar expression: int64_t, float or bool. given: text of `rows`, `cols` and tiles that a loop fixes."""
        given = given or {}
        whole = not self.types.is_test(e) and self.types.is_integer(e)
        if as_float and whole:
            return number(e.value, True) if isinstance(e, Num) else f"(float)({self.text(e, given)})"
        if e in given:
            return given[e]
        match e:
            case Num(value):
                return number(value, not whole)
            case Var(name):
                return self._variable(name)
            case Index(tensor, indices):
                return f"at_{tensor}({', '.join(self.text(i, given) for i in indices)})"
            case Op("to_float", (a,)):
                return self.text(a, given, as_float=True)
            case Op("where", (test, a, b)):
                return f"({self.text(test, given)} ? {self.text(a, given, not whole)} : {self.text(b, given, not whole)})"
            case Op(fn, args) if fn in LOGIC:
                return folded(LOGIC[fn], [self.text(a, given) for a in args])
            case Op(fn, (a, b)) if fn in COMPARISONS:
                mixed = not (self.types.is_integer(a) and self.types.is_integer(b))
                return f"({self.text(a, given, mixed)} {fn} {self.text(b, given, mixed)})"
            case Op("floor", (a,)):
                return self.text(a, given) if self.types.is_integer(a) else f"(int64_t)__builtin_floorf({self.text(a, given)})"
            case Op(fn, args):
                forms = INTEGER_FORMS if whole else FLOAT_FUNCTIONS
                if fn not in forms:
                    raise Refused(f"{fn}: no scalar code for it here", e.span.line)
                return folded(forms[fn], [self.text(a, given, not whole) for a in args])

    def _variable(self, name: str) -> str:
        if name in self.scalars:
            return self.scalars[name]
        if plain(name) in self.types.tiles:
            return tile_name(name)
        raise Refused(f"{name}: not known where a scalar is needed")
