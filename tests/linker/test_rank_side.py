"""One rank's side of the SGLang linker against a real daemon on the host device, without SGLang and torch."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from kvsidecar.client import Client, Outcome
from kvsidecar.errors import Refusal
from kvsidecar.integrations.sglang import loads
from tests.harness import NO_WAIT, SECONDS, DaemonProcess, Gate, eventually
from tests.linker.rank import LAYERS, PAGE, PAGES, Engine, LateReader, running, transfer
from tests.linker.transfers import PoolName, Transfer
from tests.marks import lent_daemon

pytestmark = lent_daemon

UPDATE = "update_weights_from_disk"


@pytest.fixture
def engine(daemon: DaemonProcess) -> Iterator[Engine]:
    each = Engine(daemon.socket).attach()
    yield each
    each.side.close()


def test_pages_come_back_byte_for_byte(engine: Engine) -> None:
    engine.store([3, 7, 5], "a")
    assert engine.lookup("a", 5) == [3]
    assert engine.load([20, 11], "a")
    index = engine.start()
    for layer in range(LAYERS):
        engine.side.loads.wait_until(layer)
        assert engine.holds([20, 11], "a", slice(layer, layer + 1))
    assert engine.side.loads.finish(index)
    assert (engine.counters.loaded_pages, engine.counters.failed_loads) == (2, 0)


def test_the_hit_rate_is_of_the_pages_that_sglang_did_not_have_asked_for_once(
    engine: Engine, daemon: DaemonProcess
) -> None:
    def counted(what: str) -> float:
        return daemon.metric(f"kvsidecar_prompt_tokens_{what}_total") / PAGE

    before = [counted(each) for each in ("needed", "loaded")]
    engine.store([3, 7], "a")
    for _ in range(3):  # SGLang asks in each step while the request waits
        engine.clock.ahead += 1.5
        assert engine.lookup("a", 5) == [2]
    assert engine.lookup("b", 3, "other") == []
    assert engine.load([20, 11], "a")
    assert engine.side.loads.finish(engine.start())

    def told() -> bool:
        engine.side.completed()
        return [counted(each) for each in ("needed", "loaded")] == [before[0] + 5 + 3, before[1] + 2]

    eventually(told, lambda: (before, counted("needed"), counted("loaded")))


def test_the_forward_begins_before_the_last_layer_is_there(short_dir: Path, gate: Gate) -> None:
    with running(short_dir, f"load.in_flight@3={gate}") as (daemon, engine):
        engine.store([1, 2], "a")
        engine.lookup("a", 2)
        assert engine.load([8, 9], "a")
        index = engine.start()
        engine.side.loads.wait_until(0)
        assert engine.holds([8, 9], "a", slice(0, 1))
        waits = threading.Thread(target=engine.side.loads.wait_until, args=(1,))
        waits.start()
        daemon.wait_log("failpoint")
        assert waits.is_alive()
        gate.let_pass()
        waits.join(SECONDS)
        assert engine.side.loads.finish(index)
        assert engine.holds([8, 9], "a")


def test_a_load_that_misses_its_deadline_fails_and_is_waited_out(short_dir: Path, gate: Gate) -> None:
    """The pages are SGLang's again when it returns."""
    with running(short_dir, f"load.in_flight@2={gate}", load_timeout=0.2) as (_, engine):
        engine.store([1, 2], "a")
        engine.lookup("a", 2)
        assert engine.load([8, 9], "a")
        index = engine.start()
        began = time.monotonic()
        for layer in range(LAYERS):
            engine.side.loads.wait_until(layer)
        assert time.monotonic() - began < NO_WAIT
        finished: list[bool] = []
        finishing = threading.Thread(target=lambda: finished.append(engine.side.loads.finish(index)))
        finishing.start()
        eventually(lambda: not engine.side._client.attached, "the daemon is given up")
        assert finishing.is_alive(), "a copy is under way"
        gate.let_pass()
        finishing.join(SECONDS)
        assert finished == [False]
        assert (engine.counters.overdue_loads, engine.counters.failed_loads) == (1, 1)
        assert engine.lookup("a", 2) == []
        engine.attach()
        engine.clock.ahead += 10
        eventually(lambda: engine.lookup("a", 2) == [2], "the daemon is used again")


