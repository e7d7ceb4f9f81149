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
