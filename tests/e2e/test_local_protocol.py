"""The local protocol as a client of another make would use it, or misuse it: raw frames against a real daemon."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from kvsidecar.client import Client, ClientError, HostBuffer
from kvsidecar.protocol.framing import MAX_MESSAGE_BYTES, frame
from kvsidecar.protocol.wire import namespace_to_wire, pack_ids
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.e2e import wire
from tests.e2e.wire import RawClient, raw_client, status
from tests.harness import (
    NAMESPACE,
    NUM_BLOCKS,
    SECONDS,
    SHARD_BYTES,
    DaemonProcess,
    Gate,
    Rank,
    done,
    eventually,
    hashes,
)
from tests.marks import both_protocols, lent_daemon, promise

pytestmark = lent_daemon

buffer, raw = wire.buffer, wire.raw
"""Fixtures, which pytest looks for in this module."""
UNKNOWN_FIELD = b"\xfa\x3e\x03abc"


def store(job: int, name: object, block_id: int = 0) -> pb.AttachRequest:
    blocks = pb.Blocks(group=0, hashes=hashes(name)[0], block_ids=pack_ids([block_id]))
    return pb.AttachRequest(store=pb.Store(job=job, blocks=[blocks]))


def lookup(*names: object) -> pb.LookupRequest:
    groups = [pb.LookupGroup(group=0, hashes=b"".join(hashes(*names)))]
    return pb.LookupRequest(namespace=namespace_to_wire(NAMESPACE), mode=pb.LookupRequest.MODE_PREFIX, groups=groups)


def goes_on(rank: Rank) -> None:
    done(rank.store("others"))
    assert rank.hits("others") == 1


def others_go_on(daemon: DaemonProcess) -> None:
    rank = Rank(daemon)
    goes_on(rank)
    rank.close()


def until_ranks(daemon: DaemonProcess, count: int) -> None:
    eventually(lambda: daemon.metric("kvsidecar_attached_ranks") == count)


# -- as it should be -------------------------------------------------------------------------------------------------


@promise("There are two equivalent carriers: gRPC, which is the public interface, and the local protocol")
def test_a_rank_registers_stores_and_detaches(daemon: DaemonProcess, raw: RawClient, buffer: HostBuffer) -> None:
    assert raw.welcome.local_protocol
    raw.send(attach=raw.register(buffer))
    registered = raw.attach("registered")
    assert (registered.epoch, registered.readiness.state) == (raw.welcome.epoch, pb.Readiness.STATE_READY)
    raw.send(attach=store(1, "a"))
    assert raw.attach("done").outcome == pb.JobDone.OUTCOME_DONE
    raw.send(detach=pb.Detach())
    assert raw.ended() == (grpc.StatusCode.OK, "")
    assert daemon.metric("kvsidecar_attached_ranks") == 0, "the end was told before the memory was unmapped"
    raw.send(call=5, lookup=lookup("a", "b"))
    reply = raw.receive()
    assert (reply.call, reply.lookup.groups[0].hits) == (5, 1), "calls go on after the end of the stream"


def test_messages_may_follow_the_registration_at_once(
    daemon: DaemonProcess, raw: RawClient, buffer: HostBuffer
) -> None:
    messages = [pb.LocalRequest(attach=raw.register(buffer))]
    messages += [pb.LocalRequest(attach=store(job, job, job)) for job in range(1, 4)]
    messages += [pb.LocalRequest(detach=pb.Detach()), pb.LocalRequest(attach=store(9, "behind the end"))]
    raw.connection.sendall(b"".join(frame(message.SerializeToString()) for message in messages))
    raw.attach("registered")
    assert [raw.attach("done").outcome for _ in range(3)] == [pb.JobDone.OUTCOME_DONE] * 3
    assert raw.ended()[0] is grpc.StatusCode.OK
    raw.send(call=1, lookup=lookup("behind the end"))
    assert raw.receive().lookup.groups[0].hits == 0


def test_a_load_has_its_blocks_whatever_comes_right_behind_it(short_dir: Path, buffer: HostBuffer, gate: Gate) -> None:
    """In one write: the load, the release of its lease, and a store that wants the room of its blocks."""
    names = list(range(NUM_BLOCKS))
    pool = NUM_BLOCKS * SHARD_BYTES >> 10
    sizes = [text for flag in ("pool", "slab", "chunk") for text in (f"--{flag}-size", f"{pool}KiB")]
    # The store is answered while the load's copy runs, so that its pins are what stands in the way.
    with DaemonProcess(short_dir, *sizes, KVSIDECAR_FAILPOINTS=f"load.in_flight@2={gate}") as daemon:
        rank = Rank(daemon.wait_ready())
        done(rank.store(*names))
        with raw_client(daemon, buffer) as raw:
            raw.send(attach=raw.register(buffer))
            raw.attach("registered")
            request = lookup(*names)
            request.lease_ms, request.token = 30_000, raw.welcome.token
            raw.send(call=1, lookup=request)
            lease = raw.receive().lookup.lease
            blocks = pb.Blocks(group=0, hashes=b"".join(hashes(*names)), block_ids=pack_ids(names))
            messages = (
                pb.LocalRequest(attach=pb.AttachRequest(load=pb.Load(job=1, lease=lease, blocks=[blocks]))),
                pb.LocalRequest(call=2, release=pb.ReleaseRequest(lease=lease)),
                pb.LocalRequest(attach=store(2, "new")),
            )
            raw.connection.sendall(b"".join(frame(each.SerializeToString()) for each in messages))
            assert raw.receive().release.released
            stored = raw.attach("done")
            gate.let_pass()
            loaded = raw.attach("done")
            assert (stored.job, stored.reason) == (2, "pool_full")
            assert (loaded.job, loaded.outcome, loaded.copied_blocks) == (1, pb.JobDone.OUTCOME_DONE, NUM_BLOCKS)
        rank.close()


def test_a_refused_call_has_grpcs_code_and_text_and_costs_nothing_else(daemon: DaemonProcess, raw: RawClient) -> None:
    raw.send(call=1, lookup=pb.LookupRequest(mode=pb.LookupRequest.MODE_PREFIX))
    code, text = raw.error(1)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "namespace.model" in text
    request = lookup("a")
    request.token = b"guessed"
    raw.send(call=2, lookup=request)
    assert raw.error(2)[0] is grpc.StatusCode.UNAUTHENTICATED
    raw.send(call=3, lookup=lookup("a"))
    assert raw.receive().lookup.ready


def test_what_a_newer_client_says_is_let_pass_or_refused_in_words(raw: RawClient, buffer: HostBuffer) -> None:
    raw.connection.sendall(frame(pb.LocalRequest(call=7).SerializeToString() + UNKNOWN_FIELD))
    assert raw.error(7)[0] is grpc.StatusCode.UNIMPLEMENTED
    raw.send(attach=raw.register(buffer))
    raw.attach("registered")
    unknown = pb.AttachRequest.FromString(UNKNOWN_FIELD)
    raw.send(attach=unknown)
    raw.send(attach=store(1, "a"))
    assert raw.attach("done").job == 1


def test_the_end_of_a_daemon_is_told_to_ranks_whose_memory_is_unmapped(
    daemon: DaemonProcess, raw: RawClient, buffer: HostBuffer
) -> None:
    raw.send(attach=raw.register(buffer))
    raw.attach("registered")
    assert daemon.terminate() == 0
    assert raw.attach("readiness").state == pb.Readiness.STATE_DRAINING
    assert raw.ended()[0] is grpc.StatusCode.UNAVAILABLE
    assert raw.closed()


def test_a_daemon_that_goes_down_under_a_running_copy_does_not_say_that_it_is_over(
    short_dir: Path, buffer: HostBuffer, gate: Gate
) -> None:
    held = f"store.in_flight@2={gate}"
    with DaemonProcess(short_dir, "--drain-timeout", "0", KVSIDECAR_FAILPOINTS=held) as daemon:
        daemon.wait_ready()
        with raw_client(daemon, buffer) as raw:
            raw.send(attach=raw.register(buffer))
            raw.attach("registered")
            raw.send(attach=store(1, "a"))
            eventually(lambda: daemon.metric('kvsidecar_jobs_running{direction="store"}') == 1)
            daemon.process.send_signal(signal.SIGTERM)
            raw.attach("readiness")
            assert raw.closed()
            gate.let_pass()  # the process cannot end while a thread of it copies
            daemon.process.wait(SECONDS)


# -- as it should not be ---------------------------------------------------------------------------------------------


def test_a_rank_registers_with_the_token_of_its_own_connection(daemon: DaemonProcess, buffer: HostBuffer) -> None:
    with raw_client(daemon, buffer) as one, raw_client(daemon, buffer) as other:
        one.send(attach=one.register(buffer, other.welcome.token))
        assert one.ended()[0] is grpc.StatusCode.UNAUTHENTICATED
        assert daemon.metric("kvsidecar_attached_ranks") == 0
        assert daemon.refused("unidentified") == 1


def test_a_stream_registers_once(daemon: DaemonProcess, raw: RawClient, buffer: HostBuffer) -> None:
    raw.send(attach=raw.register(buffer))
    raw.attach("registered")
    raw.send(attach=store(1, "a"))
    raw.send(attach=raw.register(buffer))
    assert raw.attach("done").job == 1, "the job that had begun was not finished"
    code, text = raw.ended()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "can register only once" in text
    assert daemon.metric("kvsidecar_attached_ranks") == 0


@pytest.mark.parametrize(
    ("data", "code"),
    [
        ((MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (b"\xff\xff\xff\xff", grpc.StatusCode.RESOURCE_EXHAUSTED),
        (b"GET / HTTP/1.1\r\n\r\n", grpc.StatusCode.RESOURCE_EXHAUSTED),
        (frame(b"\xff\xff\xff"), grpc.StatusCode.INVALID_ARGUMENT),
        (frame(os.urandom(3000)), grpc.StatusCode.INVALID_ARGUMENT),
    ],
    ids=["one byte too long", "4 GiB", "http", "no protobuf", "noise"],
)
def test_what_is_no_frame_ends_the_connection_in_words_and_its_stream_in_order(
    daemon: DaemonProcess, raw: RawClient, buffer: HostBuffer, data: bytes, code: grpc.StatusCode
) -> None:
    raw.send(attach=raw.register(buffer))
    raw.attach("registered")
    raw.send(attach=store(1, "a"))
    raw.connection.sendall(data)
    assert raw.attach("done").outcome == pb.JobDone.OUTCOME_DONE
    assert raw.ended()[0] is code
    assert raw.error(0)[0] is code
    assert raw.closed()
    until_ranks(daemon, 0)
    others_go_on(daemon)


def test_a_message_as_long_as_the_limit_is_taken(daemon: DaemonProcess, raw: RawClient) -> None:
    request = pb.LocalRequest(call=1, lookup=lookup())
    request.lookup.groups[0].hashes = bytes((MAX_MESSAGE_BYTES - 200) // 32 * 32)
    payload = request.SerializeToString()
    raw.connection.sendall(frame(payload + b"\xfa\x3e" + _filler(MAX_MESSAGE_BYTES - len(payload) - 2)))
    assert raw.receive().lookup.groups[0].hits == 0


def _filler(nbytes: int) -> bytes:
    """Value of an unknown field of bytes, so long in all."""
    length = nbytes - 1 if nbytes <= 128 else nbytes - 2
    head = bytes((length,)) if length < 128 else bytes((length & 127 | 128, length >> 7))
    return head + bytes(length)


def _send_until_closed(raw: RawClient) -> None:
    """Only the connection's end shows that the daemon has had enough: a pause may be a busy machine's."""
    with suppress(ConnectionError):
        for job in range(1, 1_000_000):
            raw.send(attach=pb.AttachRequest(store=pb.Store(job=job, blocks=[pb.Blocks(group=99)])))


@promise("the stream is ended when 8,192 replies are queued, or 1 MiB of them")
def test_a_client_that_does_not_read_is_ended_and_others_go_on(daemon: DaemonProcess, buffer: HostBuffer) -> None:
    other = Rank(daemon)  # attached before: what the daemon says to the one that it ends, it keeps for seconds only
    with raw_client(daemon, buffer) as raw, ThreadPoolExecutor(1) as threads:
        raw.send(attach=raw.register(buffer))
        raw.attach("registered")
        sending = threads.submit(_send_until_closed, raw)
        daemon.wait_log("rank detached")  # nobody has read anything
        goes_on(other)
        while (reply := raw.receive()).WhichOneof("message") == "attach":
            pass
        code, text = status(reply.ended.error)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "read" in text
        sending.result(SECONDS)
    other.close()


def test_a_connection_without_the_local_protocol_says_so_and_its_clients_use_grpc(short_dir: Path) -> None:
    with DaemonProcess(short_dir, "--local-protocol", "off") as daemon:
        daemon.wait_ready()
        with raw_client(daemon) as raw:
            assert not raw.welcome.local_protocol
            raw.send(call=1, lookup=lookup("a"))
            client = daemon.client(local_protocol=True)
            assert client.lookup(NAMESPACE, {0: hashes("a")}).ready
            assert not client.local_protocol
            client.close()
            raw.connection.setblocking(False)
            with pytest.raises(BlockingIOError):
                raw.connection.recv(1)


# -- the client's end ------------------------------------------------------------------------------------------------


@both_protocols
def test_a_request_that_is_too_long_is_refused_before_it_costs_the_connection(daemon: DaemonProcess) -> None:
    client: Client = daemon.client()
    long = replace(NAMESPACE, extra="x" * (5 << 20))
    for ask in (client.lookup, client.begin_lookup):
        with pytest.raises(ClientError, match="shorter namespace"):
            ask(long, {0: hashes("a")})
    assert client.lookup(NAMESPACE, {0: bytes(5 << 20)}).ready, "hashes go in parts"
    client.close()


@both_protocols
def test_a_lease_is_kept_and_given_up_without_waiting(daemon: DaemonProcess) -> None:
    def leases_become(count: int) -> None:
        eventually(lambda: daemon.metric("kvsidecar_leases") == count)

    rank, scheduler = Rank(daemon), Client(daemon.socket, step_budget=SECONDS)
    done(rank.store("a", "b"))

    def lease(seconds: float) -> int:
        found = scheduler.lookup(NAMESPACE, {0: hashes("a", "b")}, lease_seconds=seconds).lease
        assert found is not None
        return found

    long, short, lapsed = lease(60.0), lease(30.0), lease(0.01)
    kept = scheduler.renew_nowait(short, 60.0)
    leases_become(2)
    gone = scheduler.renew_nowait(lapsed, 60.0)
    scheduler.lookup(NAMESPACE, {0: hashes("a")})  # with the local protocol, their answers come with another's
    eventually(lambda: (kept.renewed, gone.renewed) == (True, False))
    scheduler.release_nowait(long)
    leases_become(1)
    kept.release()
    leases_become(0)
    long = lease(60.0)
    scheduler.release_nowait(long)
    leases_become(0)
    scheduler.close()
    late = scheduler.renew_nowait(long, 60.0)
    late.release()
    scheduler.release_nowait(long)
    assert (late.sent, late.renewed) == (False, None)
    rank.close()


@both_protocols
def test_what_is_told_soon_is_told_with_the_next_job_or_at_the_next_poll(daemon: DaemonProcess) -> None:
    rank = Rank(daemon)
    client = rank.client
    client.set_idle(True, soon=True)
    done(rank.store("a"))
    assert client.status().ranks[0].idle
    client.set_idle(False, soon=True)
    assert client.status().ranks[0].idle
    client.poll()
    eventually(lambda: not client.status().ranks[0].idle)
    rank.close()


@both_protocols
def test_an_idle_gpu_is_told_to_every_run_of_the_daemon(short_dir: Path, local: bool) -> None:
    rank: Rank | None = None
    for _ in range(2):
        with DaemonProcess(short_dir, local=local) as daemon:
            daemon.wait_ready()
            rank = rank or Rank(daemon)
            assert rank.client.wait_attached(SECONDS)
            rank.client.set_idle(True)
            done(rank.store("a"))  # what was said before it has been heard when this is done
            assert rank.client.status().ranks[0].idle
            rank.client.set_idle(False)
            done(rank.store("a"))
            assert not rank.client.status().ranks[0].idle
            rank.client.set_idle(True)
            assert daemon.terminate() == 0
        eventually(lambda rank=rank: not rank.client.attached)  # type: ignore[misc]
    rank.close()
