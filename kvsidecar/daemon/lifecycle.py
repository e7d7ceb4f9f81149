"""The parts of a daemon that live as long as its process: signals, service manager, lock, probes.

It imports little, so that a probe is answered while the rest of the daemon is still being imported.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from kvsidecar import __version__
from kvsidecar.core.readiness import DaemonReadiness
from kvsidecar.daemon.settings import Settings
from kvsidecar.daemon.systemd import Notifier
from kvsidecar.server.http import Probes
from kvsidecar.server.socket_files import SocketFiles, socket_group_id
from kvsidecar.support import log
from kvsidecar.support.addresses import at
from kvsidecar.support.loop_time import LoopTime
from kvsidecar.support.tasks import TaskSet
from kvsidecar.support.turns import Turns
from kvsidecar.types import Readiness, State

if TYPE_CHECKING:
    from kvsidecar.pool.kept_files import Carrier

_log = log.get("daemon")


class Unexpected:
    """Errors that nothing in the daemon expects: each is counted, and logged, but one kind only once a second."""

    def __init__(self) -> None:
        self._count: Callable[[], object] | None = None
        self._uncounted = 0
        """Errors since the start, while there are no metrics yet."""
        self._rate = log.Rate()

    def count_with(self, count: Callable[[], object]) -> None:
        """Call it for each error, from the first one on."""
        self._count = count
        for _ in range(self._uncounted):
            count()

    def __call__(self, name: str, error: BaseException) -> None:
        """Report an error of a task, or of a part of it that keeps running."""
        self._heard("task failed", name, error, task=name)

    def in_callback(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The event loop's exception handler."""
        error = context.get("exception")
        self._heard("unexpected error", type(error).__name__, error, where=str(context.get("message", "")))

    def _heard(self, event: str, kind: str, error: BaseException | None, **values: str) -> None:
        if self._count is None:
            self._uncounted += 1
        else:
            self._count()
        if (left_out := self._rate.passes(f"{event} {kind}")) is not None:
            more = {"left_out": left_out} if left_out else {}
            _log.error(event, error=str(error), exc_info=error, **values, **more)


class Lifecycle:
    """One run of the process, as an asynchronous context; its exit stops the probes and releases the lock.

    Args:
        at_terminal: SIGHUP means that the terminal is gone, and stops the daemon; otherwise it sets `hung_up`.

    Raises:
        ConfigError: the group of the sockets does not exist on this machine.
    """

    def __init__(self, settings: Settings, pool_bytes: int, *, notifier: Notifier, at_terminal: bool = False) -> None:
        self._settings = settings
        self._at_terminal = at_terminal
        self._stopping = False
        self.unexpected = Unexpected()
        self.notifier = notifier
        self.readiness = DaemonReadiness(pool_bytes)
        gid = socket_group_id(settings.called("socket_group"), settings.socket_group)
        self.endpoint = SocketFiles(Path(settings.socket), mode=settings.socket_mode_bits, gid=gid)
        self.loop_time = LoopTime()
        self.turns = Turns(self.loop_time)
        """The users' turns on the event loop, for all that they cause, except for the local protocol."""
        self.carrier: Carrier | None = None
        """The holder of the pool while there is no daemon."""
        self._was_ready = False
        self.probes = Probes(
            self.readiness, TaskSet(self.unexpected), page=settings.http_page, loop_time=self.loop_time
        )
        self.stop = asyncio.Event()
        """Set when the daemon must end."""
        self.hung_up = asyncio.Event()
        """Set when the settings must be read again; cleared before they are."""
        self.http = ""
        """URL of the probes, once they are answered."""
        self.readiness.listen(notifier.changed)
        self.readiness.listen(self._changed)

    async def __aenter__(self) -> Lifecycle:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self.unexpected.in_callback)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        loop.add_signal_handler(signal.SIGHUP, self._hung_up)
        self.notifier.changed(self.readiness.now)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self.notifier.failed(error)
        self.begin_stop(self._settings.drain_timeout)
        # Probes are answered until here. They stop before the lock is released: the daemon that waits for the lock may
        # use this port.
        await self.probes.stop()
        never_started = isinstance(error, Exception) and not self._was_ready
        if never_started and self.carrier is not None:
            self.carrier.undo()
        self.endpoint.release(undo=never_started)
        if error is None:  # the caller reports an error
            _log.info("stopped")

    async def open(self) -> bool:
        """Take the lock and answer probes. False if asked to stop while another daemon held the lock.

        Raises:
            AddressUnavailable, ConfigError, SocketInUse: the daemon cannot start.
        """
        # The lock first: the daemon that holds it may use this port.
        if not await self.endpoint.acquire(wait_seconds=self._settings.lock_wait, stop=self.stop):
            return False
        port = await self.probes.start(self._settings.http_host, self._settings.http_port)
        self.http = f"http://{at(self._settings.http_host, port)}"
        _log.debug("starting", http=self.http, version=__version__)
        return True

    def _changed(self, now: Readiness) -> None:
        self._was_ready = self._was_ready or now.state is State.READY

    def begin_stop(self, drain_timeout: float) -> None:
        """Announce the shutdown; running copies get ``drain_timeout`` seconds. Does nothing the second time."""
        if self._stopping:
            return
        self._stopping = True
        self.endpoint.mark_ending()  # a daemon that starts now waits for the end of this one
        if self.carrier is not None:
            self.carrier.mark_ending()
        self.readiness.shut_down()
        self.notifier.stopping(drain_timeout)

    def _signalled(self, number: int) -> None:
        if self.stop.is_set():
            _log.warning("second signal: exiting at once", signal=signal.Signals(number).name)
            exit_at_once(128 + number)
        _log.info("stopping", signal=signal.Signals(number).name)
        self.stop.set()

    def _hung_up(self) -> None:
        # Never a second signal that ends the daemon at once: a shell and the kernel may both send it for one terminal.
        if self.stop.is_set():
            return
        if self._at_terminal:
            _log.info("stopping", signal="SIGHUP", reason="the terminal was closed")
            self.stop.set()
        else:
            self.hung_up.set()


def exit_at_once(code: int) -> NoReturn:
    """End the process, whatever still runs in it, after its log is written."""
    log.flush()
    os._exit(code)
