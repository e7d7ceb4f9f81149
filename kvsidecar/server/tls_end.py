"""The client's end of a relay, or of a handshake, in TLS."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvsidecar.errors import InvalidRequest, KVSidecarError, UnknownPeer
from kvsidecar.server.grpc_front import End
from kvsidecar.server.tls import PROTOCOL
from kvsidecar.support.poll_set import PollSet

RECORD_BYTES = 16 * 1024
"""The most that TLS seals at once. More would stay allocated in its buffers, which never shrink."""
_NAMES = {"DNS", "IP Address", "URI", "email"}
"""Kinds of subject alternative names that identify a client."""


@dataclass(frozen=True, slots=True)
class Step:
    """The effects of bytes of a handshake."""

    to_send: bytes
    complete: bool = False
    refused: KVSidecarError | None = None
    """Why it failed."""


class TlsConnection:
    """TLS of one connection, without I/O. Used by one thread at a time."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_side=True)
        self.names: tuple[str, ...] = ()
        """Names in the client's certificate, once the handshake is complete."""

    def shake(self, data: bytes) -> Step:
        """Take bytes of the handshake."""
        self._received.write(data)
        try:
            self._tls.do_handshake()
            self._check()
        except ssl.SSLWantReadError:
            return Step(self._to_send.read())
        except ssl.SSLError as error:
            return Step(self._to_send.read(), refused=_failed(error))
        except KVSidecarError as error:
            return Step(self._to_send.read(), refused=error)
        return Step(self._to_send.read(), complete=True)

    def _check(self) -> None:
        if self._tls.selected_alpn_protocol() != PROTOCOL:
            raise InvalidRequest("a TLS client does not name HTTP/2 (ALPN h2)")
        try:
            self.names = names_of(self._tls.getpeercert() or {})
        except ValueError as error:
            raise InvalidRequest("a name in the client's certificate cannot be read") from error

    def open(self, data: bytes) -> tuple[bytes, bool]:
        """The client's data in these bytes, and whether it has ended the connection or broken it."""
        self._received.write(data)
        parts, ended = [], False
        try:
            while part := self._tls.read(RECORD_BYTES):
                parts.append(part)
            ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:
            ended = True
        return b"".join(parts), ended

    def seal(self, data: bytes) -> bytes:
        """These bytes for the client, after TLS's own messages. Drops them if TLS has failed."""
        parts, rest = [self._to_send.read()], memoryview(data)
        try:
            while rest:
                rest = rest[self._tls.write(rest[:RECORD_BYTES]) :]
                parts.append(self._to_send.read())
        except ssl.SSLError:
            pass
        return b"".join(parts)


class TlsEnd(End):
    """See `End`. What it sends and what is unsent is sealed.

    Args:
        tls: after its handshake.
    """

    read_bytes = 2 * RECORD_BYTES  # a lookup of 512 hashes takes a little more than one record

    def __init__(
        self,
        connection: socket.socket,
        tls: TlsConnection,
        poll_set: PollSet,
        on_readable: Callable[[], None],
        on_sent: Callable[[], None],
    ) -> None:
        super().__init__(connection, poll_set, on_readable, on_sent)
        self._tls = tls
        self._ended = False

    def receive(self) -> bytes | None:
        data = super().receive()
        if data is None or self._ended:
            return None
        opened, self._ended = self._tls.open(data)
        super().send(self._tls.seal(b""))
        if self._ended and not opened:
            return None
        return opened

    def send(self, data: bytes) -> None:
        super().send(self._tls.seal(data) if data else b"")


def names_of(certificate: Mapping[str, Any]) -> tuple[str, ...]:
    """The names in a client's certificate: its subject alternative names, or else the common name (RFC 6125).

    Args:
        certificate: from `ssl.SSLSocket.getpeercert`.
    """
    if (alternative := certificate.get("subjectAltName")) is not None:
        return tuple(_name(kind, value) for kind, value in alternative if kind in _NAMES)
    common = (value for part in certificate.get("subject", ()) for key, value in part if key == "commonName")
    return tuple(name for name in common if name)[:1]


def _name(kind: str, value: str) -> str:
    """An IP address is written as everybody writes it; OpenSSL does not shorten those of IPv6."""
    return str(ipaddress.ip_address(value.strip())) if kind == "IP Address" else value


def _failed(error: ssl.SSLError) -> KVSidecarError:
    why = (error.reason or str(error)).lower().replace("_", " ")
    if isinstance(error, ssl.SSLCertVerificationError):
        return UnknownPeer(f"the client's certificate is not accepted ({error.verify_message})")
    if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return UnknownPeer("the client shows no certificate")
    return InvalidRequest(f"a TLS handshake failed ({why})")
