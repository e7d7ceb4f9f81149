"""Messages of gRPC, as bytes."""

from __future__ import annotations

from kvsidecar.protocol.wire import namespace_to_wire
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.harness import NAMESPACE

LOOKUP = pb.LookupRequest(namespace=namespace_to_wire(NAMESPACE), mode=pb.LookupRequest.MODE_PREFIX)
