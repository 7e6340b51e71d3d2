"""Where a model is asked, and with which key: from flags and the environment, checked before anything is sent. Sends nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

KEY_VARIABLE = "OPENAI_API_KEY"
DEFAULT_URL = "https://api.openai.com/v1"


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
        """OPENAI_BASE_URL and OPENAI_API_KEY; a local server that wants no key gets a placeholder. Raises ValueError."""
        url = base_url or os.environ.get("OPENAI_BASE_URL") or None
        key = os.environ.get(KEY_VARIABLE, "").strip()
        if not key and url is None:
            raise ValueError(
                f"no model endpoint: set {KEY_VARIABLE} for a hosted model, or --base-url for your own server (vLLM, Ollama, ...)"
            )
        if not key.isascii() or not key.isprintable():
            raise ValueError(f"{KEY_VARIABLE}: expected printable ASCII characters; copy the key again")
        if url is not None:
            check_url(url)
        return Endpoint(url, key or "none", **settings)

    @property
    def place(self) -> str:
        """The endpoint as messages name it."""
        return self.base_url or "the default endpoint"

    @property
    def proxy(self) -> str | None:
        """The proxy that HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY ask for; none for servers of this machine."""
        parts = urlsplit(self.base_url or DEFAULT_URL)
        host, known = parts.hostname or "", getproxies()
        if host in ("localhost", "127.0.0.1", "::1") or proxy_bypass(host):
            return None
        return known.get(parts.scheme) or known.get("all")

    def without_key(self, text: str) -> str:
        """Text that a server sent, the key blotted out: some repeat it in their errors."""
        return text.replace(self.api_key, "[key]") if len(self.api_key) >= 8 else text


def check_url(url: str) -> None:
    """Raises ValueError for what is no address of an endpoint."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        parts, host = urlsplit(""), None
    if parts.username or parts.password:
        raise ValueError(f"expected a URL without user and password; the key goes into {KEY_VARIABLE}")
    if parts.scheme not in ("http", "https") or not host or not url.isprintable():
        raise ValueError(f"expected a URL such as http://localhost:8000/v1, found {url!r}")
    if parts.path.rstrip("/").endswith("/chat/completions"):
        cut = url[: url.rindex("/chat/completions")]
        raise ValueError(f"expected the URL above /chat/completions, found {url!r}: use {cut}")
