"""Loads within a step: which hits are offered, what the ranks wait for, and what is computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvsidecar.client import GroupLayout, Region
from kvsidecar.integrations.vllm import scheduler, step_loads
from kvsidecar.integrations.vllm.metadata import LoadJob, RankReport
from kvsidecar.integrations.vllm.step_loads import LayerChunks, StepLoads
from tests.harness import LAYERS, NUM_BLOCKS, ROW_BYTES, SECONDS, DaemonProcess, Gate
from tests.integrations.engine import (
    Allocated,
    Clock,
    LiveTables,
    Request,
    Step,
    SynchronousSide,
    TinyDaemon,
    TinyPool,
    attached,
    full,
    planned_load,
    run,
)
from tests.integrations.workers import Worker, load, store
from tests.marks import lent_daemon

pytestmark = lent_daemon

# -- the scheduler's side ------------------------------------------------------------------------------------------


def with_hit(**options: object) -> tuple[SynchronousSide, Request, list[list[int]]]:
    """A scheduler whose steps may load, a request whose first two blocks the daemon has, and the GPU blocks that were
    computed again."""
    daemon, request, wrong = TinyDaemon(), Request("r", list(range(18))), []
    daemon.put(0, request.block_hashes[:2])
    made = attached(daemon=daemon, recompute=lambda ids: wrong.append(sorted(ids)), **options)
    return made, request, wrong


def planned(made: SynchronousSide, pool: TinyPool, request: Request) -> int:
    """vLLM takes the hit, and computes the rest of the request in the same step. Returns the load's number."""
    assert made.get_num_new_matched_tokens(request, 0) == (8, False)
    made.update_state_after_alloc(request, LiveTables([pool.take(5)]), 8)
    (job,) = made.build_plan(Step({request.request_id: 10})).loads
    assert job.in_step
    request.num_computed_tokens = 18
    return job.number


def test_a_hit_is_loaded_within_the_step_of_a_request_that_is_alone() -> None:
    made, request, wrong = with_hit()
    number = planned(made, TinyPool(9), request)
    assert made.counters.step_loads == 1
    made.take_report(RankReport(loaded={number: 1}))
    assert wrong == []


@pytest.mark.parametrize("others", ["runs", "waits", "has begun"])
def test_beside_another_request_it_is_loaded_before_the_step(others: str) -> None:
    made, request, _ = with_hit()
    pool, other = TinyPool(20), Request("other", list(range(100, 120)))
    made.on_new_request(other)
    if others == "runs":
        run(made, pool, other, 20)
    elif others == "has begun":
        assert made.get_num_new_matched_tokens(other, 0) == (0, False)
        made.update_state_after_alloc(other, LiveTables([pool.take(5)]), 0)
    assert made.get_num_new_matched_tokens(request, 0) == (8, True)
    job = planned_load(made, request, LiveTables([pool.take(5)]), 8)
    assert not job.in_step
    made.take_report(RankReport(loaded={job.number: 1}))
    for each in (other, request):
        made.request_finished(each)
    assert made.get_num_new_matched_tokens(request, 0) == (8, False), "it is alone again"


def test_a_hit_that_found_no_room_and_is_not_alone_any_more_is_loaded_before_its_step() -> None:
    made, request, _ = with_hit()
    assert made.get_num_new_matched_tokens(request, 0) == (8, False)
    run(made, TinyPool(9), Request("other", list(range(100, 120))), 20)
    assert made.get_num_new_matched_tokens(request, 0) == (8, True)
    job = planned_load(made, request, Allocated([1, 2, 3, 4, 5]), 8)
    assert not job.in_step


def test_a_long_hit_does_not_hold_up_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made, request, _ = with_hit(groups=[full(page_bytes=100)])
    monkeypatch.setattr(scheduler, "STEP_BYTES", 199)
    assert made.get_num_new_matched_tokens(request, 0) == (8, True)
    monkeypatch.setattr(scheduler, "STEP_BYTES", 200)
    assert made.get_num_new_matched_tokens(request, 0) == (8, False)


def test_until_it_has_ended_nothing_is_stored_and_no_other_request_begins() -> None:
    """Blocks are in the GPU's prefix cache whose content is not there yet."""
    pool, clock = TinyPool(40), Clock()
    made, request, _ = with_hit(pool=pool, clock=clock)
    number = planned(made, pool, request)
    pool.cache_full_blocks(request, pool.blocks[1:], 0, 4)
    assert made.get_num_new_matched_tokens(Request("b", list(range(18))), 8) == (None, False)
    assert not made.build_plan(Step({"r": 1})).stores
    made.request_finished(request)
    made.take_report(RankReport(loaded={number: 1}))
    clock.now += SECONDS
    assert made.get_num_new_matched_tokens(Request("b", list(range(18))), 8) == (0, False)
    assert made.build_plan(Step({"b": 1})).stores


def test_after_a_failed_one_all_blocks_of_its_request_are_computed_again() -> None:
    pool = TinyPool(9)
    made, request, wrong = with_hit(pool=pool)
    number = planned(made, pool, request)
    made.take_report(RankReport(loaded={number: 1}, not_loaded=frozenset([number])))
    assert wrong == [[1, 2, 3, 4, 5]]
    assert made.get_num_new_matched_tokens(request, 0) == (0, False), "another load might fail again and again"


# -- the ranks -----------------------------------------------------------------------------------------------------

