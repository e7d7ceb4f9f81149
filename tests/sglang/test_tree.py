"""SGLang's own radix tree and pools drive the linker, without an engine: every component and page size, each byte."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.mixins import UnifiedRadixCacheFixtures

from kvsidecar.client import Client
from kvsidecar.integrations.sglang import KVSidecarLinker, staged_load
from kvsidecar.integrations.sglang import linker as linker_module
from kvsidecar.integrations.sglang import staging as staging_module
from tests.harness import SECONDS, DaemonProcess, Gate, eventually

FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA
LAYERS: dict[str, Any] = {"num_layers": 6, "full_attention_layer_ids": (1, 3, 5), "head_dim": 16}
CONFIGS = {
    "full, pages of 1": CacheConfig(page_size=1, **LAYERS),
    "full, pages of 4": CacheConfig(page_size=4, **LAYERS),
    "full, pages of 64": CacheConfig(page_size=64, kv_size=1024, max_context_len=1024, **LAYERS),
    "latent, pages of 4": CacheConfig(page_size=4, num_layers=7, head_dim=16),
    "window, pages of 1": CacheConfig(components=(FULL, SWA), sliding_window_size=4, **LAYERS),
    "window, pages of 16": CacheConfig(
        page_size=16, components=(FULL, SWA), sliding_window_size=16, kv_size=512, **LAYERS
    ),
    "states": CacheConfig(components=(FULL, MAMBA), **LAYERS),
    "window and states": CacheConfig(
        components=(FULL, SWA, MAMBA), sliding_window_size=8, kv_size=512, **LAYERS
    ),
}  # fmt: skip
ARGUMENTS = SimpleNamespace(
    model_path="org/model", dtype="bfloat16", load_format="auto", random_seed=0, kv_cache_dtype="auto"
)


def latent_pool(**options: Any) -> MLATokenToKVPool:
    """In place of the fixture's pool of K and V."""
    del options["head_num"], options["head_dim"]
    return MLATokenToKVPool(**options, kv_lora_rank=16, qk_rope_head_dim=8)


