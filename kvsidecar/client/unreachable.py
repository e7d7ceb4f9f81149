"""Explains why a socket cannot be connected to, and what to change."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from kvsidecar.errors import DaemonUnreachable, SocketDenied
from kvsidecar.protocol.paths import ATTACH_SUFFIX, attach_path, default_socket_path


def unreachable(path: str, error: Exception) -> DaemonUnreachable:
    """The error for a connection to the attach socket at ``path`` that failed with ``error``. Its text names the gRPC
    socket, as the user does."""
    if isinstance(error, PermissionError):
        return SocketDenied(f"{_named(path)} may not be opened: {_denied(path)}")
    text = getattr(error, "strerror", None) or str(error)
    return DaemonUnreachable(
        f"no kvsidecar answers at {_named(path)} ({text}): {_elsewhere(path) or 'is the daemon running?'}"
    )


def _named(path: str) -> str:
    return path.removesuffix(ATTACH_SUFFIX)


def _elsewhere(path: str) -> str:
    """A hint where the system's daemon is, if this user has none and looked at the default path."""
    system = attach_path(default_socket_path(uid=0))
    if path == system or path != attach_path(default_socket_path()):
        return ""
    socket = default_socket_path(uid=0)
    try:
        os.stat(system)
    except PermissionError:
        return f"there may be one at {socket}, but {_denied(system)}"
    except OSError:
        return ""
    if not os.access(system, os.W_OK, effective_ids=True):
        return f"there is one at {socket}, but {_denied(system)}"
    return f"there is one at {socket}: name it with --socket or KVSIDECAR_SOCKET"


def _denied(path: str) -> str:
    """Who may open a socket, why this user may not, and what to change."""
    # connect() needs to search every directory on the way, and to write to the socket (unix(7)).
    directories = [str(each) for each in reversed(Path(path).parents)]
    closed = next((each for each in directories if not os.access(each, os.X_OK, effective_ids=True)), path)
    us = _user(os.geteuid())
    try:
        found = os.stat(closed)
    except OSError as error:
        return f"{us} is refused at {_named(closed)} ({error.strerror})"
    mode, owner, group = stat.S_IMODE(found.st_mode), _user(found.st_uid), _group(found.st_gid)
    text = f"{_named(closed)} has mode {mode:04o} and belongs to {owner}:{group}, but this process runs as {us}: "
    wanted = stat.S_IXGRP if closed != path else stat.S_IWGRP
    if os.access(closed, os.X_OK if closed != path else os.W_OK, effective_ids=True):
        return text + "a security module of the kernel forbids it"
    if not mode & wanted or found.st_gid in {0, os.getegid(), *os.getgroups()}:
        if closed != path and closed != str(Path(path).parent):
            return text + f"chmod o+x {closed} lets others through, or give the daemon another --socket"
        advice = (
            f"start the daemon with --socket-mode 0660 and a --socket-group that has this user, or run this as {owner}"
        )
        return text + (f"{advice}; chmod o+x {closed} if it has them" if closed != path else advice)
    how = f"gpasswd -a {'USER' if us.startswith('uid ') else us} {group} and a new login; --group-add in a container"
    return text + f"run this in the group {group} ({how}), or as {owner}"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return f"gid {gid}"
