"""A real HTTP server that speaks the chat-completions protocol as badly as a test wants. No model: it plays what it is given."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Reply:
    """What the server does with one request. `body` is sent as it is; `chunks_s` pauses before each tenth of it."""

    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    close_after: int | None = None
    repeat: int = 1


def completion(text: Any, finish_reason: str = "stop", usage: dict[str, int] | None = None, **message: Any) -> Reply:
    """A well-formed chat completion with one choice."""
    choice = {"index": 0, "finish_reason": finish_reason, "message": {"role": "assistant", "content": text, **message}}
    body = {"id": "c-1", "object": "chat.completion", "created": 0, "model": "test-model", "choices": [choice]}
    return Reply(
        json.dumps(body | {"usage": usage or {"prompt_tokens": 100, "completion_tokens": 50, "total_tokens": 150}}).encode()
    )


def failure(status: int, message: str = "no", **headers: str) -> Reply:
    return Reply(
        json.dumps({"error": {"message": message, "type": "test"}}).encode(),
        status,
        {k.replace("_", "-"): v for k, v in headers.items()},
    )


class ChatServer:
    """Serves `behave(request_json, number)` on a loopback port; `requests` are all bodies received, in order."""

    def __init__(self, behave: Callable[[dict[str, Any], int], Reply]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self._behave = behave
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> ChatServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with outer._lock:
                    number = len(outer.requests)
                    outer.requests.append(request)
                    outer.keys.append(self.headers.get("authorization", ""))
                outer._play(self, outer._behave(request, number))

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    @staticmethod
    def _play(handler: BaseHTTPRequestHandler, reply: Reply) -> None:
        time.sleep(reply.delay_s)
        try:
            handler.send_response(reply.status)
            for name, value in ({"content-type": "application/json"} | reply.headers).items():
                handler.send_header(name, value)
            handler.send_header("content-length", str(len(reply.body) * reply.repeat))
            handler.end_headers()
            if reply.close_after is not None:
                handler.wfile.write(reply.body[: reply.close_after])
                handler.close_connection = True
                handler.connection.close()
                return
            for _ in range(reply.repeat):
                handler.wfile.write(reply.body)
        except (BrokenPipeError, ConnectionResetError):
            handler.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512
