"""LMCache 0.5 through its own client classes: store, lookup and retrieve against a running ``lmcache server``.

    python -m benchmarks.peers.lmcache_client --rpc 127.0.0.1:5555 --rows FILE --repeat N

What its vLLM worker does in the mode ``lmcache_driven``: the server imports the KV tensors and copies them on its own
stream, ordered by events that cross the process boundary. Pitfalls: it keeps whole chunks of 256 tokens, so the
smallest job is 16 blocks; a lookup right after a store may miss (its commit is polled every 5 ms), so it is repeated;
without its compiled extension it falls back to slow torch code with only a warning, and run.py marks such rows invalid.
"""

from __future__ import annotations

# isort: off
from benchmarks.peers import lazy_symbols  # noqa: F401 - before anything imports lmcache
# isort: on

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import zmq
from lmcache.utils import EngineType
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.group_view import EngineGroupInfo
from lmcache.v1.multiprocess.transfer_context import create_transfer_context
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

from benchmarks.peers.cuda import opened_gpu
from benchmarks.peers.report import Lookup, Transfer
from benchmarks.peers.shapes import DEPTH, TOKENS_PER_BLOCK, Direction, Shape, bfloat16_elements
from benchmarks.peers.timing import Timing, measure, poll_until
from benchmarks.peers.worker import Rows, Settings, settings_from

SYSTEM: Final = "lmcache"
HEAD_SIZE: Final = 128
PATIENCE: Final = 60.0
"""Seconds for one call."""
COMMIT_SECONDS: Final = 0.05
"""The server notes the end of a copy up to 5 ms after its client has seen it, and offers nothing to wait for."""
VERIFIED_BLOCKS: Final = 64
MISSES: Final = 4096
LOOKUPS: Final = 20


@dataclass(frozen=True)
class Request:
    """Tokens nobody has stored before, and the blocks of the GPU that hold their KV."""

    name: str
    tokens: tuple[int, ...]
    ids: list[int]


