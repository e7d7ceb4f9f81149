"""Clients of other hosts, and their certificates."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from kvsidecar.client import Tls
from kvsidecar.v1 import sidecar_pb2_grpc as pb_grpc
from tests.harness import DaemonProcess

trustme = pytest.importorskip("trustme")


POLICY = f"""[
  {{certificates=['ops.example'], admin=true}},
  {{certificates=['*.sched.example'], namespaces=['m']}},
  {{uids=[{os.getuid()}], namespaces=['*']}},
]"""


class Pki:
    """A CA of the test, and files that it signed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ca = trustme.CA()
        self.ca_file = directory / "ca.pem"
        self.ca.cert_pem.write_to_path(str(self.ca_file))
        self.certificate, self.key = self.issue("server", "localhost", "127.0.0.1")

    def issue(self, name: str, *names: str, ca: object = None) -> tuple[Path, Path]:
        leaf = (ca or self.ca).issue_cert(*names)  # type: ignore[attr-defined]
        certificate, key = self.directory / f"{name}.pem", self.directory / f"{name}.key"
        leaf.private_key_pem.write_to_path(str(key))
        key.chmod(0o600)
        certificate.unlink(missing_ok=True)
        for blob in leaf.cert_chain_pems:
            blob.write_to_path(str(certificate), append=True)
        return certificate, key

    def client(self, *names: str, ca: object = None) -> Tls:
        certificate, key = self.issue(f"client-{names[0]}", *names, ca=ca)
        return Tls(str(self.ca_file), str(certificate), str(key))

    @property
    def flags(self) -> list[str]:
        return [
            *("--tcp-listen", "127.0.0.1:0", "--tls-certificate", str(self.certificate), "--tls-key", str(self.key)),
            *("--tls-client-ca", str(self.ca_file), "--policy", POLICY),
        ]


@pytest.fixture
def pki(short_dir: Path) -> Pki:
    return Pki(short_dir)


class Remote:
    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon
        (port,) = [line["tcp_port"] for line in daemon.log if line["event"] == "listening"]
        self.port = port
        self.address = f"localhost:{port}"


@pytest.fixture
def remote(short_dir: Path, pki: Pki) -> Iterator[Remote]:
    with DaemonProcess(short_dir, *pki.flags) as daemon:
        daemon.wait_ready()
        yield Remote(daemon)


@contextmanager
def stub(remote: Remote, tls: Tls) -> Iterator[pb_grpc.SidecarStub]:
    files = [Path(path).read_bytes() for path in (tls.ca, tls.key, tls.certificate)]
    with grpc.secure_channel(remote.address, grpc.ssl_channel_credentials(*files)) as channel:
        yield pb_grpc.SidecarStub(channel)
