"""The model client against a real HTTP server that answers in every way servers do."""

import asyncio
import gzip
import json
import time

import pytest
from chat_server import ChatServer, Reply, completion, failure

from generator.authors import transport
from generator.authors.clients import OpenAIClient, RecordedClient
from generator.authors.endpoint import Endpoint
from generator.authors.exchange import Exchange, Message, ModelUnavailable, Request
from generator.authors.replies import read_completion
from generator.authors.transcripts import TranscriptError, TranscriptStore

KEY = "sk-very-secret-0123456789"


def request(text="hello", **fields):
    return Request("test-model", (Message("user", text),), max_tokens=100, **fields)


def endpoint(server, **settings):
    return Endpoint(server.base_url, KEY, **{"timeout_s": 5, "backoff_s": 0.01, "max_backoff_s": 0.05, "tries": 3} | settings)


def ask(server, *requests, store=None, **settings):
    async def main():
        async with OpenAIClient(endpoint(server, **settings), store) as client:
            return await asyncio.gather(*(client.ask(r) for r in requests))

    return asyncio.run(main())


def test_a_plain_answer_with_its_token_counts():
    with ChatServer(lambda _, __: completion("Kernel x")) as server:
        [exchange] = ask(server, request(temperature=0.5, seed=7, sample=2))
    assert exchange.answer.text == "Kernel x"
    assert (exchange.answer.tokens_in, exchange.answer.tokens_out, exchange.answer.tokens_estimated) == (100, 50, False)
    [sent] = server.requests
    assert sent["stream"] is False and sent["temperature"] == 0.5 and sent["seed"] == 9 and sent["max_tokens"] == 100
    assert server.keys == [f"Bearer {KEY}"]


@pytest.mark.parametrize(
    "first", [failure(429, retry_after="0.01"), failure(500), failure(503), Reply(b"<html>", 502), Reply(b"{", 200)]
)
def test_transient_failures_are_tried_again(first):
    with ChatServer(lambda _, n: first if n == 0 else completion("ok")) as server:
        [exchange] = ask(server, request())
    assert exchange.answer.text == "ok" and exchange.answer.tries == 2 and len(server.requests) == 2


@pytest.mark.parametrize(("status", "cure"), [(401, "OPENAI_API_KEY"), (404, "--model"), (400, "400")])
def test_final_failures_are_not(status, cure):
    with ChatServer(lambda _, __: failure(status, "because")) as server, pytest.raises(ModelUnavailable) as caught:
        ask(server, request())
    assert len(server.requests) == 1 and not caught.value.transient
    assert cure in str(caught.value) and "because" in str(caught.value)


def test_tries_are_bounded_and_the_wait_that_a_server_asks_for_too():
    start = time.monotonic()
    with ChatServer(lambda _, __: failure(429, retry_after="100000")) as server, pytest.raises(ModelUnavailable) as caught:
        ask(server, request())
    assert len(server.requests) == 3 and caught.value.transient and time.monotonic() - start < 30


def test_a_slow_server_costs_the_time_out_and_no_more():
    start = time.monotonic()
    with (
        ChatServer(lambda _, __: Reply(completion("late").body, delay_s=60)) as server,
        pytest.raises(ModelUnavailable, match=r"0\.3 s"),
    ):
        ask(server, request(), timeout_s=0.3, tries=2)
    assert time.monotonic() - start < 30


def test_a_broken_connection_is_tried_again():
    with ChatServer(lambda _, n: Reply(completion("x").body, close_after=20) if n == 0 else completion("ok")) as server:
        [exchange] = ask(server, request())
    assert exchange.answer.text == "ok"


def test_nobody_listens():
    async def main():
        async with OpenAIClient(Endpoint("http://127.0.0.1:9/v1", KEY, tries=2, backoff_s=0.01)) as client:
            await client.ask(request())

    with pytest.raises(ModelUnavailable, match=r"no connection to http://127\.0\.0\.1:9/v1"):
        asyncio.run(main())


def test_an_endless_reply_is_cut_off(monkeypatch):
    monkeypatch.setattr(transport, "MAX_REPLY_BYTES", 1 << 20)
    with (
        ChatServer(lambda _, __: Reply(b"x" * (1 << 16), repeat=1 << 10)) as server,
        pytest.raises(ModelUnavailable, match="longer than"),
    ):
        ask(server, request())
    assert len(server.requests) == 1


