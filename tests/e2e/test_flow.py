"""Floods of lookups, streams whose other half has gone: nothing piles up, nobody waits in vain."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvsidecar.client import HostBuffer, LookupMode
from kvsidecar.protocol.wire import namespace_to_wire, pack_ids
from kvsidecar.types import PROTOCOL
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.e2e.leftovers import rss_mib
from tests.e2e.wire import framed, hello, register, stub, welcome
from tests.harness import FIRST, NAMESPACE, SECONDS, DaemonProcess, Gate, Rank, environment, eventually, hashes

HASHES = 20_000
FLOODED = 3000
"""Lookups that the daemon has answered before its memory is looked at."""

_FLOOD = f"""
import sys, grpc
from tests.harness import NAMESPACE
from kvsidecar.v1 import sidecar_pb2 as pb
from kvsidecar.protocol.wire import namespace_to_wire
socket, calls = sys.argv[1], int(sys.argv[2])
request = pb.LookupRequest(namespace=namespace_to_wire(NAMESPACE), mode=pb.LookupRequest.MODE_PREFIX)
request.groups.add(group=0, hashes=bytes(32 * {HASHES}))
packed = request.SerializeToString()
channel = grpc.insecure_channel(f"unix:{{socket}}")
lookup = channel.unary_unary("/kvsidecar.v1.Sidecar/Lookup")
def ask(*_):
    lookup.future(packed).add_done_callback(ask)
for _ in range(calls):
    ask()
print("flooding", flush=True)
sys.stdin.read()
"""


@contextmanager
def flood(daemon: DaemonProcess, calls: int) -> Iterator[None]:
    """A process that always has this many lookups under way."""
    command = [sys.executable, "-c", _FLOOD, daemon.socket, str(calls)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "flooding\n"
        yield
        process.kill()


def looked_up(daemon: DaemonProcess) -> float:
    """Large lookups that were answered."""
    return daemon.metric('kvsidecar_lookup_blocks_total{result="miss"}') / HASHES


def test_many_large_lookups_at_once_cost_little_memory_and_others_are_served(daemon: DaemonProcess) -> None:
    calls = 128
    message_mib = HASHES * 32 / 2**20
    small = pb.LookupRequest(namespace=namespace_to_wire(NAMESPACE), mode=pb.LookupRequest.MODE_PREFIX)
    small.groups.add(group=0, hashes=bytes(32))
    with stub(daemon) as other:
        assert other.Lookup(small, timeout=SECONDS).ready
        before = rss_mib(daemon)
        with flood(daemon, calls):
            eventually(lambda: looked_up(daemon) >= calls)
            while looked_up(daemon) < FLOODED:
                assert other.Lookup(small, timeout=SECONDS).ready
            grown = rss_mib(daemon) - before
    print(f"grown by {grown:.0f} MiB")
    # Of each call the message and its bytes, and what the allocators keep.
    assert grown < 3.5 * calls * message_mib


class RankStream:
    """A rank that registered over gRPC; its attach connection and its stream are the test's."""

    def __init__(self, sidecar: Any, connection: Any, buffer: HostBuffer) -> None:
        self._requests: queue.SimpleQueue[pb.AttachRequest | None] = queue.SimpleQueue()
        self._replies = sidecar.Attach(iter(self._requests.get, None), timeout=SECONDS)
        self.token = welcome(connection).token
        self._requests.put(pb.AttachRequest(register=register(self.token, buffer)))
        assert next(self._replies).registered.session

    def store(self, job: int) -> None:
        blocks = [pb.Blocks(group=0, hashes=hashes(job)[0], block_ids=pack_ids([job]))]
        self._requests.put(pb.AttachRequest(store=pb.Store(job=job, blocks=blocks)))

    def done(self) -> tuple[int, int, str]:
        done = next(self._replies).done
        return done.job, done.outcome, done.reason

    def end(self) -> grpc.RpcError:
        """How the stream ends; the next that comes is its end."""
        with pytest.raises(grpc.RpcError) as caught:
            print("instead of the end:", next(self._replies))
        self._requests.put(None)
        return caught.value


def test_what_is_asked_on_a_stream_whose_attach_connection_has_ended_is_answered(short_dir: Path, gate: Gate) -> None:
    """A copy runs when it ends: what comes meanwhile is declined, and the end comes behind the copy."""
    buffer = HostBuffer(1 << 20)
    with (
        DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=f"store.in_flight@{FIRST}={gate}") as daemon,
        hello(daemon.wait_ready(), framed(pb.Hello(protocol=PROTOCOL, num_fds=1)), [buffer.fd]) as connection,
        stub(daemon) as sidecar,
    ):
        rank = RankStream(sidecar, connection, buffer)
        rank.store(1)
        daemon.wait_log("failpoint")
        connection.close()
        eventually(lambda: not _is_known(sidecar, rank.token))
        rank.store(2)
        assert rank.done() == (2, pb.JobDone.OUTCOME_DECLINED, "draining")
        gate.let_pass()
        assert rank.done() == (1, pb.JobDone.OUTCOME_DONE, "")
        end = rank.end()
        assert daemon.refused("unidentified") >= 1
    assert end.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
    assert "the connection to the attach socket" in end.details()  # type: ignore[attr-defined]
    buffer.close()


def _is_known(sidecar: Any, token: bytes) -> bool:
    request = pb.LookupRequest(namespace=namespace_to_wire(NAMESPACE), mode=pb.LookupRequest.MODE_PREFIX, token=token)
    try:
        sidecar.Lookup(request, timeout=SECONDS)
    except grpc.RpcError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("attached", [False, True], ids=["a scheduler", "a rank"])
def test_without_the_local_protocol_no_call_raises_when_the_daemon_goes(
    short_dir: Path, number: signal.Signals, attached: bool
) -> None:
    raised: list[BaseException] = []
    going = threading.Event()
    over = threading.Event()
    after = threading.Semaphore(0)
    with DaemonProcess(short_dir, local=False) as daemon:
        client = daemon.wait_ready().client()
        rank = Rank(daemon, client=client) if attached else None
        calls = (
            lambda: client.lookup(NAMESPACE, {0: bytes(32 * 5000)}, mode=LookupMode.BITMAP, lease_seconds=1).ready,
            lambda: client.release(5),
            lambda: client.renew(5, 1.0),
        )
        assert calls[0]()

        def ask(call: Any) -> None:
            while not over.is_set():
                try:
                    call()
                except Exception as error:  # noqa: BLE001 - none may come
                    raised.append(error)
                if going.is_set():
                    after.release()

        threads = [threading.Thread(target=ask, args=(call,)) for call in calls * 3]
        for thread in threads:
            thread.start()
        eventually(lambda: looked_up(daemon) > 0.25 * 20)
        daemon.process.send_signal(number)
        daemon.process.wait(SECONDS)
        going.set()
        for _ in range(200):  # calls that ended after the daemon was gone
            assert after.acquire(timeout=SECONDS)
        over.set()
        for thread in threads:
            thread.join(SECONDS)
        assert not raised, raised[:5]
        result = client.lookup(NAMESPACE, {0: hashes("a")})
        assert (result.ready, result.reason) == (False, "daemon_lost")
        assert (client.release(5), client.renew(5, 1.0)) == (False, 0.0)
        if rank is not None:
            rank.close()
        client.close()
