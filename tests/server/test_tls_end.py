"""TLS of one connection: who the client is, and what becomes of its bytes."""

from __future__ import annotations

import ipaddress
import ssl
from contextlib import suppress
from pathlib import Path

import pytest

from kvsidecar.errors import KVSidecarError
from kvsidecar.server.tls import Certificates, TlsFiles
from kvsidecar.server.tls_end import RECORD_BYTES, TlsConnection, names_of

trustme = pytest.importorskip("trustme")


class Client:
    """A client and the server's side of its connection, without sockets."""

    def __init__(self, directory: Path, *names: str, **issued: object) -> None:
        ca = trustme.CA()
        files = [directory / name for name in ("ca.pem", "server.pem", "server.key", "client.pem")]
        server, mine = ca.issue_cert("localhost"), ca.issue_cert(*names, **issued)
        ca.cert_pem.write_to_path(str(files[0]))
        server.cert_chain_pems[0].write_to_path(str(files[1]))
        server.private_key_pem.write_to_path(str(files[2]))
        files[2].chmod(0o600)
        mine.private_key_and_cert_chain_pem.write_to_path(str(files[3]))
        self.server = TlsConnection(Certificates(TlsFiles(files[1], files[2], files[0])).context())
        context = ssl.create_default_context(cafile=str(files[0]))
        context.load_cert_chain(files[3])
        context.set_alpn_protocols(["h2"])
        self.received, self.to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.received, self.to_send, server_hostname="localhost")

    def shake(self) -> KVSidecarError | None:
        while True:
            with suppress(ssl.SSLWantReadError):
                self.tls.do_handshake()
            step = self.server.shake(self.to_send.read())
            self.received.write(step.to_send)
            if step.complete or step.refused is not None:
                return step.refused


def test_the_names_are_those_of_the_certificate(tmp_path: Path) -> None:
    client = Client(tmp_path, "n1.example", "10.0.0.1", "2001:db8::1", "me@n1.example", common_name="other.example")
    assert client.shake() is None
    assert set(client.server.names) == {"n1.example", "10.0.0.1", "2001:db8::1", "me@n1.example"}


def test_the_common_name_counts_only_without_other_names(tmp_path: Path) -> None:
    subject = ((("countryName", "CH"),), (("commonName", "n1.example"),), (("commonName", "second"),))
    assert names_of({"subject": subject}) == ("n1.example",)
    assert names_of({"subject": subject, "subjectAltName": (("DNS", "a.example"),)}) == ("a.example",)
    assert names_of({"subject": subject, "subjectAltName": (("othername", "<unsupported>"),)}) == ()
    assert names_of({"subject": ((("countryName", "CH"),),)}) == ()
    assert names_of({}) == ()


def test_kinds_of_names_that_others_may_choose_do_not_count() -> None:
    assert (
        names_of({"subjectAltName": (("DirName", ((("commonName", "ops.example"),),)), ("Registered ID", "1.2"))}) == ()
    )
    shown = "2001:DB8:0:0:0:0:0:1\n"
    assert names_of({"subjectAltName": (("IP Address", shown),)}) == (str(ipaddress.ip_address("2001:db8::1")),)


def test_bytes_arrive_however_they_are_cut_and_an_end_is_seen(tmp_path: Path) -> None:
    client = Client(tmp_path, "n1.example")
    assert client.shake() is None
    said = bytes(range(256)) * 400
    client.tls.write(said)
    sealed = client.to_send.read()
    assert len(sealed) > len(said) > RECORD_BYTES
    opened, ended = b"", False
    for at in range(0, len(sealed), 1000):
        part, ended = client.server.open(sealed[at : at + 1000])
        assert not ended
        opened += part
    assert opened == said
    client.received.write(client.server.seal(said))
    answered = b""
    while len(answered) < len(said):
        answered += client.tls.read(65536)
    assert answered == said
    with pytest.raises(ssl.SSLWantReadError):
        client.tls.unwrap()
    assert client.server.open(client.to_send.read()) == (b"", True)


def test_bytes_that_are_no_tls_end_the_connection_after_what_was_said(tmp_path: Path) -> None:
    client = Client(tmp_path, "n1.example")
    assert client.shake() is None
    client.tls.write(b"last words")
    assert client.server.open(client.to_send.read() + bytes(100)) == (b"last words", True)
    assert client.server.open(b"") == (b"", True)
    client.server.seal(b"nobody reads it")


def test_no_session_is_kept_for_a_client_that_comes_again(tmp_path: Path) -> None:
    client = Client(tmp_path, "n1.example")
    assert client.shake() is None
    client.tls.write(b"x")
    assert client.server.open(client.to_send.read()) == (b"x", False)
    client.received.write(client.server.seal(b"y"))
    assert client.tls.read(1) == b"y"
    assert client.tls.session is None or not client.tls.session.has_ticket
