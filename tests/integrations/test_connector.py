"""The class that vLLM loads, hook by hook as vLLM calls them; with vLLM's base classes, and a real daemon."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput

from kvsidecar.client import Blocks
from kvsidecar.integrations.vllm import KVSidecarConnector, connector, memory, ranks, register
from kvsidecar.integrations.vllm.connector import NO_PLAN, StepMetadata, WorkerReport
from kvsidecar.integrations.vllm.metadata import RankReport, StepPlan
from kvsidecar.integrations.vllm.ranks import Place
from kvsidecar.integrations.vllm.worker import WorkerSide
from kvsidecar.types import Outcome
from tests.harness import NAMESPACE, SECONDS, DaemonProcess, hashes
from tests.integrations.workers import LateKernels, load, store


@pytest.fixture(autouse=True)
def _engine_log_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the connector logs goes where vLLM's messages go, which the fixture caplog does not see otherwise."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)


LAYERS = ("model.layers.0.attn", "model.layers.1.attn")
BLOCKS = 8
SPEC = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)


def vllm_config(socket: str, **changed: Any) -> Any:
    """What is read of vLLM's configuration."""
    extra = {"socket": socket, **changed.pop("extra", {})}
    engine_id, served = changed.pop("engine_id", "e"), changed.pop("served_model_name", None)
    values = {
        "kv_transfer_config": KVTransferConfig(
            kv_connector="KVSidecarConnector", kv_role="kv_both", engine_id=engine_id, kv_connector_extra_config=extra
        ),
        "model_config": SimpleNamespace(
            model="org/model",
            dtype=torch.float32,
            seed=0,
            hf_config=SimpleNamespace(),
            use_mla=False,
            max_model_len=64,
            served_model_name=served,
        ),
        "cache_config": SimpleNamespace(
            enable_prefix_caching=True,
            prefix_caching_hash_algo="sha256",
            cache_dtype="auto",
            block_size=16,
            hash_block_size=None,
            prefix_match_unit=None,
            mamba_cache_mode="none",
        ),
        "parallel_config": SimpleNamespace(
            world_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        "scheduler_config": SimpleNamespace(max_num_batched_tokens=1024),
        "compilation_config": SimpleNamespace(static_forward_context={}),
        "kv_events_config": None,
        "speculative_config": None,
        "load_config": SimpleNamespace(load_format="auto"),
    }
    return SimpleNamespace(**{**values, **changed})


def kv_cache_config() -> KVCacheConfig:
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(list(LAYERS), SPEC)])


class EngineScheduler:
    """As vLLM's scheduler, which constructs its connector."""

    def __init__(self, *arguments: Any) -> None:
        self.connector = KVSidecarConnector(*arguments)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> None: ...

    def finish_requests(self, request_ids: Any, finished_status: Any) -> None: ...

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return True


def made(role: KVConnectorRole, socket: str, **changed: Any) -> KVSidecarConnector:
    return EngineScheduler(vllm_config(socket, **changed), role, kv_cache_config()).connector


@pytest.fixture(autouse=True)
def _one_rank_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "place_of", lambda config, groups, facts: (Place(), tuple(facts or ())))
    platform = SimpleNamespace(is_cpu=lambda: True, get_device_name=lambda: "cpu")
    monkeypatch.setattr(connector, "current_platform", platform)
    # vLLM 0.26 has no hook for the memory, and so no shared memory on the CPU; all else is the same.
    monkeypatch.setattr(base.KVConnectorBase_V1, "get_mem_pool_context", lambda _: None, raising=False)


@pytest.fixture
def worker(daemon: DaemonProcess) -> KVSidecarConnector:
    """Registered with memory that its own hook has made."""
    made_one = made(KVConnectorRole.WORKER, daemon.socket)
    made_one.kv_caches = allocated(made_one)
    made_one.register_kv_caches(made_one.kv_caches)
    return made_one


def allocated(of: KVSidecarConnector) -> dict[str, torch.Tensor]:
    context = of.get_mem_pool_context()
    assert context is not None
    with context:
        whole = torch.zeros(len(LAYERS) * BLOCKS * SPEC.page_size_bytes, dtype=torch.int8, device="cpu")
    layers = whole.view(torch.float32).view(len(LAYERS), BLOCKS, -1)
    return dict(zip(LAYERS, layers, strict=True))


def rank_of(one: KVSidecarConnector) -> WorkerSide:
    """Its side of a rank, attached to a daemon that is ready."""
    assert one._worker is not None
    assert one._worker.wait_attached(SECONDS)
    assert one._worker._client.wait_ready(SECONDS)
    return one._worker