def test_an_endless_error_page_is_cut_off_too(monkeypatch):
    monkeypatch.setattr(transport, "MAX_REPLY_BYTES", 1 << 20)
    with ChatServer(lambda _, __: Reply(b"x" * (1 << 16), 500, repeat=1 << 10)) as server, pytest.raises(ModelUnavailable):
        ask(server, request(), tries=1)


def test_a_compressed_reply_is_refused():
    body = gzip.compress(completion("x").body)
    with (
        ChatServer(lambda _, __: Reply(body, headers={"content-encoding": "gzip"})) as server,
        pytest.raises(ModelUnavailable, match="compressed"),
    ):
        ask(server, request(), tries=1)


def test_redirects_are_not_followed():
    with (
        ChatServer(lambda _, __: Reply(b"", 307, {"location": "http://127.0.0.1:9/"})) as server,
        pytest.raises(ModelUnavailable, match="307"),
    ):
        ask(server, request(), tries=1)


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (completion(None, refusal="I will not"), ""),
        (
            completion(
                None, "tool_calls", tool_calls=[{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
            ),
            "",
        ),
        (completion([{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]), "ab"),
        (completion("x", "length"), "x"),
        (completion("x", reasoning_content="hmm " * 1000), "x"),
        (completion("x\ud800y".encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass")), "x?y"),
    ],
)
def test_odd_but_legal_messages(reply, text):
    with ChatServer(lambda _, __: reply) as server:
        [exchange] = ask(server, request())
    assert exchange.answer.text == text


def stream(*events, done=True):
    """What a server sends that streams although it was not asked to."""
    lines = [f"data: {json.dumps(e)}\n\n" for e in events] + ["data: [DONE]\n\n"] * done
    return Reply("".join(lines).encode(), headers={"content-type": "text/event-stream"})


def delta(text=None, finish=None, index=0, **fields):
    choice = {"index": index, "delta": {"content": text, **fields}, "finish_reason": finish}
    return {"object": "chat.completion.chunk", "model": "streaming-model", "choices": [choice]}


def test_a_streamed_answer_is_put_together():
    usage = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
    events = [delta("Ker", role="assistant"), delta("other choice", index=1), delta("nel x"), delta(finish="stop"), usage]
    with ChatServer(lambda _, __: stream(*events)) as server:
        [exchange] = ask(server, request())
    answer = exchange.answer
    assert (answer.text, answer.finish_reason, answer.model) == ("Kernel x", "stop", "streaming-model")
    assert (answer.tokens_in, answer.tokens_out, answer.tokens_estimated) == (7, 3, False)


def test_a_stream_that_breaks_off_is_asked_for_again():
    with ChatServer(lambda _, n: stream(delta("Ker"), done=False) if n == 0 else completion("whole")) as server:
        [exchange] = ask(server, request())
    assert exchange.answer.text == "whole" and exchange.answer.tries == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "max_tokens",
            "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.",
        ),
        ("seed", "body.seed: Extra inputs are not permitted"),
        ("temperature", "Unsupported value: 'temperature' does not support 0.5 with this model."),
    ],
)
def test_a_parameter_that_a_server_refuses_is_left_out_from_then_on(name, message):
    told = []

    def behave(sent, _):
        return failure(400, message) if name in sent else completion("ok")

    async def main(server):
        async with OpenAIClient(endpoint(server), None, told.append) as client:
            for text in ("a", "b"):
                await client.ask(request(text, seed=1, temperature=0.5))

    with ChatServer(behave) as server:
        asyncio.run(main(server))
    assert len(server.requests) == 3 and all(name not in r for r in server.requests[1:])
    assert ("max_completion_tokens" in server.requests[1]) == (name == "max_tokens")
    assert told == [f"the endpoint does not take {name}: asked without it"]


def test_another_bad_request_is_final():
    with (
        ChatServer(lambda _, __: failure(400, "max_tokens is too large")) as server,
        pytest.raises(ModelUnavailable, match="too large"),
    ):
        ask(server, request())
    assert len(server.requests) == 1


