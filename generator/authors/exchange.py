"""Requests to a language model and its answers, as data. Sends nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from generator.canonical import digest

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Request:
    """One chat completion asked for. Its hash is what an answer is stored under, so equal requests are asked once.

    sample: distinguishes several answers wanted to the same messages. max_tokens bounds the answer (tokens).
    """

    model: str
    messages: tuple[Message, ...]
    max_tokens: int
    temperature: float | None = None
    seed: int | None = None
    sample: int = 0

    @property
    def hash(self) -> str:
        return digest(self)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: the first choice's text, never trusted.

    finish_reason: as the server said ("stop", "length", "content_filter", ...). tokens: the server's count, or our estimate if it
    gave none (`tokens_estimated`). seconds: from sending to the last byte, retries excluded.
    """

    text: str
    finish_reason: str
    tokens_in: int
    tokens_out: int
    tokens_estimated: bool
    model: str
    seconds: float
    tries: int = 1
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request with its answer: what is kept of a conversation."""

    request: Request
    answer: Answer

    @property
    def hash(self) -> str:
        return digest(self)


class ModelUnavailable(RuntimeError):
    """No answer could be had. `transient`: asking again later may help. The message never holds the key.

    perhaps_paid: tries among `tries` for which the model may have worked although no answer came back.
    """

    def __init__(self, message: str, *, transient: bool, tries: int = 1, perhaps_paid: int = 0) -> None:
        super().__init__(message)
        self.transient = transient
        self.tries = tries
        self.perhaps_paid = perhaps_paid


def request_from_plain(plain: dict[str, Any]) -> Request:
    return Request(**{**plain, "messages": tuple(Message(**m) for m in plain["messages"])})


def exchange_from_plain(plain: dict[str, Any]) -> Exchange:
    """The inverse of `generator.canonical.to_plain`. Raises KeyError or TypeError for other data."""
    return Exchange(request_from_plain(plain["request"]), Answer(**plain["answer"]))


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a model is asked: what every request of a run has in common."""

    model: str
    max_tokens: int = 8192
    temperature: float | None = None
    seed: int | None = None
    token_limit: int = 32768
