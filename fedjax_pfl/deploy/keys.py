"""Keys and certificates of a trial: its certificate authority, its server and its nodes."""

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
from fedjax_pfl.deploy.storage import write_atomic

_DAYS = 30


def ensure_node_key(path: Path) -> Path:
    """Creates a node's private key unless it exists; returns the path of its public key.

    Raises UsageError if a stored key is damaged.
    """
    public = path.with_name(f"{path.name}.pub")
    if not path.exists():
        new_key = ec.generate_private_key(ec.SECP384R1())
        _write_private(path, new_key, serialization.PrivateFormat.OpenSSH)
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
    except ValueError:
        raise UsageError(f"{path} is damaged; restore it from a backup") from None
    encoding = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    write_atomic(public, key.public_key().public_bytes(*encoding))
    return public


def ensure_certificates(folder: Path) -> tuple[Path, Path, Path]:
    """Creates a certificate authority and a server certificate unless valid ones exist.

    Returns the paths of the authority's certificate, the server's certificate and its key.
    """
    paths = folder / "ca.crt", folder / "server.pem", folder / "server.key"
    if _are_valid(*paths):
        return paths
    authority = ec.generate_private_key(ec.SECP384R1())
    name = _name("fedjax_pfl trial authority")
    extensions = [(x509.BasicConstraints(True, 0), True), (_AUTHORITY_USAGE, True)]
    authority_certificate = _certificate(name, name, authority, authority, extensions)
    key = ec.generate_private_key(ec.SECP384R1())
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    names = x509.SubjectAlternativeName([address, x509.DNSName("localhost")])
    server_certificate = _certificate(_name("localhost"), name, key, authority, [(names, False)])
    write_atomic(paths[0], authority_certificate.public_bytes(serialization.Encoding.PEM))
    write_atomic(paths[1], server_certificate.public_bytes(serialization.Encoding.PEM))
    _write_private(paths[2], key, serialization.PrivateFormat.PKCS8)
    return paths


def _are_valid(authority: Path, certificate: Path, key: Path) -> bool:
    """Returns True if the files are intact, belong together and do not expire within a day."""
    try:
        signer, issued = (
            x509.load_pem_x509_certificate(path.read_bytes()) for path in (authority, certificate)
        )
        issued.verify_directly_issued_by(signer)
        private_key = serialization.load_pem_private_key(key.read_bytes(), None)
    except (OSError, ValueError, InvalidSignature):
        return False
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
    return private_key.public_key() == issued.public_key() and issued.not_valid_after_utc > soon


def _name(word: str) -> x509.Name:
    """Returns the name of a certificate's owner or signer, with `word` as its common name."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, word)])


# Python 3.13 rejects an authority without key usage.
_KEY_USES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment",
    "key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip
_AUTHORITY_USAGE = x509.KeyUsage(**{use: use in ("key_cert_sign", "crl_sign") for use in _KEY_USES})


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: Any,
    signer: Any,
    extensions: Sequence[tuple[x509.ExtensionType, bool]],
) -> x509.Certificate:
    """Creates a certificate that is valid for `_DAYS` days.

    `key` and `signer` are private keys of subject and issuer. Extensions have True if critical.
    """
    current_time = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(current_time - datetime.timedelta(days=1))
        .not_valid_after(current_time + datetime.timedelta(days=_DAYS))
    )
    authority_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    key_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    for extension, critical in [*extensions, (authority_id, False), (key_id, False)]:
        builder = builder.add_extension(extension, critical)
    return builder.sign(signer, hashes.SHA384())


def _write_private(path: Path, key: Any, key_format: serialization.PrivateFormat) -> None:
    """Writes a private key, unencrypted PEM, to a file that only its owner can read."""
    encoding, encryption = serialization.Encoding.PEM, serialization.NoEncryption()
    content = key.private_bytes(encoding, key_format, encryption)
    part = path.with_name(f".{path.name}.part")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    os.replace(part, path)
