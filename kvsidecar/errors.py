"""Every exception kvsidecar raises on purpose. ``server/status.py`` maps each to a gRPC code; a test holds that.

The text of an error is written for the person who gets it: what was wrong, with numbers, and what to do. It never
names another client's instance, address or handle (CVE-2025-23320 showed what such a text is worth to an attacker).
"""

from __future__ import annotations

from kvsidecar.types import Refusal


class KVSidecarError(Exception):
    """Base of all errors below."""


# -- the start ---------------------------------------------------------------------------------------------------


class ConfigError(KVSidecarError):
    """A setting is unknown or has a bad value. The text is one sentence that names it."""


class SocketInUse(KVSidecarError):
    """Another daemon serves this socket, or the path holds something that is not ours to remove."""


class AddressUnavailable(KVSidecarError):
    """A TCP address cannot be listened on now, and may be later: another program has the port."""


class PoolRefused(KVSidecarError):
    """The pool does not fit a limit; nothing was touched. The text names need and limit."""


class PinFailed(KVSidecarError):
    """A chunk could not be reserved, prefaulted or pinned; everything done before it has been given back."""


class PinStopped(KVSidecarError):
    """Pinning was told to stop; everything done before has been given back."""


# -- devices -----------------------------------------------------------------------------------------------------


class DeviceError(KVSidecarError):
    """Base of errors of a device or its driver."""


class DriverUnusable(DeviceError):
    """No usable CUDA driver: not installed, too old, or it does not start. The text says which."""


class DeviceNotFound(DeviceError):
    """The named GPU is not visible to the daemon."""


class ImportRefused(DeviceError):
    """A memory handle does not open, or is not what the registration says."""


class DeviceLost(DeviceError):
    """The device had an error that its context does not survive (a sticky CUDA error).

    Args:
        outcome_known: of the copy that ended with it, as that of `CopyFailed`.
    """

    def __init__(self, message: str, *, outcome_known: bool = False) -> None:
        super().__init__(message)
        self.outcome_known = outcome_known


class CopyFailed(DeviceError):
    """A copy failed.

    Args:
        outcome_known: True if no byte of the copy can move any more, so its slots may be reused. False if that is
            not known: the slots must be quarantined.
    """

    def __init__(self, message: str, *, outcome_known: bool) -> None:
        super().__init__(message)
        self.outcome_known = outcome_known


# -- requests ----------------------------------------------------------------------------------------------------


class InvalidRequest(KVSidecarError):
    """The request does not make sense, whatever the state of the daemon."""


class NamespaceMismatch(KVSidecarError):
    """The registration contradicts what other ranks of the same namespace registered."""


class ProtocolMismatch(KVSidecarError):
    """The client speaks another protocol number."""


class UnknownPeer(KVSidecarError):
    """The token is not one of a live attach-socket connection."""


class AccessDenied(KVSidecarError):
    """The request would reach what belongs to another user of the machine."""


class NotPermitted(KVSidecarError):
    """The caller may not use this namespace, or is no admin."""


class LimitExceeded(KVSidecarError):
    """The client asks for more than one client may have at once."""


class Unfinished(KVSidecarError):
    """The client did not send the rest of what it had begun, in the time there is for that."""


class Unavailable(KVSidecarError):
    """The daemon does not take this request in its present state.

    Args:
        refusal: the counted reason.
    """

    def __init__(self, message: str, *, refusal: Refusal) -> None:
        super().__init__(message)
        self.refusal = refusal


# -- the client's side -------------------------------------------------------------------------------------------


class ClientError(KVSidecarError):
    """Base of errors that only the client library raises."""


class DaemonUnreachable(ClientError):
    """No daemon answers at the socket, or the connection to it is lost."""


class SocketDenied(DaemonUnreachable):
    """There is a daemon, or may be one, whose socket this user may not open. The text says what to change."""


class AttachRefused(ClientError):
    """The daemon refused the registration; the text is the daemon's."""


class RequestDenied(ClientError):
    """The daemon answers, and does not give this to the caller; the text is the daemon's."""


class NotExportable(ClientError):
    """The engine's memory cannot be shared with another process; the text says what to change."""
