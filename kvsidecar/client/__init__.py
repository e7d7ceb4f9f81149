"""The client library that engines import: synchronous, thread-safe, and without waits in an engine's step.

>>> client = Client()                                                   # doctest: +SKIP
>>> client.attach(instance="llama", namespace=namespace, buffers=buffers, groups=groups, retry=True)
>>> job = client.store([Blocks(group=0, hashes=hashes, block_ids=ids)], after=event)
>>> for done in client.poll(): ...

Imports `protocol`, `types`, `errors`, the generated messages, and the parts of `support` that both ends need; no daemon
code, and torch only in `kvsidecar.client.torch`. Begin with `client`, the calls; the docstring of `states` draws the
states behind them, that of `supervisor` describes the threads and locks.

Elsewhere than on Linux there is `RemoteClient`, and nothing of what an engine needs on its daemon's host.
"""

import sys

from kvsidecar.client.remote import RemoteClient, Tls
from kvsidecar.client.types import (
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
    ResidencyChange,
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
from kvsidecar.support.breaker import Backoff, BreakerState, CircuitBreaker
from kvsidecar.types import GroupLayout, LookupMode, Namespace, Outcome, Priority, Readiness, Region, Residency, State

if sys.platform == "linux":
    from kvsidecar.client.buffers import Allocation, HostBuffer, KVBuffers, PhysicalRange
    from kvsidecar.client.client import Client
    from kvsidecar.client.lookups import LeaseRenewal, PendingLookup
    from kvsidecar.client.ordering import DEVICE, Completion, EventRing

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
    "LeaseRenewal",
    "LookupMode",
    "LookupResult",
    "Namespace",
    "NotExportable",
    "Outcome",
    "PendingLookup",
    "PhysicalRange",
    "Priority",
    "Readiness",
    "Region",
    "RemoteClient",
    "RequestDenied",
    "Residency",
    "ResidencyChange",
    "SocketDenied",
    "State",
    "Tls",
    "pack_ids",
]
