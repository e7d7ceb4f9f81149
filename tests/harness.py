"""Real daemons and real engine processes for the tests: no mocks, no fixed ports, no sleeps."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from kvsidecar.bench.machine import children_of
from kvsidecar.client import Blocks, Client, GroupLayout, HostBuffer, JobDone, Namespace, Outcome, Region, State
from kvsidecar.support import child_process
from kvsidecar.support.child_process import environment
from kvsidecar.support.memory_limits import memlock_limit
from tests import warm
from tests.open_files import open_files

SECONDS = 60.0
"""Nothing here takes this long, also on a machine that is slow and busy; a test that waits for it has failed."""

FIRST = 2
"""Number of the first hit of a copy's failpoint that is not the self-test's, per direction."""

NO_WAIT = SECONDS / 2
"""Seconds: what took less has not waited for an answer that does not come, where that is waited for `SECONDS`."""

NAMESPACE = Namespace("m", "bf16", "LBNHC", 16, 1, 1, "sha256")
LAYERS, ROW_BYTES, NUM_BLOCKS = 3, 4096, 8
SHARD_BYTES = LAYERS * ROW_BYTES


Answer = TypeVar("Answer")


def root_of(pid: int) -> Path:
    """The root directory of another process's mount namespace, as seen from here."""
    return Path("/proc", str(pid), "root")


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """The next call of ``owner.name(...)`` raises an error that nobody expects. Those after it work."""
    works, failures = getattr(owner, name), [ZeroDivisionError()]

    def failing(*given: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return works(*given, **options)

    monkeypatch.setattr(owner, name, failing)


def eventually(
    condition: Callable[[], Answer],
    what: str | Callable[[], object] = "",
    pause: float = 0.01,
    seconds: float = SECONDS,
    progress: Callable[[], object] = lambda: None,
) -> Answer:
    """For what nothing announces: ask until the answer is true, and return it.

    Args:
        condition: what is asked.
        what: of the failure's text; a function is called then.
        pause: between two questions, in seconds: who asks without one takes the core of what it waits for.
        seconds: the longest that it may take, since ``progress`` has last changed.
        progress: how far it is, where it is much that a slow machine may take long for.
    """
    deadline, seen = time.monotonic() + seconds, progress()
    while not (answer := condition()):
        if (now := progress()) != seen:
            deadline, seen = time.monotonic() + seconds, now
        assert time.monotonic() < deadline, f"not within {seconds} s: {what() if callable(what) else what}"
        time.sleep(pause)
    return answer


async def eventually_in_loop(condition: Callable[[], Answer]) -> Answer:
    """`eventually`, while the event loop runs on."""
    async with asyncio.timeout(SECONDS):
        while not (answer := condition()):  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.001)
    return answer


def hashes(*names: object) -> list[bytes]:
    return [hashlib.sha256(repr(name).encode()).digest() for name in names]


DEVICE = os.environ.get("TEST_DEVICE", "host")
"""Of daemons that are not told otherwise; ``cuda`` lets the tests with real engines run on a GPU."""