class Tree(UnifiedRadixCacheFixtures):
    """A tree with its pools on the CPU, and a linker to a daemon."""

    def __init__(self, cfg: CacheConfig, socket: str, **extra: Any) -> None:
        self.cfg = cfg
        with ExitStack() as patches:
            patches.enter_context(mock.patch.object(fixtures, "get_device", return_value="cpu"))
            if cfg == CONFIGS["latent, pages of 4"]:
                patches.enter_context(mock.patch.object(fixtures, "MHATokenToKVPool", latent_pool))
            self.cache, self.allocator, self.requests = fixtures.build_fixture(cfg)
        if cfg.page_size > 1 and not cfg.has_swa:
            self.allocator.alloc(cfg.page_size - 1)  # slot 0 is not given out: now pages are aligned
        options = {"socket": socket, "lookup_budget": SECONDS, "lease_seconds": 2 * SECONDS, "load_timeout": SECONDS}
        with mock.patch.object(linker_module, "ModelConfig") as config:
            config.from_server_args.return_value.hf_config = None
            self.linker = KVSidecarLinker(
                ARGUMENTS,
                self.cache.cache_init_params,
                components=set(self.cache.components),
                extra_config={**options, **extra},
            )
        self.cache.init_cache_linker(self.linker)
        self.kvcache = self.allocator.get_kvcache()
        self.kvcache.register_layer_transfer_counter(self.linker.layer_done_counter)

    def attach(self) -> Tree:
        side = self.linker._side
        assert side is not None, "the linker does not offload"
        for client in side._clients:
            assert client.wait_attached(SECONDS)
            assert client.wait_ready(SECONDS).ready
        return self

    # -- the pools -----------------------------------------------------------------------------------------------------

    def buffers(self, pool: str) -> list[torch.Tensor]:
        found = getattr(self.kvcache, pool, self.kvcache if pool == "full_kv_pool" else None)
        return [*found.kv_buffer] if hasattr(found, "kv_buffer") else [*found.k_buffer, *found.v_buffer]

    def states(self) -> list[torch.Tensor]:
        cache = self.requests.mamba_pool.mamba_cache
        return [cache.temporal, *cache.conv]

    def window_of(self, slots: torch.Tensor) -> torch.Tensor:
        pages = -(-self.cfg.sliding_window_size // self.cfg.page_size)
        return self.allocator.full_to_swa_index_mapping[slots[-pages * self.cfg.page_size :]]

    def content(self, slots: torch.Tensor, state: torch.Tensor | None) -> list[torch.Tensor]:
        """All that a request reads to go on after these slots."""
        found = [buffer[slots].clone() for buffer in self.buffers("full_kv_pool")]
        if self.cfg.has_swa:
            found += [buffer[self.window_of(slots)].clone() for buffer in self.buffers("swa_kv_pool")]
        if state is not None:
            found += [buffer[:, state].clone() for buffer in self.states()]
        return found

    # -- what SGLang does ----------------------------------------------------------------------------------------------

    def insert(self, tokens: list[int], **key: Any) -> list[torch.Tensor]:
        """Compute and insert a prompt. Returns its KV."""
        slots = self._alloc(self.allocator, len(tokens))
        state = None
        for buffer in self.buffers("full_kv_pool"):
            buffer[slots] = torch.randn_like(buffer[slots])
        params = InsertParams(key=RadixKey(array("q", tokens), **key), value=slots)
        if self.cfg.has_swa:
            window = self.allocator.full_to_swa_index_mapping[slots]
            for buffer in self.buffers("swa_kv_pool"):
                buffer[window] = torch.randn_like(buffer[window])
        if self.cfg.has_mamba:
            state = self._make_req(self.requests).kv.mamba_pool_idx
            params.mamba_value = state.unsqueeze(0)
            for buffer in self.states():
                buffer[:, state] = torch.randn_like(buffer[:, state])
        found = self.content(slots, state)
        self.cache.insert(params)
        self.settle()
        return found

    def settle(self) -> None:
        """Until no store runs any more."""

        def over() -> bool:
            self.cache.check_hicache_events()
            return not self.cache.linker.pending_offloads

        eventually(over, "the stores")

    def evict(self) -> None:
        many = 10**6
        self.cache.evict(EvictParams(num_tokens=many, swa_num_tokens=many, mamba_num=many))

    def match(self, tokens: list[int], **key: Any) -> tuple[Any, int]:
        """A request for these tokens, and how many of them the daemon has."""
        request = self._make_req(self.requests)
        request.rid = str(request.rid)
        match = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens), **key), req=request))
        self._apply_match_to_req(request, match)
        return request, match.host_hit_length

    def load(self, request: Any) -> tuple[bool, Any]:
        """Load what was matched. Returns whether it came, and the slots; None if it was refused."""
        loaded, _ = self.cache.init_load_back(
            InitLoadBackParams(
                best_match_node=request.best_match_node, host_hit_length=request.host_hit_length, req=request
            )
        )
        if not loaded:
            return False, None
        slots = self.cache.linker.private_load_indices[request.rid]
        counter: Any = self.linker.layer_done_counter
        counter.set_consumer(self.cache.ready_to_load_host_cache())
        for layer in range(self.cfg.num_layers):
            counter.wait_until(layer)
        return not self.cache.linker.finish_loads(), slots

    def close(self) -> None:
        self.linker.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as each:
        yield each


def tree(stack: ExitStack, cfg: CacheConfig, daemon: DaemonProcess, **extra: Any) -> Tree:
    each = Tree(cfg, daemon.socket, **extra).attach()
    stack.callback(each.close)
    return each


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS.keys())
def test_what_was_evicted_comes_back_byte_for_byte(cfg: CacheConfig, daemon: DaemonProcess, stack: ExitStack) -> None:
    mine = tree(stack, cfg, daemon)
    tokens = mine._make_seq(1, 3)
    expected = mine.insert(tokens)
    mine.evict()
    request, hit = mine.match(tokens + mine._make_seq(500, 1))
    assert hit == len(tokens)
    landed, slots = mine.load(request)
    assert landed
    assert len(slots) == len(tokens)
    assert same(mine.content(slots, request.kv.mamba_pool_idx if cfg.has_mamba else None), expected)


@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS.keys())
def test_another_tree_hits_what_this_one_has_stored(cfg: CacheConfig, daemon: DaemonProcess, stack: ExitStack) -> None:
    tokens = list(range(1, 2 * cfg.page_size + 1))
    expected = tree(stack, cfg, daemon).insert(tokens)
    other = tree(stack, cfg, daemon)
    request, hit = other.match(tokens)
    assert hit == len(tokens)
    landed, slots = other.load(request)
    assert landed
    assert same(other.content(slots, request.kv.mamba_pool_idx if cfg.has_mamba else None), expected)


