"""Inputs from which anything passes: a suite that does not refuse null kernels is not used."""

from dataclasses import replace

import pytest
import torch

from verifier.input_values import make_values
from verifier.inputs import suite
from verifier.trial import Trial, WeakSuite, expectation, prove, trials_for


def spoiled(spec, **tensors):
    trials = []
    for case in suite(spec, 5)[:3]:
        values = make_values(case)
        values |= {name: change(values[name]) for name, change in tensors.items()}
        trials.append(Trial(case, values, expectation(case.name, case.spec, values, case.row_indices())))
    return trials


def test_the_suite_as_it_is_refuses_every_null_kernel(spec):
    assert trials_for(spec).trials


def test_values_that_are_all_equal_are_noticed(spec):
    with pytest.raises(WeakSuite, match="mean of V"):
        prove(spoiled(replace(spec, masks=()), v=lambda v: 1 + 1e-6 * v))


def test_values_of_zero_are_right_for_a_kernel_that_gives_zeros(spec):
    """Nothing differs then: no null kernel is wrong, and none has to be refused; so such values are not in the suite."""
    prove(spoiled(spec, v=torch.zeros_like))
    for case in suite(spec, 5):
        assert all(float(make_values(case)[name].float().nan_to_num().abs().max()) > 0 for name in "qkv"), case.name
