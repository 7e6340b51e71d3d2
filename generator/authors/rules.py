"""The author that needs no language model: attention for any spec whose rules are known, as a sketch and then as code.

One writer for all variants: a rule's TL text is put where it belongs, and nothing here knows a rule by name. It chooses the
algorithm (online softmax, keys backwards, a reference moved only when it must be); tile sizes it leaves as holes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from generator.authors.folding import conjunction, gathered, multiplied
from generator.authors.problem import Cut, Problem
from generator.authors.reasoning import reason
from generator.binding import key_extent, rule_uses
from generator.masks import MaskRule
from generator.scores import ScoreRule
from generator.spec import TL_DTYPES, AttentionSpec, SpecError
from generator.tl.expressions import expression
from generator.tl.fold import substitute
from generator.tl.ir import Allocate, Argument, Axis, Constant, DType, Expr, Grid, Hint, Num, Op, Option, Program, Var, walk
from generator.tl.parser import parse_or_raise
from generator.tl.printer import print_expression

LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
#: The reference moves only when the row's maximum outgrew it by 2^8: exact, and the accumulator is rarely rescaled.
LAZY = 8
#: What varies from element to element of a tile of scores.
_ELEMENTS = {"S", "x", "kv"}


class RuleAuthor:
    """Writes a program for every spec of known rules; raises SpecError for the others."""

    name = "rules"

    def sketch(self, spec: AttentionSpec, target: str = "cpu") -> Program:
        """What moves and what is computed, without a size."""
        return parse_or_raise("\n".join(_sketch_lines(_Variant(spec, target))), "sketch")

    def code(self, spec: AttentionSpec, target: str = "cpu", sketch: Program | None = None) -> Program:
        """The sketch with every size, coordinate, allocation and Reshape; tile sizes are holes."""
        return reason(sketch or self.sketch(spec, target), problem(spec, target))


@dataclass(frozen=True, slots=True)
class _Variant:
    """The spec's rules as expressions of one program."""

    spec: AttentionSpec
    target: str = "cpu"

    def __post_init__(self) -> None:
        if self.spec.phase == "decode" and self.spec.seqlen_q != 1:
            raise SpecError(f"seqlen_q: a decode program holds one query token, found {self.spec.seqlen_q}; use phase prefill")

    @property
    def name(self) -> str:
        rules = [r.name for r in self.spec.masks + self.spec.scores] or ["full"]
        return "_".join(["attention", *rules, *(["decode"] if self.spec.phase == "decode" else [])])

    def _read(self, text: str, parameters: dict[str, int | float | str]) -> Expr:
        """A rule's text, `q` in the alignment that its parameters name."""
        e = expression(text)
        return substitute(e, {"q": Var("row")}) if parameters.get("align") == "top_left" else e

    @property
    def visible(self) -> Expr:
        """Which keys are there and may be seen."""
        uses = rule_uses(self.spec)
        masks = [self._read(rule.visible, parameters) for _, rule, parameters in uses if isinstance(rule, MaskRule)]
        return conjunction([expression("kv < SeqK"), *masks])

    @property
    def _past_only(self) -> set[str]:
        """Alignments in which no key after the query's position is visible."""
        uses = rule_uses(self.spec)
        return {str(parameters["align"]) for _, rule, parameters in uses if isinstance(rule, MaskRule) and rule.hides_future}

    @property
    def score(self) -> Expr:
        """The score in natural units, as a function of the product S."""
        x: Expr = Op("*", (Var("S"), Var("scale")))
        for _, rule, parameters in rule_uses(self.spec):
            if isinstance(rule, ScoreRule):
                past_only = parameters.get("align") in self._past_only
                x = substitute(
                    self._read(rule.value_causal if past_only and rule.value_causal else rule.value, parameters), {"x": x}
                )
        return x

    @property
    def extra_logits(self) -> list[Expr]:
        uses = rule_uses(self.spec)
        return [self._read(rule.extra_logit, p) for _, rule, p in uses if isinstance(rule, ScoreRule) and rule.extra_logit]

    @property
    def keeps_raw_scores(self) -> bool:
        """Whether S stays the plain product: its largest element is then the largest logit only if the scale is positive."""
        return self.spec.scale > 0 and self.score == Op("*", (Var("S"), Var("scale")))

    @property
    def looks_at_weights(self) -> bool:
        """Whether a tile's maxima are taken only where its weights say so (`Option row_maxima = on_demand`).

        The reference then moves to 2^8 above the row's maximum, since a weight is seen to be too large by its highest bit.
        bf16 has room for that below 1; in f16 the smallest weights would lose digits. Scores that take an exponential of
        their own lose by it: code that is nothing but exponentials waits for their unit.
        """
        costly = any(isinstance(x, Op) and x.fn in ("tanh", "exp", "exp2", "log", "log2") for x in walk(self.score))
        return self.target == "sm_80" and self.spec.dtype == "bf16" and not costly

    @property
    def exponent(self) -> str:
        """What P is 2 to the power of.

        On a GPU with 16-bit inputs `S * c - base * c`: one multiply-add an element instead of a subtraction and a product, up to
        6% of a kernel's time. `base * c` is rounded to 2^-24 of itself: at logits of 1e4 that is 6e-4 of a weight, the same for a
        whole row. It cancels in O, which is divided by the sum of those weights, and stays under the rounding of one weight in
        LSE. With fp32 inputs it would be the largest error, so there, and on a CPU, whose multiply and add are as fast, it stays
        `(S - base) * c`.
        """
        if not self.keeps_raw_scores:
            return "S - base"
        fused = self.spec.dtype != "fp32" and not self.target.startswith("cpu")
        return "S * c - base * c" if fused else "(S - base) * c"


