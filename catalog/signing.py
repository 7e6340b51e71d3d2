"""Signed manifests: what a person vouches for in a catalog, and reading it back only from people who are trusted. Trusts nobody.

A manifest holds everything that serving reads of the rows that could serve. It is one file:

    kernel-farm manifest 1          the form; what is signed starts with this line too
    8e2f...                         SHA-256 of the signer's public key
    91ab...                         Ed25519 signature of the first line and of all that follows this one
    <zlib of JSON>                  {"catalog": ..., "signed_at": ..., "rows": [...]}

Nothing of a manifest is decompressed or parsed before its signature holds. Keys are OpenSSH's (`ssh-keygen -t ed25519`), and who
is trusted is a setting of whoever loads, never something in the catalog. A manifest that was taken away leaves the one before it
in force: a lock file pins more than that.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from catalog.errors import CatalogError, DamagedFile
from catalog.kernels import COLUMNS
from catalog.locations import Location, read_small
from generator.canonical import canonical_json

if TYPE_CHECKING:
    from catalog.store import Catalog

FOLDER = "signatures"
_FORM = b"kernel-farm manifest 1\n"
_MOST_BYTES = 1 << 30


class SignatureError(CatalogError):
    """A key that cannot be used, or what is needed to use one is not installed: names the file and the cure."""


@dataclass(frozen=True, slots=True)
class Signer:
    """A public key. fingerprint: SHA-256 of its 32 bytes, in hex; name: the comment behind the key in its line."""

    fingerprint: str
    name: str
    key: Any

    def __str__(self) -> str:
        return f"{self.name} ({self.fingerprint[:12]})" if self.name else self.fingerprint[:12]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest whose signature holds."""

    signer: Signer
    file: str
    signed_at: str
    rows: tuple[dict[str, Any], ...]


def trusted_signers(allowed: Iterable[str]) -> tuple[Signer, ...]:
    """Public keys from lines (`ssh-ed25519 AAAA... name`) or from files of such lines. Raises SignatureError."""
    found: list[Signer] = []
    for entry in allowed:
        lines = [entry] if entry.startswith("ssh-") else _lines_of(Path(entry))
        found += [_signer(line) for line in lines]
    return tuple(found)


def _lines_of(path: Path) -> list[str]:
    try:
        lines = read_small(path.expanduser()).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SignatureError(f"signers: {path}: expected a file of public keys, one a line: {error}") from None
    return [line for line in map(str.strip, lines) if line and not line.startswith("#")]


def _signer(line: str) -> Signer:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        key = load_ssh_public_key(line.encode())
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise SignatureError(f"signers: expected a line such as 'ssh-ed25519 AAAA... name', found {line[:40]!r}")
    words = line.split(maxsplit=2)
    return Signer(_fingerprint(key), words[2] if len(words) > 2 else "", key)


def _fingerprint(public: Any) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(public.public_bytes(Encoding.Raw, PublicFormat.Raw)).hexdigest()


