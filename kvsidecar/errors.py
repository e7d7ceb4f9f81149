"""Every reason for a refusal, and every exception that kvsidecar raises on purpose.

``server/status_codes.py`` maps each exception to a gRPC code; a test holds that.

The text of an error is written for the person who gets it: what was wrong, with numbers, and what to do. It never
names another client's instance, address or handle (CVE-2025-23320 showed what such a text is worth to an attacker).
"""

from __future__ import annotations

from enum import StrEnum


class Refusal(StrEnum):
    """Every reason for which a request or job is refused. Each is a label value of ``kvsidecar_refusals_total``."""

    NOT_READY = "not_ready"
    """The daemon is not ready: the pool is still being pinned, or pinning failed."""
    DRAINING = "draining"
    """The daemon is draining or shutting down."""
    POOL_FULL = "pool_full"
    """The pool has too few free or evictable slots for the whole job. Nothing was evicted."""
    POOL_FRAGMENTED = "pool_fragmented"
    """The pool has enough bytes, but blocks of another size, leased or being copied, occupy the slabs."""
    TABLE_FULL = "table_full"
    """There is no memory for the records of these blocks in the table of the kept pool, because the file system of
    ``--pool-dir`` is full, and no old block whose records have memory can be evicted for them."""
    QUOTA = "quota"
    """The job would take its share of the pool beyond its maximum, or use bytes that are guaranteed to other shares."""
    NOT_ADMITTED = "not_admitted"
    """With ``--eviction rhythm``: every block that the job would evict is expected to be used before the job's own. A
    normal outcome: nothing was evicted, and the blocks may be stored when they are computed again."""
    NOT_FOUND = "not_found"
    """A block to load is not readable: it was never stored, it was evicted, or some of its shards are not sealed."""
    STALE_LEASE = "stale_lease"
    """The lease that the load names has expired or was released."""
    DEVICE_LOST = "device_lost"
    """The device's copier has ended, for example after an error of the GPU. It is replaced."""
    COPY_FAILED = "copy_failed"
    """The driver rejected the copy, or the copy failed."""
    CANCELLED = "cancelled"
    """A flush cancelled the job before it started."""
    DEADLINE = "deadline"
    """The copy had not started by the job's deadline, and never will."""
    CHECKSUM = "checksum"
    """The bytes of a shard differ from those that were stored. The block is a miss and the slot is quarantined."""
    INVALID_REQUEST = "invalid_request"
    """The request does not match what the rank registered: block ids, groups or sizes."""
    REGISTER_REFUSED = "register_refused"
    """The registration of an Attach was refused; the error says why."""
    LEASE_EXPIRED = "lease_expired"
    """A lease expired before the client released it."""
    DENIED = "denied"
    """The caller may not use this namespace, or is not an admin."""
    UNIDENTIFIED = "unidentified"
    """The caller did not identify itself: it sent no token, or the token of a connection that has ended; or, over TCP,
    no certificate of the CA."""
    LIMIT = "limit"
    """The request would exceed a per-user or per-rank limit."""
    UNFINISHED = "unfinished"
    """A client started a message, request or stream and did not complete it in time."""
    CLIENT_GONE = "client_gone"
    """The client was gone before it could be answered."""


class KVSidecarError(Exception):
    """Base of all errors below."""


# -- the start ---------------------------------------------------------------------------------------------------


class ConfigError(KVSidecarError):
    """A setting is unknown or has a bad value. The text is one sentence that names it."""


class KernelRefuses(KVSidecarError):
    """The kernel lacks a system call that the daemon needs, or a seccomp profile refuses it. The text names it."""


class SocketInUse(KVSidecarError):
    """Another daemon serves this socket or has this directory of the pool, or the path of the socket exists and is not
    a socket that the daemon may remove."""


class AddressUnavailable(KVSidecarError):
    """A TCP address cannot be bound at present: another program has the port, or the address does not exist yet."""


class TooManyProcesses(KVSidecarError):
    """The system starts no more threads or processes for this user at present. The text names what limits them."""


class PoolRefused(KVSidecarError):
    """The pool exceeds a memory limit; nothing was allocated. The text names the size and the limit.

    Args:
        lasting: whether later starts are refused, too, until a limit or a setting is changed.
    """

    def __init__(self, message: str, *, lasting: bool = False) -> None:
        super().__init__(message)
        self.lasting = lasting


class PinFailed(KVSidecarError):
    """A chunk could not be reserved, prefaulted or pinned; all memory has been released."""


class PinStopped(KVSidecarError):
    """Pinning was stopped on request; all memory has been released."""


class KeptRefused(KVSidecarError):
    """The pool of an earlier run cannot be taken over; the pool starts empty. The text says why."""


# -- tiers -------------------------------------------------------------------------------------------------------


class TierFailed(KVSidecarError):
    """A tier cannot be used, or did not do what it was asked to. The text says which and why."""


# -- devices -----------------------------------------------------------------------------------------------------


class DeviceError(KVSidecarError):
    """Base of device and driver errors."""


class DriverUnusable(DeviceError):
    """The CUDA driver is unusable: not installed, too old, or it fails to start. The text says which."""


class DeviceNotFound(DeviceError):
    """The named GPU is not visible to the daemon."""


class ImportRefused(DeviceError):
    """A memory handle cannot be opened, or its memory is not what the registration says."""


class DeviceLost(DeviceError):
    """The device had an error that its context does not survive (a sticky CUDA error); or, in the daemon, its copier
    has ended, and with it every copy."""


class CopyFailed(DeviceError):
    """A copy failed.

    Args:
        outcome_known: True if the copy can no longer move a byte, so its slots may be reused. False, in a copier's
            process only, if it still might: only the end of the process ends it.
    """

    def __init__(self, message: str, *, outcome_known: bool = True) -> None:
        super().__init__(message)
        self.outcome_known = outcome_known


# -- requests ----------------------------------------------------------------------------------------------------


class InvalidRequest(KVSidecarError):
    """The request is invalid, whatever the state of the daemon."""


class NamespaceMismatch(KVSidecarError):
    """The registration contradicts what other ranks of the same namespace registered."""


class ProtocolMismatch(KVSidecarError):
    """The client speaks another version of the protocol."""


class UnknownPeer(KVSidecarError):
    """The client cannot be identified: its token or certificate is not valid, or its connection has ended."""


class AccessDenied(KVSidecarError):
    """The request names something that belongs to another user of the machine."""


class NotPermitted(KVSidecarError):
    """The caller may not use this namespace, or is not an admin."""


class LimitExceeded(KVSidecarError):
    """The request would exceed a per-client limit."""


class Unfinished(KVSidecarError):
    """The client started a message and did not complete it in time."""


class Unavailable(KVSidecarError):
    """The daemon does not accept this request in its current state.

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
    """This user has no permission to open the daemon's socket. The text says what to change."""


class AttachRefused(ClientError):
    """The daemon refused the registration; the text is the daemon's."""


class RequestDenied(ClientError):
    """The daemon denied the request; the text is the daemon's."""


class NotExportable(ClientError):
    """The engine's memory cannot be shared with another process; the text says what to change."""
