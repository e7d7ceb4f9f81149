"""PegaFlow 0.25 through its own client: store, lookup and load against a running ``pegaflow-server``.

    python -m benchmarks.peers.pegaflow_client --rpc 127.0.0.1:50055 --http 127.0.0.1:9091 --rows FILE --repeat N

What its vLLM connector does, without vLLM: a device-wide synchronisation, then one Save of all layers, which returns
when the copies are over; a lookup that leases the blocks; one Load, whose end the server writes into shared memory.
Pitfalls, each of which would falsify a row: a hash that the server knows is skipped (so every job has fresh ones); a
store becomes visible only after its reply (so a lookup is repeated until it sees all); a lease pins blocks for ten
minutes (so each is consumed by a load, or released).
"""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import statistics
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from pegaflow import EngineRpcClient, PyLoadState, QueryReady
from pegaflow.ipc_wrapper import CudaIPCWrapper

from benchmarks.peers.cuda import opened_gpu
from benchmarks.peers.report import Lookup, Transfer
from benchmarks.peers.shapes import BLOCKS, Direction, Shape
from benchmarks.peers.timing import poll_until
from benchmarks.peers.worker import Rows, Settings, settings_from

SYSTEM: Final = "pegaflow"
BACKENDS: Final = ("direct", "kernel")
"""``direct`` issues one copy per piece; ``kernel`` gathers with the GPU's SMs, which the engine needs itself."""
LOOKUPS: Final = 50
"""Samples per number of hashes."""
PATIENCE: Final = 30.0
"""Seconds for a store to become visible, or for a load to end."""


class Engine:
    """One registered instance with the tensors of one layout. For one thread."""

    def __init__(self, rpc: str, shape: Shape, backend: str, device: str = "cuda:0") -> None:
        self.shape, self.backend = shape, backend
        self.client = EngineRpcClient(f"http://{rpc}")
        self.instance = f"peers-{os.getpid()}-{shape.name}-{backend}"
        # planes x blocks x bytes; with one plane the server is given the plane itself.
        if shape.separate:
            layers = [self._empty(1, device)[0] for _ in range(shape.layers)]
        else:
            layers = list(self._empty(shape.layers, device))
        self.layers: dict[str, torch.Tensor] = {f"layer.{index}": layer for index, layer in enumerate(layers)}
        for layer in self.layers.values():
            layer.random_(0, 256)
        shared = [layer if shape.planes > 1 else layer[0] for layer in layers]
        each = len(shared)
        tp_rank, pp_rank, tp_size, world_size, ordinal = 0, 0, 1, 1, 0
        ok, message = self.client.register_context_batch(
            self.instance,
            self.instance,  # its own namespace: nothing of another layout is ever found
            tp_rank,
            pp_rank,
            tp_size,
            world_size,
            ordinal,
            list(self.layers),
            [pickle.dumps(CudaIPCWrapper(tensor)) for tensor in shared],
            [BLOCKS] * each,
            [shape.row_bytes] * each,
            [BLOCKS * shape.row_bytes if shape.planes > 1 else 0] * each,
            [shape.planes] * each,
            backend,
            False,  # page_first
        )
        _expect(ok, message)
        # When this process dies the server sees it by this stream, and unmaps the tensors.
        self.client.start_session_watcher(self.instance, self.instance, tp_size, world_size)

    def _empty(self, layers: int, device: str) -> torch.Tensor:
        size = (layers, self.shape.planes, BLOCKS, self.shape.row_bytes)
        return torch.empty(size, dtype=torch.uint8, device=device)

    def store(self, ids: Sequence[int], hashes: Sequence[bytes]) -> float:
        """Seconds of one Save; the server answers after its copies."""
        saves = [(name, list(ids), list(hashes)) for name in self.layers]
        torch.cuda.synchronize()
        started = time.perf_counter()
        ok, message = self.client.save(self.instance, 0, 0, 0, saves)
        seconds = time.perf_counter() - started
        _expect(ok, message)
        return seconds

    def lease(self, hashes: Sequence[bytes], request: str) -> bytes:
        """A lease of all these blocks, as soon as the server's index has them."""
        found: list[bytes] = []

        def visible() -> bool:
            answer = self.query(hashes, request)
            if answer.num_hit_blocks == len(hashes):
                found.append(answer.lease)
                return True
            self.release(answer)
            return False

        poll_until(visible, PATIENCE, f"a store of {len(hashes)} blocks can be looked up")
        return found[0]

    def query(self, hashes: Sequence[bytes], request: str) -> Any:
        answer = self.client.query_prefetch(self.instance, list(hashes), request)
        if not isinstance(answer, QueryReady):  # QueryLoading: only with an SSD or a remote tier
            raise TypeError(f"the lookup answered {answer!r}")
        return answer

    def release(self, answer: Any) -> None:
        if answer.lease:
            self.client.release(answer.lease)

    def load(self, ids: Sequence[int], lease: bytes) -> float:
        """Seconds from the call to the end that the server writes into shared memory."""
        state = PyLoadState()
        names, blocks = list(self.layers), list(ids)
        torch.cuda.synchronize()
        started = time.perf_counter()
        ok, message = self.client.load(self.instance, 0, 0, state.shm_name(), [names], [(lease, [blocks])])
        _expect(ok, message)
        deadline = started + PATIENCE
        while not state.is_ready():
            if time.perf_counter() > deadline:
                raise TimeoutError(f"a load of {len(ids)} blocks is not over after {PATIENCE:g} s")
        seconds = time.perf_counter() - started
        if state.get_state() != 1:
            raise RuntimeError(f"a load of {len(ids)} blocks ended with state {state.get_state()}")
        return seconds

    def content(self, ids: Sequence[int]) -> list[torch.Tensor]:
        """Copies of these blocks, per layer."""
        return [layer[:, list(ids)].clone() for layer in self.layers.values()]

    def wipe(self, ids: Sequence[int]) -> None:
        for layer in self.layers.values():
            layer[:, list(ids)] = 0
        torch.cuda.synchronize()

    def close(self) -> None:
        ok, message = self.client.unregister_context(self.instance)
        self.layers.clear()
        torch.cuda.ipc_collect()  # shared memory is kept until the server has let go of it
        torch.cuda.empty_cache()
        _expect(ok, message)


