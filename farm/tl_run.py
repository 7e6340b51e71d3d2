"""Runs one TL program in the interpreter, on given or random arrays, beside the oracle that its file names. Parses no flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from farm.console import InputError, writing
from generator.binding import bind
from generator.spec import AttentionSpec
from generator.tl.expand import expand
from generator.tl.header import Header, read_header
from generator.tl.interpreter import CallError
from generator.tl.interpreter import run as interpret
from generator.tl.ir import Program
from generator.tl.memory import matrix_shapes
from generator.tl.numerics import Numerics

Arrays = dict[str, np.ndarray]
#: Largest difference, relative to the largest right value, that rounding explains.
TOLERANCE = {"f32": 4e-6, "f16": 2**-9, "bf16": 2**-6, "i32": 0.0}


def run_file(
    program: Program,
    text: str,
    path: Path,
    inputs: Path | None,
    settings: dict[str, int | float],
    seed: int,
    output: Path | None,
) -> list[dict[str, Any]]:
    """One result for each run: sizes, and for each output its largest difference from the oracle. Raises InputError."""
    header = read_header(text)
    given = _load(inputs) if inputs else None
    scalars = {n: v for n, v in settings.items() if n in program.arguments}
    if given is not None:
        runs = [_run(program, given, scalars, None, "given arrays")]
    elif header.specs:
        runs = [_attention(program, spec, np.random.default_rng(seed)) for spec in header.specs]
    else:
        runs = [_other(program, sizes | scalars, header, path, np.random.default_rng(seed)) for sizes in _sizes(header, scalars)]
    if output:
        with writing(output):
            np.savez(output, **runs[-1]["outputs"])
    return [{k: v for k, v in run.items() if k != "outputs"} for run in runs]


def _sizes(header: Header, scalars: dict[str, int | float]) -> list[dict[str, int | float]]:
    if not header.runs and not scalars:
        raise InputError("sizes", "the file's header names none ('# run: M=70 N=50'); give --set NAME=VALUE or --inputs FILE.npz")
    return list(header.runs) or [{}]


def _load(path: Path) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except (OSError, ValueError) as error:
        why = error.strerror or "" if isinstance(error, OSError) else ""
        raise InputError(
            "--inputs", f"{path}: expected arrays in NumPy's .npz form" + (f" ({why.lower()})" if why else "")
        ) from None


def _attention(program: Program, spec: AttentionSpec, rng: np.random.Generator) -> dict[str, Any]:
    """The program as an attention call, beside the float64 oracle."""
    import torch

    from verifier.inputs import Case, captured_values
    from verifier.oracle import attention

    binding = bind(program, spec)
    rounded = Numerics("stated")
    call = {k: v.numpy() for k, v in captured_values(Case("run", spec)).items()}
    for tensor in binding.tensors:
        if not tensor.written and tensor.name not in call:
            call[tensor.name] = np.asarray(rounded.round_to(tensor.dtype, rng.standard_normal(tensor.shape)))
    inputs = {t.name: call[t.name].reshape(t.parameter_shape(spec)) for t in binding.tensors if not t.written}
    lower = {"Q": "q", "K": "k", "V": "v"}
    reference = attention(spec, {lower.get(n, n): torch.from_numpy(np.ascontiguousarray(a)) for n, a in call.items()})
    wanted = {"O": reference.out.numpy(), "LSE": reference.lse.numpy()}
    expected = {t.name: wanted[t.name].reshape(t.parameter_shape(spec)) for t in binding.tensors if t.written}
    return _run(program, inputs, dict(binding.values), expected, str(spec))


def _other(
    program: Program, scalars: dict[str, int | float], header: Header, path: Path, rng: np.random.Generator
) -> dict[str, Any]:
    """A program that is no attention call, beside the function that its header names, if any."""
    core, rounded = expand(program), Numerics("stated")
    inputs: Arrays = {}
    shapes = matrix_shapes(core, scalars)
    for name, shape in shapes.items():
        dtype = core.allocations[name].dtype
        if name not in core.outputs:
            values = rng.integers(0, 2, shape) if dtype == "i32" else rounded.round_to(dtype, rng.standard_normal(shape))
            inputs[name] = np.asarray(values)
    inputs |= header.made_inputs(path.parent, shapes, scalars, int(rng.integers(1 << 32)))
    expected = dict(header.reference(path.parent)(inputs, scalars)) if header.oracle else None
    return _run(program, inputs, scalars, expected, " ".join(f"{k}={v}" for k, v in scalars.items()))


def _run(program: Program, inputs: Arrays, scalars: dict[str, Any], expected: dict[str, Any] | None, what: str) -> dict[str, Any]:
    try:
        outputs = interpret(program, inputs, scalars)
    except CallError as error:
        raise InputError("", str(error)) from None
    if expected is None:
        shapes = ", ".join(f"{n} {v.shape}" for n, v in outputs.items())
        return {"run": what, "outputs": outputs, "line": f"{what}: {shapes} (no oracle to compare with)"}
    differences = {name: _difference(outputs[name], np.asarray(value)) for name, value in expected.items()}
    agrees = all(d <= TOLERANCE[program.allocations[n].dtype] for n, d in differences.items())
    words = ", ".join(f"{n} off by {d:.2g}" for n, d in differences.items())
    verdict = "agrees with the oracle" if agrees else "DIFFERS from the oracle"
    line = f"{what}: {verdict}: {words} of the largest value"
    return {"run": what, "outputs": outputs, "agrees": agrees, "differences": differences, "line": line}


def _difference(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference over the largest right value; infinite where only one of the two is finite."""
    finite = np.isfinite(wanted)
    if not np.array_equal(np.where(finite, 0, wanted), np.where(finite, 0, found), equal_nan=True):
        return float("inf")
    return float(np.abs(found[finite] - wanted[finite]).max(initial=0) / np.abs(wanted[finite]).max(initial=1e-30))
