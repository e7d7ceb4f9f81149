"""The scheduler's side against vLLM's own requests, block pool, cache manager and configuration."""

from __future__ import annotations

import inspect
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from kvsidecar.client import Residency, ResidencyChange
from kvsidecar.integrations.residency import announcements
from kvsidecar.integrations.vllm.events import Events
from kvsidecar.integrations.vllm.groups import Group, GroupKind, groups_of
from kvsidecar.integrations.vllm.metadata import RankReport, StepPlan
from kvsidecar.integrations.vllm.options import ConnectorOptions
from kvsidecar.integrations.vllm.shared import EngineFacts
from tests.integrations.engine import EPOCH, NAMESPACE, Clock, SynchronousSide, TinyDaemon

kv_cache_utils.init_none_hash(sha256)

ATTENTION: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


def full(block_size: int = 16) -> Any:
    return FullAttentionSpec(block_size=block_size, **ATTENTION)


def window(block_size: int = 16, tokens: int = 40) -> Any:
    return SlidingWindowSpec(block_size=block_size, sliding_window=tokens, **ATTENTION)


def state(block_size: int = 32) -> Any:
    return MambaSpec(block_size=block_size, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode="align")


MODELS = {
    "full": [full()],
    "full and window": [full(), window()],
    "coarse full and window": [full(32), window(16)],
    "two windows": [full(), window(16, 20), window(16, 70)],
    "full and chunked local": [
        full(),
        ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=64, **ATTENTION),
    ],
    "full and state": [full(32), state(32)],
    "fine full and state": [full(16), state(32)],
}


class Engine:
    """vLLM's cache manager, and the scheduler's side of a connector that shares a daemon with others."""

    def __init__(self, specs: list[Any], daemon: TinyDaemon, *, eagle: bool = False, events: bool = False) -> None:
        config = {
            "num_blocks": 200,
            "kv_cache_tensors": [],
            "kv_cache_groups": [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)],
        }
        self.config = KVCacheConfig(**config)
        vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(
                enable_prefix_caching=True, block_size=specs[0].block_size, prefix_match_unit=None
            ),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
            kv_transfer_config=object(),
            speculative_config=SimpleNamespace(use_eagle=lambda: True, num_speculative_tokens=1) if eagle else None,
        )
        self.block_tokens, hash_tokens = kv_cache_utils.resolve_kv_cache_block_sizes(self.config, vllm_config)
        if any(spec.block_size % hash_tokens for spec in specs):
            pytest.skip("this version of vLLM does not cache prefixes of these block sizes")
        self.groups: tuple[Group, ...] = groups_of(self.config, vllm_config)
        known = inspect.signature(KVCacheManager).parameters
        values = {
            "max_model_len": 4096,
            "scheduler_block_size": self.block_tokens,
            "hash_block_size": hash_tokens,
            "max_in_flight_tokens": 4096,
            "enable_caching": True,
            "use_eagle": eagle,
        }
        self.manager = KVCacheManager(self.config, **{name: value for name, value in values.items() if name in known})
        self.hasher = kv_cache_utils.get_request_block_hasher(hash_tokens, sha256)
        self.daemon = daemon
        self.side = SynchronousSide(
            ConnectorOptions(),
            EngineFacts(NAMESPACE.hash_bytes, tuple(self.groups), 1),
            daemon,
            clock=Clock(),
            events=Events(self.groups) if events else None,
        )
        self.side.take_namespace(NAMESPACE)
        self.side.bind_block_pool(self.manager.block_pool)
        self.side.take_report(RankReport(attached={0: EPOCH}))

    def request(self, name: str, tokens: list[int]) -> Any:
        return Request(name, tokens, SamplingParams(max_tokens=5), None, block_hasher=self.hasher)

    def local(self, request: Any) -> tuple[Any, int]:
        blocks, tokens = self.manager.get_computed_blocks(request)[:2]
        return blocks, tokens

    def step(self, scheduled: dict[str, int]) -> StepPlan:
        return self.side.build_plan(
            SimpleNamespace(
                num_scheduled_tokens=scheduled,
                total_num_scheduled_tokens=sum(scheduled.values()),
                preempted_req_ids=set(),
                scheduled_new_reqs=[],
                scheduled_cached_reqs=CachedRequestData.make_empty(),
            )
        )

    def finish_stores(self, orders: StepPlan) -> None:
        for job in orders.stores:
            for blocks in job.blocks:
                self.daemon.put(blocks.group, [blocks.hashes[i : i + 32] for i in range(0, len(blocks.hashes), 32)])
            self.side.take_report(RankReport(stored={job.number: 1}))

    def compute(self, request: Any, chunk: int) -> None:
        """Compute the whole prompt in chunks, without a hit, and let the request finish."""
        if any(group.kind is GroupKind.STATE for group in self.groups):
            chunk = chunk // 32 * 32  # as vLLM's scheduler does for states
        self.manager.new_step_starts()
        while request.num_computed_tokens < request.num_tokens:
            count = min(chunk, request.num_tokens - request.num_computed_tokens)
            assert self.manager.allocate_slots(request, count) is not None
            if not request.num_computed_tokens:
                self.side.update_state_after_alloc(request, self.manager.get_blocks(request.request_id), 0)
            self.finish_stores(self.step({request.request_id: count}))
            request.num_computed_tokens += count
        self.finish_stores(self.step({request.request_id: 1}))
        self.side.request_finished(request)
        self.manager.free(request)
        self.finish_stores(self.step({}))
        assert not self.side.has_pending_push_work()
        assert self.manager.block_pool.get_num_free_blocks() == 199


