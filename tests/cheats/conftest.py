"""Kernels that must be refused: compiled once, judged on one small causal problem with grouped heads."""

import pytest

from generator.spec import AttentionSpec, Rule
from verifier.compile import compile_translated
from verifier.judge import judge
from verifier.records import Binary, Failed, Verdict
from verifier.sandbox import SandboxLimits
from verifier.traps import kernel


@pytest.fixture(scope="session")
def spec() -> AttentionSpec:
    return AttentionSpec(4, 2, 64, 64, 2, 100, 100, masks=(Rule.make("causal"),))


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    cache = tmp_path_factory.mktemp("binaries")

    def build(name: str, spec: AttentionSpec) -> Binary:
        binary = compile_translated(kernel(spec, name), cache)
        assert isinstance(binary, Binary), binary
        return binary

    return build


@pytest.fixture
def verdict_on(compiled, spec):
    def judged(name: str, on: AttentionSpec | None = None) -> Verdict:
        on = on or spec
        return judge(compiled(name, on), kernel(on, name).launch, on, num_threads=2, limits=SandboxLimits(run_s=2.0))

    return judged


@pytest.fixture
def refused(verdict_on):
    """The verdict must be this reason, found by this check; the witness comes back for a closer look."""

    def check(name: str, reason: str, check: str, on: AttentionSpec | None = None):
        verdict = verdict_on(name, on)
        assert isinstance(verdict, Failed), f"{name} passed"
        assert (verdict.reason, verdict.witness.check) == (reason, check), verdict.witness
        assert verdict.witness.message and verdict.witness.input_name
        return verdict.witness

    return check
