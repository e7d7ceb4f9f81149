"""aiohttp's server, imported without the rest of aiohttp.

aiohttp reads the certificates that the system trusts, twice, for its client, when it is imported: a tenth of the
daemon's start. Nothing here is a client, so it finds none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _no_trusted_certificates() -> Iterator[None]:
    """Nothing that is imported inside the block trusts certificates of the system. Before the process has a second
    thread: it changes the environment for a moment."""
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


with _no_trusted_certificates():
    from aiohttp import web
    from aiohttp.http import HttpProcessingError

__all__ = ["HttpProcessingError", "web"]
