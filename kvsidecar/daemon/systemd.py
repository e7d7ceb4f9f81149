"""Notifications to the service manager (systemd), by the protocol of sd_notify(3).

Source: https://www.freedesktop.org/software/systemd/man/latest/sd_notify.html and sd_watchdog_enabled(3). Messages are
datagrams of ``NAME=value`` lines to the Unix socket in ``$NOTIFY_SOCKET``: twenty lines here, where libraries for it
either have had no release for years or need libsystemd.

- ``READY=1`` only when the daemon is ready.
- ``STATUS=failed: ...`` when a start fails, at once: the manager shows it beside the exit code, whatever it does next.
- ``EXTEND_TIMEOUT_USEC`` when a chunk was pinned, never because time has passed: a pin that hangs runs into the
  timeout, a pin that takes ten minutes does not.
- ``WATCHDOG=1`` from the event loop, while no copy is stuck: when /health fails, the manager restarts the daemon.
- ``FDSTORE=1`` for the files that outlive the daemon (`kvsidecar.pool.kept_files`).
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Final

from kvsidecar.errors import KVSidecarError
from kvsidecar.support import log
from kvsidecar.support.units import format_duration, format_rate, format_size
from kvsidecar.types import Readiness, State

EXTEND_SECONDS: Final = 120
"""Time for the next chunk, once one is pinned. A chunk of 1 GiB takes about 0.1 s, but chunk_size may be far larger,
and a kernel that has to compact memory for huge pages far slower."""
STOP_MARGIN_SECONDS: Final = 30
"""Time to unmap, unpin and exit, after the running copies. The kernel unpins a pool that takes longer."""

MAX_STATUS: Final = 1000
"""Characters of a status."""
_SOCKET: Final = "NOTIFY_SOCKET"
_FIRST_DESCRIPTOR: Final = 3
_log = log.get("notify")


class NotifySocket:
    """The service manager's socket, or none.

    Args:
        address: value of ``$NOTIFY_SOCKET``: an absolute path, or ``@`` and an abstract name; None: none.
    """

    def __init__(self, address: str | None) -> None:
        self._address: str | None = None
        if address is None:
            return
        if address[:1] not in ("/", "@"):
            # systemd can also name AF_VSOCK, to a virtual machine's init only.
            _log.warning("the service manager cannot be notified", address=address, reason="no Unix socket")
            return
        self._address = "\0" + address[1:] if address[0] == "@" else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        # A manager that hangs must not hang the daemon: its queue fills up, and a message is lost and logged.
        self._socket.setblocking(False)

    @property
    def listens(self) -> bool:
        """There is a manager."""
        return self._address is not None

    def send(self, *lines: str, fds: Sequence[int] = ()) -> None:
        """Send one message. A failure is logged only: the daemon does not depend on the manager."""
        if self._address is None:
            return
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
            self._socket.sendmsg(["\n".join(lines).encode(errors="backslashreplace")], rights, 0, self._address)
        except OSError as error:
            _log.error("the service manager was not notified", lines=lines, error=str(error))


def given_descriptors(environ: MutableMapping[str, str], pid: int) -> dict[str, int]:
    """The descriptors that the manager has started this process with, by name. Takes their variables away."""
    count, names = environ.pop("LISTEN_FDS", ""), environ.pop("LISTEN_FDNAMES", "").split(":")
    if environ.pop("LISTEN_PID", "") != str(pid) or not count.isdecimal():
        return {}
    numbers = range(_FIRST_DESCRIPTOR, _FIRST_DESCRIPTOR + int(count))
    for number in numbers:
        os.set_inheritable(number, False)
    return dict(zip(names, numbers, strict=False))


def watchdog_seconds(environ: Mapping[str, str], pid: int) -> float | None:
    """The manager's watchdog timeout for this process; None without one, or if systemd did not write the value."""
    value = environ.get("WATCHDOG_USEC", "")
    if not value.isdecimal() or int(value) == 0 or environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None
    return int(value) / 1e6


def status_text(now: Readiness) -> str:
    """One line for a person, as ``systemctl status`` shows it."""
    pool = format_size(now.pool_bytes)
    if now.state is State.READY:
        return f"ready: {pool} pinned"
    if now.state is State.PINNING:
        text = f"pinning: {format_size(now.pinned_bytes)} of {pool} ({now.pinned_bytes * 100 // now.pool_bytes} %)"
        if now.pin_bytes_per_second:
            text += f", {format_rate(now.pin_bytes_per_second)}"
        if now.eta_seconds:  # not at the end either
            text += f", {format_duration(now.eta_seconds)} left"
        return text
    return f"{'not ready' if now.state is State.FAILED else now.state.value}: {now.reason}"


