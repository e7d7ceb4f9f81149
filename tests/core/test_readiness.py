from __future__ import annotations

import pytest

from kvsidecar.core.readiness import DaemonReadiness
from kvsidecar.daemon.systemd import status_text
from kvsidecar.errors import Refusal
from kvsidecar.types import Readiness, State


def test_work_is_declined_until_ready_and_again_when_draining() -> None:
    readiness = DaemonReadiness(1000)
    assert readiness.refusal is Refusal.NOT_READY
    readiness.pinning(pinned_bytes=10)
    assert readiness.refusal is Refusal.NOT_READY
    readiness.become_ready()
    assert readiness.refusal is None
    readiness.drain("bye")
    assert readiness.refusal is Refusal.DRAINING


def test_ready_says_that_everything_is_pinned_and_gives_no_reason() -> None:
    readiness = DaemonReadiness(1000)
    readiness.pinning(pinned_bytes=400, bytes_per_second=100.0, eta_seconds=6.0)
    assert readiness.now == Readiness(State.PINNING, 1000, 400, 100.0, 6.0, "the pool is being pinned")
    readiness.become_ready()
    assert readiness.now.pinned_bytes == 1000
    assert readiness.now.reason == ""
    assert readiness.now.eta_seconds is None


def test_kept_blocks_are_read_while_the_pool_is_pinned_and_in_no_other_state() -> None:
    readiness = DaemonReadiness(1000)
    readiness.serve_kept(True)
    assert (readiness.now.serves_kept, readiness.read_refusal) == (False, Refusal.NOT_READY), "nothing is pinned"
    readiness.pinning(pinned_bytes=400)
    assert readiness.read_refusal is Refusal.NOT_READY
    readiness.serve_kept(True)
    assert (readiness.read_refusal, readiness.refusal) == (None, Refusal.NOT_READY), "stores are declined as before"
    reason = "the pool is being pinned; kept blocks in pinned chunks are served"
    assert readiness.now == Readiness(State.PINNING, 1000, 400, reason=reason, serves_kept=True)
    readiness.pinning(pinned_bytes=500)
    assert (readiness.now.pinned_bytes, readiness.read_refusal) == (500, None)
    readiness.drain("an operator asked to drain")
    assert (readiness.now.serves_kept, readiness.read_refusal) == (False, Refusal.DRAINING)
    readiness.cancel_drain()
    assert readiness.read_refusal is None
    readiness.devices_down({"gpu-0": "Xid 79"}, all_down=False)
    assert readiness.read_refusal is None
    readiness.devices_down({"gpu-0": "Xid 79"}, all_down=True)
    assert (readiness.now.serves_kept, readiness.read_refusal) == (False, Refusal.NOT_READY)
    readiness.devices_down({}, all_down=False)
    assert readiness.read_refusal is None
    readiness.serve_kept(False)
    assert readiness.read_refusal is Refusal.NOT_READY
    readiness.serve_kept(True)
    readiness.become_ready()
    assert readiness.now == Readiness(State.READY, 1000, 1000)
    assert readiness.read_refusal is None


def test_a_daemon_that_nobody_can_reach_is_not_ready_and_serves_who_is_connected() -> None:
    readiness = DaemonReadiness(1000)
    readiness.unreachable("no socket")
    assert readiness.now.reason == "the daemon is starting"
    readiness.unreachable("")
    readiness.pinning()
    readiness.become_ready()
    readiness.unreachable("no socket")
    assert (readiness.ready, readiness.now.state, readiness.now.reason) == (False, State.STARTING, "no socket")
    assert (readiness.refusal, readiness.read_refusal) == (None, None)
    readiness.devices_down({"gpu-0": "Xid 79"}, all_down=True)
    assert readiness.refusal is Refusal.NOT_READY
    readiness.devices_down({}, all_down=False)
    readiness.drain("an operator asked to drain")
    assert (readiness.now.state, readiness.refusal) == (State.DRAINING, Refusal.DRAINING)
    readiness.cancel_drain()
    readiness.unreachable("")
    assert readiness.now == Readiness(State.READY, 1000, 1000)


def test_a_pin_that_fails_ends_the_service_of_kept_blocks() -> None:
    readiness = DaemonReadiness(1000)
    readiness.pinning(pinned_bytes=400)
    readiness.serve_kept(True)
    readiness.fail("chunk 3: out of memory")
    assert (readiness.now.serves_kept, readiness.read_refusal) == (False, Refusal.NOT_READY)
    readiness.serve_kept(True)
    assert readiness.now.reason == "chunk 3: out of memory"
    assert not readiness.now.serves_kept