def test_pages_that_are_copied_slowly_are_warned_of(
    daemon: DaemonProcess, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    def warned(cfg: CacheConfig) -> bool:
        caplog.clear()
        tree(stack, cfg, daemon)
        return "use --page-size 64" in caplog.text

    assert warned(CONFIGS["full, pages of 1"])
    assert not warned(CONFIGS["full, pages of 64"])


def test_a_state_is_found_at_the_ends_of_nodes_only(daemon: DaemonProcess, stack: ExitStack) -> None:
    mine = tree(stack, CONFIGS["states"], daemon)
    tokens = mine._make_seq(1, 6)
    mine.insert(tokens[:2])
    mine.insert(tokens)
    mine.evict()
    assert mine.match(tokens)[1] == 6
    assert mine.match(tokens[:5])[1] == 2, "there is no state after 5 tokens"


def test_extra_keys_and_salts_keep_requests_apart(daemon: DaemonProcess, stack: ExitStack) -> None:
    """SGLang puts the LoRA adapter into the extra key."""
    mine = tree(stack, CONFIGS["full, pages of 4"], daemon)
    tokens = mine._make_seq(1, 2)
    kinds: list[dict[str, Any]] = [{}, {"extra_key": "adapter"}, {"cache_salt": "adapter"}]
    contents = [mine.insert(tokens, **kind) for kind in kinds]
    mine.evict()
    for kind, expected in zip(kinds, contents, strict=True):
        request, hit = mine.match(tokens, **kind)
        assert hit == len(tokens)
        landed, slots = mine.load(request)
        assert landed
        assert same(mine.content(slots, None), expected)
    assert mine.match(tokens, extra_key="another")[1] == 0


def test_a_request_that_is_aborted_while_its_load_is_queued(daemon: DaemonProcess, stack: ExitStack) -> None:
    mine = tree(stack, CONFIGS["full, pages of 4"], daemon)
    tokens = mine._make_seq(1, 2)
    mine.insert(tokens)
    mine.evict()
    request, _ = mine.match(tokens)
    mine.cache.init_load_back(
        InitLoadBackParams(best_match_node=request.best_match_node, host_hit_length=8, req=request)
    )
    mine.cache.linker.release_request(request.rid)
    assert mine.cache.ready_to_load_host_cache() == -1
    assert mine.cache.linker.finish_loads() == []


@pytest.mark.parametrize(
    "rule", ["load.before_copy@0=raise(planned)", "load.in_flight@2=raise(planned)", "load.in_flight@2=kill"]
)
def test_a_load_that_fails_reaches_its_own_request_alone(short_dir: Path, stack: ExitStack, rule: str) -> None:
    daemon = stack.enter_context(DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=rule)).wait_ready()
    # One job for a load: a new copier counts its hits of the failpoint from 0.
    mine = tree(stack, CONFIGS["full, pages of 4"], daemon, load_chunks=1)
    tokens = mine._make_seq(1, 3)
    expected = mine.insert(tokens)
    mine.evict()
    request, hit = mine.match(tokens)
    assert hit == len(tokens)
    landed, slots = mine.load(request)
    assert not landed
    mine.allocator.free(slots)
    # Nothing of it is in the tree, and the daemon still has it. It is not offered at once: that might fail as well.
    request, hit = mine.match(tokens)
    assert (request.prefix_len, hit) == (0, 0)

    def lands() -> list[torch.Tensor]:
        """Until the rank is attached to the new copier."""
        request, hit = mine.match(tokens)
        landed, slots = mine.load(request) if hit else (False, None)
        if slots is not None and not landed:
            mine.allocator.free(slots)
        return [slots] if landed else []

    (slots,) = eventually(lands, "a load that lands", pause=0.1)
    assert same(mine.content(slots, None), expected)


def test_a_store_that_fails_is_offered_again(short_dir: Path, stack: ExitStack) -> None:
    rule = "store.before_copy@0=raise(planned)"
    daemon = stack.enter_context(DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=rule)).wait_ready()
    mine = tree(stack, CONFIGS["full, pages of 4"], daemon)
    tokens = mine._make_seq(1, 2)
    mine.insert(tokens)
    assert mine.linker.counters.failed_offloads == 1
    mine.insert(tokens)
    assert mine.linker.counters.offloads == 2
    mine.evict()
    assert mine.match(tokens)[1] == len(tokens)


def test_a_reset_forgets_the_tree_and_not_the_daemon(daemon: DaemonProcess, stack: ExitStack) -> None:
    mine = tree(stack, CONFIGS["full, pages of 4"], daemon)
    tokens = mine._make_seq(1, 2)
    mine.insert(tokens)
    mine.cache.reset()
    request, hit = mine.match(tokens)
    assert (request.prefix_len, hit) == (0, len(tokens))


