"""Paths of the daemon's sockets, for the daemon and its clients. Imports nothing of kvsidecar."""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import quote

SOCKET_NAME = "kvsidecar.sock"
ATTACH_SUFFIX = ".attach"
"""The path of the attach socket is that of the gRPC socket with this suffix."""

MAX_SOCKET_PATH_BYTES = 107 - len(ATTACH_SUFFIX)
"""Longest path of the gRPC socket in bytes: ``sun_path`` has 108, including the final NUL (unix(7)), and the attach
socket's path is longer by its suffix. Checked because bind() would fail long after the configuration was read."""


def default_socket_path(environ: Mapping[str, str] | None = None, uid: int | None = None) -> str:
    """The default path of the gRPC socket, the same for a daemon and a client of one user.

    In ``/run/kvsidecar`` for root; otherwise in ``$XDG_RUNTIME_DIR``, which is private to the user and cleared at
    logout; otherwise in ``/tmp/kvsidecar-UID``. Anyone may create that last directory first: before binding or
    connecting there, check that it belongs to the expected user and that nobody else can write to it.

    Args:
        environ: instead of ``os.environ``.
        uid: instead of the effective user id.
    """
    environ = os.environ if environ is None else environ
    uid = os.geteuid() if uid is None else uid
    if uid == 0:
        return f"/run/kvsidecar/{SOCKET_NAME}"
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    # The XDG Base Directory Specification says to ignore a path that is not absolute.
    if os.path.isabs(runtime):
        return os.path.join(runtime, "kvsidecar", SOCKET_NAME)
    return f"/tmp/kvsidecar-{uid}/{SOCKET_NAME}"


def grpc_address(path: str | os.PathLike[str]) -> str:
    """The address of a Unix socket for gRPC, for servers and channels: a URI, so that any path may be in it."""
    return f"unix:{quote(os.fsencode(path))}"


def attach_path(socket: str) -> str:
    """The path of the attach socket that belongs to the gRPC socket at ``socket``."""
    return socket + ATTACH_SUFFIX


def socket_path_problem(socket: str) -> str | None:
    """The problem with a socket path as a predicate ("is not an absolute path"), or None."""
    if not os.path.isabs(socket):
        return "is not an absolute path"
    if "\0" in socket:
        return "contains a NUL byte"
    length = len(os.fsencode(socket))
    if length > MAX_SOCKET_PATH_BYTES:
        return f"is {length} bytes long; a Unix socket path has at most {MAX_SOCKET_PATH_BYTES} here"
    return None
