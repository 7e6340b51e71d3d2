"""What a chat-completions endpoint sent, as an Answer: one JSON object, or the stream of events that some servers send unasked.

Nothing in a reply is believed or evaluated: it is read field by field, and what cannot be stored is replaced. Sends nothing.
"""

from __future__ import annotations

import json
from typing import Any

from generator.authors.answers import estimate_tokens
from generator.authors.exchange import Answer, Request

MAX_REFUSAL_CHARS = 2000


class NotACompletion(ValueError):
    """A reply with status 200 that is no chat completion; the message quotes its beginning."""


def read_completion(body: bytes, request: Request, seconds: float, tries: int = 1) -> Answer:
    """The first choice of a chat completion, streamed or not; every field checked, none trusted. Raises NotACompletion."""
    try:
        reply = _of_events(body) if _is_stream(body) else json.loads(body)
        choice = reply["choices"][0]
        message = choice["message"]
        content, refusal = message.get("content"), message.get("refusal")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise NotACompletion(f"the reply is not a chat completion: {short(body[:400].decode('utf-8', 'replace'))}") from None
    text = _text_of(content)
    told = reply.get("usage")
    usage = told if isinstance(told, dict) else {}
    tokens_in, tokens_out = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    return Answer(
        text=text,
        finish_reason=short(str(choice.get("finish_reason")), 40),
        tokens_in=tokens_in if tokens_in is not None else sum(estimate_tokens(m.content) for m in request.messages),
        tokens_out=tokens_out if tokens_out is not None else estimate_tokens(text),
        tokens_estimated=tokens_in is None or tokens_out is None,
        model=short(str(reply.get("model", request.model)), 200),
        seconds=round(seconds, 6),
        tries=tries,
        refusal=storable(refusal[:MAX_REFUSAL_CHARS]) if isinstance(refusal, str) else "",
    )


def storable(text: str) -> str:
    """The text without halves of surrogate pairs: no file, column or request can hold those."""
    return text.encode("utf-8", "replace").decode()


def short(text: str, limit: int = 300) -> str:
    """Text of a stranger for a message: one line, no characters that a terminal obeys, cut."""
    text = "".join(c if c.isprintable() else " " for c in storable(text[: 8 * limit]))
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _text_of(content: object) -> str:
    """A message's content: a string, or parts of which the text ones count (some servers send those)."""
    if isinstance(content, str):
        return storable(content)
    if isinstance(content, list):
        return storable("".join(p["text"] for p in content if isinstance(p, dict) and isinstance(p.get("text"), str)))
    return ""


def _count(value: object) -> int | None:
    """A token count that can be true: a whole number from 0 to a billion."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 10**9 else None


def _is_stream(body: bytes) -> bool:
    return body[:64].lstrip().startswith((b"data:", b"event:", b"id:", b": "))


def _of_events(body: bytes) -> dict[str, Any]:
    """The events of a stream put together as the completion that they are parts of. A stream that breaks off is no completion."""
    texts: list[str] = []
    refusals: list[str] = []
    finish, usage, model = None, None, None
    for line in body.split(b"\n"):
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            break
        event = json.loads(data)
        model, usage = event.get("model", model), event.get("usage") or usage
        for choice in event.get("choices") or ():
            if choice.get("index", 0) != 0:
                continue
            delta = choice.get("delta") or {}
            texts.append(_text_of(delta.get("content")))
            refusals.append(delta["refusal"] if isinstance(delta.get("refusal"), str) else "")
            finish = choice.get("finish_reason") or finish
    if finish is None:
        raise ValueError("the stream ends before its answer does")
    message = {"content": "".join(texts), "refusal": "".join(refusals) or None}
    return {"choices": [{"message": message, "finish_reason": finish}], "usage": usage, **({"model": model} if model else {})}