LAYER_NAMES = tuple(f"layer.{i}" for i in range(LAYERS))


@pytest.fixture
def worker(daemon: DaemonProcess) -> Iterator[Worker]:
    made = with_chunks(daemon.socket)
    yield made
    made.close()


def with_chunks(socket: str, timeout: float = SECONDS) -> Worker:
    """Each layer is a chunk. Its blocks 1 and 2 are stored as a and b; all others differ from them."""
    chunks = LayerChunks({name: i for i, name in enumerate(LAYER_NAMES)}, LAYERS)
    worker = Worker(socket, step_loads=StepLoads(chunks, timeout))
    layer = NUM_BLOCKS * ROW_BYTES
    regions = tuple(Region(0, i * layer, ROW_BYTES, ROW_BYTES, ROW_BYTES, 1) for i in range(LAYERS))
    worker.layouts = [GroupLayout(0, NUM_BLOCKS, 0, 1, regions, (1,) * LAYERS)]
    worker.register()
    worker.kv[...] = np.random.default_rng(0).integers(1, 256, worker.kv.shape, np.uint8)
    worker.step(store(1, "a", "b", at=[1, 2]))
    worker.until(lambda w: w.report.stored)
    return worker


def in_step(number: int, *names: str, at: list[int]) -> LoadJob:
    return replace(load(number, *names, at=at), in_step=True)


def waits(worker: Worker, *layers: str, begins: Callable[[StepLoads], object] | None = None) -> list[bool]:
    """A forward pass in which these layers wait. By layer: whether it had its KV then."""
    loads, seen = worker.side.step_loads, []
    assert loads is not None
    (begins or (lambda each: each.forward_begins(layers_wait=True)))(loads)
    for name in layers:
        loads.wait_for_layer(name)
        layer = worker.kv[0, LAYER_NAMES.index(name)]
        seen.append(np.array_equal(layer[[4, 5]], layer[[1, 2]]))
    return seen


def step(worker: Worker, number: int, *layers: str, **options: Callable[[StepLoads], object]) -> list[bool]:
    found: list[bool] = []
    worker.forward = lambda: found.extend(waits(worker, *layers, **options))
    worker.step(loads=(in_step(number, "a", "b", at=[4, 5]),))
    worker.forward = lambda: None
    return found


def test_each_layer_has_its_kv_when_it_has_waited(worker: Worker) -> None:
    assert step(worker, 7, *LAYER_NAMES) == [True] * LAYERS
    assert (worker.report.loaded, worker.report.not_loaded) == ({7: 1}, frozenset())
    assert worker.results.finished == worker.results.failed_in_step == set(), "vLLM does not wait for it"
    _, loads = worker.side.take_transfers() or pytest.fail("nothing was counted")
    assert loads.nbytes == 2 * LAYERS * ROW_BYTES


def test_where_no_layer_waits_the_step_does(worker: Worker) -> None:
    """One CUDA graph of all layers."""

    def begins(loads: StepLoads) -> None:
        loads.forward_begins(layers_wait=False)
        assert np.array_equal(worker.kv[..., [4, 5], :], worker.kv[..., [1, 2], :])

    step(worker, 7, begins=begins)
    assert (worker.report.loaded, worker.report.not_loaded) == ({7: 1}, frozenset())


def test_a_layer_that_has_not_waited_counts_as_computed_without_its_kv(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    step(worker, 7, *LAYER_NAMES[1:])
    assert worker.report.not_loaded == {7}
    assert worker.results.failed_in_step == {4, 5}
    assert "do not wait" in caplog.text
    worker.results.failed_in_step.clear()
    worker.kv[..., [4, 5], :] = 0
    assert step(worker, 8) == [], "from now on loads end before the forward pass"
    assert (worker.report.loaded.keys(), worker.report.not_loaded) == ({7, 8}, {7})
    assert np.array_equal(worker.kv[..., [4, 5], :], worker.kv[..., [1, 2], :])


def test_one_of_which_a_chunk_fails_has_failed_and_its_step_goes_on(worker: Worker) -> None:
    found: list[bool] = []
    worker.forward = lambda: found.extend(waits(worker, *LAYER_NAMES))
    worker.step(loads=(in_step(7, "a", "unknown", at=[4, 5]),))
    assert found == [False] * LAYERS
    assert (worker.report.not_loaded, worker.results.failed_in_step) == ({7}, {4, 5})


def test_one_that_hangs_ends_with_its_copier_after_its_deadline(
    short_dir: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copier's self-test loads twice, and the first chunk is the third: it is copied, but does not end."""
    monkeypatch.setattr(step_loads, "STOP_SECONDS", 0.1)
    rules = {"KVSIDECAR_FAILPOINTS": f"load.in_flight@2={gate}"}
    with DaemonProcess(short_dir, "--stuck-after", "1", **rules) as daemon:
        worker = with_chunks(daemon.wait_ready().socket, 0.2)
        (pid,) = (line["pid"] for line in daemon.log if line["event"] == "the copier works")
        copier = Path(f"/proc/{pid}/stat")
        assert step(worker, 7, *LAYER_NAMES) == [True, False, False]
        assert (worker.report.not_loaded, worker.results.failed_in_step) == ({7}, {4, 5})
        assert not copier.exists() or copier.read_text().rpartition(") ")[2][0] == "Z", "it may still write"
        worker.close()
