"""Options that tests of every package share, and settings that must stand before NumPy is imported."""

import contextlib
import os
import signal
import sys

# The interpreter multiplies small tiles: on a busy machine BLAS's own threads make that up to fifty times slower.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# What the user's shell says of catalogs, modes and clusters is not for tests: each says itself what it needs. A process that has
# started Ray says more to every later test of its worker (RAY_AUTH_MODE), so those that read it name it.
MACHINE = ("FARM_CACHE", "FARM_CUDA_CACHE", "FARM_CXX", "FARM_TEST_CACHE")  # where things lie here, which any test may use
for name in [name for name in os.environ if name.startswith(("FARM_", "RAY_")) and name not in MACHINE]:
    del os.environ[name]
# A shell without job control (a script's `make test &`, nohup) starts its background with interrupts ignored, and every program
# that is started from there would ignore those that tests send it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402

with contextlib.suppress(ImportError):  # a machine that runs only the tests of GPUs may have none
    from hypothesis import HealthCheck, settings

    # How long an example takes says how busy the machine is.
    settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy machine")


def pytest_collection_modifyitems(items):
    """Files with slow tests first: with one of them at the end, one worker would wait for the other."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write what was found into the golden files")


@pytest.fixture
def update_golden(request) -> bool:
    return request.config.getoption("--update-golden")


@pytest.fixture(scope="session", autouse=True)
def own_locks(tmp_path_factory):
    """What is timed here is nobody's figure: no worker, and no farm of this machine's user, waits for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FARM_LOCKS", str(tmp_path_factory.mktemp("locks")))
        yield


@pytest.fixture(scope="module")
def any_pace():
    """Measurements in this process count on a busy machine too: what is tested is not how long something takes."""
    from verifier import figures

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "DISTURBED", 1e9)
        yield


@pytest.fixture(autouse=True)
def registries():
    """Rules that a test registers are forgotten again: other tests go through all that there are."""
    from generator.masks import MASKS
    from generator.scores import SCORES

    tables = [MASKS, SCORES]
    if "verifier.oracle" in sys.modules:
        oracle = sys.modules["verifier.oracle"]
        tables += [oracle.DENSE_MASKS, oracle.DENSE_SCORES]
    before = [(table, dict(table)) for table in tables]
    yield
    for table, kept in before:
        table.clear()
        table.update(kept)
    if "farm.variants" in sys.modules:
        sys.modules["farm.variants"]._LOADED.clear()
    if len(tables) == 2 and "verifier.oracle" in sys.modules:  # imported by the test: only what it brought with it may stay
        oracle = sys.modules["verifier.oracle"]
        for table, rules in ((oracle.DENSE_MASKS, MASKS), (oracle.DENSE_SCORES, SCORES)):
            for name in set(table) - set(rules):
                del table[name]