def test_a_failure_is_never_overwritten_by_late_progress() -> None:
    readiness = DaemonReadiness(1000)
    readiness.pinning(pinned_bytes=400)
    readiness.fail("chunk 3: out of memory")
    readiness.pinning(pinned_bytes=500)
    readiness.become_ready()
    assert readiness.now.state is State.FAILED
    assert readiness.now.reason == "chunk 3: out of memory"
    assert readiness.now.pinned_bytes == 0


def test_draining_hides_every_state() -> None:
    for before in ("starting", "pinning", "ready", "failed"):
        readiness = DaemonReadiness(1000)
        if before != "starting":
            readiness.pinning()
        if before == "ready":
            readiness.become_ready()
        if before == "failed":
            readiness.fail("x")
        readiness.drain("stop")
        readiness.become_ready()
        readiness.fail("late")
        assert readiness.now.state is State.DRAINING


def test_a_drain_that_is_taken_back_shows_the_state_as_it_is_by_then() -> None:
    readiness = DaemonReadiness(1000)
    heard: list[State] = []
    readiness.listen(lambda now: heard.append(now.state))
    assert not readiness.cancel_drain(), "there was none"
    readiness.drain("an operator asked to drain")
    readiness.pinning(pinned_bytes=400, eta_seconds=3.0)
    assert (readiness.now.state, readiness.now.pinned_bytes, readiness.now.eta_seconds) == (State.DRAINING, 400, None)
    assert readiness.cancel_drain()
    assert (readiness.now.state, readiness.now.eta_seconds) == (State.PINNING, 3.0)
    readiness.drain("again")
    readiness.become_ready()
    assert not readiness.ready
    assert readiness.cancel_drain()
    assert readiness.ready
    assert readiness.now.reason == ""
    readiness.drain("again")
    readiness.fail("every device is lost")
    assert readiness.now.reason == "again"
    assert readiness.cancel_drain()
    assert (readiness.now.state, readiness.now.reason) == (State.FAILED, "every device is lost")
    starting = [State.DRAINING, State.DRAINING, State.PINNING, State.DRAINING, State.DRAINING, State.READY]
    assert heard == [*starting, State.DRAINING, State.DRAINING, State.FAILED]


def test_nothing_takes_a_shutdown_back() -> None:
    readiness = DaemonReadiness(1000)
    readiness.pinning()
    readiness.become_ready()
    readiness.drain("an operator asked to drain")
    readiness.shut_down()
    assert readiness.now.reason == "the daemon is shutting down"
    assert not readiness.cancel_drain()
    assert readiness.refusal is Refusal.DRAINING


def test_listeners_hear_every_change_until_they_stop_listening() -> None:
    readiness = DaemonReadiness(1000)
    heard: list[State] = []
    stop = readiness.listen(lambda now: heard.append(now.state))
    readiness.pinning()
    readiness.become_ready()
    stop()
    readiness.drain("x")
    assert heard == [State.PINNING, State.READY]


def test_while_no_device_works_the_daemon_is_starting_and_names_them() -> None:
    readiness = DaemonReadiness(1000)
    down = {"gpu-0": "the copier has ended (SIGKILL)"}
    readiness.pinning(pinned_bytes=400)
    readiness.devices_down(down, all_down=True)
    assert (readiness.now.state, readiness.now.reason) == (State.PINNING, "the pool is being pinned")
    readiness.become_ready()
    readiness.devices_down(down, all_down=False)
    assert (readiness.ready, readiness.now.reason) == (True, "gpu-0: the copier has ended (SIGKILL)")
    readiness.devices_down(down | {"gpu-1": "Xid 79"}, all_down=True)
    assert readiness.now.state is State.STARTING
    assert readiness.now.reason == "gpu-0: the copier has ended (SIGKILL); gpu-1: Xid 79"
    assert readiness.refusal is Refusal.NOT_READY
    assert status_text(readiness.now) == f"starting: {readiness.now.reason}"
    readiness.devices_down({}, all_down=False)
    assert readiness.now == Readiness(State.READY, 1000, 1000)


def test_one_who_fails_to_take_the_news_keeps_no_other_from_it() -> None:
    readiness, heard = DaemonReadiness(1000), list[State]()
    readiness.pinning()
    readiness.listen(lambda _: 1 // 0)  # type: ignore[arg-type]
    readiness.listen(lambda now: heard.append(now.state))
    with pytest.raises(ZeroDivisionError):
        readiness.become_ready()
    assert (heard, readiness.ready) == ([State.READY], True)
    readiness.listen(lambda _: 1 // 0)  # type: ignore[arg-type]
    with pytest.raises(ExceptionGroup):
        readiness.drain("bye")
    assert heard == [State.READY, State.DRAINING]
