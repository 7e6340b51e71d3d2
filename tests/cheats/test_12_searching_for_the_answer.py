"""Looks for the expected values in the process that judges: its memory cannot be opened, and the child holds none of them."""

import subprocess
import sys

import pytest


def test_the_judges_memory_cannot_be_opened(refused):
    witness = refused("reads_supervisor", "wrong_value", "max_abs")
    assert witness.found == "0", "the candidate opened the memory of the process that judges it"


def test_the_child_holds_no_oracle_no_tolerance_and_no_torch():
    code = (
        "import sys, verifier.sandbox_child; "
        "ours = ['verifier.' + name for name in ('oracle', 'tolerance', 'trial', 'inputs', 'checks')]; "
        "held = {'torch', 'numpy', *ours} & set(sys.modules); assert not held, held"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_seeds_are_not_repeated(spec):
    from verifier.inputs import fresh_seed

    assert len({fresh_seed() for _ in range(100)}) == 100


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_the_seed_decides_the_values(spec, name):
    import torch

    from verifier.input_values import make_values
    from verifier.inputs import suite

    one, same, other = (make_values(suite(spec, seed)[1])[name] for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
