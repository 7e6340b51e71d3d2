"""Asks a model behind an OpenAI-compatible endpoint, or its recorded answers. Knows nothing of TL or attention.

The endpoint is not trusted: replies are bounded in bytes and time, redirects are not followed, and the key appears in no message,
record or representation.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx2
import openai

from generator.authors.answers import estimate_tokens
from generator.authors.exchange import Answer, Exchange, ModelUnavailable, Request
from generator.authors.transcripts import TranscriptStore

#: Bytes of one reply, headers excluded: the largest context of today's models is a tenth of it.
MAX_REPLY_BYTES = 16 << 20

RETRIED_STATUS = (408, 409, 425, 429)


class ModelClient(Protocol):
    async def ask(self, request: Request) -> Exchange:
        """The answer to a request. Raises ModelUnavailable."""
        ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a model is asked. The key comes from the environment only; `repr` does not show it.

    timeout_s bounds one try from connecting to the last byte; concurrency bounds requests in flight; tries counts the first one.
    """

    base_url: str | None = None
    api_key: str = field(default="", repr=False)
    timeout_s: float = 600.0
    concurrency: int = 16
    tries: int = 5
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0

    @staticmethod
    def from_environment(base_url: str | None = None, **settings: Any) -> Endpoint:
        """OPENAI_BASE_URL and OPENAI_API_KEY; a local server that wants no key gets a placeholder."""
        url = base_url or os.environ.get("OPENAI_BASE_URL") or None
        key = os.environ.get("OPENAI_API_KEY", "")
        if not key and url is None:
            raise ValueError(
                "no model endpoint: set OPENAI_API_KEY for a hosted model, or --base-url for your own server (vLLM, Ollama, ...)"
            )
        return Endpoint(url, key or "none", **settings)


class _TooLarge(httpx2.TransportError):
    """A reply longer than MAX_REPLY_BYTES."""


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        seen = 0
        async for chunk in self._stream:
            seen += len(chunk)
            if seen > MAX_REPLY_BYTES:
                raise _TooLarge(f"the reply is longer than {MAX_REPLY_BYTES >> 20} MiB")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


