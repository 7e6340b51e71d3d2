"""Settings: precedence, unknown names, the kill switch, strict mode and overrides around calls."""

import asyncio
import contextvars
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch

import catalog
from catalog import settings
from catalog.settings import Settings, SettingsError, UnknownSettingWarning, from_environment

Q = torch.randn(1, 2, 4, 8)

pytestmark = pytest.mark.usefixtures("fresh_loader")


def test_unknown_names_warn_with_the_nearest():
    with pytest.warns(UnknownSettingWarning, match="FARM_FROCE.*did you mean FARM_FORCE"):
        assert from_environment({"FARM_FROCE": "x", "HOME": "/"}) == {}
    with pytest.warns(UnknownSettingWarning, match="moode.*did you mean mode"):
        assert catalog.configure(moode="off").mode == "auto"


def test_every_variable_that_the_packages_read_is_known():
    root = Path(catalog.__file__).parents[1]
    files = [f for package in ("catalog", "farm", "generator", "verifier") for f in (root / package).rglob("*.py")]
    read = {name for file in files for name in re.findall(r"[\"'](FARM_[A-Z_]+)[\"']", file.read_text())}
    assert {"FARM_MODE", "FARM_LOCKS", "FARM_QUIET_WAIT_S"} <= read
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert from_environment(dict.fromkeys(read - set(settings.VARIABLES), "x")) == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "of"}, "mode: expected one of auto, strict, off, found 'of'"),
        ({"on_error": 1}, "on_error: expected one of fallback, raise"),
        ({"max_frames": 0}, "max_frames: expected a whole number of at least 1"),
        ({"min_gain": -1}, "min_gain: expected a number of at least 0"),
        ({"catalog": 3}, "catalog: expected a location or an open catalog, found 3"),
        ({"force": 5}, "force: expected a text or several, found 5"),
        ({"deny": [5]}, "deny: expected texts, found"),
        ({"deterministic": "yes"}, "deterministic: expected True or False, found 'yes'"),
        ({"allow_host_code": 1}, "allow_host_code: expected True or False, found 1"),
        ({"on_miss": 5}, "on_miss: expected a function of one decision, found 5"),
        ({"lock": True}, "lock: expected the path of a lock file, found True"),
    ],
)
def test_wrong_values_change_nothing(changes, message):
    before = catalog.configure(mode="strict")
    with pytest.raises(SettingsError, match=message):
        catalog.configure(**changes)
    assert settings.current() == before


def test_precedence(monkeypatch):
    monkeypatch.setenv("FARM_MODE", "strict")
    monkeypatch.setenv("FARM_DENY", "a, b")
    settings.reset()
    assert settings.current() == Settings(mode="strict", deny=("a", "b"))
    assert catalog.configure(mode="auto").mode == "auto"
    monkeypatch.setenv("FARM_MODE", "wrong")
    with pytest.raises(SettingsError, match="FARM_MODE: expected one of"):
        catalog.configure()


def test_kill_switch_is_torch_bit_for_bit(monkeypatch):
    monkeypatch.setenv("FARM_MODE", "off")
    catalog.configure(mode="strict")
    out = catalog.scaled_dot_product_attention(Q, Q, Q, is_causal=True)
    assert torch.equal(out, torch.nn.functional.scaled_dot_product_attention(Q, Q, Q, is_causal=True))
    assert catalog.explain("scaled_dot_product_attention", Q, Q, Q).reasons[0].code == "mode_off"


def test_strict_mode_raises_with_every_reason():
    catalog.configure(mode="strict")
    with pytest.raises(catalog.NoKernelError, match="no_catalog"):
        catalog.scaled_dot_product_attention(Q, Q, Q)
    with pytest.raises(catalog.NoKernelError) as error:
        catalog.scaled_dot_product_attention(Q.clone().requires_grad_(), Q, Q, dropout_p=0.5)
    assert [r.code for r in error.value.reasons] == ["requires_grad", "dropout"]
    catalog.configure(mode="auto")
    catalog.scaled_dot_product_attention(Q, Q, Q)


def test_requests_around_calls():
    with catalog.attention_kernel("sdpa"):
        catalog.scaled_dot_product_attention(Q, Q, Q)
        assert catalog.last_decision().reasons[0].code == "override"
    with catalog.attention_kernel(["abc"], require=True), pytest.raises(catalog.NoKernelError):
        catalog.scaled_dot_product_attention(Q, Q, Q)
    with catalog.attention_kernel("abc"):
        catalog.scaled_dot_product_attention(Q, Q, Q)
    assert settings.override() is None


def test_requests_do_not_leak_into_threads_and_contexts():
    seen = []
    with catalog.attention_kernel("sdpa"):
        thread = threading.Thread(target=lambda: seen.append(settings.override()))
        thread.start()
        thread.join()
        inside = contextvars.copy_context()
    assert seen == [None] and inside.run(settings.override) is not None


def test_requests_do_not_leak_between_tasks():
    async def task(ids):
        with catalog.attention_kernel(ids):
            await asyncio.sleep(0)
            held = settings.override().ids
            await asyncio.sleep(0)
            return held == settings.override().ids == (() if ids == "sdpa" else (ids,))

    async def all_tasks():
        return await asyncio.gather(*(task(ids) for ids in ["sdpa", "a", "b", "sdpa", "c"] * 5))

    assert all(asyncio.run(all_tasks())) and settings.override() is None


def test_import_is_light():
    code = (
        "import sys, catalog; assert 'torch' not in sys.modules; catalog.scaled_dot_product_attention; import torch;"
        "assert not torch.cuda.is_initialized(); bad = {'ray', 'openai', 'typer', 'pycuda'} & set(sys.modules)"
        "; assert not bad, bad"
    )
    subprocess.run([sys.executable, "-W", "error::catalog.settings.UnknownSettingWarning", "-c", code], check=True, timeout=60)
