"""What an engine imports to use the daemon of its node: synchronous, thread-safe, and never in a step's way.

>>> client = Client()                                                   # doctest: +SKIP
>>> client.attach(instance="llama", namespace=namespace, buffers=buffers, groups=groups, retry=True)
>>> job = client.store([Blocks(group=0, hashes=hashes, block_ids=ids)], after=event)
>>> for done in client.poll(): ...

Imports `protocol`, `types`, `errors`, the generated messages, and what both ends need of `support`; nothing of the
daemon, and torch only in `kvsidecar.client.torch`. Begin with `client`, the calls; the page at the top of `supervisor`
tells the states, the threads and the locks behind them.
"""

from kvsidecar.client.breaker import Backoff, BreakerState, CircuitBreaker
from kvsidecar.client.buffers import Allocation, HostBuffer, KVBuffers
from kvsidecar.client.client import Client
from kvsidecar.client.leases import KeptLease
from kvsidecar.client.lookups import PendingLookup
from kvsidecar.client.ordering import DEVICE, Completion, EventRing
from kvsidecar.client.remote import RemoteClient, Tls
from kvsidecar.client.results import (
    BACKPRESSURE,
    BREAKER_OPEN,
    CLOSED,
    DAEMON_LOST,
    EVENT_FAILED,
    NO_ANSWER,
    NOT_ATTACHED,
    Blocks,
    GroupHits,
    JobDone,
    LookupResult,
    Readiness,
)
from kvsidecar.errors import (
    AttachRefused,
    ClientError,
    DaemonUnreachable,
    NotExportable,
    RequestDenied,
    SocketDenied,
)
from kvsidecar.protocol.wire import pack_ids
from kvsidecar.types import GroupLayout, LookupMode, Namespace, Outcome, Region, State

__all__ = [
    "BACKPRESSURE",
    "BREAKER_OPEN",
    "CLOSED",
    "DAEMON_LOST",
    "DEVICE",
    "EVENT_FAILED",
    "NOT_ATTACHED",
    "NO_ANSWER",
    "Allocation",
    "AttachRefused",
    "Backoff",
    "Blocks",
    "BreakerState",
    "CircuitBreaker",
    "Client",
    "ClientError",
    "Completion",
    "DaemonUnreachable",
    "EventRing",
    "GroupHits",
    "GroupLayout",
    "HostBuffer",
    "JobDone",
    "KVBuffers",
    "KeptLease",
    "LookupMode",
    "LookupResult",
    "Namespace",
    "NotExportable",
    "Outcome",
    "PendingLookup",
    "Readiness",
    "Region",
    "RemoteClient",
    "RequestDenied",
    "SocketDenied",
    "State",
    "Tls",
    "pack_ids",
]
