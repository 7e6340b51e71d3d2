"""Kernels that must be refused: compiled once, judged on one small causal problem with grouped heads."""

import pytest

from generator.spec import AttentionSpec, Rule
from verifier.benchmark import measure
from verifier.compile import compile_translated
from verifier.judge import judge
from verifier.patience import Patience
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
    """The verdict must be this reason, found by this check (empty: any); the witness comes back for a closer look."""

    def check(name: str, reason: str, check: str, on: AttentionSpec | None = None):
        verdict = verdict_on(name, on)
        assert isinstance(verdict, Failed), f"{name} passed"
        assert verdict.reason == reason and check in ("", verdict.witness.check), verdict.witness
        assert verdict.witness.message and verdict.witness.input_name
        return verdict.witness

    return check


@pytest.fixture
def timed(compiled, spec, any_pace):
    """Straight to the clock, as if the judge had let it pass."""
    patience = Patience(min_rounds=4, max_rounds=6, budget_s=1.0, near=1.2)

    def run(name: str):
        return measure(compiled(name, spec), kernel(spec, name).launch, spec, num_threads=2, patience=patience)

    return run


@pytest.fixture
def refused_in_a_timed_call(timed):
    def check(name: str, reason: str, check: str):
        result = timed(name)
        assert isinstance(result, Failed), f"{name} was timed"
        assert (result.reason, result.witness.check, result.witness.input_name) == (reason, check, "timed call"), result.witness
        return result.witness

    return check