def _private_key(path: Path) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    cure = "`ssh-keygen -t ed25519 -N '' -f farm-key` makes one"
    try:
        key = load_ssh_private_key(read_small(path.expanduser()), password=None)
    except OSError as error:
        raise SignatureError(f"key: {path}: cannot be read ({error.strerror}); {cure}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        trouble = "has a passphrase" if "password" in str(error).lower() else "is no private key of OpenSSH"
        raise SignatureError(f"key: {path}: {trouble}; {cure}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise SignatureError(f"key: {path}: expected an Ed25519 key, found another kind; {cure}")
    return key


def needs_cryptography() -> None:
    """Raises SignatureError where the package that signs and checks is not installed."""
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise SignatureError("signers: checking signatures needs a package: pip install 'kernel-farm[sign]'") from None


@dataclass(frozen=True, slots=True)
class Signed:
    """What was signed: the file, how many rows, and the line that makes others trust the signer."""

    file: str
    num_rows: int
    fingerprint: str
    public_line: str


def sign(catalog: Catalog, key: Path, filters: Any = None) -> Signed:
    """Vouches for every verified, unrevoked row of the catalog (or those that `filters` leave) as it is now.

    Raises SignatureError for a key that cannot be used, StorageError where the catalog cannot be written.
    """
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    needs_cryptography()
    private = _private_key(key)
    rows = [row for row in catalog.rows(COLUMNS, filters).to_pylist() if _serves(row)]
    body = {"catalog": catalog.uri, "signed_at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"), "rows": rows}
    packed = zlib.compress(canonical_json(body).encode())
    fingerprint = _fingerprint(private.public_key())
    head = fingerprint.encode() + b"\n" + private.sign(_FORM + packed).hex().encode() + b"\n"
    file = _put(catalog.location, fingerprint, _FORM + head + packed)
    line = private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    return Signed(file, len(rows), fingerprint, line)


def _serves(row: dict[str, Any]) -> bool:
    return row["status"] == "ok" and row["revoked_at"] is None and row["binary_hash"] is not None


def _put(location: Location, fingerprint: str, data: bytes) -> str:
    """Under the next number; the newest of a signer counts."""
    while True:
        number = max((n for n, _ in _files(location)), default=0) + 1
        file = f"{FOLDER}/{number:08d}-{fingerprint[:12]}"
        if location.put_new(file, data):
            return file


def _files(location: Location) -> list[tuple[int, str]]:
    """(number, file), the newest first."""
    names = [e.name for e in location.files(FOLDER)]
    numbered = [(int(n.partition("-")[0]), f"{FOLDER}/{n}") for n in names if n.partition("-")[0].isdecimal()]
    return sorted(numbered, reverse=True)


def manifests(location: Location, signers: Sequence[Signer], say: Callable[[str], None] = lambda why: None) -> list[Manifest]:
    """The newest manifest of each trusted signer. say: told of every file that does not count, and why."""
    known = {s.fingerprint: s for s in signers}
    found: dict[str, Manifest] = {}
    for _, file in _files(location):
        try:
            manifest = _checked(file, location.read(file), known)
        except DamagedFile as error:
            say(str(error))
            continue
        found.setdefault(manifest.signer.fingerprint, manifest)
    return list(found.values())


def _checked(file: str, data: bytes, known: dict[str, Signer]) -> Manifest:
    from cryptography.exceptions import InvalidSignature

    parts = data[len(_FORM) :].split(b"\n", 2)
    if not data.startswith(_FORM) or len(parts) != 3:
        raise DamagedFile(f"{file}: is no manifest of this version")
    fingerprint, signature, packed = parts
    signer = known.get(fingerprint.decode("ascii", "replace"))
    if signer is None:
        raise DamagedFile(f"{file}: signed by {fingerprint[:12].decode('ascii', 'replace')}, who is not trusted here")
    try:
        signer.key.verify(bytes.fromhex(signature.decode("ascii", "replace")), _FORM + packed)
    except (InvalidSignature, ValueError):
        raise DamagedFile(f"{file}: the signature of {signer} does not hold: the file was changed") from None
    try:
        body = json.loads(zlib.decompressobj().decompress(packed, _MOST_BYTES))
    except (ValueError, zlib.error):
        raise DamagedFile(f"{file}: {signer} signed what is no manifest") from None
    return Manifest(signer, file, body["signed_at"], tuple(body["rows"]))


def vouched_rows(location: Location, signers: Sequence[Signer], say: Callable[[str], None]) -> list[dict[str, Any]]:
    """The rows that some trusted signer vouches for, once each, without those that were revoked since."""
    from catalog.marks import REVOCATIONS, Revocation, read_all

    revoked = read_all(location, REVOCATIONS, Revocation)
    gone = {r.row_id for r in revoked if r.row_id}, {r.binary_hash for r in revoked if r.binary_hash}
    rows = {row["row_id"]: row for m in reversed(manifests(location, signers, say)) for row in m.rows}
    return [row for row in rows.values() if row["row_id"] not in gone[0] and row["binary_hash"] not in gone[1]]
