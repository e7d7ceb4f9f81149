"""What an engine imports to use the daemon of its node: synchronous, thread-safe, and never in a step's way.

>>> client = Client()                                                   # doctest: +SKIP
>>> client.attach(instance="llama", namespace=namespace, buffers=buffers, groups=groups)
>>> job = client.store([Blocks(group=0, hashes=hashes, block_ids=ids)], after=event)
>>> for done in client.poll(): ...
"""

from kvsidecar.client.buffers import Allocation, HostBuffer, KVBuffers
from kvsidecar.client.client import DAEMON_LOST, Blocks, Client, Completion, GroupHits, JobDone, LookupResult, Readiness
from kvsidecar.errors import (
    AttachRefused,
    ClientError,
    DaemonUnreachable,
    NotExportable,
)
from kvsidecar.types import GroupLayout, LookupMode, Namespace, Outcome, Region, State

__all__ = [
    "DAEMON_LOST",
    "Allocation",
    "AttachRefused",
    "Blocks",
    "Client",
    "ClientError",
    "Completion",
    "DaemonUnreachable",
    "GroupHits",
    "GroupLayout",
    "HostBuffer",
    "JobDone",
    "KVBuffers",
    "LookupMode",
    "LookupResult",
    "Namespace",
    "NotExportable",
    "Outcome",
    "Readiness",
    "Region",
    "State",
]
