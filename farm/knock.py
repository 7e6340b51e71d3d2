"""Whether somebody listens at a cluster's address, and takes our calls: asked before Ray, which waits and says it in many lines.

Joins nothing. Whether a token is wanted is asked by gRPC, which comes with Ray's client: without it, Ray tells of tokens.
"""

from __future__ import annotations

import socket
from importlib.util import find_spec
from urllib.parse import urlsplit

CONNECT_S = 10.0
ANSWER_S = 3.0  # to the question; whoever is silent for longer may still be what Ray looks for

#: A method of the server at an address, by the address's scheme. Any will do: the token is looked at before anything else.
METHODS = {"": "/ray.rpc.NodeInfoGcsService/GetClusterId", "ray": "/ray.rpc.RayletDriver/ClusterInfo"}


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
        socket.create_connection((parts.hostname, parts.port), CONNECT_S).close()
    except socket.gaierror as error:
        raise OSError(f"{parts.hostname}: no such host ({error.strerror})") from None
    except OSError as error:
        raise OSError(f"nobody listens at {place} ({error.strerror or error})") from None
    if parts.scheme in METHODS and _is_turned_away(parts.netloc, METHODS[parts.scheme], token):
        raise TurnedAway(f"{place} turned this process away")


def _is_turned_away(place: str, method: str, token: str) -> bool:
    """No answer, or one of another kind, is no."""
    if find_spec("grpc") is None:
        return False
    import grpc  # type: ignore[import-untyped]

    shown = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(place, options=(("grpc.enable_http_proxy", 0),)) as channel:
        try:
            channel.unary_unary(method)(b"", timeout=ANSWER_S, metadata=shown)
        except grpc.RpcError as error:
            return bool(error.code() is grpc.StatusCode.UNAUTHENTICATED)
    return False