class DaemonProcess:
    """``kvsidecar serve`` as a process of its own: a fork (`tests.warm`) where the test does not look at its start.

    Args:
        directory: for the sockets.
        flags: of serve.
        device: ``host`` or ``cuda``.
        under: a command that runs the daemon, such as ``unshare``.
        until: the log line that the constructor waits for. With one of the start it is started as by a user.
        stderr: a descriptor for standard error; the log is not read then, and nothing is waited for.
        local: whether its clients use the local protocol, or gRPC.
        python: the interpreter that runs it.
        variables: environment variables.
    """

    local = True
    """Of one that is made without the constructor, for a daemon that another process has started."""

    def __init__(
        self,
        directory: Path,
        *flags: str,
        device: str = DEVICE,
        under: Sequence[str] = (),
        until: str = "listening",
        stderr: int | None = None,
        local: bool = True,
        python: str | Path = sys.executable,
        **variables: str,
    ) -> None:
        self.local = local
        self.socket = str(directory / "kvs.sock")
        arguments = ["serve", "--device", device, "--socket", self.socket, "--http-port", "0", "--log-format", "json"]
        arguments += flags
        if "--config" not in flags:  # over which a flag would win
            arguments += ["--log-level", "debug"]
        if "--pool-size" not in flags:
            arguments += ["--pool-size", "1MiB"]
        self.process: subprocess.Popen[str] | warm.Forked
        self._stderr: TextIO | None = None
        all_variables, forked = environment(**variables), None
        if stderr is None:
            reader, stderr = os.pipe()
            self._stderr = os.fdopen(reader)
            if not under and python == sys.executable and until == "listening":
                forked = warm.start(arguments, all_variables, stderr=stderr)
        self.process = forked or child_process.start(
            [*under, str(python), "-m", "kvsidecar", *arguments],
            stdin=subprocess.DEVNULL,  # at a terminal SIGHUP would not reload
            stderr=stderr,
            env=all_variables,
        )
        if self._stderr is not None:
            os.close(stderr)
        self.log: list[dict[str, Any]] = []
        self._ahead: list[dict[str, Any]] = []
        """Lines that came before the one that was waited for last, and are of a later time: the daemon and its children
        write to one pipe, each when it comes to it."""
        self._news: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.http = "" if self._stderr is None else self.wait_log(until).get("http", "")

    def _read(self) -> None:
        if self._stderr is None:
            return
        for line in self._stderr:
            try:
                self._news.put(json.loads(line))
            except ValueError:
                self._news.put({"event": "stderr", "text": line})
        self._news.put(None)

    def wait_log(self, event: str, seconds: float = SECONDS) -> dict[str, Any]:
        """The next log line with this event that was not waited for before."""
        deadline = time.monotonic() + seconds
        found = next((line for line in self._ahead if line["event"] == event), None)
        while found is None:
            line = self._news.get(timeout=max(0.0, deadline - time.monotonic()))
            assert line is not None, f"the daemon ended without {event!r}; it said {self.log}"
            if event == "ready" and "(RLIMIT_MEMLOCK)" in line.get("reason", "") and memlock_limit() is not None:
                pytest.skip(line["reason"].partition(": ")[0])  # what to do is said behind it
            self.log.append(line)
            if line["event"] == event:
                found = line
            else:
                self._ahead.append(line)
        then = found.get("timestamp", "")
        self._ahead = [line for line in self._ahead if line.get("timestamp", "") > then and line is not found]
        return found

    def read_log(self) -> list[dict[str, Any]]:
        """All that it has said. Call it when it has ended."""
        self._reader.join()
        return self.read_so_far()

    def read_so_far(self) -> list[dict[str, Any]]:
        """All that it has said until now, or a little before."""
        while not self._news.empty():
            if (line := self._news.get()) is not None:
                self.log.append(line)
        return self.log

    def wait_ready(self) -> DaemonProcess:
        self.wait_log("ready")
        return self

    def get(self, path: str) -> tuple[int, Any]:
        """Status code and body (JSON where it is)."""
        try:
            with urllib.request.urlopen(self.http + path, timeout=SECONDS) as reply:
                code, text = reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            code, text = error.code, error.read().decode()
        return code, text if path == "/metrics" else json.loads(text)

    def metric(self, name: str) -> float:
        """A series by its full text, such as ``kvsidecar_refusals_total{reason="pool_full"}``."""
        for line in self.get("/metrics")[1].splitlines():
            if line.startswith(name + " "):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"{name} is not exported")

    def refused(self, reason: str) -> int:
        """How many requests and jobs it has refused for this reason; 0 if it is dead or stopped, and cannot say."""
        if self.process.poll() is not None or self.is_stopped():
            return 0
        with contextlib.suppress(OSError):
            return int(self.metric(f'kvsidecar_refusals_total{{reason="{reason}"}}'))
        return 0

    def is_stopped(self) -> bool:
        """Whether a signal has stopped it."""
        return _proc(self.process.pid, "stat").rpartition(")")[2].split()[:1] == ["T"]

    def copiers(self) -> list[int]:
        """The process ids of its copiers that live, in the order in which they were started."""
        return self.children("kvsidecar.copier.process")

    def children(self, module: str) -> list[int]:
        """The same of all that run this module."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return [pid for pid in children_of(self.process.pid) if module in _proc(pid, "cmdline")]
        return []

    def mapped_buffers(self) -> int:
        """How many engines' buffers its copiers have mapped."""
        maps = [_proc(pid, "maps") for pid in self.copiers()]
        assert "/memfd:kvsidecar-kv" not in Path(f"/proc/{self.process.pid}/maps").read_text()
        return sum(each.count("/memfd:kvsidecar-kv") for each in maps)

    def locked_kib(self) -> int:
        """Memory that its copiers have pinned with mlock(2)."""
        return sum(_locked_kib(pid) for pid in self.copiers())

    def client(self, **options: Any) -> Client:
        # A busy test machine must not turn a lookup into a miss; tests of the budget give their own.
        defaults = {"timeout": SECONDS, "step_budget": SECONDS, "local_protocol": self.local}
        return closed_after_the_test(Client(self.socket, **{**defaults, **options}))

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(SECONDS)

    def __enter__(self) -> DaemonProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        if self._stderr is not None:
            self._stderr.close()
        if error is not None:
            while not self._news.empty():
                self.log.append(self._news.get() or {})
            print("daemon log:", *self.log, sep="\n  ")


