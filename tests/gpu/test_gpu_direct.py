"""A model's recorded first CUDA answer on a real GPU: its device code, unchanged, launched from data and held to the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded_cuda import device_source, launch_text

from farm.devices import device_for
from generator.spec import AttentionSpec, Rule
from generator.targets import find_target
from generator.translate.direct import read_direct
from generator.translate.records import Translated
from verifier.compile import compile_translated
from verifier.judge import judge
from verifier.records import Binary, Passed

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_recorded_answer_is_right(device: str, cache: Path, causal: bool, kv_heads: int) -> None:
    if device_for("sm_90a") is None:
        pytest.skip("no device here runs sm_90a")
    spec = AttentionSpec(4, kv_heads, 128, 128, 2, 300, 300, "bf16", (Rule.make("causal"),) if causal else ())
    translated = read_direct(device_source(), launch_text(causal), spec, find_target("sm_90a"))
    assert isinstance(translated, Translated), str(translated)
    binary = compile_translated(translated, cache)
    assert isinstance(binary, Binary), binary
    verdict = judge(binary, translated.launch, spec, device=device)
    assert isinstance(verdict, Passed), verdict
