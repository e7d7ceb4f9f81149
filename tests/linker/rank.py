"""A rank's side of the SGLang linker with a KV cache on the host, driven as SGLang would."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvsidecar.client import GroupLayout, HostBuffer, Namespace, Region
from kvsidecar.integrations.namespace_facts import EngineIdentity
from kvsidecar.integrations.rank_memory import RankMemory
from kvsidecar.integrations.sglang.counters import RankCounters
from kvsidecar.integrations.sglang.groups import KV, groups_of
from kvsidecar.integrations.sglang.options import LinkerOptions
from kvsidecar.integrations.sglang.rank_side import RankFacts, RankSide
from kvsidecar.integrations.sglang.weights import Weights
from tests.harness import SECONDS, DaemonProcess, closed_after_the_test, eventually
from tests.linker.transfers import PoolName, Transfer, keys

LAYERS, PAGE, ROW = 4, 16, 512
PAGES = 32
NAMESPACE = Namespace("m", "bf16", "sglang pages by layer", PAGE, 1, 1, "sglang sha256")


class Ranks:
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.others_agree = True

    def agree(self, yes: bool) -> bool:
        return yes and self.others_agree


class Clock:
    """Real time, which a test may move forward, or stop."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self._stopped: float | None = None

    def stop(self) -> None:
        self._stopped = time.monotonic()

    def __call__(self) -> float:
        return (time.monotonic() if self._stopped is None else self._stopped) + self.ahead


class LateSlots:
    """Slots that are on their way to the host until a test lets them arrive."""

    def __init__(self, slots: Any) -> None:
        self.slots, self.there = np.array(slots), threading.Event()

    def arrived(self) -> bool:
        return self.there.is_set()

    def take(self) -> Any:
        assert self.there.wait(SECONDS), "the slots have not arrived"
        return self.slots


class LateReader:
    """In place of `pools.SlotReader`, which needs a GPU."""

    def __init__(self) -> None:
        self.all: list[LateSlots] = []

    def read(self, slots: Any) -> LateSlots:
        self.all.append(LateSlots(slots))
        return self.all[-1]


class LateMoves:
    """A GPU that moves as late as it may: what it is given runs only when somebody has to have seen it. So who forgets
    to wait finds other bytes: slots are overwritten before they are read, and pages are read before they are written.
    """

    def __init__(self) -> None:
        self._moves: deque[tuple[int, Callable[[], object]]] = deque()
        """By chunk; in the order of the stream."""
        self._before_forward = 0
        """How many of them the forward's stream waits for."""

    def add(self, chunk: int, move: Callable[[], object]) -> None:
        self._moves.append((chunk, move))

    def wait_free(self, chunk: int) -> None:
        self._run(max((number for number, (each, _) in enumerate(self._moves, 1) if each == chunk), default=0))

    def keep_order(self) -> None:
        self._before_forward = len(self._moves)

    def forward(self) -> None:
        """The forward reads now."""
        self._run(self._before_forward)

    def wait(self) -> None:
        self._run(len(self._moves))

    def _run(self, count: int) -> None:
        for _ in range(count):
            self._moves.popleft()[1]()
        self._before_forward = max(0, self._before_forward - count)


class HostStaging(LateMoves):
    """In place of `staging.StagingMemory`, which needs torch."""

    def __init__(self, kv: Any, slots: int) -> None:
        super().__init__()
        self.groups = groups_of([(KV, range(len(kv)), False)], len(kv), 2)
        (group,) = self.groups.all
        self._kv, self._layers, self.slots = kv, group.slices, slots
        width = kv.shape[2]
        buffer = closed_after_the_test(HostBuffer(kv.shape[0] * slots * width))
        self._places, regions, first = {}, [], 0
        for chunk, layers in group.slices.items():
            size = slots * len(layers) * width
            memory = np.frombuffer(buffer.memory, np.uint8)[first : first + size]
            self._places[chunk] = memory.reshape(slots, len(layers), width)
            regions.append(Region(0, first, len(layers) * width, len(layers) * width, len(layers) * width, 1))
            first += size
        layout = GroupLayout(group.index, slots, 0, 1, tuple(regions), (1,) * len(regions) if len(regions) > 1 else ())
        self.memory = RankMemory(buffer.kv_buffers(), (layout,))

    def on_device(self, ids: Any) -> Any:
        return ids

    def move(self, chunk: int, first: int, pages: Any) -> None:
        pieces = self._places[chunk][first : first + len(pages)]
        kv, layers = self._kv, self._layers[chunk]

        def run() -> None:
            for i, layer in enumerate(layers):
                kv[layer, pages] = pieces[:, i]
            pieces[:] = 0  # nothing is moved twice

        self.add(chunk, run)