def never_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixture: a test whose daemon has refused something as invalid fails. What an integration sends is valid."""
    leave = DaemonProcess.__exit__

    def checked(self: DaemonProcess, kind: Any, error: BaseException | None, trace: Any) -> None:
        invalid = self.refused("invalid_request") if error is None else 0
        leave(self, kind, error, trace)
        assert not invalid, f"the daemon has refused {invalid} requests as invalid"

    monkeypatch.setattr(DaemonProcess, "__exit__", checked)


def _proc(pid: int, name: str) -> str:
    """What the kernel says of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _locked_kib(pid: int) -> int:
    status = _proc(pid, "status")
    return int((status.partition("VmLck:")[2].split() or ["0"])[0])  # a process that has ended has no such line


Opened = TypeVar("Opened", Client, HostBuffer)
_opened: list[Client | HostBuffer] = []


def closed_after_the_test(opened: Opened) -> Opened:
    """What the test may leave open."""
    _opened.append(opened)
    return opened


def close_what_is_open() -> None:
    """Close what `closed_after_the_test` was told of. Memory of which there are still arrays waits for the next time:
    a test that has failed keeps them."""
    opened, _opened[:] = _opened[:], []
    for each in opened:
        if isinstance(each, Client):
            each.close()
    for each in opened:
        if isinstance(each, HostBuffer) and not each.memory.closed:
            try:
                each.close()
            except BufferError:
                _opened.append(each)