def test_pages_stay_locked_until_they_are_read(short_dir: Path, gate: Gate, stack: ExitStack) -> None:
    """Else SGLang would give them to another request while the daemon copies them."""
    daemon = stack.enter_context(DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=f"store.in_flight@2={gate}"))
    mine = tree(stack, CONFIGS["full, pages of 4"], daemon.wait_ready())
    tokens = mine._make_seq(1, 2)
    with mock.patch.object(mine, "settle"):
        mine.insert(tokens)
    daemon.wait_log("failpoint")
    mine.cache.check_hicache_events()
    mine.evict()
    assert mine.match(tokens)[0].prefix_len == len(tokens), "it was evicted"
    gate.let_pass()
    mine.settle()
    mine.evict()
    assert mine.match(tokens)[0].prefix_len == 0


def test_while_stores_hang_half_of_the_pages_can_be_evicted_and_what_was_not_stored_is_offered_again(
    short_dir: Path, gate: Gate, stack: ExitStack
) -> None:
    """SGLang takes the ends of stores in order, and keeps the pages of each until then."""
    daemon = stack.enter_context(DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=f"store.in_flight@2={gate}"))
    cfg = CONFIGS["full, pages of 1"]
    mine = tree(stack, cfg, daemon.wait_ready())
    length = cfg.kv_size // 8
    prompts = [list(range(number * length + 1, (number + 1) * length + 1)) for number in range(7)]
    with mock.patch.object(mine, "settle"):
        for tokens in prompts:
            mine.insert(tokens)
    daemon.wait_log("failpoint")
    held = mine.linker.counters.held_back_offloads
    assert held >= len(prompts) // 2
    mine.evict()
    kept = [tokens for tokens in prompts if mine.match(tokens)[0].prefix_len]
    assert kept == prompts[: len(prompts) - held], "these wait for their ends, and no others"
    gate.let_pass()
    mine.settle()
    mine.insert(prompts[-1])
    mine.evict()
    assert mine.match(prompts[-1])[1] == len(prompts[-1]), "the daemon has it now"


@pytest.mark.parametrize("name", ["full, pages of 1", "full, pages of 4", "latent, pages of 4"])
def test_pages_with_small_pieces_come_by_way_of_the_staging_memory(
    name: str, daemon: DaemonProcess, stack: ExitStack
) -> None:
    cfg = CONFIGS[name]
    tokens = list(range(1, 7 * cfg.page_size + 1))
    stored = tree(stack, cfg, daemon)
    expected = stored.insert(tokens)
    page_bytes = cfg.page_size * sum(buffer[0].nbytes for buffer in stored.buffers("full_kv_pool"))
    mine = tree(stack, cfg, daemon, staging=4 * page_bytes)  # two pieces of two pages
    mine._alloc(mine.allocator, 3 * cfg.page_size)  # other slots than those of the store
    request, hit = mine.match(tokens)
    assert hit == len(tokens)
    landed, slots = mine.load(request)
    assert landed
    assert same(mine.content(slots, None), expected)
    assert mine.linker.counters.staged_loads == 1


def test_many_pages_come_in_pieces_however_large_the_staging_memory_may_be(
    daemon: DaemonProcess, stack: ExitStack
) -> None:
    cfg = CONFIGS["full, pages of 1"]
    for module in (staging_module, staged_load):
        stack.enter_context(mock.patch.object(module, "MOST_PAGES", 2))
    mine = tree(stack, cfg, daemon, staging="16MiB")
    tokens = mine._make_seq(1, 7)
    expected = mine.insert(tokens)
    mine.evict()
    request, _ = mine.match(tokens)
    with mock.patch.object(Client, "load", autospec=True, side_effect=Client.load) as load:
        landed, slots = mine.load(request)
    assert landed
    assert same(mine.content(slots, None), expected)
    assert {len(blocks.block_ids) for call in load.call_args_list for blocks in call.args[1]} == {1, 2}


def test_pages_for_which_there_is_no_room_in_the_staging_memory_are_loaded_directly(
    daemon: DaemonProcess, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = CONFIGS["full, pages of 1"]
    mine = tree(stack, cfg, daemon, staging=16)
    assert "no staging memory: a page has" in caplog.text
    tokens = mine._make_seq(1, 3)
    expected = mine.insert(tokens)
    mine.evict()
    request, _ = mine.match(tokens)
    landed, slots = mine.load(request)
    assert landed
    assert same(mine.content(slots, None), expected)
    assert mine.linker.counters.staged_loads == 0
