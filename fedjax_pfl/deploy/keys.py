"""Keys and certificates for a trial: an authority of its own, the server, and each node."""

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy.own_state import whole

_DAYS = 30


def node_key(path: Path) -> Path:
    """Makes a node's private key if there is none; returns the path of its public key."""
    public = path.with_name(f"{path.name}.pub")
    if not path.exists():
        made = ec.generate_private_key(ec.SECP384R1())
        _secret(path, _pem(made, serialization.PrivateFormat.OpenSSH))
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
    except ValueError:
        raise UsageError(f"{path} is damaged; bring it back from a copy") from None
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    whole(public, key.public_key().public_bytes(*form))
    return public


def certificates(folder: Path, hosts: Sequence[str] = ("127.0.0.1",)) -> tuple[Path, Path, Path]:
    """Makes an authority, and a certificate with its key for some hosts, unless they are valid."""
    paths = folder / "ca.crt", folder / "server.pem", folder / "server.key"
    if _are_valid(*paths):
        return paths
    authority = ec.generate_private_key(ec.SECP384R1())
    name = _name("fedjax_pfl trial authority")
    signs = [(x509.BasicConstraints(True, 0), True), (_SIGNS, True)]
    made = _certificate(name, name, authority, authority, signs)
    key = ec.generate_private_key(ec.SECP384R1())
    addresses = [x509.IPAddress(ipaddress.ip_address(host)) for host in hosts]
    names = x509.SubjectAlternativeName([*addresses, x509.DNSName("localhost")])
    own = _certificate(_name("localhost"), name, key, authority, [(names, False)])
    for path, one in zip(paths[:2], (made, own), strict=True):
        whole(path, one.public_bytes(serialization.Encoding.PEM))
    _secret(paths[2], _pem(key, serialization.PrivateFormat.PKCS8))
    return paths


def _are_valid(authority: Path, certificate: Path, key: Path) -> bool:
    """Returns True if the files are whole, belong together and do not expire within a day."""
    try:
        signer, own = (
            x509.load_pem_x509_certificate(path.read_bytes()) for path in (authority, certificate)
        )
        own.verify_directly_issued_by(signer)
        secret = serialization.load_pem_private_key(key.read_bytes(), None)
    except (OSError, ValueError, InvalidSignature):
        return False
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
    return secret.public_key() == own.public_key() and own.not_valid_after_utc > soon


def _name(word: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, word)])


# What Python 3.13 wants of an authority.
_USES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment",
    "key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip
_SIGNS = x509.KeyUsage(**{use: use in ("key_cert_sign", "crl_sign") for use in _USES})


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: Any,
    signer: Any,
    extensions: Sequence[tuple[x509.ExtensionType, bool]],
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
    )
    signed_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    for extension, critical in [*extensions, (signed_by, False), (own, False)]:
        made = made.add_extension(extension, critical)
    return made.sign(signer, hashes.SHA384())


def _pem(key: Any, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _secret(path: Path, content: bytes) -> None:
    """Writes a file that only its owner can read."""
    part = path.with_name(f".{path.name}.part")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    os.replace(part, path)
