"""One engine of the demo: ``python -m kvsidecar.cli.demo.engine store|load CONFIG``, with the arguments of `Engine` as
JSON.

It has two tensor-parallel ranks, each with its own buffer and connection, and writes JSON lines to standard output.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsidecar.cli.demo.shape import TP_SIZE, Shape
from kvsidecar.client import Allocation, Blocks, Client, HostBuffer, JobDone, KVBuffers, Outcome

JOB_BLOCKS = 64
"""Blocks per job: a prompt of a thousand tokens."""
TIMEOUT = 60.0


class HostMemory:
    def __init__(self, nbytes: int) -> None:
        self._buffer = HostBuffer(nbytes)
        self._bytes = np.frombuffer(self._buffer.memory, np.uint8)

    def kv_buffers(self) -> KVBuffers:
        return self._buffer.kv_buffers()

    def write(self, content: npt.NDArray[np.uint8]) -> None:
        self._bytes[:] = content.reshape(-1)

    def read(self) -> npt.NDArray[np.uint8]:
        return self._bytes


class CudaMemory:
    def __init__(self, nbytes: int) -> None:
        from kvsidecar.support.cuda_driver import CudaContext, ipc_handle

        self._context = CudaContext(0)
        self._nbytes = nbytes
        self._address = self._context.alloc(nbytes)
        self._handle = ipc_handle(self._address)

    def kv_buffers(self) -> KVBuffers:
        return KVBuffers(self._context.uuid, (Allocation(self._nbytes, cuda_ipc_handle=self._handle),))

    def write(self, content: npt.NDArray[np.uint8]) -> None:
        self._context.copy_to_device(self._address, content.reshape(-1))
        self._context.synchronize()

    def read(self) -> npt.NDArray[np.uint8]:
        content = np.empty(self._nbytes, np.uint8)
        self._context.copy_from_device(content, self._address)
        return content


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


class Engine:
    """Two ranks of one instance.

    Args:
        cuda: whether the KV cache is on the GPU.
        seed: for the order in which this engine allocates block ids.
    """

    def __init__(self, *, name: str, shape: Shape, socket: str, cuda: bool, seed: int) -> None:
        self.shape = shape
        self.hashes = shape.hashes()
        self.block_ids = list(range(shape.num_blocks))
        random.Random(seed).shuffle(self.block_ids)
        self.memories: list[HostMemory | CudaMemory] = []
        self.clients: list[Client] = []
        for rank in range(TP_SIZE):
            memory = CudaMemory(shape.rank_bytes) if cuda else HostMemory(shape.rank_bytes)
            client = Client(socket, name=f"{name} rank {rank}")
            client.attach(
                instance=name,
                namespace=shape.namespace(),
                buffers=memory.kv_buffers(),
                groups=[shape.layout(rank)],
                rank=rank,
                world_size=TP_SIZE,
            )
            self.memories.append(memory)
            self.clients.append(client)

    def jobs(self) -> list[Blocks]:
        return [
            Blocks(0, self.hashes[start : start + JOB_BLOCKS], self.block_ids[start : start + JOB_BLOCKS])
            for start in range(0, self.shape.num_blocks, JOB_BLOCKS)
        ]

    def hits(self, *, lease_seconds: float = 0.0) -> tuple[int, int | None]:
        """How many of the blocks are readable, when all have come that a disk has, and the lease on them."""
        client, deadline = self.clients[0], time.monotonic() + TIMEOUT
        while True:
            result = client.lookup(
                self.shape.namespace(),
                {0: self.hashes},
                lease_seconds=lease_seconds,
                fetch_seconds=TIMEOUT,
                prefill_rate=1e-3,  # it computes nothing: whatever the disk needs is worth it
            )
            if not result.coming or time.monotonic() > deadline:
                return result.groups[0].hits, result.lease
            if result.lease is not None:
                client.release(result.lease)
            time.sleep(0.001)

    def store(self) -> None:
        """Fill the buffers with a pattern and store everything."""
        for rank, memory in enumerate(self.memories):
            memory.write(self.shape.content(rank, self.hashes, self.block_ids))
        for rank, client in enumerate(self.clients):
            started = time.perf_counter()
            done = finish(client, [client.store([blocks]) for blocks in self.jobs()])
            say(rank=rank, hits=self.hits()[0], **summary(done, time.perf_counter() - started))

    def load(self) -> None:
        """Load everything into other block ids and compare every byte."""
        hits, lease = self.hits(lease_seconds=30)
        for rank, (client, memory) in enumerate(zip(self.clients, self.memories, strict=True)):
            memory.write(np.zeros(self.shape.rank_bytes, np.uint8))
            started = time.perf_counter()
            done = finish(client, [client.load([blocks], lease=lease) for blocks in self.jobs()])
            seconds = time.perf_counter() - started
            expected = self.shape.content(rank, self.hashes, self.block_ids).reshape(-1)
            wrong = int(np.count_nonzero(memory.read() != expected))
            say(rank=rank, hits=hits, wrong_bytes=wrong, **summary(done, seconds))
        if lease is not None:
            self.clients[0].release(lease)
        for client in self.clients:
            client.close()


def finish(client: Client, jobs: list[int]) -> list[JobDone]:
    """Wait for the jobs. Exits with the reason if one does not succeed."""
    done = client.wait(jobs, TIMEOUT)
    for job in jobs:
        if job not in done:
            sys.exit(f"job {job} did not end in {TIMEOUT:g} s")
        if done[job].outcome is not Outcome.DONE:
            sys.exit(f"job {job} was {done[job].outcome}: {done[job].reason} {done[job].error}")
    return [done[job] for job in jobs]


def summary(done: list[JobDone], seconds: float) -> dict[str, Any]:
    return {
        "blocks": sum(job.copied_blocks for job in done),
        "bytes": sum(job.nbytes for job in done),
        "seconds": seconds,
        "copy_seconds": sum(job.copy_seconds for job in done),
    }


def main() -> None:
    action, config = sys.argv[1], json.loads(sys.argv[2])
    engine = Engine(shape=Shape(**config.pop("shape")), **config)
    say(attached=True)
    if action == "store":
        engine.store()
        say(finished=True)
        sys.stdin.read()  # a serving engine does not exit by itself: it is killed
    else:
        engine.load()
        say(finished=True)


if __name__ == "__main__":
    main()
