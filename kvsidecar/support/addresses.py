"""Errors of listening on a TCP address: which are temporary, and which need another setting."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from typing import Final

from kvsidecar.errors import AddressUnavailable, ConfigError, KVSidecarError

_TEMPORARY: Final = frozenset({errno.EADDRINUSE, errno.EADDRNOTAVAIL})
"""Another program has the port, or the network is not up yet."""


def at(host: str, port: int) -> str:
    """``host:port`` as in a URL: an IPv6 address gets brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_meant(host: str | None, local_address: str) -> bool:
    """Whether a request for this host is meant for a server of this machine.

    Another site's page can make a browser request that site's own name after pointing it at this machine (DNS
    rebinding): the browser takes the answer for the site's. A client that reaches a loopback address names that
    address, this machine, or a name without a dot, such as ``localhost``, which no site has. Other addresses have the
    names that a network gives them.

    Args:
        host: the client's ``Host``; None if it sent none. Browsers always do.
        local_address: the address that the request was sent to.
    """
    if host is None or not _is_address(local_address) or not ipaddress.ip_address(local_address).is_loopback:
        return True
    name = host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    name = name.lower().rstrip(".")
    own = socket.gethostname().lower()
    return "." not in name or name == own or name.endswith(".localhost") or _is_address(name)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


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
