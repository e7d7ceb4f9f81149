"""Runs as another user: reads one JSON request a line, and answers each. Its first argument is the daemon's socket."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import grpc

from kvsidecar.client import Blocks, Client, HostBuffer
from kvsidecar.errors import KVSidecarError
from kvsidecar.protocol.wire import namespace_to_wire
from kvsidecar.types import Namespace
from kvsidecar.v1 import sidecar_pb2 as pb
from kvsidecar.v1 import sidecar_pb2_grpc as pb_grpc
from tests.e2e.wire import register
from tests.harness import hashes, layout


def answer(client: Client, socket: str, request: dict[str, Any]) -> object:
    namespace = Namespace(**request["namespace"])
    match request["what"]:
        case "attach":
            buffer = HostBuffer(1 << 20)
            client.attach(instance=request["name"], namespace=namespace, buffers=buffer.kv_buffers(), groups=[layout()])
            return "attached"
        case "attach over gRPC alone":
            buffer = HostBuffer(1 << 20)
            first = register(b"", buffer, instance=request["name"])
            first.namespace.CopyFrom(namespace_to_wire(namespace))
            first.allocations[0].own_fd = buffer.fd
            with grpc.insecure_channel(f"unix:{socket}") as channel:
                replies = pb_grpc.SidecarStub(channel).Attach(iter([pb.AttachRequest(register=first)]), timeout=30)
                return next(reply.WhichOneof("message") for reply in replies)
        case "lookup":
            found = client.lookup(namespace, {0: hashes(request["name"])}, lease_seconds=request.get("lease", 0))
            return found.groups[0].hits, found.lease
        case "raw lookup":  # without a token
            with grpc.insecure_channel(f"unix:{socket}") as channel:
                raw = pb.LookupRequest(namespace=namespace_to_wire(namespace), mode=pb.LookupRequest.MODE_PREFIX)
                return pb_grpc.SidecarStub(channel).Lookup(raw, timeout=30).ready
        case "raw release":
            with grpc.insecure_channel(f"unix:{socket}") as channel:
                return (
                    pb_grpc.SidecarStub(channel).Release(pb.ReleaseRequest(lease=request["lease"]), timeout=30).released
                )
        case "raw renew":
            with grpc.insecure_channel(f"unix:{socket}") as channel:
                renewal = pb.RenewRequest(lease=request["lease"], lease_ms=1000)
                return pb_grpc.SidecarStub(channel).Renew(renewal, timeout=30).renewed
        case "store" | "load":
            blocks = [Blocks(0, hashes(request["name"]), [0])]
            job = client.store(blocks) if request["what"] == "store" else client.load(blocks, lease=request["lease"])
            done = client.wait([job], 30)[job]
            return done.outcome.value, done.reason, done.error
        case "release":
            return client.release(request["lease"])
        case "clear":
            return client.clear(namespace)
        case "clear all":
            return client.clear()
        case "drain":
            return client.drain()
        case "cancel drain":
            return client.cancel_drain()
        case _:
            status = client.status()
            models = [each.namespace.model for each in status.namespaces]
            instances = [each.instance for each in status.ranks]
            return models, instances, status.pool.blocks, status.jobs.stores_done, dict(status.refusals), status.partial


def main() -> None:
    socket, local_protocol, uid, *groups = sys.argv[1:]
    os.setgroups([int(group) for group in groups])
    os.setgid(int(uid))
    os.setuid(int(uid))
    client = Client(socket, timeout=30, step_budget=30, local_protocol=local_protocol == "local")
    for line in sys.stdin:
        try:
            reply = answer(client, socket, json.loads(line))
        except (KVSidecarError, grpc.RpcError) as error:
            code = error.code().name if isinstance(error, grpc.RpcError) else type(error).__name__
            reply = f"{code}: {error.details() if isinstance(error, grpc.RpcError) else error}"
        print(json.dumps(reply), flush=True)
    client.close()


if __name__ == "__main__":
    main()