@pytest.mark.parametrize("after", ["load", "flush"])
def test_a_daemon_that_goes_on_after_it_was_given_up_touches_nothing(short_dir: Path, after: str) -> None:
    """It was stopped when it had not read the jobs; SGLang has written other KV into their pages since."""
    with running(short_dir, load_timeout=0.1, reset_timeout=0.1) as (daemon, engine):
        engine.store([1, 2], "a")
        assert engine.lookup("a", 2) == [2]
        daemon.process.send_signal(signal.SIGSTOP)
        if after == "load":
            assert engine.load([8, 9], "a")
            assert not engine.side.loads.finish(engine.start())
        else:
            engine.fill([8, 9], "b")
            engine.offload([8, 9], "b")
            engine.side.reset()
        engine.fill([8, 9], "c")
        daemon.process.send_signal(signal.SIGCONT)
        engine.attach()
        engine.clock.ahead += 10
        eventually(lambda: engine.lookup("a", 2) == [2], "the daemon is used again")
        assert engine.holds([8, 9], "c")
        assert engine.lookup("b", 2, "other") == []


def test_a_daemon_killed_during_a_load_fails_it(short_dir: Path, gate: Gate) -> None:
    with DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=f"load.in_flight@2={gate}") as daemon:
        engine = Engine(daemon.wait_ready().socket, load_timeout=SECONDS).attach()
        engine.store([1, 2], "a")
        engine.lookup("a", 2)
        assert engine.load([8, 9], "a")
        index = engine.start()
        daemon.wait_log("failpoint")
        daemon.process.kill()
        engine.side.loads.wait_until(LAYERS - 1)
        assert not engine.side.loads.finish(index)
        assert engine.lookup("a", 2, "other") == []
        assert not engine.load([8], "a", "other")
        with DaemonProcess(short_dir) as second:
            second.wait_ready()
            engine.attach()
            engine.clock.ahead += 10
            # What the first one had is not taken for stored.
            engine.store([1, 2], "a")
            assert engine.lookup("a", 2, "third") == [2]
            engine.side.close()


@pytest.mark.parametrize("ends", ["offload", "load"])
def test_what_ended_in_one_run_of_the_daemon_is_not_known_of_the_next(short_dir: Path, ends: str) -> None:
    """SGLang takes the ends of offloads and loads when it likes."""
    with DaemonProcess(short_dir) as daemon:
        engine = Engine(daemon.wait_ready().socket).attach()
        engine.fill([1, 2], "a")
        engine.offload([1, 2], "a")
        eventually(engine.side.completed, "the offload")
        if ends == "load":
            assert engine.side.pop()
            assert engine.lookup("a", 2) == [2]
            assert engine.load([8, 9], "a")
            index = engine.start()
            jobs, number = engine.side._jobs, engine.side.loads._batches[index].all_jobs
            eventually(lambda: jobs.poll() or not jobs.outstanding(number), "the load")
        first = engine.side._client.attached_epoch
    with DaemonProcess(short_dir) as second:
        second.wait_ready()
        eventually(lambda: engine.side._client.attached_epoch not in (0, first), "the engine is attached to it")
        assert engine.lookup("b", 1, "other") == [], "the first look at the second daemon"
        assert engine.side.pop() if ends == "offload" else engine.side.loads.finish(index)
        engine.store([1, 2], "a")
        assert engine.lookup("a", 2, "third") == [2], "its pages were taken for stored"
        engine.side.close()


def test_after_a_failed_load_nothing_is_offered_for_a_while(short_dir: Path) -> None:
    """A failed load costs a request. The pause doubles while loads fail."""
    rules = "load.before_copy@0=raise(planned);load.before_copy@1=raise(planned)"
    with running(short_dir, rules, chunks=1) as (_, engine):
        engine.side.loads._pause = 1000.0
        engine.store([1, 2], "a")
        for pause, lands in ((1000, False), (2000, False), (0, True)):
            assert engine.lookup("a", 2) == [2]
            assert engine.load([8, 9], "a")
            # Far ahead: real time that passes meanwhile does not count.
            with mock.patch.object(loads, "MAX_PAUSE_SECONDS", 4000.0):
                assert engine.side.loads.finish(engine.start()) is lands
            if not lands:
                assert engine.lookup("a", 2) == []
                engine.clock.ahead += pause / 2
                assert engine.lookup("a", 2) == []
                engine.clock.ahead += pause / 2
        assert engine.side.loads._pause == loads.PAUSE_SECONDS