@pytest.mark.parametrize("eagle", [False, True], ids=["", "eagle"])
@pytest.mark.parametrize("chunk", [48, 1000])
@pytest.mark.parametrize("name", MODELS)
def test_another_engine_hits_what_this_ones_gpu_would_hit_and_loads_all_that_vllm_then_caches(
    name: str, chunk: int, eagle: bool
) -> None:
    if eagle and name == "full and chunked local":
        pytest.skip("vLLM does not run this")
    daemon = TinyDaemon()
    first = Engine(MODELS[name], daemon, eagle=eagle)
    tokens = list(range(345))
    first.compute(first.request("a", tokens), chunk)
    for length in (345, 330, 320, 321, 257, 256, 100, 33, 32, 16):
        prompt = tokens[:length]
        other = Engine(MODELS[name], daemon, eagle=eagle)
        asks, has = other.request("b", prompt), first.request("c", prompt)
        if length % 2 == 0:
            other.side.on_new_request(asks)  # asked ahead or in the step: it is the same
        _, expected = first.local(has)
        blocks, local = other.local(asks)
        assert local == 0
        external, is_async = other.side.get_num_new_matched_tokens(asks, 0)
        # vLLM drops the block before the last token, in some cases though the one behind it is known.
        assert external - expected in ((0, other.block_tokens) if eagle else (0,)), f"of {length} tokens"
        assert is_async == (external > 0)
        if not external:
            continue
        other.manager.new_step_starts()
        allocated = other.manager.allocate_slots(
            asks,
            0,
            num_new_computed_tokens=0,
            new_computed_blocks=blocks,
            num_external_computed_tokens=external,
            delay_cache_blocks=True,
        )
        assert allocated is not None
        table = other.manager.get_blocks("b")
        other.side.update_state_after_alloc(asks, table, external)
        (load,) = other.step({}).loads
        loaded = {each.group: set(each.ids()) for each in load.blocks}
        asks.num_computed_tokens = external
        other.manager.cache_blocks(asks, external)
        other.side.take_report(RankReport(loaded={load.number: 1}))
        pool = other.manager.block_pool
        cached = {block.block_id for block in pool.blocks if block.block_hash is not None}
        assert cached <= set().union(*loaded.values())
        assert other.side.counters.gone_loads == 0
        assert not daemon.leases
        # And the engine's own cache now has what it would have without the connector.
        other.manager.free(asks)
        if not eagle:  # which drops a block, as it did for `expected`
            assert other.local(other.request("d", prompt))[1] == expected