def step(worker: KVSidecarConnector, orders: StepPlan) -> tuple[set[str], set[str], WorkerReport | None]:
    """One step with vLLM's hooks. Requests that are done, those that failed, and the report."""
    worker.bind_connector_metadata(StepMetadata(orders))
    worker.start_load_kv(None)
    worker.wait_for_save()
    if hasattr(worker, "get_transfer_results"):
        results = worker.get_transfer_results(set())
        finished, failed = results.finished_recving, results.failed_recving
    else:
        finished, failed = worker.get_finished(set())[1] or set(), set()
    report = worker.build_connector_worker_meta()
    worker.clear_connector_metadata()
    return finished, failed, report


def until(
    worker: KVSidecarConnector, over: Callable[[RankReport], object], orders: StepPlan | None = None
) -> RankReport:
    """Steps, the first with these orders, until the reports together are as wanted."""
    whole = RankReport()
    while not over(whole):
        report, orders = step(worker, orders or StepPlan())[2], None
        if report is not None:
            whole = whole.merged(report.report)
    return whole


@pytest.mark.parametrize("by", [KVSidecarConnector, MultiConnector])
def test_a_wrong_option_is_refused_before_vllm_starts_its_processes(by: type[base.KVConnectorBase_V1]) -> None:
    """A configuration with CUDA graphs asks for this, and says a ValueError in one traceback."""
    register()

    def ask(extra: dict[str, Any]) -> bool:
        child = {"kv_connector": "KVSidecarConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        asked: bool = by.requires_piecewise_for_cudagraph({"connectors": [child]} if by is MultiConnector else extra)
        return asked

    assert not ask({"store_mode": "lazy"})
    with pytest.raises(ValueError, match="store_moed is unknown: did you mean store_mode"):
        ask({"store_moed": "lazy"})


@pytest.mark.parametrize(
    ("engine_id", "shown"),
    [
        ("0dbe5f5a-4d0c-4a5f-8a2b-3d3f4a5b6c7d", "vllm 0dbe5f5a"),
        ("0dbe5f5a-4d0c-4a5f-8a2b-3d3f4a5b6c7d_dp1", "vllm 0dbe5f5a_dp1"),
        ("prefill-1", "vllm prefill-1"),
    ],
)
def test_status_shows_the_served_name_and_a_short_engine_id(daemon: DaemonProcess, engine_id: str, shown: str) -> None:
    worker = KVSidecarConnector(
        vllm_config(daemon.socket, engine_id=engine_id, served_model_name="chat"),
        KVConnectorRole.WORKER,
        kv_cache_config(),
    )
    worker.kv_caches = allocated(worker)
    worker.register_kv_caches(worker.kv_caches)
    rank_of(worker)
    with daemon.client() as client:
        (rank,), (namespace,) = client.status().ranks, client.status().namespaces
    assert (rank.instance, rank.served_name) == (shown, "chat")
    assert (namespace.namespace.model, namespace.served_name) == ("org/model", "chat")
    worker.shutdown()


def test_memory_of_the_hook_is_stored_and_loaded(worker: KVSidecarConnector) -> None:
    rank_of(worker)
    kv = worker.kv_caches
    for i, layer in enumerate(LAYERS):
        kv[layer].copy_(torch.arange(kv[layer].numel()).view(kv[layer].shape) + i)
    orders = StepPlan(stores=(store(1, "a", "b", at=[1, 2]),))
    assert not until(worker, lambda report: report.stored, orders).not_stored
    wanted = [kv[layer][1:3].clone() for layer in LAYERS]
    orders = StepPlan(loads=(load(2, "a", "b", at=[5, 6]),))
    assert not until(worker, lambda report: report.loaded, orders).not_loaded
    assert [torch.equal(kv[layer][5:7], want) for layer, want in zip(LAYERS, wanted, strict=True)] == [True, True]
    stats = worker.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["vllm:kv_offload_load_bytes"] == 2 * len(LAYERS) * SPEC.page_size_bytes
    worker.shutdown()


def test_stores_come_after_the_kernels_that_the_engines_stream_was_given(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = LateKernels()
    monkeypatch.setattr(memory, "device_order_of", lambda _: kernels)
    one = made(KVConnectorRole.WORKER, daemon.socket)
    kv = allocated(one)
    one.register_kv_caches(kv)
    client = rank_of(one)._client
    assert client is not None
    step(one, StepPlan(stores=(store(1, "a", at=[1]),)))
    later = client.store([Blocks(0, hashes("b"), [2])])
    assert client.wait([later], SECONDS)[later].outcome is Outcome.DONE
    for layer in LAYERS:
        kv[layer][1] = 7
    kernels.run()
    assert not until(one, lambda report: report.stored).not_stored
    step(one, StepPlan(loads=(load(2, "a", at=[5]),)))
    kernels.run()
    assert not until(one, lambda report: report.loaded).not_loaded
    assert [bool((kv[layer][5] == 7).all()) for layer in LAYERS] == [True, True]
    one.shutdown()


def test_the_report_that_a_rank_is_attached_names_its_namespace(worker: KVSidecarConnector) -> None:
    rank = rank_of(worker)
    report = step(worker, StepPlan())[2]
    assert report is not None
    assert report.report.attached == {0: rank._client.epoch}
    assert report.namespaces == {rank.identity.namespace}
    assert step(worker, StepPlan())[2] is None
    worker.shutdown()


GONE = StepPlan(loads=(load(1, "never stored", at=[3], request="q"),))


@pytest.mark.skipif(not hasattr(base, "KVConnectorTransferResults"), reason="this vLLM knows failed blocks only")
def test_a_failed_load_is_reported_by_request(worker: KVSidecarConnector) -> None:
    finished, failed, _ = step(worker, GONE)
    while not finished:
        finished, failed, _ = step(worker, StepPlan())
    assert (finished, failed) == ({"q"}, {"q"})
    assert worker.get_block_ids_with_load_errors() == set()
    worker.shutdown()


def test_a_failed_load_is_reported_to_older_engines_by_block(worker: KVSidecarConnector) -> None:
    worker.bind_connector_metadata(StepMetadata(GONE))
    worker.start_load_kv(None)
    while worker.get_finished(set()) != (None, {"q"}):
        pass
    assert worker.get_block_ids_with_load_errors() == {3}
    assert worker.get_block_ids_with_load_errors() == set(), "once"
    worker.shutdown()


def test_after_sleep_the_memory_is_registered_again(worker: KVSidecarConnector) -> None:
    until(worker, lambda report: report.attached)
    step(worker, StepPlan(stores=(store(7, "z", at=[1]),)))
    worker.unregister_kv_caches()
    worker.unregister_kv_caches()
    worker.restore_kv_caches()
    worker.restore_kv_caches()
    rank_of(worker)
    report = until(worker, lambda report: 1 in report.stored, StepPlan(stores=(store(1, "a", at=[1]),)))
    assert report.stored == {7: 1, 1: 1}, "what was under way before is reported too"
    assert 1 not in report.not_stored
    assert report.woken == {0: False}, "no model was seen at the start whose weights could be those of now"
    worker.shutdown()


def test_an_engine_that_lets_nobody_make_its_memory_is_refused_on_the_cpu(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = made(KVConnectorRole.WORKER, str(short_dir / "none"))
    kv_caches = allocated(one)
    monkeypatch.delattr(base.KVConnectorBase_V1, "get_mem_pool_context")
    one.register_kv_caches(kv_caches)
    assert "use a later version" in caplog.text
    one.shutdown()


def test_memory_that_cannot_be_shared_is_an_error_in_the_log_and_no_offload(
    daemon: DaemonProcess, caplog: pytest.LogCaptureFixture
) -> None:
    one = made(KVConnectorRole.WORKER, daemon.socket)
    with caplog.at_level(logging.ERROR):
        one.register_kv_caches({layer: torch.zeros(BLOCKS, SPEC.page_size_bytes // 4) for layer in LAYERS})
        one.register_kv_caches({LAYERS[0]: torch.zeros(BLOCKS, 4)})
    assert "shared_empty" in caplog.text
    assert "hold 16 bytes per block" in caplog.text
    step(one, StepPlan())
    assert one.get_handshake_metadata() is None
    one.shutdown()


def test_without_prefix_caching_it_does_nothing_and_says_so(short_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = vllm_config(str(short_dir / "none"))
    config.cache_config.enable_prefix_caching = False
    for role in KVConnectorRole:
        one = EngineScheduler(config, role, kv_cache_config()).connector
        one.register_kv_caches({})
        assert one.get_num_new_matched_tokens(SimpleNamespace(), 0) == (0, False)
        assert one.build_connector_meta(SimpleNamespace()) is NO_PLAN
        assert one.request_finished_all_groups(SimpleNamespace(), ()) == (False, None)
        assert not one.has_pending_push_work()
        assert not one.has_pending_block_frees()
        assert one.reset_cache() is None
        one.shutdown()
    assert "prefix caching" in caplog.text


def test_without_vllms_scheduler_it_does_nothing_and_says_so(short_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody would tell it which blocks of the GPU are written."""
    one = KVSidecarConnector(vllm_config(str(short_dir / "none")), KVConnectorRole.SCHEDULER, kv_cache_config())
    assert one.build_connector_meta(SimpleNamespace()) is NO_PLAN
    assert "scheduler is unknown" in caplog.text
    one.shutdown()


def test_where_vllm_takes_failed_loads_of_one_group_only_it_does_nothing_for_several_and_says_so(
    short_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM 0.26."""
    monkeypatch.delitem(KVConnectorOutput.__dataclass_fields__, "failed_recving", raising=False)
    config = kv_cache_config()
    one_group = EngineScheduler(vllm_config(str(short_dir / "none")), KVConnectorRole.SCHEDULER, config).connector
    assert one_group._scheduler is not None
    one_group.shutdown()
    assert "no offload" not in caplog.text
    config.kv_cache_groups.append(KVCacheGroupSpec(["another"], SPEC))
    several = EngineScheduler(vllm_config(str(short_dir / "none")), KVConnectorRole.SCHEDULER, config).connector
    assert several._scheduler is None
    assert several.build_connector_meta(SimpleNamespace()) is NO_PLAN
    (said,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]
    assert "no offload" in said
    assert "this one has 2" in said
    several.shutdown()


def test_a_bad_option_stops_the_start(short_dir: Path) -> None:
    with pytest.raises(ValueError, match="no_such_option"):
        made(KVConnectorRole.SCHEDULER, str(short_dir / "none"), extra={"no_such_option": 1})


def test_ranks_that_hold_kv_of_different_kinds_are_not_used(
    daemon: DaemonProcess, caplog: pytest.LogCaptureFixture
) -> None:
    from dataclasses import replace

    one = made(KVConnectorRole.SCHEDULER, daemon.socket)
    assert one._scheduler is not None
    one.set_xfer_handshake_metadata_pp_aware(
        {(0, 0): WorkerReport(RankReport({0: 5}), frozenset([NAMESPACE])), (0, 1): None}
    )
    assert one._scheduler.attached
    other = WorkerReport(RankReport({0: 6}), frozenset([replace(NAMESPACE, extra="another backend")]))
    one.update_connector_output(SimpleNamespace(kv_connector_worker_meta=other))
    assert not one._scheduler.attached
    assert "another backend" in caplog.text
    one.shutdown()


def test_the_default_policy_is_warned_of(daemon: DaemonProcess, caplog: pytest.LogCaptureFixture) -> None:
    made(KVConnectorRole.SCHEDULER, daemon.socket).shutdown()
    assert '"kv_load_failure_policy": "recompute"' in caplog.text


def test_hashes_that_nobody_else_makes_are_warned_of(
    daemon: DaemonProcess, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    config = vllm_config(daemon.socket)
    config.cache_config.prefix_caching_hash_algo = "xxhash"
    assert told_hashes(config) == 1
    assert "set PYTHONHASHSEED" in caplog.text
    caplog.clear()
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert told_hashes(config) == 0
    assert "PYTHONHASHSEED" not in caplog.text


def told_hashes(config: Any) -> Any:
    """What the gauge is set to, by a connector's scheduler side; it is told once."""
    one = EngineScheduler(config, KVConnectorRole.SCHEDULER, kv_cache_config()).connector
    told = one.get_kv_connector_stats()
    assert one.get_kv_connector_stats() is None
    one.shutdown()
    return told.data["vllm:kvsidecar_own_hashes"]


def test_reports_of_ranks_are_merged() -> None:
    one = WorkerReport(RankReport({0: 5}, {1: 1}), frozenset([NAMESPACE]))
    both = one.aggregate(WorkerReport(RankReport({1: 5}, {1: 2}, frozenset([1])), frozenset([NAMESPACE])))
    assert both == WorkerReport(RankReport({0: 5, 1: 5}, {1: 3}, frozenset([1])), frozenset([NAMESPACE]))


def test_it_is_a_cache_whose_hits_come_from_host_memory(short_dir: Path) -> None:
    one = made(KVConnectorRole.SCHEDULER, str(short_dir / "none"))
    assert not one.requires_kv_delivery
    assert one.role is KVConnectorRole.SCHEDULER
    sources = getattr(one, "get_external_cache_hit_sources", None)
    if sources is not None:
        assert {source.value: tokens for source, tokens in sources(None, 32).items()} == {"host": 32}
    one.shutdown()


def test_vllm_finds_it_by_module_and_by_name() -> None:
    config = KVTransferConfig(
        kv_connector="KVSidecarConnector",
        kv_connector_module_path="kvsidecar.integrations.vllm",
        kv_role="kv_both",
    )
    register()
    register()
    assert KVConnectorFactory.get_connector_class(config) is KVSidecarConnector
    assert KVConnectorFactory.get_connector_class_by_name("KVSidecarConnector") is KVSidecarConnector
    assert issubclass(KVSidecarConnector, base.SupportsHMA)
    assert connector.KVSidecarConnector is KVSidecarConnector
