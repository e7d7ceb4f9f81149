"""Where the sockets are, for daemon and client alike."""

from __future__ import annotations

import pytest

from kvsidecar.protocol.paths import (
    MAX_SOCKET_PATH_BYTES,
    SOCKET_NAME,
    attach_path,
    default_socket_path,
    grpc_address,
    socket_path_problem,
)


@pytest.mark.parametrize(
    ("uid", "runtime", "directory"),
    [
        (0, "/run/user/0", "/run/kvsidecar"),
        (1000, "/run/user/1000", "/run/user/1000/kvsidecar"),
        (1000, "", "/tmp/kvsidecar-1000"),
        (1000, "run/user/1000", "/tmp/kvsidecar-1000"),
    ],
)
def test_the_default_is_a_path_of_the_users_own(uid: int, runtime: str, directory: str) -> None:
    assert default_socket_path({"XDG_RUNTIME_DIR": runtime}, uid) == f"{directory}/{SOCKET_NAME}"


def test_the_longest_path_leaves_room_for_that_of_the_attach_socket() -> None:
    longest = "/" + "a" * (MAX_SOCKET_PATH_BYTES - 1)
    assert socket_path_problem(longest) is None
    assert len(attach_path(longest)) == 107
    assert socket_path_problem(longest + "a") == "is 101 bytes long; a Unix socket path has at most 100 here"
    assert socket_path_problem("/" + "ä" * 50) is not None, "bytes count, not characters"


def test_a_path_that_cannot_be_bound_is_refused_in_words() -> None:
    assert socket_path_problem("kvsidecar.sock") == "is not an absolute path"
    assert socket_path_problem("/run/a\0b") == "contains a NUL byte"


def test_any_path_may_be_in_grpcs_address() -> None:
    assert grpc_address("/run/a b%#?.sock") == "unix:/run/a%20b%25%23%3F.sock"
