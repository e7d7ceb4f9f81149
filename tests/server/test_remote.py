from __future__ import annotations

from kvsidecar.server.tcp import RemoteService
from kvsidecar.v1 import sidecar_pb2 as pb


def test_whoever_adds_a_call_decides_whether_other_hosts_may_make_it() -> None:
    """What `RemoteService` does not refuse itself it serves as `Service` does. Add a new call here, and there if other
    hosts may not make it."""
    calls = {method.name for method in pb.DESCRIPTOR.services_by_name["Sidecar"].methods}
    refused = {name for name in calls if name in vars(RemoteService)}
    assert refused == {"Attach", "Release", "Renew"}
    assert calls - refused == {"Lookup", "Status", "Clear", "Pin", "Unpin", "Drain", "CancelDrain"}
