"""What the death of a copier leaves."""

from __future__ import annotations

from tests.harness import SECONDS, DaemonProcess, Rank


def deaths(daemon: DaemonProcess) -> float:
    return daemon.metric('kvsidecar_copier_deaths_total{device="host"}')


def attached_again(rank: Rank, daemon: DaemonProcess) -> None:
    daemon.wait_log("the copier works")
    daemon.wait_log("rank attached")  # its client has left the session before
    assert rank.client.wait_attached(SECONDS)
    assert rank.client.wait_ready(SECONDS).ready
