"""An object store that speaks S3's protocol on a loopback port, as far as pyarrow asks: for catalogs that lie elsewhere.

Keeps objects in memory and checks no signature. No test of its own.
"""

from __future__ import annotations

import hashlib
import io
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import BinaryIO
from xml.sax.saxutils import escape

#: What a client of it has to have in its environment, and what keeps it from asking a cloud's own servers.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "for-tests", "AWS_SECRET_ACCESS_KEY": "for-tests", "AWS_EC2_METADATA_DISABLED": "true"}


class ObjectStore:
    """objects: key (bucket/path) -> bytes. requests: (method, key) of every request, in order. down: refuses every write."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.modified: dict[str, float] = {}
        self.requests: list[tuple[str, str]] = []
        self.down = False
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"store": self}))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def uri(self, path: str) -> str:
        """s3://PATH at this server."""
        return f"s3://{path}?scheme=http&endpoint_override=127.0.0.1:{self._server.server_address[1]}&region=us-east-1"

    def keys(self, prefix: str = "") -> list[str]:
        """Keys that begin so; the empty objects that stand for folders are left out."""
        with self.lock:
            return sorted(key for key in self.objects if key.startswith(prefix) and not key.endswith("/"))

    def __enter__(self) -> ObjectStore:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True
    store: ObjectStore

    def _serve(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        asked = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        key, body = urllib.parse.unquote(url.path).lstrip("/"), self._body()
        with self.store.lock:
            self.store.requests.append((self.command, key))
            match self.command:
                case "HEAD" | "GET" if "list-type" in asked:
                    self._send(200, self._listing(key, asked))
                case "HEAD" | "GET":
                    self._object(key)
                case _ if self.store.down:
                    self._send(403, b"<Error><Code>AccessDenied</Code><Message>down</Message></Error>")
                case "DELETE":
                    self.store.objects.pop(key, None)
                    self._send(204)
                case "PUT" if "uploadId" in asked:
                    self.store.uploads[asked["uploadId"]][int(asked["partNumber"])] = body
                    self._send(200, etag=_etag(body))
                case "PUT":
                    self._keep(key, body)
                    self._send(200, etag=_etag(body))
                case "POST" if "uploads" in asked:
                    upload = hashlib.md5(f"{key} {len(self.store.requests)}".encode()).hexdigest()
                    self.store.uploads[upload] = {}
                    self._send(200, _xml("InitiateMultipartUploadResult", Key=key, UploadId=upload))
                case "POST" if "uploadId" in asked:
                    parts = self.store.uploads.pop(asked["uploadId"])
                    self._keep(key, b"".join(parts[n] for n in sorted(parts)))
                    self._send(200, _xml("CompleteMultipartUploadResult", Key=key, ETag='"done"'))
                case _:
                    self._send(501)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _serve

    def _body(self) -> bytes:
        """What was sent: in chunks of HTTP where its length was not known, and in chunks of S3's own within those."""
        if "chunked" in (self.headers.get("transfer-encoding") or ""):
            body = _unchunked(self.rfile)
        else:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
        return _unchunked(io.BytesIO(body)) if "aws-chunked" in (self.headers.get("content-encoding") or "") else body

    def _keep(self, key: str, body: bytes) -> None:
        self.store.objects[key], self.store.modified[key] = body, time.time()

    def _object(self, key: str) -> None:
        data = self.store.objects.get(key)
        if data is None:
            return self._send(404)
        wanted = (self.headers.get("range") or "").removeprefix("bytes=")
        if wanted and self.command == "GET":
            first, last = (int(n) for n in wanted.split("-"))
            return self._send(206, data[first : last + 1], etag=_etag(data))
        return self._send(200, data, etag=_etag(data), modified=self.store.modified[key])

    def _listing(self, bucket: str, asked: dict[str, str]) -> bytes:
        prefix, delimiter = f"{bucket}/{asked.get('prefix', '')}", asked.get("delimiter", "")
        found, folders = [], set[str]()
        for key in sorted(k for k in self.store.objects if k.startswith(prefix)):
            inner = key[len(prefix) :]
            if delimiter and delimiter in inner:
                folders.add(prefix + inner.split(delimiter)[0] + delimiter)
            else:
                found.append(key)
        at, size = int(asked.get("continuation-token") or 0), int(asked.get("max-keys") or 1000)
        contents = "".join(
            f"<Contents><Key>{escape(k.partition('/')[2])}</Key><Size>{len(self.store.objects[k])}</Size>"
            f"<LastModified>{time.strftime('%FT%T.000Z', time.gmtime(self.store.modified[k]))}</LastModified></Contents>"
            for k in found[at : at + size]
        )
        contents += "".join(
            f"<CommonPrefixes><Prefix>{escape(f.partition('/')[2])}</Prefix></CommonPrefixes>" for f in sorted(folders) if not at
        )
        more = at + size < len(found)
        token = f"<NextContinuationToken>{at + size}</NextContinuationToken>" if more else ""
        count = f"<KeyCount>{len(found[at : at + size]) + len(folders)}</KeyCount>"
        inner = f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{count}{contents}"
        return f'<?xml version="1.0"?><ListBucketResult>{inner}</ListBucketResult>'.encode()

    def _send(self, status: int, body: bytes = b"", etag: str = "", modified: float | None = None) -> None:
        self.send_response(status)
        if etag:
            self.send_header("etag", etag)
        if modified is not None:
            self.send_header("last-modified", time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(modified)))
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _unchunked(file: BinaryIO) -> bytes:
    """Chunks, each behind a line with its size, put together; what follows the last one is skipped."""
    whole = b""
    while size := int(file.readline().split(b";")[0], 16):
        whole += file.read(size)
        file.readline()
    while file.readline().strip():
        pass
    return whole


def _etag(body: bytes) -> str:
    return f'"{hashlib.md5(body).hexdigest()}"'


def _xml(name: str, **fields: str) -> bytes:
    inner = "".join(f"<{field}>{escape(value)}</{field}>" for field, value in fields.items())
    return f'<?xml version="1.0"?><{name}>{inner}</{name}>'.encode()