@pytest.mark.parametrize("name", MODELS)
def test_with_blocks_missing_the_hit_is_still_vllms_own(name: str) -> None:
    """vLLM's own longest hit is the oracle: what the daemon loses, the first engine's GPU loses too."""
    chance = random.Random(name)
    tokens = list(range(345))
    lengths = set()
    for _ in range(40):
        daemon = TinyDaemon()
        first, other = (Engine(MODELS[name], daemon) for _ in range(2))
        first.compute(first.request("a", tokens), 48)
        pool = first.manager.block_pool
        for block in list(pool.blocks):
            if block.block_hash is not None and chance.random() < 0.07:
                daemon.blocks.pop((kv_cache_utils.get_group_id(block.block_hash), block.block_hash[:-4]), None)
                pool.evict_blocks({block.block_id})
        external, _ = other.side.get_num_new_matched_tokens(other.request("b", tokens), 0)
        assert external == first.local(first.request("c", tokens))[1]
        lengths.add(external)
    assert len(lengths) > 3


@pytest.mark.parametrize("name", MODELS)
def test_a_hit_goes_on_behind_a_local_prefix(name: str) -> None:
    daemon = TinyDaemon()
    first, other = (Engine(MODELS[name], daemon) for _ in range(2))
    tokens = list(range(345))
    first.compute(first.request("a", tokens), 64)
    daemon_had = dict(daemon.blocks)
    other.compute(other.request("b", tokens[:128] + [7] * 20), 64)
    daemon.blocks = daemon_had
    request = other.request("c", tokens)
    blocks, local = other.local(request)
    if local % other.block_tokens:
        local -= local % other.block_tokens
        pytest.skip("vLLM has a hit inside of a block here")
    assert local > 0
    external, _ = other.side.get_num_new_matched_tokens(request, local)
    assert local + (external or 0) == first.local(first.request("d", tokens))[1]
    other.manager.new_step_starts()
    other.manager.allocate_slots(
        request,
        0,
        num_new_computed_tokens=local,
        new_computed_blocks=blocks,
        num_external_computed_tokens=external or 0,
        delay_cache_blocks=True,
    )
    other.side.update_state_after_alloc(request, other.manager.get_blocks("c"), external or 0)
    (load,) = other.step({}).loads
    held = {block.block_id for each in blocks.blocks for block in each if not block.is_null}
    assert not held & {each for blocks in load.blocks for each in blocks.ids()}
    assert other.side.counters.gone_loads == 0


def test_the_tables_that_vllm_hands_over_are_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """They grow with the request, so no block has to be looked for. If a version hands over copies, or none, all is
    stored nevertheless, and each step costs twice as much."""
    daemon = TinyDaemon()
    engine = Engine(MODELS["full"], daemon)
    asked: list[bytes] = []
    index = engine.manager.block_pool.cached_block_hash_to_block
    find = type(index).get_one_block
    request = engine.request("a", list(range(345)))

    def get_one_block(self: Any, key: bytes) -> Any:
        asked.append(key)
        return find(self, key)

    engine.manager.new_step_starts()
    engine.manager.allocate_slots(request, 48)
    engine.side.update_state_after_alloc(request, engine.manager.get_blocks("a"), 0)
    engine.finish_stores(engine.step({"a": 48}))
    request.num_computed_tokens = 48
    engine.manager.allocate_slots(request, 297)  # only vLLM knows of these blocks
    monkeypatch.setattr(type(index), "get_one_block", get_one_block)
    engine.finish_stores(engine.step({"a": 297}))
    request.num_computed_tokens = 345
    engine.side.end_step()
    engine.side.request_finished(request)
    engine.finish_stores(engine.step({}))
    assert not asked
    assert len(daemon.blocks) == 345 // 16


def test_kinds_of_vllms_own_specs() -> None:
    specs = [
        *MODELS["full and state"],
        window(),
        MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.float32),
    ]
    groups = [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
    found = groups_of(
        SimpleNamespace(kv_cache_groups=groups),
        SimpleNamespace(
            cache_config=SimpleNamespace(enable_prefix_caching=True),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1, tensor_parallel_size=4),
            speculative_config=None,
        ),
        resolve=lambda *_: (32, 16),
    )
    kinds = [GroupKind.FULL, GroupKind.STATE, GroupKind.SLIDING_WINDOW, GroupKind.FULL]
    assert [(each.kind, each.replicas) for each in found] == list(zip(kinds, [1, 1, 1, 4], strict=True))
    assert all(each.page_bytes == spec.page_size_bytes for each, spec in zip(found, specs, strict=True))