class _BoundedTransport(httpx2.AsyncHTTPTransport):
    """Bounds every reply, error pages too, and refuses compressed ones: a bomb could unpack to any size."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        request.headers["accept-encoding"] = "identity"
        response = await super().handle_async_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise httpx2.TransportError("the reply is compressed although none was asked for")
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _BoundedStream(response.stream)
        return response


class OpenAIClient:
    """Asks an endpoint: bounded concurrency, retries with backoff, answers stored before they are returned.

    Use as an async context manager. `on_try(request)` is called before each try is sent.
    """

    def __init__(
        self, endpoint: Endpoint, store: TranscriptStore | None = None, on_try: Callable[[Request], None] | None = None
    ) -> None:
        self.endpoint = endpoint
        self._store = store
        self._on_try = on_try
        self._slots = asyncio.Semaphore(endpoint.concurrency)
        limits = httpx2.Limits(max_connections=endpoint.concurrency, max_keepalive_connections=endpoint.concurrency)
        transport = _BoundedTransport(limits=limits, trust_env=True)
        http = httpx2.AsyncClient(transport=transport, timeout=endpoint.timeout_s, follow_redirects=False)
        self._client = openai.AsyncOpenAI(api_key=endpoint.api_key, base_url=endpoint.base_url, max_retries=0, http_client=http)

    async def __aenter__(self) -> OpenAIClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def ask(self, request: Request) -> Exchange:
        """The stored answer where there is one, else a new one. Raises ModelUnavailable after the last try."""
        if self._store is not None and (known := self._store.get(request)) is not None:
            return known
        async with self._slots:
            answer = await self._with_retries(request)
        exchange = Exchange(request, answer)
        if self._store is not None:
            self._store.put(exchange)
        return exchange

    async def _with_retries(self, request: Request) -> Answer:
        for attempt in range(1, self.endpoint.tries + 1):
            if self._store is not None:
                self._store.mark_asked(request)
            if self._on_try is not None:
                self._on_try(request)
            try:
                return await self._once(request, attempt)
            except _Retry as retry:
                if attempt == self.endpoint.tries:
                    raise ModelUnavailable(f"{retry} (tried {attempt} times)", transient=True, tries=attempt) from None
                await asyncio.sleep(self._pause(attempt, retry.after_s))
        raise ModelUnavailable("no try is allowed: tries must be at least 1", transient=False)

    def _pause(self, attempt: int, asked_s: float | None) -> float:
        """Exponential with jitter; what the server asks for is honoured up to the bound."""
        backoff = self.endpoint.backoff_s * 2 ** (attempt - 1) * (0.5 + random.random() / 2)
        return min(max(backoff, asked_s or 0.0), self.endpoint.max_backoff_s)

    async def _once(self, request: Request, attempt: int) -> Answer:
        start = time.monotonic()
        try:
            async with asyncio.timeout(self.endpoint.timeout_s):
                raw = await self._client.chat.completions.with_raw_response.create(**_parameters(request))
                body = raw.http_response.content
        except TimeoutError:
            raise _Retry(f"no answer within {self.endpoint.timeout_s:g} s") from None
        except openai.APITimeoutError:
            raise _Retry(f"no answer within {self.endpoint.timeout_s:g} s") from None
        except openai.APIConnectionError as error:
            raise _connection_failure(error, self.endpoint) from None
        except openai.APIStatusError as error:
            raise _status_failure(error) from None
        except (openai.OpenAIError, httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ModelUnavailable(f"the request failed: {_short(str(error))}", transient=False, tries=attempt) from None
        return read_completion(body, request, time.monotonic() - start, attempt)


class RecordedClient:
    """Answers from a transcript store alone: a replay asks nobody. A request that was never answered is an error that says so."""

    def __init__(self, store: TranscriptStore) -> None:
        self._store = store

    async def ask(self, request: Request) -> Exchange:
        known = self._store.get(request)
        if known is None:
            raise ModelUnavailable(
                f"replay: no recorded answer to request {request.hash[:12]}; the program or its prompts have changed since",
                transient=False,
            )
        return known


class ScriptedClient:
    """Answers from a function; for tests and for `--author` plug-ins that are not HTTP."""

    def __init__(self, answer: Callable[[Request], Awaitable[Answer]]) -> None:
        self._answer = answer

    async def ask(self, request: Request) -> Exchange:
        return Exchange(request, await self._answer(request))


class _Retry(Exception):
    def __init__(self, message: str, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s


def _parameters(request: Request) -> dict[str, Any]:
    parameters: dict[str, Any] = {
        "model": request.model,
        "messages": [{"role": m.role, "content": m.content} for m in request.messages],
        "max_tokens": request.max_tokens,
        "stream": False,
    }
    if request.temperature is not None:
        parameters["temperature"] = request.temperature
    if request.seed is not None:
        parameters["seed"] = request.seed + request.sample
    return parameters


def read_completion(body: bytes, request: Request, seconds: float, tries: int = 1) -> Answer:
    """A chat completion's JSON as an Answer: the first choice, every field checked, none trusted.

    Raises ModelUnavailable for anything that is not a chat completion.
    """
    try:
        reply = json.loads(body)
        choice = reply["choices"][0]
        message = choice["message"]
        content, refusal = message.get("content"), message.get("refusal")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise _Retry(f"the reply is not a chat completion: {_short(body[:400].decode('utf-8', 'replace'))}") from None
    text = _text_of(content)
    usage = reply.get("usage") if isinstance(reply.get("usage"), dict) else {}
    tokens_in, tokens_out = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    estimated = tokens_in is None or tokens_out is None
    return Answer(
        text=text,
        finish_reason=str(choice.get("finish_reason"))[:40],
        tokens_in=tokens_in if tokens_in is not None else sum(estimate_tokens(m.content) for m in request.messages),
        tokens_out=tokens_out if tokens_out is not None else estimate_tokens(text),
        tokens_estimated=estimated,
        model=str(reply.get("model", request.model))[:200],
        seconds=round(seconds, 6),
        tries=tries,
        refusal=refusal[:2000] if isinstance(refusal, str) else "",
    )


def _text_of(content: object) -> str:
    """A message's content: a string, or parts of which the text ones count (some servers send those)."""
    if isinstance(content, str):
        return content.encode("utf-8", "replace").decode()
    if isinstance(content, list):
        return (
            "".join(p["text"] for p in content if isinstance(p, dict) and isinstance(p.get("text"), str))
            .encode("utf-8", "replace")
            .decode()
        )
    return ""


def _count(value: object) -> int | None:
    """A token count that can be true: a whole number from 0 to a billion."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 10**9 else None


def _short(text: str, limit: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _connection_failure(error: openai.APIConnectionError, endpoint: Endpoint) -> Exception:
    cause = error.__cause__
    if isinstance(cause, _TooLarge):
        return ModelUnavailable(str(cause), transient=False)
    where = endpoint.base_url or "the default endpoint"
    return _Retry(f"no connection to {where}: {_short(str(cause or error))}")


def _status_failure(error: openai.APIStatusError) -> Exception:
    message = f"the endpoint answered {error.status_code}: {_short(error.message)}"
    if error.status_code in RETRIED_STATUS or error.status_code >= 500:
        return _Retry(message, _retry_after(error.response.headers.get("retry-after")))
    cures = {401: "check OPENAI_API_KEY", 403: "the key may not use this model", 404: "check --model and --base-url"}
    cure = cures.get(error.status_code)
    return ModelUnavailable(message + (f"; {cure}" if cure else ""), transient=False)


def _retry_after(header: str | None) -> float | None:
    """Seconds of a Retry-After header; dates and rubbish count as none."""
    try:
        seconds = float(header) if header else None
    except ValueError:
        return None
    return seconds if seconds is not None and 0 <= seconds < 1e6 else None
