"""Zeros, the mean of V, V[0] and a forgotten scale: near the right answer for tolerances that do not know its size."""

import pytest

from generator.spec import AttentionSpec


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["zeros", "mean_of_v", "first_v"])
def test_outputs_that_ignore_the_scores_are_refused(refused, name, dtype):
    refused(name, "wrong_value", "max_abs", AttentionSpec(4, 2, 64, 64, 1, 64, 64, dtype=dtype))


def test_a_forgotten_scale_is_refused_by_its_output_alone(refused, spec):
    assert refused("wrong_scale", "wrong_value", "lse_max").input_name == "length 1"
    long = AttentionSpec(1, 1, 16, 16, 1, 1, 4096)
    assert refused("zeros", "wrong_value", "max_abs", long)
