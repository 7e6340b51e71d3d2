"""Options that tests of every package share."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write what was found into the golden files")


@pytest.fixture
def update_golden(request) -> bool:
    return request.config.getoption("--update-golden")
