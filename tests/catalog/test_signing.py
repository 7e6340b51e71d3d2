"""Signed manifests: only what a trusted person signed serves, whatever was done to the catalog since."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from kernel_factory import Shelf, spec

import catalog
from catalog import signing
from catalog.signing import SignatureError, sign

pytestmark = pytest.mark.usefixtures("fresh_loader")

SDPA = "scaled_dot_product_attention"
X = torch.randn(1, 4, 30, 16, generator=torch.Generator().manual_seed(1))


def key_file(folder: Path, name: str, key=None) -> Path:
    path = folder / name
    made = key or Ed25519PrivateKey.generate()
    path.write_bytes(made.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    return path


@pytest.fixture
def signed(tmp_path):
    """(folder of a catalog with one kernel, its id, the key, the line of who signed it)"""
    shelf = Shelf()
    kernel = shelf.add(spec())
    folder = shelf.save(tmp_path / "catalog")
    key = key_file(tmp_path, "key")
    made = sign(catalog.open(folder), key)
    assert made.num_rows == 1 and made.public_line.startswith("ssh-ed25519 ")
    return folder, kernel, key, made.public_line


def told(folder, *signers):
    catalog.configure(catalog=folder, signers=signers, probe="off")
    return catalog.explain(SDPA, X, X, X)


def test_what_a_trusted_person_signed_serves(signed, tmp_path):
    folder, kernel, _, line = signed
    assert told(folder, line).kernel_id == kernel
    torch.testing.assert_close(
        catalog.scaled_dot_product_attention(X, X, X), torch.nn.functional.scaled_dot_product_attention(X, X, X)
    )
    assert catalog.last_decision().kernel_id == kernel
    (tmp_path / "signers").write_text(f"# who may\n\n{line} me@work\n")
    assert told(folder, str(tmp_path / "signers")).kernel_id == kernel


def test_the_environment_names_who_is_trusted(signed, tmp_path, monkeypatch):
    folder, kernel, _, line = signed
    (tmp_path / "signers").write_text(line)
    monkeypatch.setenv("FARM_SIGNERS", str(tmp_path / "signers"))
    catalog.configure(catalog=folder, probe="off")
    assert catalog.explain(SDPA, X, X, X).kernel_id == kernel


def test_unsigned_and_unknown_are_turned_down(signed, tmp_path):
    folder, _, _, _ = signed
    other = sign(catalog.open(Shelf().save(tmp_path / "other")), key_file(tmp_path, "other-key")).public_line
    decision = told(folder, other)
    assert decision.kernel_id is None and decision.reasons[0].code == "signature"
    assert "farm catalog sign" in str(decision) and "not trusted here" in str(decision)
    shutil.rmtree(folder / signing.FOLDER)
    assert told(folder, other).reasons[0].code == "signature"
    with pytest.raises(catalog.NoKernelError, match="nothing in .* is signed by"):
        catalog.configure(mode="strict")
        catalog.scaled_dot_product_attention(X, X, X)


@pytest.mark.parametrize("place", ["form", "fingerprint", "signature", "body", "short", "swapped name"])
def test_a_changed_manifest_is_none(signed, place):
    folder, _, _, line = signed
    (file,) = (folder / signing.FOLDER).iterdir()
    data = bytearray(file.read_bytes())
    lines = [i for i, byte in enumerate(data) if byte == 10][:3]
    at = {"form": 3, "fingerprint": lines[0] + 5, "signature": lines[1] + 5, "body": len(data) - 9}.get(place)
    if place == "swapped name":
        file = file.rename(file.with_name(f"99999999-{'0' * 12}"))
        assert told(folder, line).kernel_id is not None, "names say nothing: the key inside does"
        return
    if at is not None:
        data[at] ^= 1
    file.write_bytes(data if at is not None else data[: lines[1]])
    assert told(folder, line).reasons[0].code == "signature"


def test_rows_that_came_or_were_changed_later_do_not_serve(signed, tmp_path):
    folder, kernel, key, line = signed
    shelf = Shelf()
    new = shelf.add(spec(), mark=7, ours_s=1e-6)  # faster than all that was signed
    shelf.save(folder)
    assert told(folder).kernel_id == new, "without signers, every verified row counts"
    decision = told(folder, line)
    assert decision.kernel_id == kernel and all(c.kernel_id != new for c in decision.considered)
    sign(catalog.open(folder), key)
    assert told(folder, line).kernel_id == new


def test_bytes_have_to_be_those_that_were_signed(signed):
    folder, kernel, _, line = signed
    (binary,) = [p for p in (folder / "artifacts").rglob("*") if p.is_file() and p.name.startswith(kernel)]
    binary.chmod(0o644)
    binary.write_bytes(b"\x7fELF something else")
    told(folder, line)
    catalog.scaled_dot_product_attention(X, X, X)
    assert catalog.last_decision().kernel_id is None


def test_what_was_revoked_since_does_not_serve(signed):
    folder, kernel, _, line = signed
    held = catalog.open(folder)
    held.revoke("wrong after all", binary_hash=held.rows(["binary_hash"])["binary_hash"][0].as_py())
    assert told(folder, line).reasons[0].code == "signature"
    assert told(folder).kernel_id is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: d / "nowhere", "cannot be read"),
        (lambda d: key_file(d, "curve", generate_private_key(SECP256R1())), "expected an Ed25519 key"),
        (lambda d: (d / "text").write_text("no key") and d / "text", "is no private key of OpenSSH"),
    ],
)
def test_keys_that_cannot_be_used(tmp_path, make, words):
    held = catalog.open(tmp_path / "catalog", create=True)
    with pytest.raises(SignatureError, match=words) as caught:
        sign(held, make(tmp_path))
    assert "ssh-keygen" in str(caught.value) and not (tmp_path / "catalog" / signing.FOLDER).exists()


@pytest.mark.parametrize("line", ["ssh-rsa AAAA", "ssh-ed25519 AAAA me", "/no/such/file"])
def test_signers_that_are_none_are_named(tmp_path, line):
    catalog.open(tmp_path / "catalog", create=True)
    with pytest.raises(SignatureError, match="signers: "):
        told(tmp_path / "catalog", line)


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="no ssh-keygen here")
def test_a_key_of_ssh_keygen_signs(signed, tmp_path):
    folder = signed[0]
    for name, passphrase in (("k", ""), ("locked", "a secret")):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", "release", "-f", tmp_path / name]
        subprocess.run(command, check=True)
    with pytest.raises(SignatureError, match="has a passphrase; `ssh-keygen"):
        sign(catalog.open(folder), tmp_path / "locked")
    sign(catalog.open(folder), tmp_path / "k")
    assert told(folder, str(tmp_path / "k.pub")).kernel_id is not None
