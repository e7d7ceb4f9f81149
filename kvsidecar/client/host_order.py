"""Jobs that wait on the host for what they come after: see `kvsidecar.client.ordering`."""

from __future__ import annotations

import queue
import threading

from kvsidecar.client.ledger import Job
from kvsidecar.client.ordering import Completion
from kvsidecar.client.session import Session


class HostOrder:
    """Sends each job when what it comes after is over. Its thread lives from the first such job to `stop`."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Session, Job, Completion] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def add(self, session: Session, job: Job, after: Completion) -> None:
        with self._lock:
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(target=self._run, name="kvsidecar-order", daemon=True)
                self._thread.start()
            self._waiting.put((session, job, after))

    def stop(self) -> None:
        """No job is added after this. Those added before are still waited for and sent."""
        with self._lock:
            self._stopped = True
            self._waiting.put(None)

    def join(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds for the thread. False: an event of the engine is not over."""
        if self._thread is None:
            return True
        self._thread.join(max(0.0, timeout))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            session, job, after = item
            if not session.expects(job):
                continue  # cancelled, or its daemon is lost: nobody needs to wait for its event
            try:
                after.synchronize()
            except Exception as error:  # noqa: BLE001 - an engine's event may raise anything; the job must end
                session.fail(job, str(error))
                continue
            session.send(job)
