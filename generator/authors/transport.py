"""HTTP to an endpoint that is not trusted: replies are bounded in bytes, never unpacked. Knows nothing of models."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2

#: Bytes of one reply, headers excluded: the largest context of today's models is a tenth of it.
MAX_REPLY_BYTES = 16 << 20


class TooLarge(httpx2.TransportError):
    """A reply longer than MAX_REPLY_BYTES."""


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, limit: int) -> None:
        self._stream, self._limit = stream, limit

    async def __aiter__(self) -> AsyncIterator[bytes]:
        seen = 0
        async for chunk in self._stream:
            seen += len(chunk)
            if seen > self._limit:
                raise TooLarge(f"the reply is longer than {self._limit >> 20} MiB")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


class BoundedTransport(httpx2.AsyncHTTPTransport):
    """Bounds every reply, error pages too, and refuses compressed ones: a bomb could unpack to any size."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        request.headers["accept-encoding"] = "identity"
        response = await super().handle_async_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise httpx2.TransportError("the reply is compressed although none was asked for")
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _BoundedStream(response.stream, MAX_REPLY_BYTES)
        return response
