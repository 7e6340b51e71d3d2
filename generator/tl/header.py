"""The header of a TL file: comment lines that say what to compare the program with, and at which sizes. Part of no program.

    # Any words about the program.
    # oracle: attention                                  what it computes: an attention call ...
    # spec: heads=4/2 dim=64 dtype=bf16 mask=causal mask=window(left=9) score=softcap(cap=30.0)
    # run: batch=2 seqlen_q=100 seqlen_k=130             sizes to run it at, one line each

    # oracle: references.py:gemm                         ... or a function of a Python file beside the TL file
    # run: M=70 N=50 K=33                                every scalar argument of the program
    # inputs: references.py:pages                        where random numbers will not do: a function that makes some of them

`dim=192/128` is head_dim / head_dim_v, `heads=4/2` num_heads / num_kv_heads; `phase=` and `scale=` may be given too.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from generator.spec import AttentionSpec, Rule, SpecError

ATTENTION = "attention"
#: A dense reference of a program that is no attention: (tensors, scalars) -> outputs by name, in float64.
Reference = Callable[[Mapping[str, Any], Mapping[str, int | float]], Mapping[str, Any]]
#: Inputs that have to be more than random: (shapes, scalars, seed) -> arrays by name, for some of the inputs.
Inputs = Callable[[Mapping[str, tuple[int, ...]], Mapping[str, int | float], int], Mapping[str, Any]]
_FIELD = re.compile(r"#\s*(oracle|inputs|spec|run)\s*:(.*)")
_WORD = re.compile(r"(\w+)=(\w+\([^)]*\)|\S+)")
_RULE = re.compile(r"(\w+)(?:\(([^)]*)\))?")
_SIZES = ("batch", "seqlen_q", "seqlen_k")


class HeaderError(ValueError):
    """A header line that cannot be used: names the line, what was found and what is expected."""


@dataclass(frozen=True, slots=True)
class Header:
    """oracle: "attention", "FILE.py:FUNCTION", or "" where the file names none. spec: for attention, at the first of the sizes.

    runs: sizes by name: batch, seqlen_q, seqlen_k for attention, else scalar arguments. inputs: "FILE.py:FUNCTION" or "".
    """

    oracle: str
    spec: AttentionSpec | None
    runs: tuple[dict[str, int | float], ...]
    inputs: str = ""

    @property
    def specs(self) -> tuple[AttentionSpec, ...]:
        """The attention spec at each size."""
        return () if self.spec is None else tuple(self.spec.with_shape(**cast(dict[str, int], sizes)) for sizes in self.runs)

    def reference(self, folder: Path) -> Reference:
        """The function that `oracle` names, from the folder that the TL file lies in. Raises HeaderError."""
        return _function("oracle", f"{ATTENTION} or FILE.py:FUNCTION", self.oracle, folder)

    def made_inputs(
        self, folder: Path, shapes: Mapping[str, tuple[int, ...]], scalars: Mapping[str, int | float], seed: int
    ) -> dict[str, Any]:
        """What the function that `inputs` names gives; nothing where the file names none. Raises HeaderError."""
        if not self.inputs:
            return {}
        return dict(_function("inputs", "FILE.py:FUNCTION", self.inputs, folder)(shapes, scalars, seed))


def _function(field: str, allowed: str, name: str, folder: Path) -> Callable[..., Mapping[str, Any]]:
    """A function of somebody's file; whatever that raises is a HeaderError with its words."""
    file, _, function = name.partition(":")
    path = folder / file
    if not path.is_file():
        raise HeaderError(f"{field}: expected {allowed} with a file in {folder}, found {name!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise HeaderError(f"{field}: expected a Python file, found {path.name}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise HeaderError(f"{field}: {path}: cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found := getattr(module, function, None)):
        raise HeaderError(f"{field}: expected a function of {path.name}, found {function!r}")

    def called(*arguments: Any) -> Mapping[str, Any]:
        try:
            result = found(*arguments)
        except Exception as error:
            raise HeaderError(f"{field}: {name}: {type(error).__name__}: {error}") from error
        if not isinstance(result, Mapping):
            raise HeaderError(f"{field}: {name}: expected arrays by name, found {type(result).__name__}")
        return cast(Mapping[str, Any], result)

    return called


def read_header(text: str) -> Header:
    """The fields of the comment lines that a text starts with. Raises HeaderError for a line that is wrong."""
    fields: dict[str, list[tuple[int, str]]] = {"oracle": [], "inputs": [], "spec": [], "run": []}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            break
        if found := _FIELD.match(line.strip()):
            fields[found[1]].append((number, found[2].strip()))
    for field in ("oracle", "inputs", "spec"):
        if len(fields[field]) > 1:
            raise HeaderError(f"line {fields[field][1][0]}: {field}: expected once, found again")
    oracle = fields["oracle"][0][1] if fields["oracle"] else ""
    runs = tuple(_numbers(number, words) for number, words in fields["run"])
    if oracle != ATTENTION:
        return Header(oracle, None, runs, fields["inputs"][0][1] if fields["inputs"] else "")
    if not fields["spec"]:
        raise HeaderError("spec: expected a line such as '# spec: heads=4/2 dim=64 dtype=bf16 mask=causal', found none")
    if not runs:
        raise HeaderError("run: expected a line such as '# run: batch=2 seqlen_q=100 seqlen_k=130', found none")
    for (number, _), sizes in zip(fields["run"], runs, strict=True):
        if tuple(sorted(sizes)) != tuple(sorted(_SIZES)):
            raise HeaderError(f"line {number}: run: expected {', '.join(_SIZES)}, found {', '.join(sizes) or 'nothing'}")
    return Header(oracle, _spec(*fields["spec"][0], dict(runs[0])), runs)


def _words(line: int, field: str, text: str) -> list[tuple[str, str]]:
    words = _WORD.findall(text)
    if not words or _WORD.sub("", text).strip():
        raise HeaderError(f"line {line}: {field}: expected NAME=VALUE words, found {text!r}")
    return words


def _number(line: int, field: str, text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise HeaderError(f"line {line}: {field}: expected a number, found {text!r}") from None


def _numbers(line: int, text: str) -> dict[str, int | float]:
    return {name: _number(line, f"run: {name}", value) for name, value in _words(line, "run", text)}


def _pair(line: int, field: str, text: str) -> tuple[int, int]:
    first, _, second = text.partition("/")
    a, b = (_number(line, field, part) for part in (first, second or first))
    if not (isinstance(a, int) and isinstance(b, int)):
        raise HeaderError(f"line {line}: {field}: expected whole numbers, found {text!r}")
    return a, b


def _rule(line: int, field: str, text: str) -> Rule:
    found = _RULE.fullmatch(text)
    if found is None:
        raise HeaderError(f"line {line}: {field}: expected RULE or RULE(NAME=VALUE,...), found {text!r}")
    parameters: dict[str, int | float | str] = {}
    for part in filter(None, (p.strip() for p in (found[2] or "").split(","))):
        name, _, value = part.partition("=")
        parameters[name.strip()] = (
            value.strip() if value.strip().isidentifier() else _number(line, f"{field}.{name}", value.strip())
        )
    return Rule.make(found[1], **parameters)


def _spec(line: int, text: str, sizes: dict[str, Any]) -> AttentionSpec:
    masks: list[Rule] = []
    scores: list[Rule] = []
    values: dict[str, Any] = {}
    for name, value in _words(line, "spec", text):
        match name:
            case "mask":
                masks.append(_rule(line, "mask", value))
            case "score":
                scores.append(_rule(line, "score", value))
            case "heads":
                values["num_heads"], values["num_kv_heads"] = _pair(line, "heads", value)
            case "dim":
                values["head_dim"], values["head_dim_v"] = _pair(line, "dim", value)
            case "scale":
                values["softmax_scale"] = float(_number(line, "scale", value))
            case "dtype" | "phase":
                values[name] = value
            case _:
                raise HeaderError(f"line {line}: spec: expected heads, dim, dtype, mask, score, phase or scale, found {name!r}")
    for name, field in (("heads", "num_heads"), ("dim", "head_dim")):
        if field not in values:
            raise HeaderError(f"line {line}: spec: expected {name}=..., found none")
    try:
        return replace(AttentionSpec(**values, **sizes), masks=tuple(masks), scores=tuple(scores))
    except SpecError as error:
        raise HeaderError(f"line {line}: spec: {error}") from None
