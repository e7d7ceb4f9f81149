"""Prompts of any length hit: the scheduler's side at its default options, with a real daemon that has all blocks."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvsidecar.client import Blocks, BreakerState, Client, GroupLayout, HostBuffer, Outcome, PendingLookup, Region
from kvsidecar.errors import ClientError
from kvsidecar.integrations.vllm import lookups
from kvsidecar.integrations.vllm.groups import Group, GroupKind
from kvsidecar.integrations.vllm.metadata import RankReport
from kvsidecar.integrations.vllm.options import ConnectorOptions
from kvsidecar.integrations.vllm.shared import EngineFacts
from kvsidecar.support.breaker import CircuitBreaker
from kvsidecar.types import Namespace
from tests.e2e.endings import pause
from tests.harness import NAMESPACE, SECONDS, DaemonProcess, Gate, closed_after_the_test, eventually
from tests.integrations.engine import Clock, Request, Step, SynchronousSide, full, group
from tests.marks import processes

pytestmark = processes

BLOCK_TOKENS = 16
ROW_BYTES = 64
TRIES = 10
"""A machine that stands still for some tenths of a second is not told from a daemon that hangs: not every time."""
HITS, MISSES = (f'kvsidecar_lookup_blocks_total{{result="{each}"}}' for each in ("hit", "miss"))
LEASES, EXPIRED = "kvsidecar_leases", 'kvsidecar_refusals_total{reason="lease_expired"}'


def full_groups(count: int) -> list[Group]:
    return [full(index, BLOCK_TOKENS, hash_tokens=BLOCK_TOKENS, alignment=BLOCK_TOKENS) for index in range(count)]


def gemma(window: int = 1024) -> list[Group]:
    """Six groups with a sliding window, and one with full attention."""
    sliding = [
        group(
            i, GroupKind.SLIDING_WINDOW, BLOCK_TOKENS, hash_tokens=BLOCK_TOKENS, alignment=BLOCK_TOKENS, window=window
        )
        for i in range(6)
    ]
    return [*sliding, *full_groups(7)[6:]]


def prompt(name: str, tokens: int) -> Request:
    """All prompts are prefixes of the same one. Its last token is computed in any case."""
    request = Request(name, [])
    request.all_token_ids = range(tokens + 1)  # type: ignore[assignment]
    request.num_prompt_tokens = tokens + 1
    last, request.block_hashes = b"", []
    for _ in range(tokens // BLOCK_TOKENS):
        request.block_hashes.append(last := hashlib.sha256(last).digest())
    return request


class Engine:
    """A rank that has stored a prompt, in blocks of a few bytes, and a scheduler."""

    def __init__(
        self, daemon: DaemonProcess, groups: Sequence[Group], tokens: int, breaker: CircuitBreaker | None
    ) -> None:
        self.daemon, self.tokens, self.groups = daemon, tokens, groups
        self._store(prompt("stored", tokens).block_hashes)
        options = ConnectorOptions.parse({"socket": daemon.socket})
        # As `connector.KVSidecarConnector` makes it.
        self.client = Client(daemon.socket, step_budget=options.lookup_budget, breaker=breaker)
        clock = None if breaker is None else Clock()
        self.side = SynchronousSide(
            options,
            EngineFacts(NAMESPACE.hash_bytes, tuple(groups), 1),
            self.client,
            **({} if clock is None else {"clock": clock}),
        )
        self.clock = clock
        self.side.take_namespace(NAMESPACE)
        eventually(self._connected)
        self.side.take_report(RankReport(attached={0: self.client.epoch}))

    def _connected(self) -> int:
        self.side.connect(SECONDS)
        return self.client.epoch

    def _store(self, hashes: Sequence[bytes]) -> None:
        count = len(hashes)
        region = Region(0, 0, count * ROW_BYTES, ROW_BYTES, ROW_BYTES, 1)
        self.buffer = closed_after_the_test(HostBuffer(count * ROW_BYTES))
        self.rank = self.daemon.client()
        layouts = [GroupLayout(each.index, count, 0, 1, (region,)) for each in self.groups]
        self.rank.attach(instance="t", namespace=NAMESPACE, buffers=self.buffer.kv_buffers(), groups=layouts)
        for each in self.groups:
            for first in range(0, count, 16384):
                ids = range(first, min(count, first + 16384))
                job = self.rank.store([Blocks(each.index, [hashes[i] for i in ids], ids)], timeout=SECONDS)
                assert self.rank.wait([job], SECONDS)[job].outcome is Outcome.DONE

    def answers(self, *requests: Request, local: int = 0) -> list[int | None]:
        """What one step is told of these requests, after which it ends."""
        told = [self.side.get_num_new_matched_tokens(each, local)[0] for each in requests]
        self.side.build_plan(Step())
        return told

    def until_known(self, *requests: Request) -> list[int | None]:
        """What is known of each in the first step in which it is."""
        known: dict[str, int] = {}

        def all_known() -> bool:
            waiting = [each for each in requests if each.request_id not in known]
            answers = zip(waiting, self.answers(*waiting), strict=True)
            known.update({each.request_id: tokens for each, tokens in answers if tokens is not None})
            return len(known) == len(requests)

        eventually(all_known, pause=0.001)
        return [known[each.request_id] for each in requests]

    def metric(self, name: str) -> int:
        return int(self.daemon.metric(name))

    def leaves_no_lease(self) -> None:
        eventually(lambda: self.metric(LEASES) == 0 and not self.client._supervisor.late_answers)
        assert self.metric(EXPIRED) == 0

    def close(self) -> None:
        self.side.shutdown()
        self.rank.close()


@pytest.fixture(autouse=True)
def longer_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that none ends by itself on a machine that stands still."""
    monkeypatch.setattr(lookups, "OFFER_SECONDS", 2 * SECONDS)


