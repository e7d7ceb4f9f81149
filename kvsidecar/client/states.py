"""The states of a client's connection to the daemon, and all their transitions in one table.

::

    IDLE --dial--> DIALLING <--connected, lost--> CONNECTED         for lookups; attaching ends it
      |              '------start, try----.----------'
      '--start, try----------------> CONNECTING or TRYING --attached--> ATTACHED --lost-----> QUIESCING
                                          ^                                |                    |
                                          |                                '--give up--> GIVEN_UP
                                          '------------------ended---------------------------'

    close:  ATTACHED --> LEAVING,  QUIESCING --> ENDING,  GIVEN_UP --> ABANDONING,  each --ended--> CLOSED
            every other state --> CLOSED

The engine's threads may dial, give up and close at any time: where that means nothing, the state stays. An attempt that
is under way ends in whatever state the client is in by then: one that has connected for lookups while the client began
to attach is made again, and a session that began while the client was closed is left in order.

No session begins before every job of the last one has ended: the only ways out of the states that end a session are
``ended``, and ``close`` to others of them.
"""

from __future__ import annotations

from enum import Enum

from kvsidecar.errors import ClientError


class ConnectionState(Enum):
    IDLE = "idle"
    """The supervisor has no thread."""
    DIALLING = "dialling"
    """Connecting without a registration, again and again."""
    CONNECTED = "connected"
    """A transport is published, and no session."""
    TRYING = "trying"
    """Connecting and attaching, until it fails for the first time."""
    CONNECTING = "connecting"
    """Connecting and attaching, again and again. `store` and `load` are declined, lookups miss."""
    ATTACHED = "attached"
    """A transport and a session are published. In the other states, but CONNECTED, nothing is."""
    QUIESCING = "quiescing"
    """The daemon is lost. Each outstanding job ends when nothing can touch its blocks any more, not before."""
    GIVEN_UP = "given up"
    """Like QUIESCING, for a daemon that hangs: the fence gives the proof, and no last replies are awaited."""
    LEAVING = "leaving"
    """This client is being closed: the daemon finishes the jobs."""
    ENDING = "ending"
    """Like QUIESCING, but this client is being closed, and the memory should be unmapped, too."""
    ABANDONING = "abandoning"
    """Like GIVEN_UP, but this client is being closed, and the memory should be unmapped, too."""
    CLOSED = "closed"
    """Nothing is begun any more. The thread ends, if there is one."""


class Event(Enum):
    # Caused by the engine's threads.
    DIAL = "dial"
    START = "start"
    TRY = "try"
    """Start, and end with the first attempt if that fails."""
    GIVE_UP = "give up"
    CLOSE = "close"
    # Caused by the supervisor's thread.
    CONNECTED = "connected"
    """Connected without a registration."""
    ATTACHED = "attached"
    FAILED = "failed"
    LOST = "lost"
    ENDED = "ended"
    """The session is over."""


CONNECTING = frozenset({ConnectionState.DIALLING, ConnectionState.TRYING, ConnectionState.CONNECTING})
PUBLISHED = frozenset({ConnectionState.CONNECTED, ConnectionState.ATTACHED})
HUNG = frozenset({ConnectionState.GIVEN_UP, ConnectionState.ABANDONING})
CLOSING = frozenset(
    {ConnectionState.LEAVING, ConnectionState.ENDING, ConnectionState.ABANDONING, ConnectionState.CLOSED}
)

S, E = ConnectionState, Event
_NEXT: dict[ConnectionState, dict[Event, ConnectionState]] = {
    S.IDLE: {E.DIAL: S.DIALLING, E.START: S.CONNECTING, E.TRY: S.TRYING, E.CLOSE: S.CLOSED},
    S.DIALLING: {
        E.CONNECTED: S.CONNECTED, E.FAILED: S.DIALLING, E.START: S.CONNECTING, E.TRY: S.TRYING, E.CLOSE: S.CLOSED,
    },
    S.CONNECTED: {E.LOST: S.DIALLING, E.START: S.CONNECTING, E.TRY: S.TRYING, E.CLOSE: S.CLOSED},
    S.TRYING: {E.CONNECTED: S.TRYING, E.ATTACHED: S.ATTACHED, E.FAILED: S.CLOSED, E.CLOSE: S.CLOSED},
    S.CONNECTING: {E.CONNECTED: S.CONNECTING, E.ATTACHED: S.ATTACHED, E.FAILED: S.CONNECTING, E.CLOSE: S.CLOSED},
    S.ATTACHED: {E.LOST: S.QUIESCING, E.GIVE_UP: S.GIVEN_UP, E.CLOSE: S.LEAVING},
    S.QUIESCING: {E.ENDED: S.CONNECTING, E.CLOSE: S.ENDING},
    S.GIVEN_UP: {E.ENDED: S.CONNECTING, E.CLOSE: S.ABANDONING},
    S.LEAVING: {E.ENDED: S.CLOSED},
    S.ENDING: {E.ENDED: S.CLOSED},
    S.ABANDONING: {E.ENDED: S.CLOSED},
    S.CLOSED: {E.CONNECTED: S.CLOSED, E.ATTACHED: S.LEAVING, E.FAILED: S.CLOSED},
}  # fmt: skip


def after(state: ConnectionState, event: Event) -> ConnectionState:
    """The state that follows. Raises ClientError if this event cannot happen in this state."""
    following = _NEXT[state].get(event)
    if following is not None:
        return following
    if event in (E.DIAL, E.GIVE_UP) or (state in CLOSING and event in (E.START, E.TRY, E.CLOSE)):
        return state
    raise ClientError(f"{event.value!r} is impossible while the connection is {state.value}")
