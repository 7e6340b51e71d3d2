"""Tests that need an NVIDIA GPU with PyCUDA, NVRTC and a CUDA build of torch; all of them are skipped elsewhere."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from verifier.gpu import gpus_here


def _why_not() -> str:
    if not gpus_here():
        return "no NVIDIA GPU here"
    missing = [name for name in ("pycuda", "cuda", "pynvml") if find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    why = _why_not() if here else ""
    for item in here if why else []:
        item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda:0"


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled kernels; FARM_CACHE keeps them over sessions."""
    kept = os.environ.get("FARM_CACHE")
    return Path(kept) if kept else tmp_path_factory.mktemp("cache")
