"""Watchers of real daemons: what they are told, whoever stores, and whatever becomes of the daemon."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import grpc
import pytest

from benchmarks.attacks.support import attack
from kvsidecar.client import Blocks, Residency
from kvsidecar.client import inbox as client_inbox
from kvsidecar.core.block_notes import MAX_NOTES_BYTES
from kvsidecar.protocol.wire import namespace_to_wire
from kvsidecar.types import PROTOCOL, Namespace
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.e2e.disks import disk_daemon, evict_all, fetched, keep_on_disk, tier_metric, tier_pid
from tests.e2e.policies import daemon_for_others
from tests.e2e.watcher import Watcher
from tests.e2e.wire import RawClient
from tests.harness import NAMESPACE, NUM_BLOCKS, SECONDS, DaemonProcess, Rank, done, eventually, hashes
from tests.marks import both_protocols, promise


@promise("what every engine of the node can load, evictions, and what a restart has kept")
@both_protocols
def test_watchers_are_told_what_others_store_lose_and_clear(short_dir: Path, local: bool) -> None:
    with DaemonProcess(short_dir, "--pool-size", "1MiB", local=local) as daemon:
        daemon.wait_ready()
        rank = Rank(daemon)
        done(rank.store("a", "b"))
        watcher = Watcher(daemon)
        watcher.wait_for("a", "b")
        assert watcher.client.local_protocol == local
        blocks = Blocks(0, hashes("c"), [0], notes=b"what c is")
        done(rank.finish(rank.client.store([blocks])))
        watcher.wait_for("a", "b", "c")
        assert watcher.notes == {hashes("c")[0]: b"what c is"}
        later = Watcher(daemon)
        later.wait_for("a", "b", "c")
        assert later.notes == watcher.notes
        assert daemon.metric("kvsidecar_watchers") == 2
        assert daemon.metric('kvsidecar_residency_resets_total{reason="new"}') == 2
        later.close()
        eventually(lambda: daemon.metric("kvsidecar_watchers") == 1)

        number = 0
        while Residency.REMOVED not in watcher.said:
            done(rank.store(*range(number, number + NUM_BLOCKS)))
            number += NUM_BLOCKS
            eventually(lambda last=number - 1: set(hashes(last)) <= watcher.read())  # type: ignore[misc]
        every = ["a", "b", "c", *range(number)]
        watcher.wait_for(*[name for name in every if rank.hits(name)])
        rank.client.clear(NAMESPACE)
        watcher.wait_for()
        assert daemon.metric("kvsidecar_residency_notes_bytes") == 0
        watcher.close()
        rank.close()


def test_one_user_cannot_take_the_notes_of_another(short_dir: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may become another user")
    # Room for all that the flood stores: notes on blocks that have gone are dropped after some seconds, whosever.
    with daemon_for_others(short_dir, "--pool-size", "128MiB") as daemon:
        rank = Rank(daemon)
        done(rank.finish(rank.client.store([Blocks(0, hashes("a"), [0], notes=b"what a is")])))
        with attack("note_flood", short_dir, 5 * SECONDS) as flood:
            eventually(
                lambda: (
                    flood.process.poll() is not None
                    or daemon.metric("kvsidecar_residency_dropped_notes_total") > NUM_BLOCKS
                ),
                lambda: f"{daemon.metric('kvsidecar_residency_notes_bytes')} bytes of notes",
                progress=lambda: daemon.metric("kvsidecar_residency_notes_bytes"),
            )
            assert flood.process.poll() is None
        assert daemon.metric("kvsidecar_residency_notes_bytes") <= MAX_NOTES_BYTES
        watcher = Watcher(daemon)
        eventually(
            lambda: watcher.read() is None or watcher.notes.get(hashes("a")[0]) == b"what a is",
            progress=lambda: len(watcher.said),
        )
        watcher.close()
        rank.close()


@promise("what a restart has kept")
@both_protocols
def test_a_watcher_outlives_its_daemon_and_learns_what_the_next_one_has(
    short_dir: Path, pool_dir: Path, local: bool
) -> None:
    kept = ("--pool-dir", str(pool_dir))
    with DaemonProcess(short_dir, *kept, local=local) as daemon:
        rank = Rank(daemon.wait_ready())
        watcher = Watcher(daemon)
        done(rank.store("a", "b"))
        watcher.wait_for("a", "b")
        daemon.process.kill()
        daemon.process.wait(SECONDS)
        watcher.wait_for()
        assert watcher.said[-1] is Residency.LOST
        rank.close()
        with DaemonProcess(short_dir, *kept, local=local) as warm:
            warm.wait_ready()
            watcher.wait_for("a", "b")
            warm.process.kill()
            warm.process.wait(SECONDS)
            watcher.wait_for()
        with DaemonProcess(short_dir, local=local) as cold:
            del watcher.said[:]
            cold.wait_ready()
            watcher.wait_complete()
            assert watcher.readable == set()
        watcher.close()


@both_protocols
def test_a_watcher_that_does_not_take_is_told_everything_again(
    short_dir: Path, local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client stops reading, the sockets fill, and the daemon leaves it out."""
    monkeypatch.setattr(client_inbox, "MAX_BYTES", 1000)
    with DaemonProcess(short_dir, local=local) as daemon:
        rank = Rank(daemon.wait_ready())
        slow, other = Watcher(daemon), Watcher(daemon)
        for each in (slow, other):
            each.wait_complete()
        # More than may be unread, and than the kernel's buffers and gRPC take.
        for number in range(48):
            notes = bytes([number]) * 16 * 1024 * NUM_BLOCKS
            blocks = Blocks(0, hashes(*range(NUM_BLOCKS)), list(range(NUM_BLOCKS)), notes=notes)
            done(rank.finish(rank.client.store([blocks])))
            last = notes[: 16 * 1024]
            eventually(lambda last=last: other.read() is not None and set(other.notes.values()) == {last})  # type: ignore[misc]
        assert slow.said.count(Residency.RESET) == 1
        slow.wait_for(*range(NUM_BLOCKS))
        eventually(lambda: slow.read() is not None and slow.notes == other.notes, "the notes")
        assert slow.said.count(Residency.RESET) == 2
        assert daemon.metric('kvsidecar_residency_resets_total{reason="unread"}') == 1
        assert other.said.count(Residency.RESET) == 1
        for each in (slow, other):
            each.close()
        rank.close()


