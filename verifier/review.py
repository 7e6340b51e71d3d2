"""Judges a TL program before anything is compiled: the interpreter against the oracle, on small inputs.

Not a verdict on a kernel: a translator may still be wrong. It exists so that an author learns what is wrong in the words of its
own program: `verifier.wrong_tile` looks for the first tile that is. `verifier.reviewer` runs it in a child.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from generator.binding import Binding, BindingError, bind
from generator.spec import AttentionSpec, SpecError, spec_from_plain
from generator.tl.diagnostics import TLError
from generator.tl.expand import expand
from generator.tl.fill import fill, hole_choices
from generator.tl.interpreter import CallError, ProgramError, run
from generator.tl.ir import Copy, Num, Program, walk_statements
from generator.tl.parser import parse_or_raise
from verifier import confine, oracle
from verifier.input_values import make_values
from verifier.inputs import Case, Values, with_lengths
from verifier.reviewer import ASKED, RESULT, Wrong
from verifier.wrong_tile import TOLERANCE, FirstWrongTile


def review(program: Program, spec: AttentionSpec, seed: int = 1) -> Wrong | None:
    """None where the interpreted program gives the oracle's values on every small input; else what is wrong first.

    `program` is checked code; holes take their first choice. Raises SpecError for a spec without a reference.
    """
    core = expand(program)
    for case in _cases(core, spec, seed):
        if (wrong := _review_case(core, case)) is not None:
            return wrong
    return None


_KINDS = {"ramp": "scores that grow along the keys", "dominant": "one dominant key", "negative": "very negative scores"}


def _cases(program: Program, spec: AttentionSpec, seed: int) -> Iterator[Case]:
    """Smallest first: one tile, several ragged tiles, more keys than queries, rows that see nothing."""
    decode = spec.phase == "decode"
    group, kv_heads = min(spec.group, 3), min(spec.num_kv_heads, 2)
    tile = max(_tile_rows(program), default=64)
    inputs: list[tuple[int, int, Values]] = [(5, 5, "random"), (tile + 9, tile + 9, "random"), (7, 2 * tile + 3, "random")]
    inputs += [(23, 11, "random"), (9, 3 * tile + 5, "ramp"), (9, 2 * tile + 5, "dominant"), (9, tile + 5, "negative")]
    for seqlen_q, seqlen_k, values in inputs:
        sized = with_lengths(spec, 1, 1 if decode else seqlen_q, seqlen_k, kv_heads, group)
        yield Case(f"{sized.seqlen_q} queries, {seqlen_k} keys, {_KINDS.get(values, values)}", sized, values=values, seed=seed)


def _tile_rows(program: Program) -> Iterator[int]:
    for s in walk_statements(program.body):
        if isinstance(s, Copy) and s.into_level == "shared" and isinstance(s.shape[0], Num):
            yield int(s.shape[0].value)


def _review_case(program: Program, case: Case) -> Wrong | None:
    values = make_values(case)
    try:
        binding = bind(program, case.spec)
        tensors, scalars = _arguments(binding, case.spec, values)
        outputs = run(program, tensors, scalars, precision="exact")
    except BindingError as error:
        return Wrong(str(error), input_name=case.name)
    except (CallError, ProgramError) as error:
        return Wrong(f"the program cannot be run: {error}", input_name=case.name)
    expected = _expected(binding, case.spec, values)
    wrong_output = _first_difference(outputs, expected)
    if wrong_output is None:
        return None
    finding = FirstWrongTile(case.spec, values, scalars).find(program, tensors)
    if finding is not None:
        return Wrong(f"{finding.message} Then {wrong_output}", finding.line, case.name)
    return Wrong(wrong_output, input_name=case.name)


def _arguments(
    binding: Binding, spec: AttentionSpec, values: Mapping[str, torch.Tensor]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The program's tensors and scalars, as the interpreter takes them."""
    tensors = {}
    for t in binding.tensors:
        if not t.written:
            value = values[t.role if t.role in ("q", "k", "v") else t.name]
            array = value.numpy() if value.dtype == torch.int32 else value.float().numpy()
            tensors[t.name] = array.reshape(t.parameter_shape(spec))
    return tensors, {n: v if isinstance(v, int) else oracle.as_f32(v) for n, v in binding.values.items()}


def _expected(binding: Binding, spec: AttentionSpec, values: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    reference = oracle.attention(spec, values)
    by_role = {"o": reference.out.numpy(), "lse": reference.lse.numpy()}
    return {t.name: by_role[t.role].reshape(t.parameter_shape(spec)) for t in binding.tensors if t.written}


def _first_difference(outputs: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> str | None:
    """The first output that differs, with the first element that does."""
    for name, want in expected.items():
        got = outputs[name]
        finite = want[np.isfinite(want)]
        limit = TOLERANCE * max(1e-6, float(np.abs(finite).max(initial=0.0)))
        with np.errstate(invalid="ignore"):
            same = (got == want) | (np.abs(got - want) <= limit)
        if not same.all():
            at = tuple(int(i) for i in np.argwhere(~same)[0])
            share = f"{int((~same).sum())} of {same.size} elements differ"
            return f"{name}{list(at)} is {got[at]:.6g} where {want[at]:.6g} is right ({share})."
    return None if "O" in expected else "the program writes no O."


def main(facts: Mapping[str, Any]) -> None:
    """The child: says on its standard output, in one line of JSON, what is wrong with the program in its folder."""
    confine.bound_to_parent(facts["parent"])
    confine.limit(facts["cpu_s"], facts["memory_bytes"])
    with open(ASKED) as file:
        asked = json.load(file)
    for module, function, text in asked["first"]:
        getattr(importlib.import_module(module), function)(text)
    try:
        program = parse_or_raise(asked["text"])
        wrong = review(fill(program, next(iter(hole_choices(program)))), spec_from_plain(asked["spec"]))
    except MemoryError:
        wrong = Wrong("the interpreter ran out of memory on inputs of a few hundred tokens: the grid or a tile is too large.")
    except (TLError, SpecError) as error:
        wrong = Wrong(str(error).strip().splitlines()[0])
    os.write(1, (RESULT + json.dumps(None if wrong is None else dataclasses.asdict(wrong)) + "\n").encode())
