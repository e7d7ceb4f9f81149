"""Notices that the sockets or the lock were removed under the daemon, and makes them again.

Cleaners of temporary files do that, and people who clean up after a daemon that they take for dead. Connected clients
notice nothing; nobody else could connect any more, and a second daemon could start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from kvsidecar.core.readiness import DaemonReadiness
from kvsidecar.errors import SocketInUse
from kvsidecar.server.socket_files import SocketFiles
from kvsidecar.support import log
from kvsidecar.support.tasks import TaskSet

LOOK_SECONDS = 1.0

_log = log.get("endpoint")


class SocketWatch:
    """Used from the event loop.

    Args:
        start_again: by the path of each socket, a function that binds and publishes another one. Raises SocketInUse.
        readiness: learns when the daemon cannot be reached.
    """

    def __init__(
        self,
        files: SocketFiles,
        start_again: Mapping[Path, Callable[[], object]],
        readiness: DaemonReadiness,
        tasks: TaskSet,
    ) -> None:
        self._files, self._start_again, self._readiness, self._tasks = files, start_again, readiness, tasks
        self._watching: asyncio.Task[None] | None = None
        self._reason = ""
        """Why they cannot be made again; empty while they are there."""

    def start(self) -> None:
        self._watching = self._tasks.keep(self._watch, name="socket-watch")

    async def stop(self) -> None:
        """Return when it makes none any more."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            missing = self._files.missing()
            reason = ""
            try:
                if missing:
                    self._files.reclaim()
                    for path in missing:
                        if path in self._start_again:
                            self._start_again[path]()
            except SocketInUse as error:
                reason = str(error)
            if reason and reason != self._reason:
                _log.error("sockets are gone and cannot be created again", missing=_names(missing), reason=reason)
            elif missing and not reason:
                _log.warning("sockets were removed, and have been created again", missing=_names(missing))
            elif self._reason and not reason:
                _log.info("the sockets are there again")
            if reason != self._reason:
                self._reason = reason
                self._readiness.unreachable(reason and f"nobody can connect: {reason}")


def _names(paths: list[Path]) -> list[str]:
    return [str(each) for each in paths]
