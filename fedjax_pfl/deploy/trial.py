"""A federation on one machine, to try: a SuperLink, nodes with TLS and keys, and an end to all.

Everything lies in one folder, and everything that is started is ended, whatever happens.
"""

import contextlib
import datetime
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy.app import HERE
from fedjax_pfl.deploy.flower import ENDED, FAILED, NAME

_DAYS = 30
_END = 10.0  # seconds that a process has to end by itself


def run(
    config: Mapping[str, Any],
    workdir: Path,
    folder: Path,
    waiting: Mapping[str, Any],
    tell: Callable[[str], None],
    data: Sequence[str] = (),
) -> None:
    """A run with as many nodes as the configuration has clients, all on this machine.

    Args:
      folder: of certificates, keys, logs, and of each node.
      data: of each node the JSON file that names its data; none: its part of the configuration's.
    """
    nodes = config["clients"]
    folder.mkdir(parents=True, exist_ok=True)
    os.chmod(folder, 0o700)
    authority, certificate, key = certificates(folder)
    ports = free_ports(nodes + 2)
    home = _home(folder, authority, ports[0])
    log = folder / "run.log"
    for old in [log, *folder.glob("superlink.db*")]:  # who is who follows from keys alone
        old.unlink(missing_ok=True)
    settings = folder / "settings.json"
    asked = {"config": config, "workdir": str(workdir), "log": str(log), "waiting": waiting}
    settings.write_text(json.dumps(asked))
    with _Processes(folder, home) as started:
        started.start(
            "superlink",
            *("flower-superlink", "--ssl-ca-certfile", authority, "--ssl-certfile", certificate),
            *("--ssl-keyfile", key, "--enable-supernode-auth", "--host", "127.0.0.1"),
            *("--port", ports[0], "--control-api-address", f"127.0.0.1:{ports[1]}"),
            *("--database", folder / "superlink.db", "--disable-runtime-dependency-installation"),
        )
        started.until(ports[0], "superlink")
        for i in range(nodes):
            public = node_key(folder / f"{NAME}{i}.key")
            started.command(
                "flwr", "supernode", "register", public, "trial", "--name", f"{NAME}{i}"
            )
            own = data[i : i + 1]
            started.start(f"worker-{i}", sys.executable, "-m", "fedjax_pfl.deploy.worker",
                          folder / f"node-{i}", *own)  # fmt: skip
            words = {"folder": folder / f"node-{i}", **({"data": own[0]} if own else {})}
            said = " ".join(f"{word}={json.dumps(str(value))}" for word, value in words.items())
            started.start(
                f"node-{i}",
                *("flower-supernode", "--superlink", f"127.0.0.1:{ports[0]}"),
                *("--root-certificates", authority, "--port", ports[2 + i]),
                *("--auth-supernode-private-key", folder / f"{NAME}{i}.key"),
                *("--node-config", said, *_runtime(authority, certificate, key)),
            )
        asking = f"settings={json.dumps(str(settings))}"
        started.command("flwr", "run", HERE, "trial", "--run-config", asking)
        _follow(log, started, tell)


def _runtime(authority: Path, certificate: Path, key: Path) -> list[Any]:
    """Of the interface through which a SuperNode's own processes speak to it."""
    return ["--ssl-ca-certfile", authority, "--ssl-certfile", certificate, "--ssl-keyfile", key]


def _follow(log: Path, started: "_Processes", tell: Callable[[str], None]) -> None:
    """Tell the run's lines as they come, until the last one."""
    seen = 0
    while True:
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        for line in lines[seen:]:
            if not line.endswith("\n"):
                break
            seen += 1
            if line.startswith(FAILED):
                raise UsageError(line.removeprefix(FAILED).strip())
            if line.startswith(ENDED):
                return
            tell(line.rstrip("\n"))
        started.alive()
        for name in started.again():
            tell(f"{name} has ended, and is started again")
        time.sleep(0.2)


