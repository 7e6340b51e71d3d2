"""A spec's inputs with what they should give, made once, and the proof that they can tell wrong kernels from right ones.

The proof: null kernels (zeros, the mean of V, V[0], a wrong scale, dropped rules) have to fail on at least one input wherever
they differ from the right answer. A spec for which that does not hold is not used. Runs no candidate.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from generator.spec import AttentionSpec, SpecError
from verifier import oracle
from verifier.checks import Expected, Outputs, check_outputs
from verifier.dtypes import torch_dtype
from verifier.environment import cores_given
from verifier.input_values import make_values
from verifier.inputs import Case, fresh_seed, suite
from verifier.tolerance import UNIT_ROUNDOFF, limits, plain_errors

#: Inputs larger than this (scores) take no part in the proof; the small ones are many.
PROOF_ELEMENTS = 1 << 21


class WeakSuite(SpecError):
    """The inputs cannot tell a null kernel from a right one: nothing may be judged by them."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One input: its recipe, its tensors, and what is expected of them."""

    case: Case
    values: Mapping[str, Tensor]
    expected: Expected


@dataclass(frozen=True, slots=True)
class Trials:
    """All of a spec's inputs, proved; `seed` says what they were made from."""

    spec: AttentionSpec
    seed: int
    trials: tuple[Trial, ...]


def expectation(
    name: str, spec: AttentionSpec, values: Mapping[str, Tensor], rows: Tensor, pairs: oracle.Pairs | None = None
) -> Expected:
    """Reference and limits for one call, or for some pairs of it. Raises WeakSuite for an input whose right answer is not
    finite.
    """
    reference = oracle.attention(spec, values, rows, pairs)
    if not bool(reference.out.isfinite().all()) or bool((reference.lse.isnan() | (reference.lse == torch.inf)).any()):
        raise WeakSuite(f"input {name!r}: its right answer is not finite, so nothing can be compared with it")
    trusted = plain_errors(spec, values, rows, reference, pairs)
    return Expected(name, rows, reference, trusted, limits(trusted, reference, torch_dtype(spec)))


def make_trial(case: Case) -> Trial:
    values = make_values(case)
    return Trial(case, values, expectation(case.name, case.spec, values, case.row_indices()))


class _OneThread:
    """torch's own number of threads is 1 while anybody is inside; the last one out puts back what the first one found."""

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, 1

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if self._inside == 0:
                self._before = torch.get_num_threads()
                torch.set_num_threads(1)
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    torch.set_num_threads(self._before)


#: Small tensors gain nothing from threads, and on a busy machine lose a hundredfold: idle OpenMP threads spin.
one_thread = _OneThread()


#: Specs whose inputs are kept: a sweep goes through several at a time, and inputs take seconds to make and some 50 MiB to keep.
KEPT_TRIALS = 16


@functools.lru_cache(maxsize=KEPT_TRIALS)
def trials_for(spec: AttentionSpec, seed: int | None = None) -> Trials:
    """The proved inputs of a spec. Without a seed: a fresh one, kept for this process. Raises WeakSuite, SpecError."""
    seed = fresh_seed() if seed is None else seed
    with one_thread(), ThreadPoolExecutor(min(4, cores_given()), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        trials = tuple(pool.map(make_trial, suite(spec, seed)))
        prove(trials)
    return Trials(spec, seed, trials)


#: What a null kernel gives for an input: O (B, H, R, Dv) in float64; None where it is no null kernel of this spec.
Null = Callable[[Trial], Tensor | None]


def _zeros(trial: Trial) -> Tensor:
    return torch.zeros_like(trial.expected.reference.out)


def _mean_of_v(trial: Trial) -> Tensor:
    v = _heads(trial)
    if "KvLen" in trial.values:  # what lies beyond a length may be NaN
        lengths = trial.values["KvLen"].long().view(-1, 1, 1, 1)
        v = torch.where(torch.arange(v.shape[2]).view(1, 1, -1, 1) < lengths, v, 0)
    return v.mean(2, keepdim=True).expand_as(trial.expected.reference.out)


def _first_v(trial: Trial) -> Tensor:
    return _heads(trial)[:, :, :1].nan_to_num(0, 0, 0).expand_as(trial.expected.reference.out)


def _heads(trial: Trial) -> Tensor:
    return trial.values["v"].double().repeat_interleave(trial.case.spec.group, 1)


def _wrong_scale(trial: Trial) -> Tensor:
    spec = trial.case.spec
    return _answer(trial, replace(spec, softmax_scale=1.0 if abs(spec.scale - 1) > 1e-6 else 0.5))


def _no_masks(trial: Trial) -> Tensor | None:
    spec = trial.case.spec
    kept = tuple(r for r in spec.masks if r.name == "padding")  # without it, rubbish beyond the length would be read
    return _answer(trial, replace(spec, masks=kept)) if kept != spec.masks else None


def _no_scores(trial: Trial) -> Tensor | None:
    spec = trial.case.spec
    return _answer(trial, replace(spec, scores=())) if spec.scores else None


def _answer(trial: Trial, spec: AttentionSpec) -> Tensor:
    return oracle.attention(spec, trial.values, trial.expected.rows).out


NULLS: dict[str, Null] = {
    "zeros": _zeros,
    "mean of V": _mean_of_v,
    "V[0]": _first_v,
    "wrong scale": _wrong_scale,
    "masks dropped": _no_masks,
    "score rules dropped": _no_scores,
}


def prove(trials: Sequence[Trial]) -> None:
    """Raises WeakSuite that names the null kernel which no input refuses, or the input tensor to which no output reacts."""
    small = [t for t in trials if t.case.spec.num_heads * len(t.expected.rows) * t.case.spec.seqlen_k <= PROOF_ELEMENTS]
    for name, null in NULLS.items():
        differs = False
        for trial, out in _null_outputs(small, null):
            if _refused(trial, out):
                break
            differs = differs or _differs(trial, out)
        else:
            if differs:
                raise WeakSuite(
                    f"the inputs of {trials[0].case.spec} do not refuse the null kernel {name!r}; nothing is judged by them"
                )


def _null_outputs(trials: Sequence[Trial], null: Null) -> Iterator[tuple[Trial, Tensor]]:
    """Later inputs first: they are the ones that tell most."""
    for trial in reversed(trials):
        if (out := null(trial)) is not None:
            yield trial, out


def _refused(trial: Trial, out: Tensor) -> bool:
    """By its O alone: LSE is given right."""
    expected = trial.expected
    every_row = replace(expected, rows=torch.arange(len(expected.rows)))
    rounded = out.to(torch_dtype(trial.case.spec))
    return check_outputs(Outputs(rounded, expected.reference.lse.float(), {}), every_row) is not None


def _differs(trial: Trial, out: Tensor) -> bool:
    reference = trial.expected.reference
    unit = UNIT_ROUNDOFF[torch_dtype(trial.case.spec)]
    return bool(((out - reference.out).abs() > 4 * unit * reference.magnitude + 1e-300).any())
