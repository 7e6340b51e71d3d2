"""Fixtures of the catalog's tests."""

import warnings

import pytest


@pytest.fixture
def fresh_loader(monkeypatch):
    """The loader as in a new process: no settings, no counts, nothing loaded, no FARM_* variable. Fallback warnings are quiet."""
    from catalog import serving, settings
    from catalog.counting import FallbackWarning
    from catalog.loader import Loader

    for name in ("FARM_MODE", "FARM_FORCE", "FARM_DENY", "FARM_CATALOG", "FARM_SIGNERS", "FARM_LOG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", "/nonexistent")
    monkeypatch.setattr(serving, "loader", Loader(serving.outcomes))
    settings.reset()
    serving.outcomes.clear()
    serving.outcomes.forget_warnings()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        yield
    serving.unfreeze()
    settings.reset()


@pytest.fixture
def cat(tmp_path):
    """A new, empty catalog in a local folder."""
    import catalog

    return catalog.open(tmp_path / "catalog", create=True)
