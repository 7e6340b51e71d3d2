"""A user's own mask and score rules, from a Python file that a plan names. Defines no rule; edits no package.

The file holds three dicts: `MASKS` (name -> generator.masks.MaskRule) and `SCORES` (name -> generator.scores.ScoreRule) say in
TL what the kernel computes; `REFERENCES` (name -> function) says the same once more as dense float64 code for the judge, who
takes no rule without it. `INPUTS` (captured tensor -> function) is optional. examples/variants/ has one.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from catalog.locations import read_small
from generator.canonical import digest_bytes
from generator.masks import MASKS, MaskRule
from generator.rule_check import rule_problems
from generator.scores import SCORES, ScoreRule
from generator.spec import SpecError


class VariantsError(ValueError):
    """A file of rules that cannot be used: one sentence with the name in it that is wrong."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A file whose rules this process knows, and their names."""

    path: str
    digest: str
    masks: tuple[str, ...]
    scores: tuple[str, ...]


_LOADED: dict[str, Loaded] = {}


def load_variants(path: str | Path) -> Loaded:
    """Registers the rules of a file, once a process. Raises VariantsError for a file that cannot be used."""
    path = Path(os.path.realpath(path))  # which no loop of links stops
    try:
        digest = digest_bytes(read_small(path))
    except OSError as error:
        raise VariantsError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}") from None
    known = _LOADED.get(str(path))
    if known is not None:
        if known.digest != digest:
            raise VariantsError(f"{path}: changed since this process read it; start again")
        return known
    module = _run(path, digest)
    masks, scores = _dict(module, "MASKS", MaskRule), _dict(module, "SCORES", ScoreRule)
    if not masks and not scores:
        raise VariantsError(f"{path}: expected a dict MASKS or SCORES with at least one rule, found none")
    references = _dict(module, "REFERENCES", None)
    for name in (*masks, *scores):
        _check(path, name, references)
    if problems := [p for rule in (*masks.values(), *scores.values()) for p in rule_problems(rule)]:
        raise VariantsError(f"{path}: {'; '.join(problems)}")
    _register(masks, scores, references, _dict(module, "INPUTS", None), path)
    _LOADED[str(path)] = Loaded(str(path), digest, tuple(masks), tuple(scores))
    return _LOADED[str(path)]


def calls_to_load() -> tuple[tuple[str, str, str], ...]:
    """What a child has to call to know the rules that this process knows: module, function, argument."""
    return tuple((__name__, load_variants.__name__, known.path) for known in _LOADED.values())


def _run(path: Path, digest: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"kernel_farm_variants_{digest[:12]}", path)
    if spec is None or spec.loader is None:
        raise VariantsError(f"{path}: expected a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        line = next((f":{t.tb_lineno}" for t in _frames(error) if t.tb_frame.f_code.co_filename == str(path)), "")
        raise VariantsError(f"{path}{line}: {type(error).__name__}: {error}") from None
    return module


def _frames(error: BaseException) -> list[Any]:
    frames, now = [], error.__traceback__
    while now is not None:
        frames.append(now)
        now = now.tb_next
    return frames[::-1]


def _dict(module: ModuleType, name: str, kind: type[MaskRule] | type[ScoreRule] | None) -> dict[str, Any]:
    found = getattr(module, name, {})
    if not isinstance(found, dict):
        raise VariantsError(f"{module.__file__}: {name}: expected a dict, found {type(found).__name__}")
    for key, value in found.items():
        if kind is not None and (not isinstance(value, kind) or value.name != key):
            raise VariantsError(
                f"{module.__file__}: {name}[{key!r}]: expected a {kind.__name__} of that name, found {value!r:.80}"
            )
        if kind is None and not callable(value):
            raise VariantsError(f"{module.__file__}: {name}[{key!r}]: expected a function, found {value!r:.80}")
    return found


def _check(path: Path, name: str, references: dict[str, Any]) -> None:
    if name in MASKS or name in SCORES:
        raise VariantsError(f"{path}: {name}: a rule of this name is there already; choose another name")
    if name not in references:
        raise VariantsError(f"{path}: {name}: REFERENCES has no dense definition of it, and without one nothing can be judged")


def _register(
    masks: dict[str, Any], scores: dict[str, Any], references: dict[str, Any], inputs: dict[str, Any], path: Path
) -> None:
    from verifier.input_values import register_captured
    from verifier.oracle import register_mask, register_score

    try:
        for name in masks:
            register_mask(name, references[name])
        for name in scores:
            register_score(name, references[name])
    except SpecError as error:
        raise VariantsError(f"{path}: {error}") from None
    for name, maker in inputs.items():
        register_captured(name, maker)
    MASKS.update(masks)
    SCORES.update(scores)