def test_two_choices_the_first_counts():
    body = json.loads(completion("first").body)
    body["choices"].append({"index": 1, "message": {"content": "second"}, "finish_reason": "stop"})
    with ChatServer(lambda _, __: Reply(json.dumps(body).encode())) as server:
        [exchange] = ask(server, request())
    assert exchange.answer.text == "first"


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": -5, "completion_tokens": 10**12}, {"prompt_tokens": "many"}, [1]])
def test_token_counts_that_cannot_be_true_are_estimated(usage):
    body = json.loads(completion("four words of text").body) | {"usage": usage}
    with ChatServer(lambda _, __: Reply(json.dumps(body).encode())) as server:
        [exchange] = ask(server, request())
    assert exchange.answer.tokens_estimated and exchange.answer.tokens_in > 0 and exchange.answer.tokens_out > 0


@pytest.mark.parametrize(
    "body",
    [b"", b"null", b"[]", b'{"choices": []}', b'{"choices": [null]}', b'{"choices": {"0": 1}}', b"[" * 100_000, b"\xff\xfe"],
)
def test_rubbish_with_status_200_is_unavailable_never_a_crash(body):
    with ChatServer(lambda _, __: Reply(body)) as server, pytest.raises(ModelUnavailable, match="not a chat completion"):
        ask(server, request(), tries=1)


def test_concurrency_is_bounded():
    running, most = 0, 0

    def behave(_, __):
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.02)
        running -= 1
        return completion("ok")

    with ChatServer(behave) as server:
        ask(server, *(request(str(i)) for i in range(20)), concurrency=4)
    assert most <= 4 and len(server.requests) == 20


def test_the_key_is_nowhere_but_in_the_header(tmp_path):
    store = TranscriptStore(tmp_path)
    with ChatServer(lambda _, n: failure(429) if n == 0 else completion("ok")) as server:
        [exchange] = ask(server, request(), store=store)
        assert KEY not in repr(endpoint(server))
    assert KEY not in repr(exchange)
    assert not any(KEY in f.read_text() for f in tmp_path.rglob("*") if f.is_file())


@pytest.mark.parametrize(
    "reply",
    [completion(f"your key is {KEY}"), completion("x", finish_reason=KEY, refusal=KEY), failure(401, f"Incorrect key: {KEY}")],
)
def test_a_server_that_repeats_the_key_spreads_it_no_further(tmp_path, reply):
    store = TranscriptStore(tmp_path)
    said = ""
    with ChatServer(lambda _, __: reply) as server:
        try:
            said = repr(ask(server, request(), store=store))
        except ModelUnavailable as error:
            said = str(error)
    assert "[key]" in said and KEY not in said
    assert not any(KEY in f.read_text() for f in tmp_path.rglob("*") if f.is_file())


@pytest.mark.parametrize("name", ["finish_reason", "refusal", "model", "content"])
@pytest.mark.parametrize("text", ["\\ud800", "\\u0000", "\\u001b[2J", "9" * 100_000])
def test_any_text_in_any_field_can_be_stored_and_shown(tmp_path, name, text):
    body = completion("x", finish_reason="stop", refusal=None).body.decode()
    found = {"finish_reason": '"stop"', "refusal": "null", "model": '"test-model"', "content": '"x"'}[name]
    store = TranscriptStore(tmp_path)
    with ChatServer(lambda _, __: Reply(body.replace(f'"{name}": {found}', f'"{name}": "{text}"').encode())) as server:
        [exchange] = ask(server, request(), store=store)
    assert store.get(request()) == exchange
    assert all(c.isprintable() for c in exchange.answer.finish_reason + exchange.answer.model)


def test_messages_of_servers_hold_no_terminal_codes():
    with (
        ChatServer(lambda _, __: failure(404, "\x1b]0;owned\x07 gone\n\x9b2J")) as server,
        pytest.raises(ModelUnavailable) as caught,
    ):
        ask(server, request())
    assert str(caught.value).isprintable() and "gone" in str(caught.value)


def test_a_gigabyte_costs_what_the_bound_says():
    start = time.process_time()
    with (
        ChatServer(lambda _, __: Reply(b"x" * (1 << 20), repeat=1 << 10)) as server,
        pytest.raises(ModelUnavailable, match="16 MiB"),
    ):
        ask(server, request(), timeout_s=60)
    assert time.process_time() - start < 5


def test_the_same_request_twice_at_a_time_is_sent_once():
    with ChatServer(lambda _, __: Reply(completion("ok").body, delay_s=0.1)) as server:
        first, second, other = ask(server, request(), request(), request("other"))
    assert first == second != other and len(server.requests) == 2