class Engine:
    """One registered instance with the tensors of one layout. For one thread.

    Args:
        blocks: of KV on the device; all jobs in flight have blocks of their own.
    """

    def __init__(self, rpc: str, shape: Shape, blocks: int, device: str = "cuda:0") -> None:
        self.shape, self.blocks = shape, blocks
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self.client = RequestClientFactory.create(f"tcp://{rpc}", context=self._context)
        self.chunk_blocks = self.client.get_chunk_size().result(timeout=PATIENCE) // TOKENS_PER_BLOCK
        self.model = f"peers-{os.getpid()}-{shape.name}"
        self._rng = random.Random(self.model)
        self._made = 0
        size = self._layer_size()
        if shape.separate:
            layers = [torch.empty(size, dtype=torch.bfloat16, device=device) for _ in range(shape.layers)]
        else:
            layers = list(torch.empty((shape.layers, *size), dtype=torch.bfloat16, device=device))
        self.layers: dict[str, torch.Tensor] = {f"layer.{index}": layer for index, layer in enumerate(layers)}
        for layer in self.layers.values():
            layer.view(torch.int16).random_()
        self._transfer = create_transfer_context(
            self.layers, mode="lmcache_driven", instance_id=time.monotonic_ns() & (2**53 - 1), req_client=self.client
        )
        group = EngineGroupInfo(
            engine_group_id=0, layer_indices=tuple(range(shape.layers)), tokens_per_block=TOKENS_PER_BLOCK
        )
        self._transfer.register(
            self.layers,
            self.model,
            1,
            self.chunk_blocks,
            PATIENCE,
            layout_hints={"kv_layout": "NHD"},
            engine_group_infos=[group],
            engine_type=EngineType.VLLM,
        )

    def _layer_size(self) -> tuple[int, ...]:
        """K and V apart are ``2 x blocks x tokens x heads x size``; one plane is ``blocks x tokens x size``."""
        elements = bfloat16_elements(self.shape)
        if self.shape.planes == 1:
            return (self.blocks, TOKENS_PER_BLOCK, elements)
        return (2, self.blocks, TOKENS_PER_BLOCK, elements // HEAD_SIZE, HEAD_SIZE)

    def request(self, blocks: int, place: int, places: int) -> Request:
        """A new request whose blocks lie at random in one of ``places`` equal parts of the memory."""
        self._made += 1
        part = self.blocks // places
        ids = self._rng.sample(range(place * part, (place + 1) * part), blocks)
        tokens = tuple(self._rng.randrange(1, 100_000) for _ in range(blocks * TOKENS_PER_BLOCK))
        return Request(f"{self.model}-{self._made}", tokens, ids)

    def _key(self, request: Request, worker: int | None) -> Any:
        return IPCCacheServerKey(
            model_name=self.model,
            world_size=1,
            worker_id=worker,
            token_ids=request.tokens,
            start=0,
            end=len(request.tokens),
            request_id=request.name,
            num_kv_readers=1,
        )

    def submit(self, direction: Direction, request: Request) -> Any:
        """A future of one store or retrieve."""
        event = self._transfer.create_recorded_event()
        key, ids = self._key(request, 0), [request.ids]
        if direction == "store":
            future = self._transfer.submit_store(request.name, key, self.layers, ids, event, self.chunk_blocks)
        else:
            future = self._transfer.submit_retrieve(
                request.name, key, self.layers, ids, event, self.chunk_blocks, skip_first_n_tokens=0
            )
        return future, event  # destroying an exported event leaves the server's wait undefined

    @staticmethod
    def wait(submitted: Any) -> None:
        future, _event = submitted
        if not future.result(timeout=PATIENCE):
            raise RuntimeError("the server says that the copy failed")

    def lookup(self, request: Request) -> int:
        """Chunks of a request that can be retrieved, each locked once; the request must be ended, or retrieved."""
        self.client.lookup(self._key(request, None), 1).result(timeout=PATIENCE)
        answer: list[int] = []

        def answered() -> bool:
            hits = self.client.query_prefetch_status(request.name).result(timeout=PATIENCE)
            if hits is not None:
                answer.append(hits)
            return bool(answer)

        poll_until(answered, PATIENCE, "a lookup is answered")
        return answer[0]

    def lock_all(self, request: Request) -> float:
        """Look up until the whole request is there; microseconds of the lookup that found it."""
        took: list[float] = []

        def there() -> bool:
            started = time.perf_counter()
            hits = self.lookup(request)
            took.append(time.perf_counter() - started)
            if hits * self.chunk_blocks == len(request.ids):
                return True
            self.client.free_lookup_locks(self._key(request, None), 1).result(timeout=PATIENCE)
            return False

        poll_until(there, PATIENCE, f"a store of {len(request.ids)} blocks can be looked up", pause=0.02)
        return 1e6 * took[-1]

    def end(self, request: Request) -> None:
        self.client.end_session(request.name).result(timeout=PATIENCE)

    def content(self, ids: Sequence[int]) -> list[torch.Tensor]:
        """Copies of these blocks, per layer, as integers: a NaN differs from itself."""
        return [self._part(layer, ids).view(torch.int16) for layer in self.layers.values()]

    def _part(self, layer: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
        return layer[list(ids)] if self.shape.planes == 1 else layer[:, list(ids)]

    def wipe(self) -> None:
        for layer in self.layers.values():
            layer.zero_()

    def forget_all(self) -> None:
        """Empty the server's memory: near its watermark it would evict, and when full it stores nothing and says so to
        nobody."""
        time.sleep(COMMIT_SECONDS)
        self.client.clear(True).result(timeout=PATIENCE)

    def close(self) -> None:
        try:
            future = self._transfer.unregister()
            if future is not None:
                future.result(timeout=PATIENCE)
            self.forget_all()
        finally:
            self.layers.clear()
            self._transfer.close()
            self.client.close()
            self._context.term()


def verified(engine: Engine, synchronize: Callable[[], None]) -> bool:
    """Store, wipe, retrieve: every byte of the blocks must be back."""
    request = engine.request(VERIFIED_BLOCKS, 0, 1)
    before = engine.content(request.ids)
    synchronize()
    engine.wait(engine.submit("store", request))
    engine.lock_all(request)
    engine.wipe()
    synchronize()
    engine.wait(engine.submit("load", request))
    synchronize()
    right = all(map(torch.equal, engine.content(request.ids), before))
    engine.end(request)
    for layer in engine.layers.values():
        layer.view(torch.int16).random_()
    return right


def phase(engine: Engine, direction: Direction, requests: Sequence[Request], depth: int) -> Timing:
    return measure(len(requests), depth, lambda job: engine.submit(direction, requests[job]), engine.wait)


def transfers(engine: Engine, settings: Settings, right: bool) -> Iterator[Transfer | Lookup]:
    """All rows of one layout, and the lookups that go before its retrieves."""
    depths = [(size, 1) for size in settings.chunk_sizes] + [(size, DEPTH) for size in settings.deep_sizes]
    for blocks, depth in depths:
        # With several in flight as many jobs as will fill the queue twice; the pool must keep them all.
        jobs = max(settings.repeat, 2 * depth if depth > 1 else 1) + 1
        requests = [engine.request(blocks, index % depth, depth) for index in range(jobs)]
        warm, timed = requests[:1], requests[1:]
        phase(engine, "store", warm, 1)
        stored = phase(engine, "store", timed, depth)
        found = [engine.lock_all(request) for request in requests]
        phase(engine, "load", warm, 1)
        loaded = phase(engine, "load", timed, depth)
        for request in requests:
            engine.end(request)
        engine.forget_all()
        ways: tuple[tuple[Direction, Timing], ...] = (("store", stored), ("load", loaded))
        for direction, timing in ways:
            yield Transfer(
                SYSTEM,
                engine.shape.name,
                blocks,
                depth,
                direction,
                gbps=timing.gbps(blocks * engine.shape.block_bytes),
                ms_p50=timing.ms_p50,
                verified=right,
            )
        if depth == 1:
            note = f"{blocks // engine.chunk_blocks} chunks; request and poll; {engine.shape.name}"
            yield Lookup(SYSTEM, blocks, True, statistics.median(found), note)


def misses(engine: Engine) -> Lookup:
    """Lookups of 4096 blocks that nobody stored."""
    took: list[float] = []
    for _ in range(LOOKUPS):
        tokens = tuple(random.randrange(1, 100_000) for _ in range(MISSES * TOKENS_PER_BLOCK))
        request = Request(f"{engine.model}-miss-{len(took)}", tokens, [])
        started = time.perf_counter()
        hits = engine.lookup(request)
        took.append(time.perf_counter() - started)
        engine.end(request)
        if hits:
            raise RuntimeError(f"{hits} chunks of fresh tokens were found")
    note = f"{MISSES // engine.chunk_blocks} chunks; request and poll"
    return Lookup(SYSTEM, MISSES, False, 1e6 * statistics.median(took), note)


def measure_layout(
    shape: Shape, settings: Settings, rows: Rows, synchronize: Callable[[], None], device: str = "cuda:0"
) -> None:
    """All rows of one layout."""
    deepest = max([*settings.chunk_sizes, *(DEPTH * size for size in settings.deep_sizes)])
    engine = Engine(settings.rpc, shape, blocks=deepest, device=device)
    try:
        for row in transfers(engine, settings, verified(engine, synchronize)):
            rows.add(row)
        if shape is settings.shapes[-1]:
            rows.add(misses(engine))
    finally:
        engine.close()


def main(settings: Settings) -> None:
    torch.cuda.set_device(0)
    with Rows(settings.rows) as rows, opened_gpu() as gpu:
        rows.add_limits(SYSTEM, gpu.bulk_gbps)
        for shape in settings.shapes:
            if shape.layers == 1:
                continue  # it registers layers; a block that is one row has none
            try:
                measure_layout(shape, settings, rows, torch.cuda.synchronize)
            except Exception as error:  # noqa: BLE001 - whatever its client raises; the row says what
                rows.refuse(SYSTEM, f"{shape.name}: {type(error).__name__}: {error}")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(settings_from())