class Engine:
    """A rank with a KV cache ``[layers, pages, row]`` in shared memory, as SGLang would drive it."""

    def __init__(
        self,
        socket: str,
        *,
        name: str = "test",
        chunks: int = 2,
        rank: int = 0,
        size: int = 1,
        replicated: bool = False,
        per_head: int = 1,
        reader: Any = None,
        staged_pages: int = 0,
        **extra: Any,
    ) -> None:
        self.buffer = closed_after_the_test(HostBuffer(LAYERS * PAGES * ROW))
        self.kv = np.frombuffer(self.buffer.memory, np.uint8).reshape(LAYERS, PAGES, ROW)
        groups = groups_of([(KV, range(LAYERS), replicated)], LAYERS, chunks, {KV: per_head})
        layouts = tuple(
            GroupLayout(
                each.index,
                PAGES,
                *each.shard(rank, size),
                tuple(Region(0, own[0] * PAGES * ROW, PAGES * ROW, ROW, ROW, len(own)) for own in each.slices.values()),
                (1,) * len(each.slices) if len(each.slices) > 1 else (),
            )
            for each in groups.all
        )
        self.staging = HostStaging(self.kv, staged_pages) if staged_pages else None
        self.ranks, self.clock, self.counters = Ranks(rank, size), Clock(), RankCounters()
        options = LinkerOptions.parse(
            {"socket": socket, "lookup_budget": SECONDS, "lease_seconds": 2 * SECONDS, **extra}
        )
        self.side = RankSide(
            options,
            RankFacts(
                EngineIdentity(NAMESPACE, {}),
                name,
                groups,
                RankMemory(self.buffer.kv_buffers(), layouts),
                PAGE,
                reader,
                self.staging,
            ),
            self.ranks,
            Weights(32, lambda: "default", name),
            self.counters,
            clock=self.clock,
        )

    def attach(self) -> Engine:
        for client in self.side._clients:
            assert client.wait_attached(SECONDS)
            assert client.wait_ready(SECONDS).ready
        return self

    def fill(self, pages: Sequence[int], name: object) -> None:
        for i, page in enumerate(pages):
            self.kv[:, page] = pattern(name, i)

    def holds(self, pages: Sequence[int], name: object, layers: slice = slice(None)) -> bool:
        return all(np.array_equal(self.kv[layers, page], pattern(name, i)[layers]) for i, page in enumerate(pages))

    def forward_sees(self, pages: Sequence[int], name: object, layer: int) -> bool:
        """Whether a forward that has waited for this layer reads these pages."""
        self.side.loads.wait_until(layer)
        if self.staging is not None:
            self.staging.forward()
        return self.holds(pages, name, slice(layer, layer + 1))

    def offload(self, pages: Sequence[int], name: object) -> None:
        assert self.side.offload([transfer(name, pages=pages)])

    def why_not(self) -> set[str]:
        """The reasons for which its gauges say that nothing is offloaded."""
        return {name.partition("|")[2] for name, value in self.side.gauges().items() if "|" in name and value}

    def ended(self) -> bool:
        """The result of the oldest offload."""
        eventually(self.side.completed, "an offload")
        return self.side.pop()

    def store(self, pages: Sequence[int], name: object) -> None:
        self.fill(pages, name)
        self.offload(pages, name)
        assert self.ended()

    def lookup(self, name: object, count: int, rid: str = "r") -> list[int]:
        return self.side.lookup(rid, [transfer(name, count=count)])

    def load(self, pages: Sequence[int], name: object, rid: str = "r") -> bool:
        return self.side.load(rid, [transfer(name, pages=pages)])

    def start(self) -> int:
        index = self.side.loads.start()
        self.side.loads.set_consumer(index)
        return index


def pattern(name: object, page: int) -> Any:
    seed = abs(hash((str(name), page))) % 2**32
    return np.random.default_rng(seed).integers(0, 256, (LAYERS, ROW), np.uint8)


def transfer(name: object, *, count: int = 0, pages: Sequence[int] | None = None) -> Transfer:
    if pages is None:
        return Transfer(PoolName.KV, keys(count, name))
    slots = (np.asarray(pages)[:, None] * PAGE + np.arange(PAGE)).ravel()
    return Transfer(PoolName.KV, keys(len(pages), name), slots)


@contextmanager
def running(directory: Path, failpoints: str = "", **options: Any) -> Iterator[tuple[DaemonProcess, Engine]]:
    """An engine, and its daemon with these failpoints."""
    with DaemonProcess(directory, KVSIDECAR_FAILPOINTS=failpoints) as daemon:
        engine = Engine(daemon.wait_ready().socket, **options).attach()
        yield daemon, engine
        engine.side.close()
