"""Options that tests of every package share, and settings that must stand before NumPy is imported."""

import os

# The interpreter multiplies small tiles: on a busy machine BLAS's own threads make that up to fifty times slower.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest  # noqa: E402


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write what was found into the golden files")


@pytest.fixture
def update_golden(request) -> bool:
    return request.config.getoption("--update-golden")
