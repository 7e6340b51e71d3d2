"""A language model's sweep into a catalog on an object store: what was answered is there, for other machines too.

Each machine has its own folders for state and cache; the object store speaks S3's protocol on a loopback port.
"""

import json
import subprocess
import time
from dataclasses import replace

import pytest
from chat_server import ChatServer
from model_runs import PLAN, PROGRAM, answering, environment, sweep, sweep_command
from object_store import CREDENTIALS, ObjectStore

import catalog

pytestmark = pytest.mark.usefixtures("any_pace")
WRONG = PROGRAM.replace("kv <= q", "kv < q")


@pytest.fixture
def bucket(monkeypatch):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with ObjectStore() as store:
        yield store


def run(machine, server, uri, *flags, plan=PLAN, key="sk-test-0123456789"):
    """A sweep to its end on a machine that has its own state: what it printed."""
    machine.mkdir(exist_ok=True)
    ended = sweep(machine, server, *flags, plan=plan, key=key, catalog_at=uri, XDG_STATE_HOME=str(machine / "state"))
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def made_from(uri):
    """What every row was made from, byte for byte: the conversation, the prompt, the program."""
    rows = catalog.open(uri).rows(["transcript_hash", "prompt_hash", "tl_hash", "reason_code"]).to_pylist()
    return sorted(tuple(row.values()) for row in rows)


def test_another_machine_replays_it_from_the_catalog_alone(tmp_path, bucket):
    plan, uri = PLAN.replace("improvements: 0", "improvements: 1"), bucket.uri("team/kernels")
    with ChatServer(answering(WRONG, PROGRAM, PROGRAM.replace("BM = 32", "BM = 16"))) as server:
        first = run(tmp_path / "one", server, uri, plan=plan)
        assert len(server.requests) == 4 and first["best"][0]["verdict"] == "verified"
    answers, said = (bucket.keys(f"team/kernels/transcripts/{kind}/") for kind in ("answers", "feedback"))
    assert len(answers) == 4 and len(said) == 4 and not bucket.keys("team/kernels/transcripts/asked/")
    again = run(tmp_path / "two", None, uri, "--replay", plan=plan, key="")
    assert again["known"] == 3 and "4 answers, 400 tokens in" in again["author"]
    other = bucket.uri("others/kernels")
    for key in bucket.keys("team/kernels/transcripts/"):
        bucket.objects[key.replace("team/", "others/", 1)] = bucket.objects[key]
        bucket.modified[key.replace("team/", "others/", 1)] = bucket.modified[key]
    anew = run(tmp_path / "three", None, other, "--replay", plan=plan, key="")
    assert anew["known"] == 0 and made_from(other) == made_from(uri), "judged anew, told what was told then"


def test_a_killed_sweep_goes_on_from_another_machine(tmp_path, bucket):
    """Killed with the second question in flight: the first answer is there, and the question counts as perhaps paid."""
    uri, script = bucket.uri("team/kernels"), answering(PROGRAM, PROGRAM)
    with ChatServer(lambda request, n: replace(script(request, n), delay_s=60 if n == 1 else 0)) as server:
        (tmp_path / "one").mkdir()
        command, state = sweep_command(tmp_path / "one", server, catalog_at=uri), str(tmp_path / "one" / "state")
        process = subprocess.Popen(
            command,
            env=environment("sk-test-0123456789") | {"XDG_STATE_HOME": state},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until = time.monotonic() + 60
        while len(server.requests) < 2 and time.monotonic() < until:
            time.sleep(0.02)
        process.kill()
        process.wait()
        assert len(bucket.keys("team/kernels/transcripts/answers/")) == 1
        assert len(bucket.keys("team/kernels/transcripts/asked/")) == 1
        summary = run(tmp_path / "two", server, uri)
        assert [r["messages"] for r in server.requests[2:]] == [server.requests[1]["messages"]]
    assert summary["best"][0]["verdict"] == "verified" and "perhaps paid: 1" in summary["author"]