def _expect(ok: bool, message: str) -> None:
    if not ok:
        raise RuntimeError(message)


def fresh_hashes(engine: Engine, what: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{engine.instance}/{what}/{index}".encode()).digest() for index in range(count)]


def transfers(engine: Engine, settings: Settings) -> Iterator[Transfer]:
    """All rows of one layout and backend. The first job of each size warms up, and its bytes are compared."""
    rng = random.Random(1)
    for blocks in settings.sizes:
        stores, loads, right = [], [], True
        for job in range(settings.repeat + 1):
            ids = rng.sample(range(BLOCKS), blocks)
            hashes = fresh_hashes(engine, f"{blocks}/{job}", blocks)
            before = engine.content(ids) if job == 0 else []
            stored = engine.store(ids, hashes)
            lease = engine.lease(hashes, f"{blocks}-{job}")
            if job == 0:
                engine.wipe(ids)
            loaded = engine.load(ids, lease)
            if job == 0:
                torch.cuda.synchronize()
                right = all(map(torch.equal, engine.content(ids), before))
            else:
                stores.append(stored)
                loads.append(loaded)
        ways: tuple[tuple[Direction, list[float]], ...] = (("store", stores), ("load", loads))
        for direction, seconds in ways:
            middle = statistics.median(seconds)
            yield Transfer(
                SYSTEM,
                engine.shape.name,
                blocks,
                1,
                direction,
                gbps=blocks * engine.shape.block_bytes / middle / 1e9,
                ms_p50=1e3 * middle,
                variant=engine.backend,
                verified=right,
            )


def lookups(engine: Engine) -> Iterator[Lookup]:
    """Hits of 1, 64 and 512 hashes that are stored here first, and misses of 4096."""
    for count in (1, 64, 512):
        hashes = fresh_hashes(engine, f"lookup/{count}", count)
        engine.store(random.Random(2).sample(range(BLOCKS), count), hashes)
        engine.client.release(engine.lease(hashes, f"lookup-{count}"))
        yield Lookup(SYSTEM, count, True, _lookup_us(engine, hashes))
    yield Lookup(SYSTEM, 4096, False, _lookup_us(engine, fresh_hashes(engine, "never", 4096)))


def _lookup_us(engine: Engine, hashes: Sequence[bytes]) -> float:
    seconds = []
    for index in range(LOOKUPS):
        started = time.perf_counter()
        answer = engine.query(hashes, f"timed-{len(hashes)}-{index}")
        seconds.append(time.perf_counter() - started)
        engine.release(answer)
    return 1e6 * statistics.median(seconds)


def forget_all(http: str) -> None:
    """Empty the server's memory, so that the next layout finds the whole pool."""
    request = urllib.request.Request(f"http://{http}/cache/memory/cleanup", method="POST")
    urllib.request.urlopen(request, timeout=PATIENCE).close()


def main(settings: Settings) -> None:
    torch.cuda.set_device(0)
    with Rows(settings.rows) as rows, opened_gpu() as gpu:
        rows.add_limits(SYSTEM, gpu.bulk_gbps)
        looked_up = False
        for backend in BACKENDS:
            for shape in settings.shapes:
                try:
                    engine = Engine(settings.rpc, shape, backend)
                    try:
                        for row in transfers(engine, settings):
                            rows.add(row)
                        if not looked_up:
                            for lookup in lookups(engine):
                                rows.add(lookup)
                            looked_up = True
                    finally:
                        engine.close()
                        forget_all(settings.http)
                except Exception as error:  # noqa: BLE001 - its client has exceptions of its own; the row says which
                    rows.refuse(f"{SYSTEM} {backend}", f"{shape.name}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main(settings_from())