class Notifier:
    """Notifies the service manager of the daemon's state. Used by the event loop's thread only.

    Args:
        listener: the socket to notify.
        watchdog: the service manager's watchdog timeout in seconds; None: it has none.
    """

    def __init__(self, listener: NotifySocket, watchdog: float | None) -> None:
        self.listener = listener
        self._send = listener.send
        self._watchdog = watchdog
        self._pinned_bytes = 0
        self._status = ""
        self._stuck: str | None = None
        self._ready = False
        """READY=1 was sent."""
        self._not_ready = ""
        """Why the daemon is not going to be ready."""
        self._failed = False
        """The reason of the end was sent: no other status follows."""

    @classmethod
    def from_environment(cls) -> Notifier:
        """The notifier of the manager that started this process, if any."""
        return cls(NotifySocket(os.environ.get(_SOCKET)), watchdog_seconds(os.environ, os.getpid()))

    def changed(self, now: Readiness) -> None:
        lines = []
        if now.state is State.PINNING and now.pinned_bytes > self._pinned_bytes:
            self._pinned_bytes = now.pinned_bytes
            lines.append(_extend(EXTEND_SECONDS))
        if now.state is State.READY and not self._ready:
            self._ready = True
            lines.append("READY=1")
        if now.state is State.FAILED:
            self._not_ready = now.reason
        if not self._failed:
            self._status = status_text(now)
            self._send(*lines, self._status_line())

    def stopping(self, drain_timeout: float) -> None:
        """The daemon stops. Running copies get ``drain_timeout`` seconds, whatever the unit's TimeoutStopSec is."""
        if self._failed:  # it ends by itself
            self._send(_extend(STOP_MARGIN_SECONDS))
            return
        self._status = "stopping: running copies are finished first"
        if self._not_ready:  # what an operator looks for, where the manager stops it because the start has timed out
            self._status = f"stopping: it was not ready: {self._not_ready}"
        self._send("STOPPING=1", _extend(drain_timeout + STOP_MARGIN_SECONDS), self._status_line())

    def failed(self, error: BaseException) -> None:
        """The daemon ends for this reason, which stays its status. Does nothing the second time."""
        if self._failed:
            return
        self._failed = True
        told = str(error) if isinstance(error, KVSidecarError) else f"{type(error).__name__}: {error}"
        self._status, self._stuck = f"failed: {told}", None
        self._send(self._status_line())

    async def reloading(self, reload: Callable[[], Awaitable[str]]) -> None:
        """Run ``reload``, which returns its result in a few words, and must not raise."""
        # While the daemon is not ready, READY=1 at the end would say that it is.
        if not self._ready:
            await reload()
            return
        # CLOCK_MONOTONIC in microseconds, for Type=notify-reload.
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        result = await reload()
        self._send("READY=1", f"STATUS={_one_line(self._status)} ({_one_line(result)})")

    async def watch(self, stuck: Callable[[], str | None]) -> None:
        """Feed the watchdog twice per timeout, while the event loop runs and no copy is stuck. Not before READY=1:
        until then the start timeout applies.

        Args:
            stuck: why the copy workers make no progress, or None; /health calls it too.
        """
        if self._watchdog is None:
            return
        while True:
            reason = stuck()
            if (reason is None) != (self._stuck is None):
                self._stuck = reason
                if reason is None:
                    _log.info("progress resumed")
                else:
                    _log.error(
                        "no progress: the watchdog is not notified", reason=reason, watchdog_seconds=self._watchdog
                    )
                self._send(self._status_line())
            if self._ready and reason is None:
                self._send("WATCHDOG=1")
            await asyncio.sleep(self._watchdog / 2)

    def _status_line(self) -> str:
        return "STATUS=" + _one_line(self._status if self._stuck is None else f"stuck: {self._stuck}")


def _extend(seconds: float) -> str:
    return f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}"


def _one_line(text: str) -> str:
    """A driver's error may have several lines, and the manager would read each as a field. A long one would be lost."""
    return " ".join(text.split())[:MAX_STATUS]