def test_other_namespaces_are_not_told(short_dir: Path) -> None:
    other = Namespace("other", "bf16", "LBNHC", 16, 1, 1, "sha256")
    with DaemonProcess(short_dir) as daemon:
        rank, watcher = Rank(daemon.wait_ready()), Watcher(daemon, other)
        watcher.wait_complete()
        done(rank.store("a"))
        mine = Rank(daemon, namespace=other)
        done(mine.store("b"))
        watcher.wait_for("b")
        for each in (rank, mine):
            each.close()
        watcher.close()


def watch(raw: RawClient, namespace: Namespace = NAMESPACE, token: bytes | None = None) -> pb.AttachRequest:
    token = raw.welcome.token if token is None else token
    return pb.AttachRequest(watch=pb.Watch(protocol=PROTOCOL, token=token, namespace=namespace_to_wire(namespace)))


def test_watchers_that_break_the_rules_are_refused(short_dir: Path) -> None:
    with DaemonProcess(short_dir) as daemon:
        daemon.wait_ready()
        refused = {
            "token": (watch(RawClient(daemon)), grpc.StatusCode.UNAUTHENTICATED),
            "namespace": (None, grpc.StatusCode.INVALID_ARGUMENT),
            "twice": (None, grpc.StatusCode.INVALID_ARGUMENT),
        }
        for why, (request, code) in refused.items():
            raw = RawClient(daemon)
            if why == "namespace":
                request = watch(raw, Namespace("", "", "", 0, 0, 0, "", 32))
            raw.send(attach=request or watch(raw))
            if why == "twice":
                assert raw.attach("registered").epoch
                raw.send(attach=watch(raw))
                reply = raw.receive()
                while reply.WhichOneof("message") == "attach":
                    reply = raw.receive()
                assert reply.ended.error.code == code.value[0]
            else:
                assert raw.ended()[0] is code, why
            raw.connection.close()
        eventually(lambda: daemon.metric("kvsidecar_watchers") == 0)
        assert daemon.refused("unidentified") == 1
        assert daemon.refused("invalid_request") == 2


