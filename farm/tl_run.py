"""Runs one TL program in the interpreter, on given or random arrays, beside the oracle that its file names. Parses no flags."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping
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

#: Of all tensors of one run together; in float64, with what is made on the way, a few GiB.
MAX_ELEMENTS = 1 << 27


def run_file(
    program: Program,
    text: str,
    folder: Path,
    inputs: Path | None,
    settings: dict[str, int | float],
    seed: int,
    output: Path | None,
) -> list[dict[str, Any]]:
    """One result for each run: sizes, and for each output its largest difference from the oracle. Raises InputError.

    folder: where the files that the header names lie.
    """
    header = read_header(text)
    given = _load(inputs) if inputs else None
    scalars = {n: v for n, v in settings.items() if n in program.arguments}
    try:
        runs = list(_runs(program, header, folder, given, scalars, seed))
    except MemoryError:
        raise InputError("sizes", "the tensors do not fit into this machine's memory; give smaller ones") from None
    if output is not None:
        with writing("--output", output) as fresh, fresh.open("wb") as file:
            np.savez(file, **runs[-1]["outputs"])
    return [{k: v for k, v in run.items() if k != "outputs"} for run in runs]


def _runs(
    program: Program, header: Header, folder: Path, given: Arrays | None, scalars: dict[str, int | float], seed: int
) -> Iterator[dict[str, Any]]:
    if given is not None:
        yield _run(program, given, _complete(program, scalars), None, "given arrays")
    elif header.specs:
        if scalars:
            raise InputError(
                "--set", f"{', '.join(scalars)}: the header's spec and run lines decide it; change those, or give --inputs"
            )
        for spec in header.specs:
            yield _attention(program, spec, np.random.default_rng(seed))
    else:
        for sizes in _sizes(header, scalars):
            yield _other(program, _complete(program, sizes | scalars), header, folder, np.random.default_rng(seed))


def _complete(program: Program, scalars: dict[str, int | float]) -> dict[str, int | float]:
    if missing := [name for name in program.arguments if name not in scalars]:
        raise InputError(
            "--set", f"expected a value of {', '.join(missing)} too: --set {missing[0]}=VALUE, or in the '# run:' line"
        )
    return scalars


def _check_size(shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Before anything is made: memory that the system only promises ends a process without a word when it is used."""
    for name, shape in shapes.items():
        if min(shape, default=0) < 0:
            raise InputError("sizes", f"expected none below 0, found {name} with {shape}")
    elements = {name: math.prod(shape) for name, shape in shapes.items()}
    if sum(elements.values()) > MAX_ELEMENTS:
        largest = max(elements, key=elements.__getitem__)
        raise InputError(
            "sizes",
            f"expected at most {MAX_ELEMENTS:,} elements in all, found {largest} with {shapes[largest]}; give smaller ones",
        )


def _sizes(header: Header, scalars: dict[str, int | float]) -> list[dict[str, int | float]]:
    if not header.runs and not scalars:
        raise InputError("sizes", "the file's header names none ('# run: M=70 N=50'); give --set NAME=VALUE or --inputs FILE.npz")
    return list(header.runs) or [{}]


def _load(path: Path) -> Arrays:
    try:
        with path.open("rb") as file:  # NumPy leaves a file that is no archive open
            found = np.load(file, allow_pickle=False)
            if isinstance(found, np.lib.npyio.NpzFile):
                return dict(found)
            why = "one array without a name"
    except OSError as error:
        why = (error.strerror or str(error)).lower()
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error):
        why = "other bytes, or arrays of Python objects"
    raise InputError("--inputs", f"{path}: expected arrays in NumPy's .npz form, as numpy.savez writes them ({why})")


def _attention(program: Program, spec: AttentionSpec, rng: np.random.Generator) -> dict[str, Any]:
    """The program as an attention call, beside the float64 oracle."""
    import torch

    from verifier.input_values import captured_values
    from verifier.inputs import Case
    from verifier.oracle import attention

    binding = bind(program, spec)
    _check_size({t.name: t.shape for t in binding.tensors})
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
    program: Program, scalars: dict[str, int | float], header: Header, folder: Path, rng: np.random.Generator
) -> dict[str, Any]:
    """A program that is no attention call, beside the function that its header names, if any."""
    core, rounded = expand(program), Numerics("stated")
    inputs: Arrays = {}
    shapes = matrix_shapes(core, scalars)
    _check_size(shapes)
    for name, shape in shapes.items():
        dtype = core.allocations[name].dtype
        if name not in core.outputs:
            values = rng.integers(0, 2, shape) if dtype == "i32" else rounded.round_to(dtype, rng.standard_normal(shape))
            inputs[name] = np.asarray(values)
    inputs |= header.made_inputs(folder, shapes, scalars, int(rng.integers(1 << 32)))
    expected = dict(header.reference(folder)(inputs, scalars)) if header.oracle else None
    return _run(program, inputs, scalars, expected, " ".join(f"{k}={v}" for k, v in scalars.items()))


def _run(program: Program, inputs: Arrays, scalars: dict[str, Any], expected: dict[str, Any] | None, what: str) -> dict[str, Any]:
    try:
        outputs = interpret(program, inputs, scalars)
    except CallError as error:
        raise InputError("", str(error)) from None
    if expected is None:
        shapes = ", ".join(f"{n} {v.shape}" for n, v in outputs.items())
        return {"run": what, "outputs": outputs, "line": f"{what}: {shapes} (no oracle to compare with)"}
    for name, output in outputs.items():
        if name not in expected or np.shape(expected[name]) != output.shape:
            found = f"shape {np.shape(expected[name])}" if name in expected else ", ".join(expected) or "nothing"
            raise InputError("oracle", f"expected {name} with shape {output.shape}, found {found}")
    differences = {name: _difference(output, np.asarray(expected[name])) for name, output in outputs.items()}
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