class Gate:
    """Holds whatever passes a failpoint until the test lets it go on: ``f"store.in_flight@2={gate}"``.

    Each hit takes one pass; passes may be given before they are asked for.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / "gate"
        os.mkfifo(self.path)
        self._pipe = os.open(self.path, os.O_RDWR)  # for reading too, so that writing never waits for a reader

    def __str__(self) -> str:
        return f"hold({self.path})"

    def let_pass(self, count: int = 1) -> None:
        os.write(self._pipe, bytes(count))

    def holds(self, pid: int) -> bool:
        """Whether a thread of this process waits here."""
        return str(self.path) in open_files(pid).values()

    def close(self) -> None:
        os.close(self._pipe)


class Relay:
    """Stands between a client and the daemon's gRPC socket, and can cut that connection; the attach socket is direct.

    Both processes live on when it cuts: that is a broken stream, not a dead daemon.
    """

    def __init__(self, daemon: DaemonProcess, directory: Path) -> None:
        self.socket = str(directory / "relay.sock")
        os.symlink(daemon.socket + ".attach", self.socket + ".attach")
        self._target = daemon.socket
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.socket)
        self._listener.listen()
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket(socket.AF_UNIX)
                far.connect(self._target)
                with self._lock:
                    self._open += [near, far]
                threading.Thread(target=self._pump, args=(near, far), daemon=True).start()

    def _pump(self, near: socket.socket, far: socket.socket) -> None:
        other = {near: far, far: near}
        with contextlib.suppress(OSError):
            while True:
                for ready in select.select([near, far], [], [])[0]:
                    data = ready.recv(65536)
                    if not data:
                        return self._end(near, far)
                    other[ready].sendall(data)
        self._end(near, far)
        return None

    @staticmethod
    def _end(*sockets: socket.socket) -> None:
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def cut(self, client: Client | None = None) -> None:
        """Break the stream of this client, whatever carries it, or all that pass here."""
        if client is not None and client.local_protocol:
            transport = client._supervisor.transport
            assert transport is not None
            # Nothing can stand between the two here: the kernel would name it as the peer.
            transport.connection.shut_down()
        with self._lock:
            self._end(*self._open)
            self._open.clear()

    def close(self) -> None:
        self.cut()
        self._end(self._listener)
        self._listener.close()


def layout(
    shard: int = 0,
    num_shards: int = 1,
    *,
    group: int = 0,
    layers: int = LAYERS,
    row_bytes: int = ROW_BYTES,
    num_blocks: int = NUM_BLOCKS,
) -> GroupLayout:
    """Layer-stacked in one allocation."""
    region = Region(0, 0, num_blocks * row_bytes, row_bytes, row_bytes, layers)
    return GroupLayout(group, num_blocks, shard, num_shards, (region,))


class Rank:
    """One attached rank with its own host buffer of shape ``[layers, num_blocks, row_bytes]``.

    Args:
        daemon: None if the test has not started it itself, and gives a ``client``.
    """

    def __init__(
        self,
        daemon: DaemonProcess | None,
        *,
        namespace: Namespace = NAMESPACE,
        instance: str = "test",
        rank: int = 0,
        world_size: int = 1,
        groups: GroupLayout | None = None,
        client: Client | None = None,
        device: str = DEVICE,
        **attach: Any,
    ) -> None:
        self.namespace = namespace
        self.layout = groups or layout()
        (region,) = self.layout.regions
        shape = (region.num_rows, self.layout.num_blocks, region.row_bytes)
        self.buffer = closed_after_the_test(HostBuffer(shape[0] * shape[1] * shape[2]))
        self.kv: npt.NDArray[np.uint8] = np.frombuffer(self.buffer.memory, np.uint8).reshape(shape)
        if client is None:
            assert daemon is not None
            client = daemon.client(name=f"{instance} rank {rank}")
        self.client = client
        self.client.attach(
            instance=instance,
            namespace=namespace,
            buffers=dataclasses.replace(self.buffer.kv_buffers(), device=device),
            groups=[self.layout],
            rank=rank,
            world_size=world_size,
            **attach,
        )
        if self.client.attached and daemon is not None:
            assert self.client.local_protocol == daemon.local, "this test uses another protocol than it says"

    def fill(self, block_id: int, content: object) -> None:
        self.kv[:, block_id] = self.pattern(content)

    def pattern(self, content: object) -> npt.NDArray[np.uint8]:
        seed = int.from_bytes(hashes(content)[0][:8], "little")
        layers, _, row_bytes = self.kv.shape
        return np.random.default_rng(seed).integers(0, 256, (layers, row_bytes), np.uint8)

    def holds(self, block_id: int, content: object) -> bool:
        return np.array_equal(self.kv[:, block_id], self.pattern(content))

    def store(self, *names: object, at: list[int] | None = None) -> JobDone:
        """Fill blocks with the contents of these names and store them."""
        ids = at or list(range(len(names)))
        for block_id, name in zip(ids, names, strict=True):
            self.fill(block_id, name)
        return self.finish(self.client.store([Blocks(self.layout.group, hashes(*names), ids)]))

    def load(self, *names: object, at: list[int], lease: int | None = None) -> JobDone:
        return self.finish(self.client.load([Blocks(self.layout.group, hashes(*names), at)], lease=lease))

    def hits(self, *names: object) -> int:
        return self.client.lookup(self.namespace, {self.layout.group: hashes(*names)}).groups[self.layout.group].hits

    def finish(self, job: int) -> JobDone:
        done = self.client.wait([job], SECONDS)
        assert job in done, f"job {job} did not end"
        return done[job]

    def close(self) -> None:
        self.client.close()
        del self.kv
        self.buffer.close()


def wait_until_ready(client: Client) -> None:
    readiness = client.wait_ready(SECONDS)
    assert readiness.state is State.READY, readiness


def done(job: JobDone) -> JobDone:
    assert job.outcome is Outcome.DONE, job
    return job
