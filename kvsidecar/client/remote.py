"""A client of a daemon on another host, over TCP with mTLS: lookups and operator calls. It cannot attach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from kvsidecar.client.channel_options import CHANNEL_OPTIONS
from kvsidecar.client.lookup_parts import LookupParts
from kvsidecar.client.messages import LookupQuery
from kvsidecar.client.operator import OperatorCalls, operator_error
from kvsidecar.client.types import LookupResult
from kvsidecar.errors import ClientError
from kvsidecar.types import LookupMode, Namespace
from kvsidecar.v1 import sidecar_pb2_grpc as pb_grpc


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of PEM files: the CA of the daemon's certificate, and this client's own certificate and key."""

    ca: str
    certificate: str
    key: str


class RemoteClient(OperatorCalls):
    """Makes lookups and operator calls. All methods may be called from any thread.

    The daemon's policy grants permissions to the names in the client's certificate.

    Args:
        address: host:port of the daemon; the host must be a name in the daemon's certificate.
        timeout: time limit of each call, in seconds.

    Raises:
        ClientError: a file cannot be read.
    """

    def __init__(self, address: str, tls: Tls, *, timeout: float = 5.0) -> None:
        self.address = address
        self._timeout = timeout
        credentials = grpc.ssl_channel_credentials(_read(tls.ca), _read(tls.key), _read(tls.certificate))
        self._channel = grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        self._stub = pb_grpc.SidecarStub(self._channel)

    def lookup(
        self,
        namespace: Namespace,
        groups: Mapping[int, bytes | Sequence[bytes]],
        *,
        mode: LookupMode = LookupMode.PREFIX,
    ) -> LookupResult:
        """Look up which of these blocks the daemon has, by KV cache group. Without a lease: they may be evicted at any
        time.

        Raises:
            DaemonUnreachable: no daemon answers.
            RequestDenied: this client may not use the namespace.
        """
        parts = LookupParts(LookupQuery(namespace, groups, mode))
        while (part := parts.next()) is not None:
            parts.take(part.result(self._call("Lookup", part.request(b"").lookup)))
        return parts.result()

    def close(self, timeout: float | None = None) -> bool:
        self._channel.close()
        return True

    def _call(self, method: str, request: object) -> Any:
        try:
            return getattr(self._stub, method)(request, timeout=self._timeout)
        except grpc.RpcError as error:
            raise operator_error(error, self.address) from error


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ClientError(f"{path} cannot be read: {error.strerror}") from error
