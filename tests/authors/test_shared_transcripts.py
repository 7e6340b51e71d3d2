"""Transcripts of a catalog that lies elsewhere: there as they arrive, and enough there for a machine that has nothing."""

import asyncio
import contextlib

import fsspec
import pyarrow.fs as pafs
import pytest
from chat_server import ChatServer, completion

from catalog.errors import StorageError
from catalog.locations import Location
from generator.authors import shared_transcripts
from generator.authors.clients import OpenAIClient, RecordedClient
from generator.authors.endpoint import Endpoint
from generator.authors.exchange import Answer, Exchange, Message, ModelUnavailable, Request
from generator.authors.shared_transcripts import SharedTranscripts
from generator.authors.transcripts import TranscriptError
from generator.feedback import Feedback


@pytest.fixture(params=["fsspec", "subtree"])
def elsewhere(request, tmp_path):
    """A catalog's location on a file system that is not this machine's."""
    if request.param == "fsspec":
        fsspec.filesystem("memory").rm("/", recursive=True) if fsspec.filesystem("memory").ls("/") else None
        return Location(
            pafs.PyFileSystem(pafs.FSSpecHandler(fsspec.filesystem("memory"))), "team/catalog", "memory://team/catalog"
        )
    (tmp_path / "bucket").mkdir()
    return Location(pafs.SubTreeFileSystem(str(tmp_path / "bucket"), pafs.LocalFileSystem()), "catalog", "mock://catalog")


@contextlib.contextmanager
def machine(folder, elsewhere):
    """What a start of a sweep on a machine of its own does."""
    with contextlib.closing(SharedTranscripts(folder, elsewhere, "transcripts")) as store:
        store.catch_up()
        yield store


def request(text="hello"):
    return Request("m", (Message("user", text),), 100)


def exchange(text="hello", answer="x"):
    return Exchange(request(text), Answer(answer, "stop", 10, 5, False, "m", 1.0))


def names(elsewhere, kind):
    return sorted(entry.name for entry in elsewhere.files(f"transcripts/{kind}"))


def ask(store, url, *texts, **settings):
    async def main():
        async with OpenAIClient(Endpoint(url, "sk-test", **settings), store) as client:
            return await asyncio.gather(*(client.ask(request(t)) for t in texts))

    return asyncio.run(main())


def test_an_answer_is_elsewhere_before_it_is_acted_on_and_another_machine_asks_nobody(elsewhere, tmp_path):
    with ChatServer(lambda sent, _: completion(f"to {sent['messages'][0]['content']}")) as server:
        with machine(tmp_path / "one", elsewhere) as store:
            asked = ask(store, server.base_url, "a", "b")
            assert names(elsewhere, "answers") == sorted(f"{request(t).hash}.json" for t in "ab")
            assert not names(elsewhere, "asked") and store.unsettled() == 0
        with machine(tmp_path / "two", elsewhere) as store:
            assert ask(store, server.base_url, "a", "b") == asked and len(server.requests) == 2
            assert [e.answer.text for e in store.exchanges()] == [
                e.answer.text for e in sorted(asked, key=lambda e: e.request.hash)
            ]
    with machine(tmp_path / "three", elsewhere) as store:
        assert asyncio.run(RecordedClient(store).ask(request("a"))) == asked[0]
        with pytest.raises(ModelUnavailable, match="no recorded answer"):
            asyncio.run(RecordedClient(store).ask(request("c")))


def test_the_mark_of_a_try_is_elsewhere_while_it_is_in_flight(elsewhere, tmp_path):
    seen = []

    def behave(*_):
        seen.append(names(elsewhere, "asked"))
        return completion("ok")

    with ChatServer(behave) as server, machine(tmp_path / "one", elsewhere) as store:
        ask(store, server.base_url, "a")
    assert [len(marks) for marks in seen] == [1] and not names(elsewhere, "asked")


def test_what_a_kill_left_here_alone_is_copied_by_the_next_start(elsewhere, tmp_path):
    with machine(tmp_path / "one", elsewhere) as store:
        store.put(exchange())
        store.put_feedback("0" * 64, Feedback("measured", "9 us", 9e-6))
        store.mark_asked(request("lost"))
        assert not names(elsewhere, "answers")
    with machine(tmp_path / "one", elsewhere):
        pass
    with machine(tmp_path / "two", elsewhere) as store:
        assert asyncio.run(store.find(request())) == exchange()
        assert asyncio.run(store.find_feedback("0" * 64)) == Feedback("measured", "9 us", 9e-6)
        assert store.unsettled() == 1, "asked on the other machine, and nothing heard of it"


def test_the_first_of_two_machines_is_who_both_go_by(elsewhere, tmp_path):
    with machine(tmp_path / "one", elsewhere) as one, machine(tmp_path / "two", elsewhere) as two:
        for store, said in ((one, "first"), (two, "second")):
            store.put(exchange(answer=said))
            assert asyncio.run(store.share(exchange(answer=said))).answer.text == "first"
            assert store.get(request()).answer.text == "first"
            told = asyncio.run(store.keep_feedback("1" * 64, Feedback("measured", said, 1e-6)))
            assert told.text == "first" and store.get_feedback("1" * 64).text == "first"


def test_trouble_elsewhere_loses_nothing_that_was_answered(elsewhere, tmp_path, monkeypatch):
    monkeypatch.setattr(shared_transcripts, "PAUSES_S", (0.01, 0.01))
    calls = []

    def refused(name, data):
        calls.append(name)
        raise StorageError(f"{name}: writing failed")

    with ChatServer(lambda *_: completion("ok")) as server:
        with machine(tmp_path / "one", elsewhere) as store:
            real = elsewhere.put_new
            monkeypatch.setattr(elsewhere, "put_new", lambda n, d: real(n, d) if "asked" in n else refused(n, d))
            with pytest.raises(StorageError):
                ask(store, server.base_url, "a")
            assert len(calls) == 3, "tried again before it is given up"
        monkeypatch.undo()
        with machine(tmp_path / "one", elsewhere) as store:
            assert names(elsewhere, "answers") == [f"{request('a').hash}.json"]
            assert ask(store, server.base_url, "a")[0].answer.text == "ok" and len(server.requests) == 1


def test_a_damaged_record_elsewhere_is_named_and_not_kept_here(elsewhere, tmp_path):
    elsewhere.put_new(f"transcripts/answers/{request().hash}.json", b"{")
    with machine(tmp_path / "one", elsewhere) as store, pytest.raises(TranscriptError, match=request().hash):
        asyncio.run(store.find(request()))
    assert not list((tmp_path / "one").rglob("*.json"))
