"""Errors of listening on a TCP address: which are temporary, and which need another setting."""

from __future__ import annotations

import errno
import os
import socket
from typing import Final

from kvsidecar.errors import AddressUnavailable, ConfigError, KVSidecarError

_TEMPORARY: Final = frozenset({errno.EADDRINUSE, errno.EADDRNOTAVAIL})
"""Another program has the port, or the network is not up yet."""


def cannot_listen(service: str, address: str, option: str, error: OSError) -> KVSidecarError:
    """The error with which the daemon exits when it cannot bind.

    Args:
        service: HTTP or gRPC.
        option: the option that sets the address.
        error: from bind() or getaddrinfo().
    """
    if isinstance(error, socket.gaierror):
        temporary, why = error.errno == socket.EAI_AGAIN, error.strerror
    else:
        temporary, why = error.errno in _TEMPORARY, os.strerror(error.errno) if error.errno else str(error)
    text = f"{service} cannot listen on {address} ({why})"
    if temporary:
        return AddressUnavailable(f"{text}: free it, or set {option}")
    return ConfigError(f"{text}: set {option}")


def bind_error(host: str, port: int) -> OSError | None:
    """Why a server cannot bind to this address now, for servers that do not report it; None if it can."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        return error
    return None