def test_a_lease_that_has_ended_lets_the_request_be_computed(engine: Engine, daemon: DaemonProcess) -> None:
    engine.store([1, 2], "a")
    assert engine.lookup("a", 2) == [2]
    engine.clock.ahead += 10
    assert not engine.load([8, 9], "a")
    assert engine.start() == -1
    assert engine.counters.gone_leases == 1
    assert engine.lookup("a", 2) == [2], "it may be looked up again"
    assert engine.load([8, 9], "a")


def test_one_rank_whose_lease_has_ended_speaks_for_all(engine: Engine, daemon: DaemonProcess) -> None:
    """SGLang's ranks must answer alike."""
    engine.store([1], "a")
    assert engine.lookup("a", 1) == [1]
    engine.ranks.others_agree = False
    assert not engine.load([8], "a")
    eventually(lambda: daemon.get("/status")[1]["pool"]["leases"] == 0, "the lease is given back")


def test_a_cancelled_load_gives_its_lease_back(engine: Engine, daemon: DaemonProcess) -> None:
    engine.store([1], "a")
    assert engine.lookup("a", 1) == [1]
    assert engine.load([8], "a")
    assert engine.side.loads.cancel("r")
    assert not engine.side.loads.cancel("r")
    assert engine.start() == -1
    eventually(lambda: daemon.get("/status")[1]["pool"]["leases"] == 0, "the lease is given back")


@pytest.mark.parametrize("arrives", [True, False])
def test_a_load_that_is_over_gives_its_lease_back(engine: Engine, daemon: DaemonProcess, arrives: bool) -> None:
    engine.store([1, 2], "a")
    assert engine.lookup("a", 2) == [2]
    assert engine.load([8, 9], "a")
    if not arrives:
        with daemon.client() as operator:
            operator.clear()
        engine.clock.ahead += 10 * SECONDS
    engine.side.loads.finish(engine.start())
    eventually(lambda: daemon.get("/status")[1]["pool"]["leases"] == 0, "the lease is given back")


def test_a_repeated_lookup_is_answered_at_once(engine: Engine) -> None:
    engine.store([1, 2], "a")
    engine.clock.stop()
    assert engine.lookup("a", 2) == engine.lookup("a", 2) == [2], "SGLang takes the longest"
    assert engine.lookup("a", 1) == [1], "a shorter prefix of the same"
    assert engine.counters.lookups == 1
    assert engine.lookup("a", 3) == [2]
    assert engine.lookup("b", 2) == [], "other pages"
    assert engine.counters.lookups == 3
    engine.store([3], "b")
    assert engine.lookup("b", 1) == [], "so soon after a miss"
    engine.clock.ahead += 0.5
    assert engine.lookup("b", 1) == [1]
    assert engine.counters.lookups == 4
    engine.clock.ahead += 1.5
    assert engine.lookup("b", 1) == [1]
    assert engine.counters.lookups == 5


@pytest.mark.parametrize(("pages", "budgets"), [(1, 1.0), (2048, 1.0), (32768, 16.0), (204800, 100.0)])
def test_a_long_prompt_has_more_time_for_its_lookup(engine: Engine, pages: int, budgets: float) -> None:
    with mock.patch.object(engine.side._client, "lookup", wraps=engine.side._client.lookup) as asked:
        assert engine.lookup("long", pages) == []
    assert asked.call_args.kwargs["timeout"] == budgets * SECONDS


def test_requests_that_vanish_are_forgotten(engine: Engine) -> None:
    for i in range(50):
        engine.lookup("a", 1, f"r{i}")
    assert len(engine.side._lookups._offers) == 50
    engine.clock.ahead += 10
    engine.lookup("a", 1, "last")
    assert len(engine.side._lookups._offers) == 1


def test_a_lookup_never_raises(engine: Engine) -> None:
    assert engine.side.lookup("r", [Transfer(PoolName.KV, ["not a hash"])]) == []
    assert engine.counters.refused_lookups == 1


def test_without_a_daemon_nothing_waits(short_dir: Path) -> None:
    engine = Engine(str(short_dir / "kvs.sock"), lookup_budget=SECONDS)
    began = time.monotonic()
    assert engine.lookup("a", 3) == []
    engine.offload([1], "a")
    assert not engine.ended(), "SGLang must not take it for stored"
    assert not engine.load([1], "a")
    engine.side.reset()
    assert time.monotonic() - began < NO_WAIT
    assert engine.why_not() == {"not_attached"}
    engine.side.close()


