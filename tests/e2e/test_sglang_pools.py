"""SGLang's pools on a GPU: CUDA IPC of one allocation per layer, and stores behind the forward stream. Needs torch, but
no SGLang: where it is missing, tensors of the same layout stand in for its pool.

The race proves itself: stores that are ordered behind the current stream alone, on which SGLang chooses pages, are
corrupted; those behind the forward stream as well are not.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvsidecar.client import Namespace
from kvsidecar.integrations.namespace_facts import EngineIdentity
from kvsidecar.integrations.sglang.counters import RankCounters
from kvsidecar.integrations.sglang.groups import KV, groups_of
from kvsidecar.integrations.sglang.options import LinkerOptions
from kvsidecar.integrations.sglang.rank_side import RankFacts, RankSide
from kvsidecar.integrations.sglang.weights import Weights
from tests.harness import SECONDS, DaemonProcess

torch = pytest.importorskip("torch")
from kvsidecar.integrations.sglang import pools  # noqa: E402
from kvsidecar.integrations.sglang.staging import staging_for  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="there is no NVIDIA GPU"),
]

LAYERS, PAGE, HEADS, DIM = 6, 16, 8, 128
PAGES = 64
ROUNDS = 150
CYCLES = 2_000_000_000
"""Of a GPU in a second, or a few fewer."""
STAGING = 3 * 2 * PAGE * HEADS * DIM * 2 * LAYERS
"""Bytes of three pages: two pieces of one page each are on their way at once."""
STORES = 10
"""A forward takes as long as so many stores take on this machine."""


class MHATokenToKVPool:
    """The layout of SGLang 0.5.23's pool of this name: for each layer one allocation, K and V its halves."""

    kv_cache_layout = "nhd"
    k_scale_buffer = v_scale_buffer = None
    layer_num = LAYERS

    def __init__(self) -> None:
        fused = [torch.zeros((2, PAGES * PAGE, HEADS, DIM), dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]
        self.k_buffer = [each[0] for each in fused]
        self.v_buffer = [each[1] for each in fused]


def pool() -> Any:
    try:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool as Pool  # type: ignore[import-not-found]
    except ImportError:
        return MHATokenToKVPool()
    return Pool(
        size=(PAGES - 1) * PAGE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cuda",
        enable_memory_saver=False,
    )


class OneRank:
    rank, size = 0, 1

    def agree(self, yes: bool) -> bool:
        return yes


class Engine:
    """A pool, and what the linker does with it.

    Args:
        forward_stream: that stores are ordered behind; None for the current stream alone.
        staging: bytes of the staging memory; 0: loads are direct.
    """

    def __init__(self, daemon: DaemonProcess, forward_stream: Any, staging: int = 0) -> None:
        self.kvcache = pool()
        params = SimpleNamespace(sidecar_draft_device_pools=(), mtp_draft_device_pools=())
        found, num_layers = pools.pools_of(self.kvcache, params, PAGE, set())
        groups = groups_of([(each.name, each.layers, each.replicated) for each in found], num_layers, 3)
        memory = pools.export(found, groups, 0, 1)
        self.staging = staging_for(found, groups, memory.groups, staging)
        self.counters = RankCounters()
        self.side = RankSide(
            LinkerOptions.parse(
                {
                    "socket": daemon.socket,
                    "lookup_budget": SECONDS,
                    "load_timeout": SECONDS,
                    "lease_seconds": 2 * SECONDS,
                }
            ),
            RankFacts(
                EngineIdentity(Namespace("m", "bf16", "sglang pages by layer", PAGE, 1, 1, "sglang sha256"), {}),
                "sglang",
                groups,
                memory,
                PAGE,
                pools.SlotReader(torch.device("cuda"), forward_stream),
                self.staging,
            ),
            OneRank(),
            Weights(32, lambda: "default", "token"),
            self.counters,
        )
        for client in self.side._clients:
            assert client.wait_attached(SECONDS)
            assert client.wait_ready(SECONDS).ready

    def rows(self, page: int) -> Iterator[Any]:
        for buffer in (*self.kvcache.k_buffer, *self.kvcache.v_buffer):
            yield buffer[page * PAGE : (page + 1) * PAGE]

    def store(self, name: object, pages: Sequence[int]) -> None:
        assert self.side.offload([transfer(name, pages)])

    def stored(self) -> None:
        deadline = time.monotonic() + SECONDS
        while not self.side.completed():  # without a pause: how long it takes decides who wins a race
            assert time.monotonic() < deadline, "the store has not ended"
        assert self.side.pop()

    def cycles(self) -> int:
        """Of the GPU, in which some stores end."""
        took = []
        for number in range(5):
            began = time.monotonic()
            self.store(("seen", number), [number])
            self.stored()
            took.append(time.monotonic() - began)
        return int(max(took[1:]) * STORES * CYCLES)

    def load(self, name: object, pages: Sequence[int]) -> None:
        rid = str(name)
        assert self.side.lookup(rid, [transfer(name, pages)])[-1] == len(pages)
        assert self.side.load(rid, [transfer(name, pages)])
        index = self.side.loads.start()
        self.side.loads.set_consumer(index)
        for layer in range(LAYERS):
            self.side.loads.wait_until(layer)
        assert self.side.loads.finish(index)


def transfer(name: object, pages: Sequence[int]) -> Any:
    keys = [hashlib.sha256(f"{name} {i}".encode()).hexdigest() for i in range(len(pages))]
    slots = (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).ravel()
    return SimpleNamespace(name=KV, keys=keys, device_indices=slots.to("cuda"))


@pytest.fixture
def cuda_daemon(short_dir: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(short_dir, "--pool-size", "256MiB", device="cuda") as process:
        yield process.wait_ready()


@pytest.mark.parametrize("staging", [0, STAGING])
def test_pages_of_every_layer_come_back(cuda_daemon: DaemonProcess, staging: int) -> None:
    engine = Engine(cuda_daemon, torch.cuda.Stream(), staging)
    pages, targets = [3, 9, 4, 5], [20, 7, 30, 31]
    for buffer in (*engine.kvcache.k_buffer, *engine.kvcache.v_buffer):
        buffer.normal_()
    torch.cuda.synchronize()
    expected = [[row.clone() for row in engine.rows(page)] for page in pages]
    engine.store("a", pages)
    engine.stored()
    engine.load("a", targets)
    torch.cuda.synchronize()
    for page, rows in zip(targets, expected, strict=True):
        assert all(map(torch.equal, engine.rows(page), rows))
    assert engine.counters.staged_loads == bool(staging)
    engine.side.close()


def race(engine: Engine, stream: Any, number: int, name: str, cycles: int) -> int | None:
    """Store a page while the forward stream writes it. Returns how many of its values came back wrong; None if the
    store was not over before the page was written, though it did not wait for that."""
    page, target = number % (PAGES // 2), PAGES // 2 + number % (PAGES // 2)
    value = float(number % 100 + 1)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)
        for row in engine.rows(page):
            row.fill_(value)
        written = torch.cuda.Event()
        written.record()
    engine.store((name, number), [page])
    engine.stored()
    late = written.query()
    torch.cuda.synchronize()
    engine.load((name, number), [target])
    torch.cuda.synchronize()
    wrong = sum(int((row != value).sum()) for row in engine.rows(target))
    return None if name == "none" and late else wrong


def test_stores_wait_for_the_forward_stream(cuda_daemon: DaemonProcess) -> None:
    stream = torch.cuda.Stream()
    wrong = {}
    for name, known in (("none", None), ("forward", stream)):
        engine = Engine(cuda_daemon, known)
        cycles = engine.cycles()
        wrong[name] = [race(engine, stream, number, name, cycles) for number in range(ROUNDS)]
        engine.side.close()
    races = [each for each in wrong["none"] if each is not None]
    print(f"corrupted rounds: {sum(map(bool, races))} of {len(races)}", {a: sum(map(bool, wrong[a])) for a in wrong})
    assert races, "this machine was too slow to store a page before it is written"
    assert all(races)
    assert not any(wrong["forward"])


def test_the_scheduler_does_not_wait_for_a_forward_that_runs(cuda_daemon: DaemonProcess) -> None:
    """SGLang's own stream stands behind the forward: to wait for it would keep the scheduler from its next batch."""
    stream = torch.cuda.Stream()
    engine = Engine(cuda_daemon, stream)
    cycles = engine.cycles()
    transfers = [[transfer(name, [1])] for name in ("a", "b")]
    engine.store("c", [2])
    engine.stored()
    assert engine.side.lookup("c", [transfer("c", [3])]) == [1]
    target = [transfer("c", [3])]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)
        ended = torch.cuda.Event()
        ended.record()
    torch.cuda.current_stream().wait_event(ended)
    for each in transfers:
        assert engine.side.offload(each)
    assert engine.side.load("c", target)
    index = engine.side.loads.start()
    engine.side.loads.set_consumer(index)
    assert engine.side.completed() == 0
    assert not ended.query(), "the forward has ended meanwhile"
    for layer in range(LAYERS):
        engine.side.loads.wait_until(layer)
    assert ended.query()
    assert engine.side.loads.finish(index)
    engine.stored()
    engine.stored()
    engine.side.close()


@pytest.mark.parametrize("staging", [0, STAGING])
def test_a_load_waits_for_a_forward_that_may_still_write_its_pages(cuda_daemon: DaemonProcess, staging: int) -> None:
    """SGLang frees pages while the last forward that writes them still runs."""
    stream = torch.cuda.Stream()
    engine = Engine(cuda_daemon, stream, staging)
    for row in engine.rows(1):
        row.fill_(7.0)
    torch.cuda.synchronize()
    engine.store("a", [1])
    engine.stored()
    cycles = engine.cycles()
    for number in range(ROUNDS // 4):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
            for row in engine.rows(2):
                row.fill_(float(number))
        engine.load("a", [2])
        torch.cuda.synchronize()
        assert all(bool((row == 7.0).all()) for row in engine.rows(2)), "the forward wrote after the load"
        engine.side._lookups.forget_all()
    engine.side.close()


def test_layers_are_computed_behind_the_moves_from_the_staging_memory(cuda_daemon: DaemonProcess) -> None:
    """`wait_until` returns when they have been started; the stream of the forward waits for them."""
    engine = Engine(cuda_daemon, None, 6 * STAGING)  # all pages are one piece
    assert engine.staging is not None
    pages, targets = list(range(8)), list(range(20, 28))
    for page in pages:
        for row in engine.rows(page):
            row.fill_(float(page + 1))
    torch.cuda.synchronize()
    engine.store("a", pages)
    engine.stored()
    expected = torch.tensor([float(page + 1) for page in pages], device="cuda")
    cycles = engine.cycles()
    for _ in range(ROUNDS // 4):
        for page in targets:
            for row in engine.rows(page):
                row.zero_()
        assert engine.side.lookup("a", [transfer("a", targets)]) == [len(targets)]
        assert engine.side.load("a", [transfer("a", targets)])
        with torch.cuda.stream(engine.staging._stream):
            torch.cuda._sleep(cycles)
        index = engine.side.loads.start()
        engine.side.loads.set_consumer(index)
        found = []
        for layer in range(LAYERS):
            engine.side.loads.wait_until(layer)
            keys = engine.kvcache.k_buffer[layer].unflatten(0, (-1, PAGE))
            found.append((keys[targets] == expected[:, None, None, None]).all())
        assert all(map(bool, found))
        assert engine.side.loads.finish(index)
        engine.side._lookups.forget_all()
    engine.side.close()


@pytest.mark.parametrize(
    ("page", "heads", "chunks"),
    [
        pytest.param(1, 8, 3, id="pages of one token: three parts"),
        pytest.param(16, 8, 6, id="16 tokens: as many as load_chunks"),
        pytest.param(64, 4, 6, id="64, with two ranks"),
        pytest.param(64, 8, None, id="64: pieces are as fast as the link"),
    ],
)
def test_the_default_staging_memory_is_for_small_pieces(page: int, heads: int, chunks: int | None) -> None:
    shape = (2, 256, page, heads, DIM)  # K and V
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]
    found = [pools.PagePool(KV, {layer: tuple(both) for layer, both in enumerate(tensors)}, False)]
    groups = groups_of([(KV, range(LAYERS), False)], LAYERS, 6)
    staging = staging_for(found, groups, pools.export(found, groups, 0, 1).groups, None)
    assert (staging and staging.groups.num_chunks) == chunks
    free, _ = torch.cuda.mem_get_info()
    assert staging is None or staging.nbytes < free / 4


def test_the_forward_waits_for_each_move_and_not_only_for_the_first_one() -> None:
    params = SimpleNamespace(sidecar_draft_device_pools=(), mtp_draft_device_pools=())
    kvcache = pool()
    found, num_layers = pools.pools_of(kvcache, params, PAGE, set())
    groups = groups_of([(each.name, each.layers, each.replicated) for each in found], num_layers, 3)
    staging = staging_for(found, groups, pools.export(found, groups, 0, 1).groups, STAGING)
    assert staging is not None
    keys = [buffer[:PAGE].view(torch.int16) for buffer in kvcache.k_buffer]
    for each in keys:
        each.random_()
    before, seen = [each.clone() for each in keys], {}
    first_page = staging.on_device(np.zeros(1, np.int64))
    for chunk, layers in staging.groups.all[0].slices.items():
        with torch.cuda.stream(staging._stream):
            torch.cuda._sleep(CYCLES // 100)
        staging.move(chunk, 0, first_page)
        staging.keep_order()
        seen |= {layer: keys[layer].clone() for layer in layers}
    torch.cuda.synchronize()
    for layer in range(num_layers):
        assert not torch.equal(keys[layer], before[layer]), "what is in the staging memory is something else"
        assert torch.equal(keys[layer], seen[layer])


def test_memory_that_cannot_be_shared_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvsidecar.errors import NotExportable
    from kvsidecar.support import cuda_driver

    monkeypatch.setattr(cuda_driver, "is_legacy_ipc_capable", lambda pointer: False)
    params = SimpleNamespace(sidecar_draft_device_pools=(), mtp_draft_device_pools=())
    found, num_layers = pools.pools_of(pool(), params, PAGE, set())
    groups = groups_of([(each.name, each.layers, each.replicated) for each in found], num_layers, 3)
    with pytest.raises(NotExportable, match="--enable-memory-saver"):
        pools.export(found, groups, 0, 1)