def test_events_say_what_is_stored_with_the_medium_and_what_a_lookup_found_gone() -> None:
    daemon = TinyDaemon()
    engine = Engine(MODELS["full"], daemon, events=True)
    engine.compute(engine.request("a", list(range(40))), 1000)
    first, second = engine.side.take_events()
    assert (type(first).__name__, first.medium, first.block_size, first.group_idx) == ("BlockStored", "CPU", 16, 0)
    assert (first.token_ids, second.token_ids) == (list(range(16)), list(range(16, 32)))
    assert first.parent_block_hash is None
    assert second.parent_block_hash == first.block_hashes[0]
    assert engine.side.take_events() == []
    daemon.blocks.clear()
    engine.side.get_num_new_matched_tokens(engine.request("b", list(range(40))), 0)
    assert [(type(each).__name__, each.medium) for each in engine.side.take_events()] == [("BlockRemoved", "CPU")] * 2


def load(engine: Engine, request: Any) -> int:
    """Begin to load what the daemon has of a request. Returns the number of the job."""
    blocks, local = engine.local(request)
    external, _ = engine.side.get_num_new_matched_tokens(request, local)
    engine.manager.new_step_starts()
    allocated = engine.manager.allocate_slots(
        request,
        0,
        num_new_computed_tokens=local,
        new_computed_blocks=blocks,
        num_external_computed_tokens=external,
        delay_cache_blocks=True,
    )
    assert allocated is not None
    engine.side.update_state_after_alloc(request, engine.manager.get_blocks(request.request_id), external)
    (job,) = engine.step({}).loads
    return int(job.number)


def told(engine: Engine) -> list[tuple[str, str, list[int], Any]]:
    return [
        (type(each).__name__, each.medium, getattr(each, "token_ids", []), getattr(each, "parent_block_hash", None))
        for each in engine.side.take_events()
    ]


@pytest.mark.parametrize("who", ["the engine that has stored it", "another engine"])
def test_what_came_back_from_a_slower_tier_is_told_when_it_was_loaded(who: str) -> None:
    daemon = TinyDaemon()
    first = Engine(MODELS["full"], daemon, events=True)
    tokens = list(range(40))
    first.compute(first.request("a", tokens), 1000)
    before = told(first)
    engine = Engine(MODELS["full"], daemon, events=True)
    if who != "another engine":
        engine = first
        assert engine.manager.reset_prefix_cache()
        kept, daemon.blocks = daemon.blocks, {}
        engine.side.get_num_new_matched_tokens(engine.request("b", tokens), 0)
        assert [each[:2] for each in told(engine)] == [("BlockRemoved", "CPU")] * 2
        daemon.blocks = kept
    numbers = [load(engine, engine.request(name, tokens)) for name in ("c", "d")]
    assert told(engine) == [], "they may still fail"
    engine.side.take_report(RankReport(loaded=dict.fromkeys(numbers, 1)))
    assert told(engine) == before
    engine.side.take_report(RankReport(loaded={load(engine, engine.request("e", [*tokens[:32], *tokens])): 1}))
    assert told(engine) == [], "the router knows"


@pytest.mark.parametrize("fate", ["failed", "restart", "reset"])
def test_what_was_not_loaded_or_is_lost_meanwhile_is_not_told(fate: str) -> None:
    daemon = TinyDaemon()
    first, engine = (Engine(MODELS["full"], daemon, events=True) for _ in range(2))
    first.compute(first.request("a", list(range(40))), 1000)
    number = load(engine, engine.request("b", list(range(40))))
    if fate == "restart":
        daemon.epoch += 1
        engine.side.take_report(RankReport(attached={0: daemon.epoch}))
    elif fate == "reset":
        assert engine.side.reset_cache() is False
    engine.side.take_report(RankReport(loaded={number: 1}, not_loaded=frozenset([number] if fate == "failed" else [])))
    assert told(engine) == []