def test_a_store_that_is_not_admitted_is_no_failure(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    client = engine.side._jobs.client
    poll = client.poll
    client.poll = lambda: [  # type: ignore[method-assign]
        replace(done, outcome=Outcome.DECLINED, reason=Refusal.NOT_ADMITTED.value) for done in poll()
    ]
    engine.offload([1, 2], "a")
    assert not engine.ended(), "SGLang must not take it for stored"
    assert (engine.counters.failed_offloads, engine.counters.not_admitted_offloads) == (0, 1)
    assert not caplog.records


def test_known_pages_are_not_asked_for(engine: Engine, daemon: DaemonProcess) -> None:
    engine.store([1, 2], "a")
    engine.offload([1, 2], "a")
    assert engine.ended()
    assert (engine.counters.offloads, engine.counters.known_offloads) == (1, 1)
    with daemon.client() as operator:
        operator.clear()
    assert engine.lookup("a", 2) == []
    engine.offload([1, 2], "a")
    assert engine.ended()
    assert engine.counters.offloads == 2, "the lookup has shown that they are gone"
    engine.clock.ahead += 1
    assert engine.lookup("a", 2) == [2]


def test_known_pages_before_others_are_not_sent(engine: Engine) -> None:
    engine.store([1, 2], "a")
    engine.fill([1, 2, 3, 4], "a")
    with mock.patch.object(Client, "store", autospec=True, side_effect=Client.store) as store:
        engine.offload([1, 2, 3, 4], "a")
        assert engine.ended()
    (blocks,) = store.call_args.args[1]
    assert blocks.block_ids.tolist() == [3, 4]
    engine.offload([1, 2, 3, 4], "a")
    assert engine.ended()
    assert (engine.counters.offloads, engine.counters.known_offloads) == (2, 1)
    assert engine.lookup("a", 4) == [4]
    assert engine.load([9, 10, 11, 12], "a")
    assert engine.side.loads.finish(engine.start())
    assert engine.holds([9, 10, 11, 12], "a")


def test_offloads_end_in_the_order_in_which_they_were_offered(short_dir: Path, gate: Gate) -> None:
    with running(short_dir, f"store.in_flight@2={gate}") as (daemon, engine):
        engine.offload([1], "a")
        daemon.wait_log("failpoint")
        engine.side._lookups._known.clear()
        assert engine.side.offload([])  # it ends at once, but after the first one
        assert engine.side.completed() == 0
        gate.let_pass()
        eventually(lambda: engine.side.completed() == 2, "both")
        assert [engine.side.pop(), engine.side.pop()] == [True, True]


def test_an_offload_is_sent_when_its_slots_have_arrived_and_none_overtakes_it(short_dir: Path) -> None:
    reader = LateReader()
    with running(short_dir, reader=reader) as (_, engine):
        engine.offload([1], "a")
        engine.offload([2], "b")
        first, second = reader.all
        second.there.set()
        assert engine.side.completed() == 0
        assert engine.side._jobs.num_running == 0, "the first one is on its way"
        engine.fill([1], "a")
        engine.fill([2], "b")
        first.there.set()
        assert engine.ended()
        assert engine.ended()
        assert engine.counters.offloads == 2


def test_a_reset_forgets_offloads_whose_slots_have_not_arrived(short_dir: Path) -> None:
    reader = LateReader()
    with running(short_dir, reader=reader) as (_, engine):
        engine.offload(range(PAGES // 2), "a")
        engine.side.reset()
        reader.all[0].there.set()
        assert engine.side.completed() == 0
        engine.fill(range(PAGES // 2), "b")
        engine.offload(range(PAGES // 2), "b")
        reader.all[1].there.set()
        assert engine.ended(), "the first one holds no pages any more"
        assert engine.lookup("a", 1) == [], "its pages were others' when its slots came"


def test_a_load_is_sent_when_the_forward_asks_for_it_if_its_slots_come_late(short_dir: Path) -> None:
    reader = LateReader()
    with running(short_dir, reader=reader) as (_, engine):
        engine.fill([1, 2], "a")
        engine.offload([1, 2], "a")
        reader.all[0].there.set()
        assert engine.ended()
        assert engine.lookup("a", 2) == [2]
        assert engine.load([5, 6], "a")
        index = engine.side.loads.start()
        engine.side.loads.set_consumer(index)
        assert engine.side._jobs.num_running == 0
        reader.all[-1].there.set()
        for layer in range(LAYERS):
            engine.side.loads.wait_until(layer)
            assert engine.holds([5, 6], "a", slice(layer, layer + 1))
        assert engine.side.loads.finish(index)


def test_slots_that_are_no_pages_cost_a_store_and_a_load_and_never_an_engine(short_dir: Path) -> None:
    reader = LateReader()
    with running(short_dir, reader=reader) as (_, engine):
        engine.offload([1], "a")
        reader.all[0].slots += 1
        reader.all[0].there.set()
        assert not engine.ended()
        engine.fill([1], "a")
        engine.offload([1], "a")
        reader.all[1].there.set()
        assert engine.ended()
        assert engine.lookup("a", 1) == [1]
        assert engine.load([5], "a")
        reader.all[-1].slots += 1
        reader.all[-1].there.set()
        index = engine.side.loads.start()
        engine.side.loads.set_consumer(index)
        engine.side.loads.wait_until(0)
        assert not engine.side.loads.finish(index)
        assert (engine.counters.failed_offloads, engine.counters.failed_loads) == (1, 1)


def test_stores_of_a_daemon_that_hangs_hold_a_part_of_the_pages(short_dir: Path, gate: Gate) -> None:
    with running(short_dir, f"store.in_flight@2={gate}") as (_, engine):
        engine.offload(range(PAGES // 2), "a")
        assert not engine.side.offload([transfer("b", pages=[20])]), "SGLang would keep it until the others have ended"
        engine.side.weights_changing(UPDATE)
        assert not engine.side.offload([transfer("b", pages=[20])]), "and would do so as well if it is not to be stored"
        engine.side.weights_changed(lambda: True)
        assert engine.counters.held_back_offloads == 2
        gate.let_pass()
        assert engine.ended()
        engine.offload([20], "b")
        gate.let_pass()
        assert engine.ended()


def test_a_node_of_more_than_half_of_the_pages_is_stored_when_no_other_is_held(engine: Engine) -> None:
    engine.store(range(PAGES - 1), "a")
    assert engine.lookup("a", PAGES) == [PAGES - 1]


def test_pages_that_are_known_count_as_held_behind_a_store_that_hangs(short_dir: Path, gate: Gate) -> None:
    """Their end is taken in order."""
    with running(short_dir, f"store.in_flight@3={gate}") as (daemon, engine):
        engine.store(range(PAGES // 2), "known")
        engine.offload([20], "slow")
        daemon.wait_log("failpoint")
        engine.offload(range(PAGES // 2 - 1), "known")
        assert engine.side.completed() == 0
        assert not engine.side.offload([transfer("known", pages=[0])])
        gate.let_pass()
        assert engine.ended()
        assert engine.ended()


def test_a_reset_waits_until_nothing_reads_the_pages(short_dir: Path, gate: Gate) -> None:
    with running(short_dir, f"store.in_flight@2={gate}", reset_timeout=SECONDS) as (daemon, engine):
        engine.fill([1], "a")
        engine.offload([1], "a")
        daemon.wait_log("failpoint")
        resets = threading.Thread(target=engine.side.reset)
        resets.start()
        resets.join(0.2)
        assert resets.is_alive(), "the store still reads"
        gate.let_pass()
        resets.join(SECONDS)
        assert not resets.is_alive()
        assert engine.side.completed() == 0, "SGLang has forgotten them as well"
        engine.fill([1], "another")
        if engine.lookup("a", 1):
            assert engine.load([5], "a")
            assert engine.side.loads.finish(engine.start())
            assert engine.holds([5], "a")


def test_nothing_is_stored_or_looked_up_between_a_change_of_the_weights_and_the_flush(engine: Engine) -> None:
    """What SGLang computes meanwhile stands on KV of the old weights."""
    engine.store([1, 2], "a")
    assert engine.lookup("a", 2) == [2]
    engine.side.weights_changing(UPDATE)
    assert not engine.load([8, 9], "a"), "a hit of the old weights"
    engine.side.weights_changed(lambda: False)
    assert engine.lookup("a", 2, "later") == []
    engine.offload([1, 2], "b")
    assert not engine.ended(), "SGLang must not take it for stored"
    assert (engine.counters.unflushed_lookups, engine.counters.unflushed_offloads) == (1, 1)
    assert engine.counters.lookups == 1, "the daemon is not asked"
    assert engine.why_not() == {"reset_refused"}
    engine.side.reset()
    assert engine.why_not() == set()
    assert (engine.side.gauges()["attached"], engine.side.gauges()["breaker_open"]) == (1, 0)
    assert engine.counters.unnamed_weights == 1
    for name in ("a", "b"):
        assert engine.lookup(name, 2, f"after {name}") == []
    engine.store([1, 2], "b")
    engine.clock.ahead += 1
    assert engine.lookup("b", 2, "at last") == [2]


def test_an_empty_engine_offloads_right_after_a_change_of_its_weights(engine: Engine) -> None:
    """Which is so if all ranks are empty: they must go through the same versions."""
    engine.side.weights_changing(UPDATE)
    engine.ranks.others_agree = False
    engine.side.weights_changed(lambda: True)
    assert engine.lookup("a", 2) == []
    assert engine.counters.unflushed_lookups == 1
    engine.side.weights_changing(UPDATE)
    engine.ranks.others_agree = True
    engine.side.weights_changed(lambda: True)
    assert engine.counters.unnamed_weights == 1
    engine.store([1, 2], "a")
    assert engine.lookup("a", 2) == [2]


def test_a_store_from_before_a_change_of_the_weights_goes_under_the_old_ones(short_dir: Path, gate: Gate) -> None:
    """SGLang keeps its pages until it ends."""
    with running(short_dir, f"store.in_flight@2={gate}") as (daemon, engine):
        other = Engine(daemon.socket, name="of the old weights").attach()
        engine.fill([1, 2], "a")
        engine.offload([1, 2], "a")
        daemon.wait_log("failpoint")
        engine.side.weights_changing(UPDATE)
        engine.side.weights_changed(lambda: False)
        gate.let_pass()
        assert engine.ended()
        engine.side.reset()
        assert engine.lookup("a", 2) == []
        assert other.lookup("a", 2) == [2]
        assert other.load([8, 9], "a")
        assert other.side.loads.finish(other.start())
        assert other.holds([8, 9], "a")
        other.side.close()


def test_pages_can_be_hit_when_every_rank_has_stored_its_shard(daemon: DaemonProcess) -> None:
    ranks = [Engine(daemon.socket, rank=rank, size=2).attach() for rank in range(2)]
    ranks[0].store([1, 2], "a")
    assert ranks[0].lookup("a", 2) == []
    ranks[1].fill([5, 6], "the other heads")
    ranks[1].offload([5, 6], "a")
    assert ranks[1].ended()
    for each, content in zip(ranks, ("a", "the other heads"), strict=True):
        each.clock.ahead += 1
        assert each.lookup("a", 2) == [1, 2]
        assert each.load([8, 9], "a")
        assert each.side.loads.finish(each.start())
        assert each.holds([8, 9], content)
        each.side.close()


def test_latent_attention_is_stored_once_and_loaded_by_every_rank(daemon: DaemonProcess) -> None:
    ranks = [Engine(daemon.socket, rank=rank, size=2, replicated=True).attach() for rank in range(2)]
    for each in reversed(ranks):
        each.fill([1, 2], "a")
        each.offload([1, 2], "a")
        assert each.ended(), "all ranks must say the same"
    assert [each.counters.offloads for each in ranks] == [1, 0]
    assert daemon.get("/status")[1]["pool"]["blocks"] == 2, "each page once"
    for each in ranks:
        assert each.lookup("a", 2) == [1, 2]
        assert each.load([8, 9], "a")
        assert each.side.loads.finish(each.start())
        assert each.holds([8, 9], "a")
        each.side.close()


def test_a_head_that_ranks_share_is_stored_by_the_first_of_them_and_loaded_by_all(daemon: DaemonProcess) -> None:
    """Four ranks and two heads."""
    ranks = [Engine(daemon.socket, rank=rank, size=4, per_head=2).attach() for rank in range(4)]
    for each in reversed(ranks):
        each.fill([1, 2], f"a {each.ranks.rank // 2}")
        each.offload([1, 2], "a")
        assert each.ended()
    assert [each.counters.offloads for each in ranks] == [1, 0, 1, 0]
    for each in ranks:
        assert each.lookup("a", 2) == [1, 2]
        assert each.load([8, 9], "a")
        assert each.side.loads.finish(each.start())
        assert each.holds([8, 9], f"a {each.ranks.rank // 2}")
        each.side.close()


def test_two_engines_share_and_a_dead_one_leaves_its_pages(daemon: DaemonProcess, engine: Engine) -> None:
    other = Engine(daemon.socket, name="other").attach()
    other.store([1, 2], "a")
    other.side.close()
    assert engine.lookup("a", 2) == [2]
    assert engine.load([8, 9], "a")
    assert engine.side.loads.finish(engine.start())
    assert engine.holds([8, 9], "a")