def test_one_trouble_of_many_requests_is_told_once():
    told = []

    async def main(server):
        async with OpenAIClient(endpoint(server), None, told.append) as client:
            await asyncio.gather(*(client.ask(request(str(i))) for i in range(10)))

    with ChatServer(lambda _, n: failure(429, "slow down") if n < 10 else completion("ok")) as server:
        asyncio.run(main(server))
    assert len(told) == 1 and "slow down" in told[0] and "try 2 of 3" in told[0]


def test_an_answer_is_stored_once_and_never_asked_for_again(tmp_path):
    store = TranscriptStore(tmp_path)
    with ChatServer(lambda _, n: completion(f"answer {n}")) as server:
        [first] = ask(server, request(), store=store)
        [second] = ask(server, request(), store=store)
    assert first == second and len(server.requests) == 1
    assert asyncio.run(RecordedClient(store).ask(request())) == first
    with pytest.raises(ModelUnavailable, match="replay"):
        asyncio.run(RecordedClient(store).ask(request("something else")))


def test_what_was_in_flight_counts_as_perhaps_paid(tmp_path):
    store = TranscriptStore(tmp_path)
    store.mark_asked(request("a"))
    store.mark_asked(request("b"))
    assert store.unsettled() == 2
    with ChatServer(lambda _, __: completion("ok")) as server:
        [exchange] = ask(server, request("a"), store=store)
    assert store.unsettled() == 2, "the earlier try may be on the bill although another one was answered"
    assert list(store.exchanges()) == [exchange]


@pytest.mark.parametrize(
    ("reply", "left"),
    [(failure(401), 0), (failure(500), 0), (Reply(b"{", 200), 2), (Reply(completion("late").body, delay_s=1), 2)],
)
def test_tries_that_the_server_turned_down_are_not_perhaps_paid(tmp_path, reply, left):
    store = TranscriptStore(tmp_path)
    with ChatServer(lambda _, __: reply) as server, pytest.raises(ModelUnavailable) as caught:
        ask(server, request(), store=store, tries=2, timeout_s=0.3)
    assert (store.unsettled(), caught.value.perhaps_paid) == (left, left)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "asked").write_text("in the way")
    with pytest.raises(TranscriptError, match="cannot be written"):
        TranscriptStore(tmp_path).mark_asked(request())


def test_the_first_of_two_answers_stays(tmp_path):
    store = TranscriptStore(tmp_path)
    one = read_completion(completion("one").body, request(), 1.0)
    two = read_completion(completion("two").body, request(), 2.0)
    store.put(Exchange(request(), one))
    store.put(Exchange(request(), two))
    assert store.get(request()).answer.text == "one"


def test_a_damaged_record_is_named(tmp_path):
    store = TranscriptStore(tmp_path)
    path = tmp_path / "answers" / f"{request().hash}.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"request": 1')
    with pytest.raises(TranscriptError, match=request().hash):
        store.get(request())


def test_no_endpoint_says_what_to_set(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(ValueError, match="OPENAI_API_KEY.*--base-url"):
        Endpoint.from_environment()
    assert Endpoint.from_environment("http://127.0.0.1:8000/v1").api_key == "none"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("localhost:8000/v1", "http://localhost:8000/v1"),
        ("http:///v1", "expected a URL"),
        ("http://host:port/v1", "expected a URL"),
        ("https://me:secret@host/v1", "OPENAI_API_KEY"),
        ("http://host/v1/chat/completions", "use http://host/v1"),
    ],
)
def test_an_address_that_is_none_is_refused_before_anything_is_sent(url, said):
    with pytest.raises(ValueError, match=said) as caught:
        Endpoint.from_environment(url)
    assert "secret" not in str(caught.value)


def test_a_proxy_of_the_environment_is_used_but_not_for_this_machine(monkeypatch):
    with ChatServer(lambda _, __: completion("through the proxy")) as server:
        monkeypatch.setenv("HTTP_PROXY", server.base_url.removesuffix("/v1"))
        monkeypatch.setenv("http_proxy", server.base_url.removesuffix("/v1"))
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)

        async def main():
            async with OpenAIClient(Endpoint("http://models.invalid/v1", KEY, tries=1)) as client:
                return await client.ask(request())

        assert asyncio.run(main()).answer.text == "through the proxy"
    assert Endpoint("http://127.0.0.1:8000/v1").proxy is None
    assert Endpoint("http://models.invalid/v1").proxy