# -- with a disk: what was evicted from the pool may still be on the node ---------------------------------------------


@both_protocols
def test_watchers_are_told_what_moves_to_the_disk_and_back(short_dir: Path, local: bool) -> None:
    with disk_daemon(short_dir, local=local) as daemon:
        rank = Rank(daemon.wait_ready())
        watcher = Watcher(daemon)
        watcher.wait_complete()
        keep_on_disk(daemon, rank, "a", "b", "c")
        watcher.wait_for("a", "b", "c")
        watcher.wait_for_disk("a", "b", "c")
        evict_all(rank)
        others = [f"other {each}" for each in range(8)]
        watcher.wait_for(*others)
        assert watcher.on_disk, "the disk still has what the pool has not"
        assert fetched(rank, "a", "b").groups[0].hits == 2
        eventually(lambda: len(watcher.read() & set(watcher.on_disk)) == 2)
        rank.client.clear(NAMESPACE)
        watcher.wait_for()
        watcher.wait_for_disk()
        watcher.close()
        rank.close()


def test_a_snapshot_ends_when_the_disk_has_been_told(short_dir: Path) -> None:
    with disk_daemon(short_dir) as daemon:
        rank = Rank(daemon.wait_ready())
        keep_on_disk(daemon, rank, "a", "b", "c")
        evict_all(rank)
        first = Watcher(daemon)
        first.wait_complete()
        later = Watcher(daemon)
        later.wait_complete()
        assert [len(each.complete[0]) for each in (first, later)] == [3, 3]
        first.wait_for_disk("a", "b", "c")
        keep_on_disk(daemon, rank, "d")
        for each in (first, later):
            each.wait_for_disk("a", "b", "c", "d")
        first.close()
        rank.client.clear(NAMESPACE)
        later.wait_for_disk()
        later.close()
        rank.close()


def test_a_disk_that_makes_room_says_what_has_gone(short_dir: Path) -> None:
    with disk_daemon(short_dir, "--disk-size=512KiB", "--disk-admission=all") as daemon:
        rank = Rank(daemon.wait_ready())
        eventually(lambda: tier_metric(daemon, "up") == 1)
        watcher = Watcher(daemon)
        number = 0
        while Residency.TIER_REMOVED not in watcher.said:
            done(rank.store(number))
            last = set(hashes(number))
            eventually(lambda last=last: watcher.read() is not None and last <= watcher.on_disk)  # type: ignore[misc]
            number += 1
        eventually(lambda: len(watcher.on_disk) == tier_metric(daemon, "blocks"), lambda: len(watcher.on_disk))
        assert 0 < len(watcher.on_disk) < number
        watcher.close()
        rank.close()


def test_what_a_dead_tier_had_is_told_again_by_the_next_one(short_dir: Path) -> None:
    with disk_daemon(short_dir) as daemon:
        rank = Rank(daemon.wait_ready())
        watcher = Watcher(daemon)
        keep_on_disk(daemon, rank, "a", "b")
        watcher.wait_for_disk("a", "b")
        os.kill(tier_pid(daemon), signal.SIGKILL)
        eventually(lambda: watcher.read() is not None and Residency.TIER_CLEARED in watcher.said)
        watcher.wait_for_disk("a", "b")
        assert watcher.read(), "the pool is as it was"
        watcher.close()
        rank.close()


def test_the_disk_is_told_again_after_a_restart_of_the_daemon(short_dir: Path) -> None:
    with disk_daemon(short_dir) as daemon:
        rank = Rank(daemon.wait_ready())
        watcher = Watcher(daemon)
        keep_on_disk(daemon, rank, "a", "b", "c")
        watcher.wait_for_disk("a", "b", "c")
        daemon.process.kill()
        daemon.process.wait(SECONDS)
        watcher.wait_for_disk()
        rank.close()
    with disk_daemon(short_dir) as daemon:
        rank = Rank(daemon.wait_ready())
        watcher.wait_for_disk("a", "b", "c")
        assert not watcher.read(), "the pool is new"
        rank.client.clear(NAMESPACE)
        watcher.wait_for_disk()
        watcher.close()
        rank.close()