def test_salted_requests_do_not_share() -> None:
    daemon = TinyDaemon()
    engine = Engine(MODELS["full"], daemon)
    tokens = list(range(40))
    salted = Request("a", tokens, SamplingParams(max_tokens=5), None, block_hasher=engine.hasher, cache_salt="x")
    engine.compute(salted, 1000)
    assert engine.side.get_num_new_matched_tokens(engine.request("b", tokens), 0) == (0, False)
    again = Request("c", tokens, SamplingParams(max_tokens=5), None, block_hasher=engine.hasher, cache_salt="x")
    assert engine.side.get_num_new_matched_tokens(again, 0) == (32, True)


def test_blocks_that_wait_to_be_stored_are_told_with_their_tokens() -> None:
    daemon = TinyDaemon()
    engine = Engine(MODELS["full"], daemon, events=True)
    engine.side.take_report(RankReport(attached={0: 0}))
    engine.compute(engine.request("a", list(range(40))), 1000)
    assert engine.side.take_events() == []
    engine.side.take_report(RankReport(attached={0: EPOCH}))
    engine.finish_stores(engine.step({}))
    first, second = engine.side.take_events()
    assert (first.token_ids, second.token_ids) == (list(range(16)), list(range(16, 32)))
    assert second.parent_block_hash == first.block_hashes[0]


@pytest.mark.parametrize("loss", ["restart", "reset"])
def test_routers_are_told_over_the_steps_what_the_daemon_has_lost(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcements, "RETRACTED_PER_STEP", 3)
    daemon = TinyDaemon()
    engine = Engine(MODELS["full"], daemon, events=True)
    engine.compute(engine.request("a", list(range(16 * 8))), 1000)
    announced = [block for each in engine.side.take_events() for block in each.block_hashes]
    assert len(announced) == 8
    assert not engine.side.has_pending_push_work()
    if loss == "restart":
        daemon.epoch += 1
        daemon.blocks.clear()
        engine.side.take_report(RankReport(attached={0: daemon.epoch}))
    else:
        assert engine.manager.reset_prefix_cache()
        assert engine.side.reset_cache()
    sizes, removed = [], []
    while engine.side.has_pending_push_work():
        for each in engine.side.take_events():
            assert (type(each).__name__, each.medium, each.group_idx) == ("BlockRemoved", "CPU", 0)
            sizes.append(len(each.block_hashes))
            removed += each.block_hashes
    assert sizes == [3, 3, 2]
    assert sorted(removed) == sorted(announced)
    assert engine.side.take_events() == []


def test_what_the_next_daemon_has_got_already_is_not_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcements, "RETRACTED_PER_STEP", 1)
    daemon = TinyDaemon()
    engine = Engine(MODELS["full"], daemon, events=True)
    engine.compute(engine.request("a", list(range(32))), 1000)
    told = [*engine.side.take_events()]
    daemon.epoch += 1
    engine.side.take_report(RankReport(attached={0: daemon.epoch}))
    engine.compute(engine.request("b", list(range(32))), 1000)
    known: set[Any] = set()
    for each in [*told, *engine.side.take_events()]:
        known = known.union(each.block_hashes) if hasattr(each, "token_ids") else known.difference(each.block_hashes)
    assert len(known) == 2
    assert not engine.side.has_pending_push_work()


def test_only_so_many_announced_blocks_are_remembered_and_those_before_them_are_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(announcements, "MAX_ANNOUNCED", 4)
    engine = Engine(MODELS["full"], TinyDaemon())
    events, hashes = Events(engine.groups), engine.request("a", list(range(16 * 6))).block_hashes
    events.stored(0, hashes)
    told = events.take()
    stored = [block for each in told if hasattr(each, "token_ids") for block in each.block_hashes]
    removed = [block for each in told if not hasattr(each, "token_ids") for block in each.block_hashes]
    assert sorted(removed) == sorted(stored[:2])


