"""Paths of the socket that mean something to a parser of URIs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import run
from tests.harness import DaemonProcess, Rank, done


@pytest.mark.parametrize("name", ["a%2Fb%20c", "100%", "a#b", "a?b=c", "a b", "ü", "a:b@c"])
def test_whatever_its_path_is_both_protocols_find_the_socket(short_dir: Path, name: str) -> None:
    (directory := short_dir / name).mkdir()
    with DaemonProcess(directory) as daemon:
        rank = Rank(daemon.wait_ready())
        done(rank.store("a"))
        daemon.local = False
        over_grpc = Rank(daemon)
        assert over_grpc.hits("a") == 1
        assert run("status", "--socket", daemon.socket).returncode == 0
        over_grpc.close()
        rank.close()
        assert daemon.terminate() == 0
    assert [each.name for each in directory.iterdir()] == ["kvs.sock.lock"]
