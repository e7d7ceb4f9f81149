"""Where the daemon's sockets are, for the daemon and its clients alike. Imports nothing of kvsidecar."""

from __future__ import annotations

import os
from collections.abc import Mapping

SOCKET_NAME = "kvsidecar.sock"
ATTACH_SUFFIX = ".attach"
"""The attach socket lies beside the gRPC socket, under its name with this suffix."""

MAX_SOCKET_PATH_BYTES = 107 - len(ATTACH_SUFFIX)
"""Longest path of the gRPC socket, in bytes: ``sun_path`` holds 108 with the final NUL (unix(7)), and the attach
socket's name is longer by its suffix. A longer path makes bind() fail long after the configuration was read."""


def default_socket_path(environ: Mapping[str, str] | None = None, uid: int | None = None) -> str:
    """The gRPC socket when none is named: the same answer in a daemon and in a client of the same user.

    ``/run/kvsidecar`` for root; else under ``$XDG_RUNTIME_DIR``, which is private to the user and cleared at logout;
    else ``/tmp/kvsidecar-UID``. Anybody may create that last directory first: whoever binds or connects there must
    check that it belongs to the expected user and that nobody else may write to it.

    Args:
        environ: instead of ``os.environ``.
        uid: instead of the effective user id.
    """
    environ = os.environ if environ is None else environ
    uid = os.geteuid() if uid is None else uid
    if uid == 0:
        return f"/run/kvsidecar/{SOCKET_NAME}"
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    # The XDG Base Directory Specification: a path that is not absolute is invalid and is to be ignored.
    if os.path.isabs(runtime):
        return os.path.join(runtime, "kvsidecar", SOCKET_NAME)
    return f"/tmp/kvsidecar-{uid}/{SOCKET_NAME}"


def attach_path(socket: str) -> str:
    """The attach socket beside the gRPC socket at ``socket``."""
    return socket + ATTACH_SUFFIX


def socket_path_problem(socket: str) -> str | None:
    """What is wrong with a socket path, as the end of a sentence about it, or None."""
    if not os.path.isabs(socket):
        return "is not an absolute path"
    if "\0" in socket:
        return "holds a NUL byte"
    length = len(os.fsencode(socket))
    if length > MAX_SOCKET_PATH_BYTES:
        return f"is {length} bytes long; a Unix socket path has at most {MAX_SOCKET_PATH_BYTES} here"
    return None
