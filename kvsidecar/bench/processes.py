"""The processes of a run: its daemon, and children that act as engines. None outlives the run."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket as sockets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvsidecar.bench.errors import BenchError
from kvsidecar.client import Client, State
from kvsidecar.protocol.wire import STATE_FROM_WIRE
from kvsidecar.support import child_process, peer
from kvsidecar.support.units import format_size

READY_SECONDS = 300.0
"""Time limit of a daemon's start. A pool of some hundred GiB takes a minute."""
STOP_SECONDS = 20.0
REPLY_SECONDS = 180.0
"""Time limit of a child's answer. The first use of torch on a cold machine takes most of a minute."""


# -- the daemon --------------------------------------------------------------------------------------------------


class RunningDaemon:
    """A daemon that was already running.

    Raises:
        DaemonUnreachable: no daemon answers.
        BenchError: it is not ready.
    """

    def __init__(self, socket: str) -> None:
        with Client(socket, name="kvsidecar bench") as client:
            status = client.status()
        readiness = status.readiness
        state = STATE_FROM_WIRE[readiness.state]
        if state is not State.READY:
            raise BenchError(f"the daemon at {client.socket} is {state}: {readiness.reason}")
        self.socket = client.socket
        self.backend: str = status.backend
        self.pool_bytes: int = readiness.pool_bytes
        with sockets.socket(sockets.AF_UNIX) as connection:
            connection.connect(client.socket)
            self.pid = peer.credentials(connection).pid or None
            """Process id of the daemon; None: unknown here, as in another PID namespace."""


class PrivateDaemon:
    """``kvsidecar serve`` for this run alone. `private_daemon` starts and stops it.

    Args:
        device: ``cuda`` or ``host``.
        flags: further options of serve.
        cores: the cores that it may run on; None for all.
        python: how Python is started.
    """

    def __init__(
        self,
        directory: Path,
        device: str,
        pool_bytes: int,
        flags: Sequence[str],
        cores: frozenset[int] | None = None,
        python: Sequence[str] = (sys.executable,),
    ) -> None:
        number = len(list(directory.glob("daemon-*.log")))
        self.socket = str(directory / f"daemon-{number}.sock")
        self.pool_bytes = pool_bytes
        self._log = directory / f"daemon-{number}.log"
        self._command = [*python, "-m", "kvsidecar", "serve", "--device", device, "--socket", self.socket]
        self._command += ["--http-port", "0", "--pool-size", str(pool_bytes), "--log-format", "json", *flags]
        self._cores = cores
        self._process: subprocess.Popen[bytes] | None = None
        self.started = time.perf_counter()
        self.pid: int | None = None
        self.times: dict[str, float] = {}
        """When the lines ``listening`` and ``ready`` appeared in its log, on this process's clock."""
        self.said: dict[str, dict[str, Any]] = {}
        """The fields of these lines, by their event."""

    def start(self) -> None:
        """Start it; `stop` must follow in any case. Then it may be started again, at the same socket."""
        self.times.clear()
        self.said.clear()
        with self._log.open("wb") as stream:
            self.started = time.perf_counter()
            # In a session of its own, as every child: Ctrl-C is for the bench alone.
            self._process = child_process.start(
                self._command, cores=self._cores, stderr=stream, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self.pid = self._process.pid

    def wait_ready(self) -> None:
        """Wait until it is ready. Raises BenchError, with lines of its log, if it does not become ready."""
        line = b""
        with self._log.open("rb") as log:
            while "ready" not in self.said:
                line += log.readline()
                if line.endswith(b"\n"):
                    self._heard(line)
                    line = b""
                else:
                    self._wait_for_more()

    def _wait_for_more(self) -> None:
        if time.perf_counter() - self.started > READY_SECONDS:
            raise BenchError(f"the daemon was not ready after {READY_SECONDS:g} s; its log ends:\n{self.log_end()}")
        assert self._process is not None
        if self._process.poll() is not None:
            raise BenchError(f"the daemon ended with exit code {self._process.returncode}:\n{self.log_end()}")
        time.sleep(0.002)

    def _heard(self, line: bytes) -> None:
        try:
            said = json.loads(line)
        except ValueError:
            return
        event = said.get("event", "")
        if event == "not ready":
            raise BenchError(f"the daemon cannot pin {format_size(self.pool_bytes)}: {said.get('reason')}")
        self.said[event] = said
        self.times[event] = time.perf_counter()

    @property
    def ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def log_end(self) -> str:
        return child_process.last_lines(self._log)

    def stop(self) -> None:
        """End it in order, or by force if it does not end."""
        if self._process is not None and not child_process.stop(self._process, STOP_SECONDS):
            raise BenchError(f"the daemon did not end in {STOP_SECONDS:g} s; its log ends:\n{self.log_end()}")


Daemon = RunningDaemon | PrivateDaemon
"""A daemon that is ready."""


@contextmanager
def private_daemon(
    directory: Path, device: str, pool_bytes: int, flags: Sequence[str], **how: Any
) -> Iterator[PrivateDaemon]:
    """A ready daemon until the end of the block. The arguments are those of `PrivateDaemon`."""
    daemon = PrivateDaemon(directory, device, pool_bytes, flags, **how)
    try:
        daemon.start()
        daemon.wait_ready()
        yield daemon
    finally:
        daemon.stop()


# -- children ----------------------------------------------------------------------------------------------------


class BenchChild:
    """A process of the benchmark that answers JSON lines, one at a time, and ends with its standard input.

    `serve` is its other end.

    Args:
        module: run as ``python -m``, with ``config`` as its only argument.
    """

    def __init__(
        self, module: str, config: Mapping[str, Any], directory: Path, *, cores: frozenset[int] | None = None
    ) -> None:
        number = len(list(directory.glob("child-*.log")))
        self._what = module.rpartition(".")[2]
        self._log = directory / f"child-{number}.log"
        self._buffer = b""
        command, pipe = [sys.executable, "-m", module, json.dumps(config)], subprocess.PIPE
        with self._log.open("wb") as stream:
            self._process = child_process.start(
                command, cores=cores, stdin=pipe, stdout=pipe, stderr=stream, start_new_session=True
            )

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Ask, and wait for the answer. Raises BenchError with the child's message if it fails."""
        self.ask(do, **arguments)
        return self.answer()

    def ask(self, do: str, **arguments: Any) -> None:
        """Ask without waiting; `answer` waits."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def answer(self, seconds: float = REPLY_SECONDS) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        fd = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise BenchError(f"the {self._what} process did not answer in {seconds:g} s")
            piece = os.read(fd, 1 << 16)
            if not piece:
                raise self._ended()
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise BenchError(f"the {self._what} process: {reply['error']}")
        return reply

    def _ended(self) -> BenchError:
        code = self._process.wait()
        return BenchError(
            f"the {self._what} process ended with exit code {code}:\n{child_process.last_lines(self._log)}"
        )

    def close(self) -> None:
        """Let it end, or end it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it died before it had read all
            self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()


def serve(handlers: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """The child's end: answer until standard input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = handlers[request.pop("do")](**request)
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent reports it
            reply = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()