@contextmanager
def engine(
    directory: Path,
    groups: Sequence[Group],
    tokens: int,
    *,
    breaker: CircuitBreaker | None = None,
    **variables: str,
) -> Iterator[Engine]:
    blocks = len(groups) * tokens // BLOCK_TOKENS
    with DaemonProcess(directory, "--pool-size", f"{blocks * 4096 // 2**20 + 16}MiB", **variables) as daemon:
        daemon.wait_ready()
        made = Engine(daemon, groups, tokens, breaker)
        try:
            yield made
        finally:
            made.close()


SHAPES = {
    "131072 tokens of Gemma": (gemma(), 131_072),
    "600000 tokens in one group": (full_groups(1), 600_000),
    "1000000 tokens in one group": (full_groups(1), 1_000_000),
    "600000 tokens in four groups": (full_groups(4), 600_000),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_long_prompts_hit_and_short_ones_beside_them(short_dir: Path, shape: str) -> None:
    groups, tokens = SHAPES[shape]
    with engine(short_dir, groups, tokens) as made:
        # No question is asked a second time, and sliding windows are asked for only where they count.
        windows = sum(each.window // BLOCK_TOKENS for each in groups)
        everything = sum(tokens // BLOCK_TOKENS for each in groups if each.kind is GroupKind.FULL) + windows
        for early in (True, False):
            for number in range(TRIES):
                long, short = prompt(f"long {early} {number}", tokens), prompt(f"short {early} {number}", 64)
                before = made.metric(HITS), made.metric(MISSES)
                if early:
                    made.side.on_new_request(long)
                    made.side.on_new_request(short)
                told = made.until_known(long, short)
                asked = made.metric(HITS) - before[0] - 4 * len(groups), made.metric(MISSES) - before[1]
                opened = made.client.breaker_state is not BreakerState.CLOSED
                made.side.request_finished(long)
                made.side.request_finished(short)
                made.leaves_no_lease()
                if told == [tokens, 64] and not opened:
                    break
                eventually(lambda: made.client.breaker_state is BreakerState.CLOSED)
            assert (told, opened, asked) == ([tokens, 64], False, (everything, 0))


@pytest.fixture
def gate(short_dir: Path) -> Iterator[Gate]:
    made = Gate(short_dir)
    yield made
    made.close()


def patient() -> CircuitBreaker:
    return CircuitBreaker(silence=2 * SECONDS)


def asked_by(made: Engine) -> int:
    return made.metric(HITS) + made.metric(MISSES)


@pytest.mark.parametrize("tokens", [64, 40_000])
@pytest.mark.parametrize("early", [True, False])
def test_an_answer_that_comes_in_a_later_step_is_used_then(
    short_dir: Path, gate: Gate, tokens: int, early: bool
) -> None:
    """The clock stands still: patience is not what this is about."""
    held = f"lookup.before_answer@1={gate};lookup.before_answer@2={gate}"
    with engine(short_dir, full_groups(4), 40_000, breaker=patient(), KVSIDECAR_FAILPOINTS=held) as made:
        request = prompt("r", tokens)
        if early:
            made.side.on_new_request(request)
        assert made.answers(request) == [None]
        eventually(lambda: gate.holds(made.daemon.process.pid))
        for _ in range(5):
            assert made.answers(request) == [None]
        gate.let_pass(2)
        assert made.until_known(request) == [tokens]
        assert asked_by(made) == 4 * tokens // BLOCK_TOKENS, "it was asked once"
        made.side.request_finished(request)
        made.leaves_no_lease()


def test_a_step_waits_once_for_all_that_is_not_answered(short_dir: Path, gate: Gate) -> None:
    patch = pytest.MonkeyPatch()
    with engine(
        short_dir, full_groups(1), 40_000, breaker=patient(), KVSIDECAR_FAILPOINTS=f"lookup.before_answer@1={gate}"
    ) as made:
        clock = made.clock
        assert clock is not None
        requests = [prompt(f"r{i}", tokens) for i, tokens in enumerate((64, 40_000, 128, 39_984))]
        waited: list[float] = []
        for each in requests:
            made.side.on_new_request(each)
            pending = made.side._lookups._questions._questions[each.request_id].pending
            assert pending is not None

            def wait(timeout: float, wait=pending.wait) -> bool:  # type: ignore[no-untyped-def]
                waited.append(timeout)
                clock.now += timeout
                return bool(wait(0.0))

            patch.setattr(pending, "wait", wait)
        for _ in range(3):
            waited.clear()
            assert made.answers(*requests) == [None] * 4
            assert len(waited) == 4, "each is looked at"
            assert 0 < sum(waited) <= 0.005
        patch.undo()
        gate.let_pass()
        assert made.until_known(*requests) == [64, 40_000, 128, 39_984]


@pytest.mark.parametrize("tokens", [64, 40_000])
def test_a_request_is_held_back_only_so_long_and_its_answer_keeps_nothing(
    short_dir: Path, gate: Gate, tokens: int
) -> None:
    with engine(
        short_dir, full_groups(4), 40_000, breaker=patient(), KVSIDECAR_FAILPOINTS=f"lookup.before_answer@1={gate}"
    ) as made:
        clock = made.clock
        assert clock is not None
        request = prompt("r", tokens)
        made.side.on_new_request(request)
        assert made.answers(request) == [None]
        eventually(lambda: gate.holds(made.daemon.process.pid))
        in_proportion = max(1.0, 4 * tokens / BLOCK_TOKENS / 2048)
        clock.now += 0.1 * in_proportion - 0.01
        assert made.answers(request) == [None]
        clock.now += 0.02
        assert made.answers(request) == [0]
        gate.let_pass()
        eventually(lambda: made.metric(HITS) > 0)
        made.leaves_no_lease()
        assert made.side.counters.unanswered_lookups == 1


class Computing:
    """An engine that computes for so many seconds in each step, in which the daemon answers all that it was asked. Its
    scheduler has no time to wait: it finds the answers to what it has asked before."""

    def __init__(self, made: Engine, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made, self.seconds = made, seconds
        self._new: list[PendingLookup] = []
        """That were sent since the engine has last computed."""
        begin, self._wait = made.client.begin_lookup, PendingLookup.wait
        monkeypatch.setattr(PendingLookup, "wait", lambda each, _: each not in self._new and self._wait(each, 0.0))

        def noted(namespace: Namespace, groups: Mapping[int, bytes], **options: Any) -> PendingLookup | None:
            pending = begin(namespace, groups, **options)
            assert pending is not None
            self._new.append(pending)
            return pending

        made.client.begin_lookup = noted  # type: ignore[method-assign, assignment]

    def compute(self) -> None:
        assert self.made.clock is not None
        self.made.clock.now += self.seconds
        eventually(lambda: all(each._cancelled or self._wait(each, 0.0) for each in self._new))
        self._new.clear()

    def steps_until_known(self, requests: Sequence[Request]) -> dict[str, tuple[int, int]]:
        """Of each request, in which step its answer was known, and what it was."""
        known: dict[str, tuple[int, int]] = {}
        for step in range(1, 40):
            waiting = [each for each in requests if each.request_id not in known]
            if not waiting:
                break
            told = zip(waiting, self.made.answers(*waiting), strict=True)
            known |= {each.request_id: (step, tokens) for each, tokens in told if tokens is not None}
            self.compute()
        return known


@pytest.mark.parametrize("seconds", [0.02, 0.15, 0.4, 3.0])
@pytest.mark.parametrize("early", [True, False])
def test_requests_that_wait_for_others_hit_in_their_second_step_however_long_steps_are(
    short_dir: Path, early: bool, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = 7_024
    with engine(short_dir, gemma(), tokens, breaker=patient()) as made:
        computing = Computing(made, seconds, monkeypatch)
        requests = [prompt(f"r{i}", tokens) for i in range(24)]
        if early:
            for each in requests:
                made.side.on_new_request(each)
            for _ in range(max(1, round(1.2 / seconds))):
                made.answers()
                computing.compute()
        known = computing.steps_until_known(requests)
        assert {hit for _, hit in known.values()} == {tokens}
        assert max(step for step, _ in known.values()) <= 2
        assert made.side.counters.unanswered_lookups == 0
        for each in requests:
            made.side.request_finished(each)
        made.leaves_no_lease()


@pytest.mark.parametrize("fails", [False, True])
def test_a_round_that_cannot_be_sent_before_the_requests_step_is_asked_for_again(
    short_dir: Path, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = 130_000  # too many hashes for one message
    with engine(short_dir, gemma(), tokens, breaker=patient()) as made:
        before, request, sent = asked_by(made), prompt("r", tokens), []

        def not_sent(*_: Any, **__: Any) -> None:
            sent.append(False)
            if fails:
                raise ClientError("no")

        made.side.on_new_request(request)
        eventually(lambda: asked_by(made) == before + tokens // BLOCK_TOKENS)
        monkeypatch.setattr(made.client, "begin_lookup", not_sent)
        eventually(lambda: made.answers() == [] and sent)
        monkeypatch.undo()
        assert made.until_known(request) == [tokens]
        made.side.request_finished(request)
        made.leaves_no_lease()


@contextmanager
def engine_whose_first_answer_is_held(directory: Path, gate: Gate) -> Iterator[Engine]:
    held = f"lookup.before_answer@1={gate}"
    with engine(directory, full_groups(1), 64, breaker=patient(), KVSIDECAR_FAILPOINTS=held) as made:
        yield made


def test_a_daemon_that_a_step_has_waited_for_in_vain_is_not_waited_for_again(short_dir: Path, gate: Gate) -> None:
    """As with a budget that is larger than the patience."""
    with engine_whose_first_answer_is_held(short_dir, gate) as made:
        request = prompt("r", 64)
        made.side.on_new_request(request)
        pending = made.side._lookups._questions._questions["r"].pending
        assert pending is not None

        def wait(_: float) -> bool:
            assert made.clock is not None
            made.clock.now += 0.2
            return False

        pending.wait = wait  # type: ignore[method-assign, assignment]
        assert made.answers(request) == [0]
        gate.let_pass()
        made.leaves_no_lease()


def test_a_step_that_computes_for_long_is_no_daemon_that_is_silent(short_dir: Path, gate: Gate) -> None:
    with engine_whose_first_answer_is_held(short_dir, gate) as made:
        request = prompt("r", 64)
        assert made.answers(request) == [None]
        assert made.clock is not None
        made.clock.now += 3.0
        assert made.answers(request) == [None]
        gate.let_pass()
        assert made.until_known(request) == [64]


def test_a_daemon_that_hangs_is_noticed_also_with_a_long_prompt(short_dir: Path) -> None:
    with engine(short_dir, gemma(), 16_384, breaker=CircuitBreaker(silence=0.25)) as made:
        pause(made.daemon)
        request, short = prompt("r", 16_384), prompt("s", 64)
        made.side.on_new_request(request)
        made.side.on_new_request(short)
        # The clock stands still, so that only the silence ends it.
        assert made.until_known(request, short) == [0, 0]
        assert made.client.breaker_state is not BreakerState.CLOSED
        assert made.answers(prompt("t", 64)) == [0], "nothing is waited for any more"
        made.daemon.process.send_signal(signal.SIGCONT)
        made.leaves_no_lease()
        eventually(lambda: made.client.breaker_state is BreakerState.CLOSED)
        assert made.until_known(prompt("again", 16_384)) == [16_384]


def test_a_window_that_is_gone_moves_the_end_of_the_hit(short_dir: Path) -> None:
    """And the prompt goes on behind what is stored."""
    with engine(short_dir, gemma(), 65_536, breaker=patient()) as made:
        hashes = prompt("stored", 65_536).block_hashes
        assert made.rank.clear(NAMESPACE, groups={2: [hashes[4090]]}) == 1
        for local in (0, 512, 65_440):
            request = prompt(f"r{local}", 70_000)
            made.side.on_new_request(request)
            eventually(lambda request=request, local=local: made.answers(request, local=local) != [None], pause=0.001)
            assert made.answers(request, local=local) == [4090 * BLOCK_TOKENS - local]
            made.side.request_finished(request)
        made.leaves_no_lease()
