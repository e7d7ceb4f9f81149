"""What is offered stays in the daemon until vLLM has allocated: both sides of the connector with a real daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvsidecar.client import Blocks, Client, Outcome
from kvsidecar.integrations.vllm import lookups
from kvsidecar.integrations.vllm.lookups import UNCLAIMED_SECONDS
from kvsidecar.integrations.vllm.metadata import RankReport
from tests.harness import NAMESPACE, NUM_BLOCKS, SECONDS, DaemonProcess, Rank, eventually
from tests.integrations.engine import Allocated, Clock, Request, Step, TinyPool, side
from tests.integrations.workers import Worker
from tests.marks import lent_daemon

pytestmark = lent_daemon


class Engine:
    """Both sides of a connector, and another engine that stores into the same pool."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon, self.clock = daemon, Clock()
        self.worker, self.other = Worker(daemon.socket).register(), Rank(daemon, instance="other")
        asking = Client(daemon.socket, step_budget=SECONDS)
        pool = TinyPool(NUM_BLOCKS)
        self.side = side(pool=pool, daemon=asking, namespace=NAMESPACE, clock=self.clock, lookup_budget=SECONDS)  # type: ignore[arg-type]
        self.until(lambda: self.side.attached)
        self.others = 0

    def step(self) -> None:
        orders = self.side.build_plan(Step())
        self.worker.step(*orders.stores, loads=orders.loads)
        report, self.worker.report = self.worker.report, RankReport()
        self.side.take_report(report)

    def until(self, over: Callable[[], object]) -> None:
        def stepped() -> object:
            return over() or self.step()

        eventually(stepped, lambda: (self.side.counters, self.daemon.get("/status")[1]["pool"]), pause=0.0)

    def stores(self, request: Request) -> None:
        """Two blocks of 5s, for the first tokens of a request."""
        self.worker.kv[...] = 5
        client = self.worker.client
        job = client.store([Blocks(0, request.block_hashes[:2], [0, 1])])
        assert client.wait([job], SECONDS)[job].outcome is Outcome.DONE
        self.worker.kv[...] = 0

    def offered(self) -> Request:
        """A request that has been offered the blocks of its first tokens."""
        request = Request("r", list(range(9)))
        self.stores(request)
        assert self.side.get_num_new_matched_tokens(request, 0) == (8, True)
        return request

    def loaded(self, request: Request, *block_ids: int) -> None:
        """The request has been given these blocks, and goes on when the first two have been loaded."""
        self.side.update_state_after_alloc(request, Allocated(block_ids), 8)
        self.until(lambda: self.worker.results.finished)
        assert not self.worker.results.failed
        assert (self.worker.kv[:, :, block_ids[:2]] == 5).all()

    def press(self) -> None:
        """Store five times what the pool holds: all goes that may."""
        evicted = self.daemon.metric("kvsidecar_evicted_blocks_total")
        enough = evicted + 4 * int(self.daemon.get("/status")[1]["pool"]["blocks"] or 1)
        rounds = 0
        while rounds < 100 or self.daemon.metric("kvsidecar_evicted_blocks_total") < enough:
            self.others += NUM_BLOCKS
            self.other.store(*range(self.others, self.others + NUM_BLOCKS))
            rounds += 1

    def leases(self) -> float:
        return self.daemon.metric("kvsidecar_leases")

    def expired(self) -> float:
        return self.daemon.metric('kvsidecar_refusals_total{reason="lease_expired"}')

    def close(self) -> None:
        self.side.shutdown()
        self.worker.close()
        self.other.close()


