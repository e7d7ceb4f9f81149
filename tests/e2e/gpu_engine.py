"""A program that is an engine on a GPU."""

from __future__ import annotations

ENGINE = """
import sys
from kvsidecar.support.cuda_driver import CudaContext
from tests import harness
from tests.e2e import test_gpu
daemon = object.__new__(harness.DaemonProcess)
daemon.socket = sys.argv[1]
context = CudaContext(0)
ballast = context.alloc(2 << 30)
rows = tuple(test_gpu.STACKED)
rank = test_gpu.GpuRank(daemon, context, rows)
from kvsidecar.client import Allocation, GroupLayout, KVBuffers, Region
from kvsidecar.support.cuda_driver import ipc_handle
import dataclasses
big = daemon.client()
big.attach(
    instance="big",
    namespace=dataclasses.replace(harness.NAMESPACE, model="big"),
    buffers=KVBuffers(context.uuid, (Allocation(2 << 30, cuda_ipc_handle=ipc_handle(ballast)),)),
    groups=[GroupLayout(0, 1024, 0, 1, (Region(0, 0, 0, 2 << 20, 2 << 20, 1),))],
)
rank.fill(5)
job = rank.client.store([harness.Blocks(0, harness.hashes("a"), [0])])
harness.done(rank.client.wait([job], harness.SECONDS)[job])
print("stored", flush=True)
sys.stdin.read()
"""
