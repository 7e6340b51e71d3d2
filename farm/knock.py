"""Whether a Ray cluster would take this process in, asked over a plain socket in a moment. Joins none, and knows no Ray.

Ray itself waits for half a minute where nobody listens, and for twenty seconds, with a line of its own for each, where it is
turned away for want of a token.
"""

from __future__ import annotations

import contextlib
import socket
import time
from urllib.parse import urlsplit

CONNECT_S = 10.0
ANSWER_S = 3.0  # to the question; whoever is silent for longer may still be what Ray looks for

#: A method of the server at an address, by the address's scheme. Any will do: the token is looked at before anything else.
METHODS = {"": "/ray.rpc.NodeInfoGcsService/GetClusterId", "ray": "/ray.rpc.RayletDriver/ClusterInfo"}
#: What a gRPC server that turns a call away for want of a token writes: the header's name, the length of its value, the value.
TURNED_AWAY = b"grpc-status\x0216"


class TurnedAway(OSError):
    """Somebody listens, and wants a token, or another one than was shown."""


def knock(address: str, token: str = "") -> None:
    """address: HOST:PORT or ray://HOST:PORT; others are left to Ray, which has words for them. token: what is shown, if any.

    Raises ValueError for a ray:// address without host or port, OSError where nobody listens, TurnedAway.
    """
    parts = urlsplit(address if "://" in address else f"//{address}")
    if not parts.hostname or parts.port is None:
        if parts.scheme == "ray":
            raise ValueError("names no host and port, such as ray://head:10001")
        return
    place = f"{parts.hostname}:{parts.port}"
    try:
        with socket.create_connection((parts.hostname, parts.port), CONNECT_S) as line:
            turned_away = (method := METHODS.get(parts.scheme)) is not None and _is_turned_away(line, place, method, token)
    except socket.gaierror as error:
        raise OSError(f"{parts.hostname}: no such host ({error.strerror})") from None
    except OSError as error:
        raise OSError(f"nobody listens at {place} ({error.strerror or error})") from None
    if turned_away:
        raise TurnedAway(f"{place} turned this process away")


def _is_turned_away(line: socket.socket, place: str, method: str, token: str) -> bool:
    """Asks by hand, as HTTP/2 has it: a call of a gRPC method with an empty message. No answer, or one of another kind, is no."""
    headers = {
        ":method": "POST", ":scheme": "http", ":path": method, ":authority": place, "te": "trailers",
        "content-type": "application/grpc",
    } | ({"authorization": f"Bearer {token}"} if token else {})  # fmt: skip
    call = _frame(1, 4, 1, b"".join(_header(name, value) for name, value in headers.items())) + _frame(0, 1, 1, bytes(5))
    heard, until = b"", time.monotonic() + ANSWER_S
    with contextlib.suppress(OSError):
        line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b"") + call)
        while b"grpc-status" not in heard[:-3] and (left_s := until - time.monotonic()) > 0:
            line.settimeout(left_s)
            if not (more := line.recv(1 << 16)):
                break
            heard += more
    return TURNED_AWAY in heard


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """kind 0: data, 1: headers, 4: settings. flags 1: the stream's last, 4: the last of its headers."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _header(name: str, value: str) -> bytes:
    """Written out, and to be remembered by nobody: a zero, then both texts behind their lengths of seven bits."""
    return b"\0" + b"".join(_length(len(text)) + text for text in (name.encode(), value.encode()))


def _length(number: int) -> bytes:
    """HPACK's integer behind a prefix of seven bits (RFC 7541, 5.1); its first bit, zero, says that the text is plain."""
    if number < 127:
        return bytes((number,))
    found, number = bytearray((127,)), number - 127
    while number >= 128:
        found.append(number % 128 + 128)
        number //= 128
    return bytes((*found, number))