@pytest.fixture
def longer_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a machine that is slow to press. The engine takes the time when it is made: ask for this one first."""
    monkeypatch.setattr(lookups, "OFFER_SECONDS", SECONDS)


@pytest.fixture
def engine(daemon: DaemonProcess) -> Iterator[Engine]:
    made = Engine(daemon)
    yield made
    made.close()


@pytest.mark.usefixtures("longer_offers")
def test_an_offer_is_loaded_though_the_pool_was_short_before_it_was_taken(engine: Engine) -> None:
    request = engine.offered()
    engine.press()
    engine.loaded(request, 4, 5, 6)
    counters = engine.side.counters
    assert (counters.loads, counters.failed_loads, counters.gone_loads, counters.unleased_loads) == (1, 0, 0, 0)
    engine.until(lambda: engine.leases() == 0)
    engine.press()
    assert engine.side.get_num_new_matched_tokens(Request("s", list(range(9))), 0) == (0, False)


@pytest.mark.usefixtures("longer_offers")
def test_an_offer_that_vllm_asks_for_no_more_is_given_up(engine: Engine) -> None:
    engine.offered()
    assert engine.leases() == 1
    engine.clock.now += UNCLAIMED_SECONDS
    engine.step()
    eventually(lambda: engine.leases() == 0)
    assert engine.expired() == 0


def test_the_hit_rate_is_of_what_the_engine_did_not_have_itself_whatever_its_lookups_find(engine: Engine) -> None:
    def rate() -> tuple[float, float]:
        return tuple(engine.daemon.metric(f"kvsidecar_prompt_tokens_{each}_total") for each in ("loaded", "needed"))  # type: ignore[return-value]

    def until(loaded: int, needed: int) -> None:
        engine.step()
        eventually(lambda: rate() == (loaded, needed), rate)

    def shown() -> tuple[int, int]:
        """By the status, whose numbers begin with the daemon: it may be lent, and have served other tests."""
        with engine.daemon.client() as client:
            lookups = client.status().lookups
        return lookups.loaded_tokens, lookups.needed_tokens

    found = 'kvsidecar_lookup_blocks_total{result="hit"}'
    loaded, needed = shown()
    engine.loaded(engine.offered(), 3, 4, 5)
    until(loaded=8, needed=8)
    before = engine.daemon.metric(found)
    for number in range(3):  # the GPU has them, and the lookups on their arrival ask for all of them
        again = Request(f"again {number}", list(range(9)))
        engine.side.on_new_request(again)
        eventually(lambda: engine.daemon.metric(found) >= before + 2 * (number + 1))  # noqa: B023 - called at once
        assert engine.side.get_num_new_matched_tokens(again, 8) == (0, False)
        engine.side.update_state_after_alloc(again, Allocated((3, 4, 6 + number)), 0)
        engine.step()
    new = Request("new", list(range(100, 113)))
    assert engine.side.get_num_new_matched_tokens(new, 0) == (0, False)
    engine.side.update_state_after_alloc(new, Allocated((6, 7, 8, 9)), 0)
    until(loaded=8, needed=20)
    assert engine.side.attached
    with engine.daemon.client() as client:
        status = client.status()
    assert shown() == (loaded + 8, needed + 20)
    (space,) = [each for each in status.namespaces if each.needed_tokens]
    assert (space.loaded_tokens, space.needed_tokens) == (8, 20)


def test_an_offer_of_an_engine_that_stands_still_ends_by_itself(engine: Engine) -> None:
    engine.offered()
    eventually(lambda: engine.expired() == 1)
    assert engine.leases() == 0


def test_a_request_whose_offer_has_gone_is_computed_and_loads_again_when_it_was_preempted(engine: Engine) -> None:
    request = engine.offered()
    eventually(lambda: engine.leases() == 0)
    engine.press()
    engine.side.update_state_after_alloc(request, Allocated([4, 5, 6]), 8)
    engine.until(lambda: engine.side.counters.failed_loads)
    assert engine.worker.results.failed == {"r"}
    assert engine.side.counters.gone_loads == 1
    engine.stores(request)
    assert engine.side.get_num_new_matched_tokens(request, 0) == (0, False)
    engine.side.update_state_after_alloc(request, Allocated([4, 5, 6]), 0)  # it is computed, and then preempted
    assert engine.side.get_num_new_matched_tokens(request, 0) == (8, True)
    engine.worker.results = type(engine.worker.results)()
    engine.loaded(request, 1, 2, 3)


def test_what_was_asked_for_as_the_request_arrived_is_offered_and_loaded(engine: Engine) -> None:
    request = Request("r", list(range(9)))
    engine.stores(request)
    engine.side.on_new_request(request)
    eventually(lambda: engine.leases() == 1)
    assert engine.side.get_num_new_matched_tokens(request, 0) == (8, True)
    engine.loaded(request, 4, 5, 6)
    engine.until(lambda: engine.leases() == 0)


def test_a_request_that_goes_before_its_answer_is_read_keeps_nothing(engine: Engine) -> None:
    request = Request("r", list(range(9)))
    engine.stores(request)
    engine.side.on_new_request(request)
    engine.side.request_finished(request)
    engine.side.get_num_new_matched_tokens(Request("s", list(range(100, 109))), 0)  # reads what has come
    eventually(lambda: engine.leases() == 0)
    assert engine.expired() == 0