def _sketch_lines(v: _Variant) -> list[str]:
    return [
        f"Kernel {v.name}",
        "Copy Q from global to shared",
        *_loop_lines(v),
        *_ending_lines(v),
        "Copy acc into O from register to global",
        "Copy lse into LSE from register to global",
    ]


def _loop_lines(v: _Variant) -> list[str]:
    """One pass over the keys."""
    scored = [] if v.keeps_raw_scores else [f"Compute S = {_text(_in_log2(v.score))}"]
    log2 = "({}) * c" if v.keeps_raw_scores else "{}"
    return [
        "for j = 0:tiles reversed",
        "Copy K from global to shared",
        "Copy V from global to shared",
        "Compute GEMM Q, K^T and get S",
        *scored,
        f"Compute S = where({_text(v.visible)}, S, -inf)",
        "Compute new_max = max(row_max, rowmax(S))",
        *_reference_lines(v),
        "Compute base = where(new_max == -inf, 0.0, new_max)",
        f"Compute corr = exp2({log2.format('row_max - base')})",
        "Compute row_max = new_max",
        f"Compute P = exp2({v.exponent})",
        "Compute row_sum = row_sum * corr + rowsum(P)",
        "Compute acc = acc * corr",
        "Compute GEMM P, V and accumulate acc",
        "end",
    ]


def _reference_lines(v: _Variant) -> list[str]:
    """The reference stays while the row's maximum is near it: below it where weights are looked at instead of maxima."""
    if not v.looks_at_weights:
        log2 = "(new_max - row_max) * c" if v.keeps_raw_scores else "new_max - row_max"
        return [f"Compute new_max = where({log2} <= {LAZY}, row_max, new_max)"]
    room = f"{LAZY}.0 / c" if v.keeps_raw_scores else f"{LAZY}.0"
    return [f"Compute new_max = where(new_max <= row_max, row_max, new_max + {room})"]


def _ending_lines(v: _Variant) -> list[str]:
    """Division by the row sum, and the LSE; logits without a key join the sum here."""
    to_natural = "scale" if v.keeps_raw_scores else str(LN2)
    if not v.extra_logits:
        return [
            f"Compute lse = where(row_sum > 0.0, row_max * {to_natural} + log(row_sum), -inf)",
            "Compute acc = acc * where(row_sum > 0.0, 1.0 / row_sum, 0.0)",
        ]
    lines = ["Compute row_max = row_max * c"] if v.keeps_raw_scores else []
    for logit in v.extra_logits:
        log2 = _text(Op("*", (logit, Num(LOG2E))))
        lines += [
            f"Compute new_max = max(row_max, {log2})",
            "Compute base = where(new_max == -inf, 0.0, new_max)",
            "Compute corr = exp2(row_max - base)",
            f"Compute row_sum = row_sum * corr + exp2({log2} - base)",
            "Compute acc = acc * corr",
            "Compute row_max = new_max",
        ]
    return [
        *lines,
        f"Compute lse = where(row_sum > 0.0, row_max * {LN2} + log(row_sum), -inf)",
        "Compute acc = acc * where(row_sum > 0.0, 1.0 / row_sum, 0.0)",
    ]


def _in_log2(score: Expr) -> Expr:
    return multiplied(gathered(score, _ELEMENTS), Num(LOG2E), _ELEMENTS)


def _text(e: Expr) -> str:
    return print_expression(e)


#: Tile sizes that a tuner may choose from, by the widest head size they are for: rows of queries, rows of keys, the most
#: promising first. `generator.tuning` leaves out what does not fit.
TILE_CHOICES: dict[str, tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]] = {
    "cpu": ((256, (32, 64, 128), (64, 96, 128, 256, 512, 1024)),),
    "sm_75": ((64, (128, 64), (64, 32)), (128, (128, 64), (32, 64)), (256, (64,), (32, 16))),
    "sm_80": (
        (64, (128, 256, 64), (64, 128, 96)), (128, (128, 256, 64), (48, 64)), (192, (64, 128), (32, 64)), (256, (64,), (64, 32)),
    ),
    "sm_90a": (
        (64, (192, 128, 64), (128, 96, 176)), (128, (128, 192, 64), (128, 80, 64, 160, 176)),
        (192, (128, 64), (128, 112, 96)), (256, (128, 64), (64, 80, 96)),
    ),
}  # fmt: skip
_GROUP_CHOICES = (1, 2, 4, 8, 16, 32, 64, 128)


