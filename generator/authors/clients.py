"""Asks a model behind an OpenAI-compatible endpoint, or its recorded answers. Knows nothing of TL or attention.

The endpoint is not trusted: replies are bounded in bytes and time, redirects are not followed, and the key appears in no message,
record or representation.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import httpx2
import openai

from generator.authors.endpoint import KEY_VARIABLE, Endpoint
from generator.authors.exchange import Answer, Exchange, ModelUnavailable, Request
from generator.authors.replies import NotACompletion, read_completion, short
from generator.authors.transcripts import TranscriptStore
from generator.authors.transport import BoundedTransport, TooLarge

RETRIED_STATUS = (408, 409, 425, 429)
#: Idle connections that are kept: each request looks through all of them.
KEPT_CONNECTIONS = 16
#: A trouble that lasts is told again after so long.
TELL_AGAIN_S = 2.5

#: Parameters that some servers refuse, by name in an error of status 400 or 422; a refused one is left out from then on.
#: `max_tokens` is then sent under its newer name.
_OPTIONAL = ("max_tokens", "seed", "temperature")
_REFUSES = re.compile(
    r"unsupported|not support|unrecogni[sz]ed|unknown|unexpected|not permitted|not allowed|forbidden|invalid param"
)


class ModelClient(Protocol):
    async def ask(self, request: Request) -> Exchange:
        """The answer to a request. Raises ModelUnavailable."""
        ...


class OpenAIClient:
    """Asks an endpoint: bounded concurrency, retries with backoff, answers stored before they are returned. A request that is in
    flight already is not sent twice.

    Use as an async context manager. tell: where waits and retries are said, a line each. waiting: when each request in flight was
    sent (seconds of time.monotonic), for who watches.
    """

    def __init__(
        self, endpoint: Endpoint, store: TranscriptStore | None = None, tell: Callable[[str], None] = lambda line: None
    ) -> None:
        self.endpoint = endpoint
        self.waiting: dict[int, float] = {}
        self._store = store
        self._tell = tell
        self._refused: set[str] = set()
        self._running: dict[str, asyncio.Task[Exchange]] = {}
        self._said = ("", 0.0)
        self._slots = asyncio.Semaphore(endpoint.concurrency)
        kept = min(KEPT_CONNECTIONS, endpoint.concurrency)
        limits = httpx2.Limits(max_connections=endpoint.concurrency, max_keepalive_connections=kept)
        transport = BoundedTransport(limits=limits, trust_env=True, proxy=endpoint.proxy)
        http = httpx2.AsyncClient(transport=transport, timeout=endpoint.timeout_s, follow_redirects=False)
        self._client = openai.AsyncOpenAI(api_key=endpoint.api_key, base_url=endpoint.base_url, max_retries=0, http_client=http)

    async def __aenter__(self) -> OpenAIClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        running = tuple(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._client.close()

    async def ask(self, request: Request) -> Exchange:
        """The stored answer where there is one, else a new one. Raises ModelUnavailable after the last try."""
        running = self._running.get(request.hash)
        if running is None:
            running = self._running[request.hash] = asyncio.ensure_future(self._in_turn(request))
            running.add_done_callback(lambda _: self._running.pop(request.hash))
        return await asyncio.shield(running)

    async def _in_turn(self, request: Request) -> Exchange:
        if self._store is not None and (known := await self._store.find(request)) is not None:
            return known
        async with self._slots:
            return await self._with_retries(request)

    async def _with_retries(self, request: Request) -> Exchange:
        perhaps_paid = 0
        for attempt in range(1, self.endpoint.tries + 1):
            try:
                return await self._try(request, attempt)
            except _Failed as failed:
                perhaps_paid += failed.perhaps_paid
                message = self.endpoint.without_key(str(failed))
                if not failed.again or attempt == self.endpoint.tries:
                    tried = f" (tried {attempt} times)" if attempt > 1 else ""
                    raise ModelUnavailable(
                        message + tried, transient=failed.again, tries=attempt, perhaps_paid=perhaps_paid
                    ) from None
                pause = self._pause(attempt, failed.after_s)
            self._tell_of_wait(message, f"asking again in {pause:.0f} s (try {attempt + 1} of {self.endpoint.tries})")
            await asyncio.sleep(pause)
        raise ModelUnavailable("no try is allowed: tries must be at least 1", transient=False)

    def _tell_of_wait(self, message: str, then: str) -> None:
        """Many requests often fail of one cause at a time: it is said once."""
        last, when = self._said
        if message != last or time.monotonic() - when > TELL_AGAIN_S:
            self._said = (message, time.monotonic())
            self._tell(f"{message}; {then}")

    def _pause(self, attempt: int, asked_s: float | None) -> float:
        """Exponential with jitter; what the server asks for is honoured up to the bound."""
        backoff = self.endpoint.backoff_s * 2.0 ** (attempt - 1) * (0.5 + random.random() / 2)
        return min(max(backoff, asked_s or 0.0), self.endpoint.max_backoff_s)

    async def _try(self, request: Request, attempt: int) -> Exchange:
        """One try, on record before it is sent. What was certainly not answered is struck off; the rest may be on the bill."""
        mark = await self._store.announce(request) if self._store is not None else None
        start = time.monotonic()
        self.waiting[id(request)] = start
        try:
            async with asyncio.timeout(self.endpoint.timeout_s):
                body = await self._send(request)
            answer = self._clean(read_completion(body, request, time.monotonic() - start, attempt))
        except TimeoutError:
            raise _Failed(f"no answer within {self.endpoint.timeout_s:g} s", again=True, perhaps_paid=True) from None
        except NotACompletion as error:
            raise _Failed(str(error), again=True, perhaps_paid=True) from None
        except _Failed as failed:
            if self._store is not None and mark is not None and not failed.perhaps_paid:
                await self._store.strike(mark)
            raise
        finally:
            self.waiting.pop(id(request), None)
        exchange = Exchange(request, answer)
        if self._store is None:
            return exchange
        self._store.put(exchange, mark)
        return await self._store.share(exchange, mark)

    async def _send(self, request: Request) -> bytes:
        """The body of a reply with status 200. Raises _Failed."""
        while True:
            parameters = self._parameters(request)
            try:
                raw = await self._client.chat.completions.with_raw_response.create(**parameters)
                return raw.http_response.content
            except openai.APIStatusError as error:
                if not self._adapted(error, parameters):
                    raise _of_status(error) from None
            except openai.APITimeoutError:
                raise TimeoutError from None
            except openai.APIConnectionError as error:
                raise self._of_connection(error) from None
            except (openai.OpenAIError, httpx2.HTTPError, httpx2.InvalidURL) as error:
                raise _Failed(f"the request failed: {short(str(error))}", again=False, perhaps_paid=False) from None

    def _parameters(self, request: Request) -> dict[str, Any]:
        limit = "max_completion_tokens" if "max_tokens" in self._refused else "max_tokens"
        optional: dict[str, Any] = {"temperature": request.temperature}
        optional["seed"] = None if request.seed is None else request.seed + request.sample
        return {
            "model": request.model,
            "messages": [{"role": m.role, "content": m.content} for m in request.messages],
            "stream": False,
            limit: request.max_tokens,
            **{name: value for name, value in optional.items() if value is not None and name not in self._refused},
        }

    def _adapted(self, error: openai.APIStatusError, parameters: dict[str, Any]) -> bool:
        """Whether the server refuses a parameter that it can be asked without; each is found out once."""
        said = short(str(error.body or error.message), 2000).lower()
        if error.status_code not in (400, 422) or not _REFUSES.search(said):
            return False
        for name in _OPTIONAL:
            if name in parameters and re.search(rf"\b{name}\b", said):
                self._refused.add(name)
                self._tell(f"the endpoint does not take {name}: asked without it")
                return True
        return False

    def _of_connection(self, error: openai.APIConnectionError) -> _Failed:
        cause = error.__cause__
        if isinstance(cause, TooLarge):
            return _Failed(str(cause), again=False, perhaps_paid=True)
        never_sent = isinstance(cause, httpx2.ConnectError | httpx2.UnsupportedProtocol)
        what = "no connection to" if never_sent else "the connection broke to"
        return _Failed(f"{what} {self.endpoint.place}: {short(str(cause or error))}", again=True, perhaps_paid=not never_sent)

    def _clean(self, answer: Answer) -> Answer:
        blotted = {
            name: self.endpoint.without_key(getattr(answer, name)) for name in ("text", "refusal", "model", "finish_reason")
        }
        return dataclasses.replace(answer, **blotted)  # type: ignore[arg-type]


class RecordedClient:
    """Answers from a transcript store alone: a replay asks nobody. A request that was never answered is an error that says so."""

    def __init__(self, store: TranscriptStore) -> None:
        self._store = store

    async def ask(self, request: Request) -> Exchange:
        known = await self._store.find(request)
        if known is None:
            raise ModelUnavailable(
                f"replay: no recorded answer to request {request.hash[:12]}; the plan, the prompts or this kind of "
                "machine are not those of the record",
                transient=False,
            )
        return known


class ScriptedClient:
    """Answers from a function: for tests, and for whoever asks a model in another way than by HTTP."""

    def __init__(self, answer: Callable[[Request], Awaitable[Answer]]) -> None:
        self._answer = answer

    async def ask(self, request: Request) -> Exchange:
        return Exchange(request, await self._answer(request))


class _Failed(Exception):
    """One try without an answer. again: another may help; perhaps_paid: the model may have worked for it all the same."""

    def __init__(self, message: str, *, again: bool, perhaps_paid: bool, after_s: float | None = None) -> None:
        super().__init__(message)
        self.again, self.perhaps_paid, self.after_s = again, perhaps_paid, after_s


def _of_status(error: openai.APIStatusError) -> _Failed:
    said = short(error.message).removeprefix(f"Error code: {error.status_code} - ")
    message = f"the endpoint answered {error.status_code}: {said}"
    if error.status_code in RETRIED_STATUS or error.status_code >= 500:
        after_s = _retry_after(error.response.headers.get("retry-after"))
        return _Failed(message, again=True, perhaps_paid=False, after_s=after_s)
    cures = {
        401: f"check {KEY_VARIABLE}",
        403: "the key may not use this model",
        404: "check --model, and --base-url, which usually ends in /v1",
    }
    cure = cures.get(error.status_code)
    return _Failed(message + (f"; {cure}" if cure else ""), again=False, perhaps_paid=False)


def _retry_after(header: str | None) -> float | None:
    """Seconds of a Retry-After header; dates and rubbish count as none."""
    try:
        seconds = float(header) if header else None
    except ValueError:
        return None
    return seconds if seconds is not None and 0 <= seconds < 1e6 else None
