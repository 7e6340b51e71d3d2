"""The words and forms of TL as tables: what the parsers read by and docs/language.md prints. Parses nothing.

Keywords, levels and dtypes are read in any case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from generator.tl.ir import FUNCTIONS, DType, Span, Stmt

#: Keyword -> its canonical form.
FORMS: dict[str, str] = {
    "Kernel": "Kernel NAME",
    "Argument": "Argument NAME, ... DTYPE [positive]",
    "Constant": "Constant NAME = INTEGER, NAME in {INTEGER, ...}, ...",
    "Let": "Let NAME = EXPRESSION",
    "Grid": "Grid NAME = 0:EXTENT, ...",
    "Allocate": "Allocate NAME in LEVEL (EXTENT, ...) DTYPE [with offset [INDEX, ...]] [= INITIAL]",
    "Hint": "Hint NAME = VALUE",
    "Option": "Option NAME = VALUE",
    "Copy": "Copy NAME [into NAME] [(EXTENT, ...) in coordinate [L = ROW_TILE, D = COLUMN_TILE]] from LEVEL to LEVEL",
    "Compute": "Compute NAME = EXPRESSION",
    "Compute GEMM": "Compute GEMM NAME[^T], NAME[^T] and get|accumulate NAME",
    "Compute OPERATOR": "Compute OPERATOR OPERAND, ... [and get NAME] [with STATE, ...]",
    "Reshape": "Reshape NAME from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new) and get NAME DTYPE",
    "for": "for NAME = FIRST:END [reversed]",
    "if": "if TEST",
    "else": "else",
    "end": "end",
}

#: The paper's words for arithmetic -> the function. `Compute Multiply S, scale and get new S` is `Compute S = S * scale`.
ARITHMETIC: dict[str, str] = {
    "add": "+", "subtract": "-", "multiply": "*", "divide": "/", "max": "max", "maximum": "max", "min": "min", "minimum": "min",
    "exp": "exp", "exp2": "exp2", "log": "log", "log2": "log2", "sqrt": "sqrt", "tanh": "tanh", "abs": "abs", "negate": "neg",
    "rowmax": "rowmax", "rowsum": "rowsum",
}  # fmt: skip

#: Macros by their lower-case name.
MACROS: dict[str, str] = {"softmax": "Softmax"}

LEVEL_WORDS: dict[str, str] = {"global": "global", "shared": "shared", "register": "register", "registers": "register"}
DTYPE_WORDS: dict[str, str] = {
    "f32": "f32", "f16": "f16", "bf16": "bf16", "i32": "i32",
    "fp32": "f32", "float32": "f32", "float": "f32", "fp16": "f16", "float16": "f16", "half": "f16", "bfloat16": "bf16",
    "int32": "i32", "int": "i32",
}  # fmt: skip

#: Names that a program cannot define, in any case.
RESERVED: frozenset[str] = frozenset({f for f in FUNCTIONS if f.isidentifier()}) | {
    "inf", "nan", "rows", "cols", "for", "end", "if", "else", "in", "reversed", "from", "to", "into", "with", "get", "new",
}  # fmt: skip

#: What a Reshape without a dtype holds until the parser has looked for the GEMM that reads it.
UNSTATED = cast(DType, "")
FRAGMENT_C = ("MMA_C", "MMA_M", "MMA_N")
FRAGMENT_A = ("MMA_A", "MMA_M", "MMA_N_new")


@dataclass(frozen=True, slots=True)
class KernelLine:
    name: str
    span: Span


@dataclass(frozen=True, slots=True)
class ElseLine:
    span: Span


@dataclass(frozen=True, slots=True)
class EndLine:
    span: Span


#: A For or an If stands for its first line: its body is empty.
Line = KernelLine | ElseLine | EndLine | tuple[Stmt, ...]
