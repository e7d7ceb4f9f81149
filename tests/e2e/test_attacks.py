"""Clients that attack: who is honest is served all the same. Each attack is a process, of `tests/attacks`."""

from __future__ import annotations

from pathlib import Path

from kvsidecar.server.arrivals import TABLE_SHARE
from tests.attacks.support import attack
from tests.e2e.test_unfinished import open_fds
from tests.harness import SECONDS, DaemonProcess, Rank, done, eventually

TABLE = 4096
"""Descriptors that a daemon may have here: few, so that an attack of any user can fill them."""


def test_descriptors_of_unfinished_hellos_leave_room_for_honest_ones(short_dir: Path) -> None:
    few = ("sh", "-c", f'ulimit -n {TABLE}; exec "$@"', "sh")
    with DaemonProcess(short_dir, under=few) as daemon:
        daemon.wait_ready()
        before = open_fds(daemon)
        with attack("unfinished_hellos", short_dir, SECONDS):
            eventually(lambda: open_fds(daemon) > before + TABLE / 4)
            most = 0
            for number in range(45):
                rank = Rank(daemon, instance=str(number))
                done(rank.store(number))
                rank.close()
                most = max(most, open_fds(daemon))
            assert most < before + TABLE * TABLE_SHARE
            assert daemon.refused("limit") > 0
            assert len([line for line in daemon.read_so_far() if line["event"] == "attach connection refused"]) < 200
        eventually(lambda: open_fds(daemon) <= before + 1)
        assert daemon.terminate() == 0
