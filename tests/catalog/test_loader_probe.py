"""The golden case in a child process: a kernel that crashes, hangs or errs never reaches the serving process."""

import pytest
import torch
from kernel_factory import CAUSAL, CAUSAL_BR, Shelf, spec

import catalog
from catalog import probe, serving
from generator.spec import Rule

pytestmark = pytest.mark.usefixtures("fresh_loader")

X = torch.randn(1, 4, 30, 16, generator=torch.Generator().manual_seed(1))


def kernels(shelf):
    return shelf.source().index.all()


@pytest.mark.parametrize(
    "family",
    [
        {},
        {"masks": CAUSAL},
        {"masks": (Rule.make("window", left=9, right=3),), "scores": (Rule.make("softcap", cap=3.0),)},
        {"masks": CAUSAL_BR, "scores": (Rule.make("alibi"),), "dtype": "bf16", "heads": 4, "kv_heads": 2},
    ],
)
def test_a_sound_kernel_passes(family):
    shelf = Shelf()
    shelf.add(spec(**family), lse=True)
    (kernel,) = kernels(shelf)
    assert probe.golden_case(kernel).shape == (1, 32, 17)
    assert probe.probe(kernel, shelf.binaries[kernel.binary_hash], 20.0) is None


@pytest.mark.parametrize(
    ("fault", "words"),
    [("crash", "killed by SIGSEGV"), ("wrong", "golden case"), ("no_memory", "no memory"), ("hang", "did not end within 2 s")],
)
def test_a_kernel_that_fails_is_never_loaded(fault, words):
    shelf = Shelf()
    bad, good = shelf.add(spec(), fault=fault, ours_s=1e-5), shelf.add(spec())
    catalog.configure(catalog=shelf.source(), probe_timeout_s=2.0 if fault == "hang" else 60.0)
    out = catalog.scaled_dot_product_attention(X, X, X)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(X, X, X))
    told = {k["kernel_id"]: k for k in catalog.loaded_kernels()}
    assert told[bad]["quarantined"].startswith("probe_failed") and words in told[bad]["quarantined"]
    assert told[good]["probed"] and not told[good]["quarantined"] and catalog.last_decision().kernel_id == good
    assert serving.loader.loads == 1


def test_a_decode_kernel_has_a_golden_case_too():
    shelf = Shelf()
    shelf.add(spec(seqlen_q=1, seqlen_k=300, heads=4, kv_heads=2, phase="decode"))
    (kernel,) = kernels(shelf)
    assert probe.probe(kernel, shelf.binaries[kernel.binary_hash], 20.0) is None


def test_bytes_that_are_no_shared_object_are_quarantined():
    shelf = Shelf()
    shelf.add(spec())
    (kernel,) = kernels(shelf)
    assert "golden" not in str(probe.probe(kernel, b"\x7fELF rubbish", 20.0))
    assert probe.probe(kernel, b"\x7fELF rubbish", 20.0).code == "probe_failed"
