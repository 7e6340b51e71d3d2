"""Joining a cluster: who does not listen, or wants a token, is told in one line, before Ray says anything."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from farm.console import InputError
from farm.knock import TurnedAway, knock

session = pytest.importorskip("farm.session")
ROOT = Path(__file__).parents[2]
TOKEN = "0123456789abcdef" * 2


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that is in no session, on a machine where no head runs, in a shell that says nothing of tokens."""
    monkeypatch.setattr(session.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(session.ray, "init", lambda **given: pytest.fail("Ray, which waits"))
    monkeypatch.setattr(session, "_head_runs_here", lambda: False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)


def test_without_rays_client_a_sweep_says_what_to_install(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs Ray's client, not installed here: pip install 'kernel-farm\[client\]'"):
        session.join_cluster("ray://127.0.0.1:10001")


@pytest.mark.parametrize("address", ["ray://127.0.0.1:1", "127.0.0.1:1", "auto"])
def test_where_nobody_listens_is_said_at_once(address: str, alone: None, tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")  # what a head that died leaves behind
    pytest.importorskip("grpc" if "//" in address else "ray")
    with pytest.raises(
        InputError, match=rf"--address: expected local, .*'{address}': nobody listens at 127.0.0.1:1 \(Connection"
    ):
        session.join_cluster(address)


@pytest.mark.parametrize("heard", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\0\x0fgrpc-status\x010"])
def test_who_answers_otherwise_is_left_to_ray(heard: bytes) -> None:
    """Nothing, something that is no gRPC, a call that was taken."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with contextlib.suppress(OSError):  # the server is closed, or who asked is gone
                while True:
                    line, _ = server.accept()
                    line.sendall(heard)
                    line.close()

        threading.Thread(target=answer, daemon=True).start()
        started = time.monotonic()
        knock(f"127.0.0.1:{server.getsockname()[1]}")
        assert time.monotonic() - started < 10


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a head that asks for a token, in processes of their own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = tmp_path_factory.mktemp("token")
    shell = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_TMPDIR": str(place)}
    control = Path(session.ray.__file__).parent / "core/src/ray/gcs/gcs_server"
    argv = [str(control), f"--log_dir={place}", f"--gcs_server_port={port}", "--node-ip-address=127.0.0.1", "--config_list=e30="]
    argv += ["--session-name=guarded", f"--session-dir={place}", "--metrics-agent-port=0"]
    running = subprocess.Popen(argv, env=shell, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 30
    while time.monotonic() < until and running.poll() is None:
        with socket.socket() as line:
            if line.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    yield f"127.0.0.1:{port}"
    running.kill()
    running.wait()


def test_a_token_opens_the_door_and_another_one_does_not(guarded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("grpc")
    knock(guarded, TOKEN)
    for wrong in ("", "another", "x" * 300):
        with pytest.raises(TurnedAway):
            knock(guarded, wrong)
    monkeypatch.setattr("farm.knock.find_spec", lambda name: None)
    knock(guarded, "another")  # without gRPC nobody asks


@pytest.mark.parametrize(
    ("token", "mode", "said"),
    [
        (
            "",
            "",
            "asks for a token, and there is none here: put the cluster's token into ~/.ray/auth_token, or into ",
        ),
        (TOKEN, "", "asks for a token: set RAY_AUTH_MODE=token here too"),
        ("another", "token", "asks for another token than the one here"),
    ],
    ids=["none", "not shown", "another"],
)
def test_a_cluster_that_asks_for_a_token_is_one_line_and_nothing_of_rays(
    token: str, mode: str, said: str, guarded: str, tmp_path: Path
) -> None:
    shell = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"HOME": str(tmp_path)}
    shell |= ({"RAY_AUTH_TOKEN": token} if token else {}) | ({"RAY_AUTH_MODE": mode} if mode else {})
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "farm", "preflight", "--address", guarded],
        env=shell | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"farm: --address: '{guarded}' {said}") and len(done.stderr.splitlines()) == 1, done.stderr
    assert time.monotonic() - started < 15, "Ray was asked, who tries for twenty seconds"


def test_a_cluster_may_be_named_twice_by_a_name_that_ray_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep joins for its preflight and again for its executor; Ray knows a head by the number of its host."""
    joined: list[str] = []
    context = SimpleNamespace(dashboard_url="", gcs_address="192.0.2.7:6379")
    monkeypatch.setattr(session, "_SESSION", {})
    monkeypatch.setattr(session, "_knock", lambda address: None)
    monkeypatch.setattr(session.ray, "is_initialized", lambda: bool(joined))
    monkeypatch.setattr(session.ray, "init", lambda address, **given: joined.append(address) or context)
    monkeypatch.setattr(session.ray, "get_runtime_context", lambda: context)
    for address in ("head.example.com:6379", "head.example.com:6379", "192.0.2.7:6379", "auto"):
        session.join_cluster(address)
    assert joined == ["head.example.com:6379"]
    with pytest.raises(InputError, match="this process is connected to 192.0.2.7:6379"):
        session.join_cluster("other.example.com:6379")


def test_of_a_servers_traceback_its_last_line_is_told(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(**given: object) -> None:
        raise ConnectionAbortedError(
            'Initialization failure from server:\nTraceback (most recent call last):\n  File "a.py", line 1\n'
            "RuntimeError: Starting Ray client server failed. See a.err for detailed logs.\n"
        )

    monkeypatch.setattr(session.ray, "init", failing)
    with pytest.raises(InputError, match="; 'elsewhere': RuntimeError: Starting Ray client server failed$"):
        session.join_cluster("elsewhere")
