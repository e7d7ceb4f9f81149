"""Imports aiohttp's server without loading the system's CA certificates.

aiohttp loads them twice on import, for its client, which takes a tenth of the daemon's start. The daemon has no HTTP
client, so they are hidden from it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _no_ca_certificates() -> Iterator[None]:
    """Hide the system's CA certificates inside the block. It changes the environment: use it before the process has a
    second thread."""
    name = "SSL_CERT_FILE"
    value = os.environ.get(name)
    os.environ[name] = os.devnull
    try:
        yield
    finally:
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


with _no_ca_certificates():
    from aiohttp import web
    from aiohttp.http import HttpProcessingError

__all__ = ["HttpProcessingError", "web"]