def problem(spec: AttentionSpec, target: str) -> Problem:
    """Sizes, matrices and cuts of an attention call. Decode: one query token, the heads of a KV head's group are the rows."""
    variant = _Variant(spec, target)
    decode = spec.phase == "decode"
    rows, keys = _tile_choices(spec, target)
    if decode:
        fitting = [size for size in _GROUP_CHOICES if size >= spec.group] or [_GROUP_CHOICES[-1]]
        rows = (fitting[0],) if target.startswith("cpu") else (max(16, fitting[0]),)
    dtype = cast(DType, TL_DTYPES[spec.dtype])
    return Problem(
        name=variant.name,
        arguments=_arguments(spec),
        constants=(
            Constant("BM", rows),
            Constant("BN", keys),
            Constant("D", (spec.head_dim,)),
            Constant("DV", (spec.head_dim_v,)),
        ),
        grid=_grid(decode),
        matrices=_matrices(spec, dtype),
        cuts=_CUTS,
        loops={"j": (Num(0), expression("ceildiv(SeqK, BN)"))},
        lets=_lets(decode),
        row_axis=Var("BM"),
        column_axis=Var("BN"),
        operand_dtype=dtype,
        settings=_settings(variant, decode),
    )


def _tile_choices(spec: AttentionSpec, target: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    table = TILE_CHOICES.get("cpu" if target.startswith("cpu") else target, ((256, (64, 128), (64, 128)),))
    widest = max(spec.head_dim, spec.head_dim_v)
    _, rows, keys = next((row for row in table if widest <= row[0]), table[-1])
    return rows, keys


_CUTS: dict[str, Cut] = {
    "Q": Cut((Var("BM"), Var("D")), (Var("m"), Num(0))),
    "K": Cut((Var("BN"), Var("D")), (Var("j"), Num(0))),
    "V": Cut((Var("BN"), Var("DV")), (Var("j"), Num(0))),
    "O": Cut((Var("BM"), Var("DV")), (Var("m"), Num(0))),
    "LSE": Cut((Var("BM"),), (Var("m"),)),
}


def _arguments(spec: AttentionSpec) -> tuple[Argument, ...]:
    scalars = [s for _, rule, _ in rule_uses(spec) for s in rule.scalars]
    return (
        Argument(("scale",), "f32", positive=spec.scale > 0),
        Argument(("SeqQ", "SeqK", "Heads", "KvHeads", "Group", "Batch"), "i32"),
        *(Argument((s.name,), s.dtype, s.positive) for s in scalars),
    )


def _grid(decode: bool) -> Grid:
    rows, heads = ("Group", Axis("hk", Var("KvHeads"))) if decode else ("SeqQ", Axis("h", Var("Heads")))
    return Grid((Axis("m", expression(f"ceildiv({rows}, BM)")), heads, Axis("b", Var("Batch"))))


def _matrices(spec: AttentionSpec, dtype: DType) -> tuple[Allocate, ...]:
    decode = spec.phase == "decode"
    rows = Var("Group" if decode else "SeqQ")
    q_offset = (Var("b"), Var("hk") if decode else Var("h"))
    kv_offset = (Var("b"), Var("hk") if decode else expression("h // (Heads // KvHeads)"))
    captured = [c for _, rule, _ in rule_uses(spec) for c in rule.captured]
    keys = expression(key_extent(spec))
    return (
        *(Allocate(c.name, "global", tuple(map(Var, c.shape)), c.dtype, tuple(map(Var, c.offset))) for c in captured),
        Allocate("Q", "global", (rows, Var("D")), dtype, q_offset),
        Allocate("K", "global", (keys, Var("D")), dtype, kv_offset),
        Allocate("V", "global", (keys, Var("DV")), dtype, kv_offset),
        Allocate("O", "global", (rows, Var("DV")), dtype, q_offset),
        Allocate("LSE", "global", (rows,), "f32", q_offset),
    )


def _lets(decode: bool) -> dict[str, Expr]:
    """What the sketch's names mean. `rows` and `cols` count inside the tile that a statement writes."""
    if decode:
        rows = {"h": "hk * Group + m * BM + rows", "row": "0", "q": "SeqK - 1"}
    else:
        rows = {"row": "m * BM + rows", "q": "m * BM + rows + SeqK - SeqQ"}
    return {name: expression(text) for name, text in ({"c": f"scale * {LOG2E}"} | rows | {"kv": "j * BN + cols"}).items()}


def _settings(variant: _Variant, decode: bool) -> tuple[Hint | Option, ...]:
    """16-bit inputs round P to 8 or 11 bits: the hardware's own exponential is exact enough there."""
    settings: tuple[Hint | Option, ...] = (Option("row_sums", "rounded" if variant.looks_at_weights else "deferred"),)
    if variant.looks_at_weights:
        settings += (Option("row_maxima", "on_demand"),)
    if variant.spec.dtype != "fp32":
        settings += (Option("functions", "fast"),)
    return (*settings, Hint("view", "grouped")) if decode else settings