class _Processes:
    """What was started: each in a group of its own, which is ended with all that it started."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder, self.running = folder, dict[str, subprocess.Popen[bytes]]()
        self.words: dict[str, tuple[Any, ...]] = {}
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }

    def __enter__(self) -> "_Processes":
        return self

    def __exit__(self, *_: object) -> None:
        for each in (signal.SIGTERM, signal.SIGKILL):
            alive = [one for one in self.running.values() if one.poll() is None]
            for one in reversed(alive) if each is signal.SIGTERM else self.running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(one.pid, each)
            until = time.monotonic() + _END
            for one in alive:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    one.wait(max(0.1, until - time.monotonic()))
        home = Path(self.environment["FLWR_HOME"])
        for pid in left(home):  # Flower gives its apps sessions of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def start(self, name: str, *words: Any) -> None:
        """A process whose output goes to a file of its name."""
        self.words[name] = words
        with open(self.folder / f"{name}.log", "ab") as out:
            self.running[name] = subprocess.Popen(
                [str(word) for word in words],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def command(self, *words: Any) -> None:
        """A command that ends by itself."""
        done = subprocess.run(
            [str(word) for word in words], env=self.environment, capture_output=True, text=True
        )
        if done.returncode:
            said = " ".join((done.stderr or done.stdout).split())[-400:]
            raise UsageError(f"{' '.join(map(str, words[:3]))} failed: {said}")

    def alive(self) -> None:
        """UsageError where the one that all hang on has ended."""
        name, one = next(iter(self.running.items()))
        if one.poll() is not None:
            raise UsageError(
                f"{name} has ended with status {one.returncode}; see {self.folder / f'{name}.log'}"
            )

    def again(self) -> list[str]:
        """Start those that have ended again; their names."""
        ended = [name for name, one in self.running.items() if one.poll() is not None]
        for name in ended:
            self.start(name, *self.words[name])
        return ended

    def until(self, port: int, name: str, seconds: float = 120.0) -> None:
        """Wait until somebody listens."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.alive()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return
            time.sleep(0.2)
        raise UsageError(f"{name} does not listen after {seconds:.0f} s; see {self.folder}")


def left(home: Path) -> list[int]:
    """Processes that have this home for Flower in their environment, whoever started them."""
    mark, found = f"FLWR_HOME={home}\0".encode(), list[int]()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark in path.read_bytes() + b"\0":
                found.append(int(path.parent.name))
    return found


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody uses now."""
    with contextlib.ExitStack() as kept:
        held = [kept.enter_context(socket.socket()) for _ in range(count)]
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]


def _home(folder: Path, authority: Path, port: int) -> Path:
    """A home for Flower's commands, with a connection named trial."""
    home = folder / "flwr"
    home.mkdir(exist_ok=True)
    lines = ["[superlink]", 'default = "trial"', "", "[superlink.trial]"]
    lines += [f'address = "127.0.0.1:{port}"', f"root-certificates = {json.dumps(str(authority))}"]
    (home / "config.toml").write_text("\n".join(lines) + "\n")
    return home


def node_key(path: Path) -> Path:
    """A node's private key, made if it is not there; the path of its public key."""
    public = path.with_name(f"{path.name}.pub")
    if not path.exists():
        key = ec.generate_private_key(ec.SECP384R1())
        _secret(path, _pem(key, serialization.PrivateFormat.OpenSSH))
        form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        public.write_bytes(key.public_key().public_bytes(*form))
    return public


def certificates(folder: Path, hosts: Sequence[str] = ("127.0.0.1",)) -> tuple[Path, Path, Path]:
    """An authority of this folder's own, and a certificate with its key for some hosts."""
    paths = folder / "ca.crt", folder / "server.pem", folder / "server.key"
    if all(path.exists() for path in paths):
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
        path.write_bytes(one.public_bytes(serialization.Encoding.PEM))
    _secret(paths[2], _pem(key, serialization.PrivateFormat.PKCS8))
    return paths


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
    """A file that only its owner reads."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)


@contextlib.contextmanager
def interrupted() -> Iterator[None]:
    """What ends by SIGTERM ends as by Ctrl-C, so that what it started is ended too."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
