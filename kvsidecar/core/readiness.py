"""Whether the daemon accepts work, and why not: one state and one reason, sent to every listener.

Ready means: the pool is pinned, a self-test copy has come back right, and RPC listens. Transitions::

    starting -> pinning -> ready
          \\________\\________\\-> failed   (left by a restart only)

Kept blocks are served before that, from the memory that is pinned: `serve_kept`.

While no device takes copies, a ready daemon reports the state starting, and the devices: their copiers are being
started again. So does one to which nobody can connect: `unreachable`. Draining hides the state, which goes on changing
underneath: `cancel_drain` uncovers the state as it is by then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from kvsidecar.errors import Refusal
from kvsidecar.types import Readiness, State

_NEXT: dict[State, frozenset[State]] = {
    State.STARTING: frozenset({State.PINNING, State.FAILED}),
    State.PINNING: frozenset({State.PINNING, State.READY, State.FAILED}),
    State.READY: frozenset({State.FAILED}),
    State.FAILED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class WarmStart:
    """What a start has found of an earlier daemon's cache."""

    carrier: str = ""
    """The holder of the pool while there is no daemon: ``systemd``, ``directory``, or empty for none."""
    cold_reason: str = ""
    """Why nothing was kept; empty if the pool was taken over."""
    kept_blocks: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Blocks that were not kept, by reason."""
    seconds: float = 0.0
    """Time until the cache was known, without the time to pin it."""

    @property
    def warm(self) -> bool:
        return bool(self.carrier) and not self.cold_reason

    @property
    def dropped_blocks(self) -> int:
        return sum(self.dropped.values())


class DaemonReadiness:
    """The state. Used by the event loop's thread only."""

    def __init__(self, pool_bytes: int) -> None:
        self._below = self.now = Readiness(State.STARTING, pool_bytes, reason="the daemon is starting")
        self._draining = ""
        """The reason; empty while the daemon does not drain."""
        self._ending = False
        self._down: dict[str, str] = {}
        """Why a device takes no copies now."""
        self._all_down = False
        self._unreachable = ""
        """Why nobody can connect; empty while clients can."""
        self._accepts = False
        """True while connected clients are served as by a ready daemon."""
        self.warm_start = WarmStart()
        """What was kept; known before the daemon is ready."""
        self._listeners: dict[object, Callable[[Readiness], None]] = {}

    @property
    def ready(self) -> bool:
        return self.now.state is State.READY

    @property
    def refusal(self) -> Refusal | None:
        """Why stores are declined in this state, or None if they are not."""
        if self._accepts:
            return None
        return Refusal.DRAINING if self.now.state is State.DRAINING else Refusal.NOT_READY

    @property
    def read_refusal(self) -> Refusal | None:
        """Why lookups and loads are declined, or None if they are not."""
        return None if self.now.serves_kept else self.refusal

    def listen(self, listener: Callable[[Readiness], None]) -> Callable[[], None]:
        """Call ``listener`` with every change. Returns the function that ends it."""
        key = object()
        self._listeners[key] = listener
        return lambda: self._listeners.pop(key, None) and None

    def pinning(
        self, *, pinned_bytes: int = 0, bytes_per_second: float = 0.0, eta_seconds: float | None = None
    ) -> None:
        """Pinning has begun, or has come further. Ignored once the daemon is ready or has failed."""
        if State.PINNING in _NEXT[self._below.state]:
            self._set(
                State.PINNING,
                "the pool is being pinned",
                pinned_bytes=pinned_bytes,
                pin_bytes_per_second=bytes_per_second,
                eta_seconds=eta_seconds,
            )

    def serve_kept(self, serves: bool) -> None:
        """Answer lookups and loads while the pool is pinned, or stop to. Ignored in other states."""
        if self._below.state is State.PINNING:
            self._below = replace(self._below, serves_kept=serves)
            self._tell()

    def become_ready(self) -> None:
        """All conditions of ready hold. Ignored once the daemon has failed."""
        if State.READY in _NEXT[self._below.state]:
            self._set(State.READY, "", pinned_bytes=self._below.pool_bytes, eta_seconds=None, serves_kept=False)

    def fail(self, reason: str) -> None:
        """The daemon cannot serve. It stays alive and reports the reason."""
        if State.FAILED in _NEXT[self._below.state]:
            self._set(State.FAILED, reason, pinned_bytes=0, eta_seconds=None, serves_kept=False)

    def devices_down(self, down: Mapping[str, str], *, all_down: bool) -> None:
        """Set the devices that take no copies now, and why. The daemon stays ready while another one does."""
        self._down, self._all_down = dict(down), all_down
        self._tell()

    def unreachable(self, reason: str) -> None:
        """Set why nobody can connect now; empty: clients can. Those that are connected are served as before."""
        self._unreachable = reason
        self._tell()

    def drain(self, reason: str) -> None:
        """No new work until `cancel_drain`."""
        if not self._draining:
            self._draining = reason
            self._tell()

    def cancel_drain(self) -> bool:
        """Accept new work again, as far as the state allows. False if there was no drain, or the daemon shuts down."""
        if not self._draining or self._ending:
            return False
        self._draining = ""
        self._tell()
        return True

    def shut_down(self) -> None:
        """No new work any more."""
        self._ending, self._draining = True, "the daemon is shutting down"
        self._tell()

    def _set(self, state: State, reason: str, **changes: int | float | None) -> None:
        self._below = replace(self._below, state=state, reason=reason, **changes)  # type: ignore[arg-type]
        self._tell()

    def _tell(self) -> None:
        now = self._below
        if self._down and now.state is State.READY:
            reason = "; ".join(f"{device}: {why}" for device, why in self._down.items())
            now = replace(now, state=State.STARTING if self._all_down else State.READY, reason=reason)
        if now.serves_kept and self._all_down:
            now = replace(now, serves_kept=False)  # nothing can be loaded
        if now.serves_kept:
            now = replace(now, reason=f"{now.reason}; kept blocks in pinned chunks are served")
        if self._draining:
            now = replace(now, state=State.DRAINING, reason=self._draining, eta_seconds=None, serves_kept=False)
        self._accepts = now.state is State.READY
        if self._unreachable and self._accepts:
            now = replace(now, state=State.STARTING, reason=self._unreachable)
        if now == self.now:
            return
        self.now = now
        errors: list[Exception] = []
        for listener in tuple(self._listeners.values()):
            try:
                listener(now)
            except Exception as error:  # noqa: BLE001 - raised when all have been told
                errors.append(error)
        if errors:
            raise errors[0] if len(errors) == 1 else ExceptionGroup("listeners have failed", errors)
