"""An Attach stream, whatever carries it: decides what to do when something arrives. Pure; `Attachment` does it.

::

    NEW --begin--> REGISTERING --accepted--> OPEN --finish, gone--> ENDING --ended--> OVER
     |              | |   '-------finish-----> LEAVING --accepted-----^
     |              | '--gone---> ORPHANED <--gone--'                 |
     |              |                 '-----------accepted------------'
     '--finish--> LEAVING         each of the three, and NEW, --refused--> OVER
     '--gone----> OVER

A registration cannot be cancelled, because the driver call that imports memory cannot: a stream that ends meanwhile
waits for its session and ends it, in order (LEAVING) or as that of a client that has gone (ORPHANED).
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Final, Literal

from kvsidecar.core.sessions import RankSession
from kvsidecar.errors import KVSidecarError, LimitExceeded

MAX_EARLY_BYTES = 64 * 1024
"""Limit of messages that are kept while the driver imports the rank's memory, of each connection."""
EARLY_MESSAGE_BYTES = 1024
"""Memory that each of them takes besides: even a message of few bytes is several objects."""

AttachState = Enum("AttachState", "NEW REGISTERING LEAVING ORPHANED OPEN ENDING OVER")
S = AttachState
Event = Literal["begin", "accepted", "refused", "finish", "gone", "ended"]
_NEXT: Final[dict[AttachState, dict[Event, AttachState]]] = {
    S.NEW: {"begin": S.REGISTERING, "refused": S.OVER, "finish": S.LEAVING, "gone": S.OVER},
    S.REGISTERING: {"accepted": S.OPEN, "refused": S.OVER, "finish": S.LEAVING, "gone": S.ORPHANED},
    S.LEAVING: {"accepted": S.ENDING, "refused": S.OVER, "gone": S.ORPHANED},
    S.ORPHANED: {"accepted": S.ENDING, "refused": S.OVER},
    S.OPEN: {"finish": S.ENDING, "gone": S.ENDING},
    S.ENDING: {"ended": S.OVER},
    S.OVER: {},
}
_IGNORED = ("finish", "gone", "ended")
"""What may happen in every state, and changes nothing where the table lacks it."""

Do = Literal["register", "open", "take", "end", "cut", "tell"]


class AttachProtocol:
    """Each method returns what to do, in order, and with what:

    register: the first message, None if there was none; then call `accepted` or `refused`. open: the stream of a
    session. take: a message. end: a session, in order; then call `ended`. cut: end the session of a client that has
    gone: jobs that have not started must not start. tell: the client that the stream is over, with an error or None.
    """

    def __init__(self) -> None:
        self.state = AttachState.NEW
        self.session: RankSession | None = None
        """The session of a rank, once it is registered; a watcher has none."""
        self._early: list[Any] = []
        self._early_bytes = 0
        self._error: KVSidecarError | None = None

    def receive(self, message: Any, nbytes: int = 0) -> list[tuple[Do, Any]]:
        """Raises LimitExceeded: too much has arrived before the reply to the registration."""
        match self.state:
            case AttachState.NEW:
                self._enter("begin")
                return [("register", message)]
            case AttachState.REGISTERING:
                self._early.append(message)
                self._early_bytes += nbytes + EARLY_MESSAGE_BYTES
                if self._early_bytes > MAX_EARLY_BYTES:
                    raise LimitExceeded(f"{self._early_bytes} bytes arrived before the reply to the registration")
            case AttachState.OPEN:
                return [("take", message)]
        return []

    def accepted(self, session: RankSession | None) -> list[tuple[Do, Any]]:
        orphaned, self.session = self.state is AttachState.ORPHANED, session
        self._enter("accepted")
        if orphaned:
            return [("cut", session)]
        todo: list[tuple[Do, Any]] = [("open", session), *[("take", each) for each in self._early]]
        self._early.clear()
        return todo if self.state is AttachState.OPEN else [*todo, ("end", session)]

    def refused(self, error: KVSidecarError) -> list[tuple[Do, Any]]:
        self._enter("refused")
        return [("tell", error)]

    def finish(self, error: KVSidecarError | None = None) -> list[tuple[Do, Any]]:
        """End the stream because the client half-closes, or because of an error: the first of these counts."""
        begun = self.state is not AttachState.NEW
        if error is not None and not begun:
            return self.refused(error)
        if not self._enter("finish"):
            return []
        self._error = error
        if self.state is AttachState.ENDING:
            return [("end", self.session)]
        return [] if begun else [("register", None)]

    def gone(self) -> list[tuple[Do, Any]]:
        self._enter("gone")
        return [("cut", self.session)] if self.state is AttachState.ENDING else []

    def ended(self) -> list[tuple[Do, Any]]:
        return [("tell", self._error)] if self._enter("ended") else []

    def _enter(self, event: Event) -> bool:
        """The only place where the state changes. Returns whether it does."""
        before, self.state = self.state, _NEXT[self.state].get(event, self.state)
        assert self.state is not before or event in _IGNORED, f"{event!r} is impossible in {before}"
        return self.state is not before