class Watched:
    """A daemon that tells what the test says."""

    def __init__(self) -> None:
        self.news: list[ResidencyChange] = []

    @property
    def has_residency(self) -> bool:
        return bool(self.news)

    def take_residency(self, _most_bytes: int) -> list[ResidencyChange]:
        taken, self.news = self.news, []
        return taken

    def tell(self, kind: Residency, hashes: Sequence[bytes] = ()) -> None:
        self.news.append(ResidencyChange(kind, 0, b"".join(hashes)))


def followed() -> tuple[Watched, Events, list[bytes]]:
    """Events of an engine that has planned to store a request's three blocks, while the daemon tells everything."""
    watched, engine = Watched(), Engine(MODELS["full"], TinyDaemon())
    events = Events(engine.groups, 32, watched)
    request = engine.request("a", list(range(48)))
    for index, each in enumerate(request.block_hashes):
        events.note(request, engine.groups[0], index, each)
    watched.tell(Residency.RESET)
    watched.tell(Residency.COMPLETE)
    assert events.take() == []
    return watched, events, request.block_hashes


def kinds(events: Events) -> list[tuple[str, int]]:
    return [(type(each).__name__, len(each.block_hashes)) for each in events.take()]


def test_what_this_engine_has_stored_is_announced_once_whoever_says_it_first() -> None:
    watched, events, hashes = followed()
    events.stored(0, hashes[:1])
    assert kinds(events) == [("BlockStored", 1)]
    watched.tell(Residency.STORED, hashes)
    assert kinds(events) == [("BlockStored", 1)] * 2
    events.stored(0, hashes)
    assert kinds(events) == []


def test_a_store_that_is_reported_after_its_blocks_were_evicted_is_not_announced() -> None:
    watched, events, hashes = followed()
    watched.tell(Residency.STORED, hashes)
    watched.tell(Residency.REMOVED, hashes[2:])
    assert kinds(events) == [("BlockStored", 1)] * 3 + [("BlockRemoved", 1)]
    events.stored(0, hashes)
    assert kinds(events) == []


@pytest.mark.parametrize("loss", [Residency.CLEARED, Residency.RESET, Residency.LOST])
def test_a_store_that_is_reported_after_all_was_lost_is_announced_only_once_it_is_there_again(loss: Residency) -> None:
    watched, events, hashes = followed()
    watched.tell(Residency.STORED, hashes)
    assert kinds(events) == [("BlockStored", 1)] * 3
    watched.tell(loss)
    if loss is Residency.RESET:
        watched.tell(Residency.COMPLETE)
    assert kinds(events) == [("BlockRemoved", 3)]
    events.stored(0, hashes)
    assert kinds(events) == [], "routers would believe in it until somebody asks for it"
    if loss is Residency.LOST:
        watched.tell(Residency.RESET)
    watched.tell(Residency.STORED, hashes[:2])
    assert kinds(events) == [("BlockStored", 1)] * 2


def test_stores_into_the_next_daemon_are_announced_even_if_it_tells_nothing() -> None:
    watched, events, hashes = followed()
    watched.tell(Residency.STORED, hashes)
    watched.tell(Residency.LOST)
    kinds(events)
    events.all_removed()  # the ranks have attached to it
    events.stored(0, hashes)
    assert kinds(events) == [("BlockStored", 1)] * 3


def test_a_lookup_takes_back_only_what_the_daemon_does_not_say_it_holds() -> None:
    watched, events, hashes = followed()
    watched.tell(Residency.STORED, hashes[:1])
    events.stored(0, hashes)
    kinds(events)
    events.removed(0, hashes)
    assert kinds(events) == [("BlockRemoved", 1)] * 2


def test_another_daemon_run_takes_nothing_back_that_the_daemon_tells_of() -> None:
    watched, events, hashes = followed()
    watched.tell(Residency.STORED, hashes)
    kinds(events)
    events.all_removed()  # the ranks have attached to the run of which it tells
    assert kinds(events) == []
    watched.tell(Residency.LOST)
    assert kinds(events) == [("BlockRemoved", 3)]
    watched.tell(Residency.RESET)
    watched.tell(Residency.STORED, hashes[:2])
    watched.tell(Residency.COMPLETE)
    assert kinds(events) == [("BlockStored", 1)] * 2
    events.reset()
    assert kinds(events) == [("BlockRemoved", 2)]
