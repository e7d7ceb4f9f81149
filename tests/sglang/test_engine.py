"""A real engine on the CPU against a real daemon: what comes back gives the tokens of what was computed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from kvsidecar.integrations.offload_condition import GAUGES
from kvsidecar.integrations.sglang.counters import HELP
from tests.harness import DaemonProcess, eventually
from tests.marks import promise
from tests.open_files import open_files
from tests.sglang.conftest import POOL
from tests.sglang.engine import PAGE, WHOLE, Answer, SGLangProcess, forgotten, join, stored
from tests.vllm.engine import LONG, blocks, prompt

POOL_BYTES = 6 << 20
AMID_TOKENS = 500
"""Of a request that must still run when the next message reaches the scheduler: each is a step of milliseconds."""


@promise("the next request hits the daemon's blocks")
@pytest.mark.parametrize("pool", [POOL, (*POOL, "--local-protocol", "off")], ids=["local", "grpc"])
def test_an_external_hit_gives_the_tokens_that_were_computed(engine: SGLangProcess, daemon: DaemonProcess) -> None:
    join(engine, daemon)
    cold = stored(engine, daemon, LONG)
    hit = engine.ask(LONG)
    assert (cold.cached, hit.cached, hit.host) == (0, WHOLE, WHOLE)
    assert hit.tokens == cold.tokens
    # Attention does not see in which order the pages behind it lie: a part of them shows that each holds its own.
    part = prompt("long", 300) + [3] * 10
    local = engine.ask(part)
    assert (local.cached, local.host) == (288, 0)
    forgotten(engine, daemon, part)
    again = engine.ask(part)
    assert (again.cached, again.host) == (304, 304), "the page behind the shared prefix was stored as well"
    assert again.tokens == local.tokens


@promise("neither sees the other's blocks")
def test_wrong_kv_gives_other_tokens(engine: SGLangProcess, daemon: DaemonProcess) -> None:
    """Without this, equal tokens would prove nothing."""
    join(engine, daemon)
    cold = stored(engine, daemon, LONG)
    _overwrite_the_pool(daemon)
    hit = engine.ask(LONG)
    assert hit.host == WHOLE
    assert hit.tokens != cold.tokens


def _overwrite_the_pool(daemon: DaemonProcess) -> None:
    for each, name in open_files(daemon.process.pid).items():
        if "memfd" in name and each.stat().st_size == POOL_BYTES:
            with each.open("r+b") as file:
                file.write(b"\x3f" * POOL_BYTES)
            return
    raise AssertionError("the daemon has no memfd of the pool's size")


@promise("longest prefix that all ranks can restore")
def test_local_and_external_hits_of_a_batch_add_up(engine: SGLangProcess, daemon: DaemonProcess) -> None:
    """Each with its own prefix of the same tokens, some pages still in the engine's own cache, some not."""
    join(engine, daemon)
    other = prompt("long", 500) + [3] * 150
    cold = [engine.ask(each).tokens for each in (LONG, other, prompt("new", 100))]
    forgotten(engine, daemon, LONG)
    engine.ask(prompt("long", 300))
    answers = engine.generate(LONG, other, prompt("newer", 100))
    assert [each.cached for each in answers] == [WHOLE, 640, 0]
    assert [each.tokens for each in answers[:2]] == cold[:2]


@promise("SGLang offers the linker every new page of its radix tree")
def test_pages_that_were_evicted_come_back(engine: SGLangProcess, daemon: DaemonProcess) -> None:
    """The engine has room for 2048 tokens."""
    join(engine, daemon)
    cold, numbers = engine.ask(LONG), itertools.count()

    def back() -> Answer | None:
        """None: they were not evicted, because they are still being stored."""
        for _ in range(4):
            engine.ask(prompt(("evict", next(numbers)), 600))
        hit = engine.ask(LONG)
        return hit if hit.host else None

    hit = eventually(back, "an eviction")
    assert hit is not None
    assert (hit.cached, hit.tokens) == (WHOLE, cold.tokens)


@promise("(prompts and answers, and the chunks of a chunked prefill)")
def test_a_conversation_hits_what_the_engine_wrote_itself(engine: SGLangProcess, daemon: DaemonProcess) -> None:
    join(engine, daemon)
    first = prompt("turn", 100)
    answer = stored(engine, daemon, first, tokens=100)
    second = first + answer.tokens + prompt("turn 2", 20).ids
    hit = engine.ask(second)
    assert hit.host > len(first.ids), "decoded tokens were not stored"
    engine.forget()
    with daemon.client() as operator:
        operator.clear()
    cold = engine.ask(second)
    assert (cold.cached, cold.tokens) == (0, hit.tokens)


@promise("separated by SGLang's own hashes")
def test_salts_keep_requests_apart(engine: SGLangProcess, daemon: DaemonProcess) -> None:
    join(engine, daemon)
    mine, theirs = prompt("salted", 100, "mine"), prompt("salted", 100, "theirs")
    cold = stored(engine, daemon, mine)
    assert engine.ask(theirs).cached == 0
    engine.forget()
    hit = engine.ask(mine)
    assert (hit.host, hit.tokens) == (96, cold.tokens)


@promise("a hit ends before the first token whose log probability is asked for")
def test_log_probabilities_of_a_prompt_are_those_that_were_computed(
    engine: SGLangProcess, daemon: DaemonProcess
) -> None:
    join(engine, daemon)
    computed, cached = engine.log_probabilities(LONG, 300)
    forgotten(engine, daemon, LONG)
    found, host = engine.log_probabilities(LONG, 300)
    assert (cached, host) == (0, 300 // PAGE * PAGE)
    assert len(found) == len(computed) >= len(LONG.ids) - 301
    assert found == pytest.approx(computed, abs=1e-3)


def test_pages_that_are_there_are_not_copied_again(engine: SGLangProcess, daemon: DaemonProcess) -> None:
    join(engine, daemon)
    stored(engine, daemon, LONG)
    copied = daemon.get("/status")[1]["jobs"]["stored_bytes"]
    before = engine.counters()
    assert engine.ask(LONG).host == WHOLE
    engine.forget()
    assert engine.ask(LONG, tokens=1).host == WHOLE
    assert daemon.get("/status")[1]["jobs"]["stored_bytes"] == copied
    known = "known_offloads"
    eventually(lambda: engine.counters()[known] > before.get(known, 0), "SGLang offers what it has just loaded")


def test_counters_are_on_sglangs_metrics(engine: SGLangProcess, daemon: DaemonProcess) -> None:
    join(engine, daemon)
    before = engine.counters()
    assert set(before) == {*HELP, *GAUGES}
    stored(engine, daemon, LONG)
    engine.ask(LONG)

    def counted() -> bool:
        now = {name: value - before[name] for name, value in engine.counters().items()}
        assert now["failed_loads"] == 0
        return now["loads"] >= 1 and now["loaded_pages"] >= WHOLE // PAGE and now["resets"] >= 1

    eventually(counted, lambda: f"{before} {engine.counters()}")
    assert (engine.counters()["attached"], engine.counters()["breaker_open"]) == (1, 0)
    assert "sglang " in daemon.get("/status")[1]["ranks"][0]["instance"]


def test_a_new_weight_version_is_a_generation_of_its_own(
    engine: SGLangProcess, daemon: DaemonProcess, model: str, other_weights: str
) -> None:
    join(engine, daemon)
    old = stored(engine, daemon, LONG)
    engine.update(other_weights, "step 1")
    new = engine.ask(LONG)
    assert (new.cached, new.tokens == old.tokens) == (0, False), "KV of the old weights was used"
    forgotten(engine, daemon, LONG)
    assert engine.ask(LONG).host == WHOLE
    # Back to the old weights without a name: nothing of what is there may be used, although it is the same KV.
    engine.update(model)
    back = engine.ask(LONG)
    assert (back.cached, back.tokens) == (0, old.tokens)
    eventually(lambda: engine.counters()["unnamed_weights"] > 0, "the change is counted")


@pytest.fixture(scope="module")
def computed(other_weights: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangProcess]:
    """An engine of the other weights that offloads nothing."""
    with SGLangProcess(other_weights, None, tmp_path_factory.mktemp("computed") / "log").wait_started() as engine:
        yield engine


@promise("No KV from before an update is stored after it.")
@pytest.mark.parametrize("flush", [True, False], ids=["flush refused", "no flush"])
def test_kv_of_old_weights_is_not_stored_under_the_new_ones(
    engine: SGLangProcess,
    daemon: DaemonProcess,
    computed: SGLangProcess,
    model: str,
    other_weights: str,
    flush: bool,
) -> None:
    """A request runs on across the update, so SGLang keeps KV of the old weights and appends to it."""
    join(engine, daemon)
    engine.update(model)
    old = stored(engine, daemon, LONG)
    held, before = blocks(daemon), engine.counters()
    message = engine.update_amid(LONG, AMID_TOKENS, other_weights, flush=flush)
    assert ("cache was not flushed" in message) is flush
    further = prompt("long", 700) + [3] * 100
    mixed = engine.ask(further)
    assert (mixed.cached, mixed.host) == (WHOLE, 0), "the engine's own cache is as SGLang has it"
    assert engine.ask(prompt("meanwhile", 100)).host == 0
    engine.forget()
    assert blocks(daemon) == held

    def counted() -> bool:
        now = engine.counters()
        return all(now[name] > before[name] for name in ("unflushed_offloads", "unflushed_lookups"))

    eventually(counted, "what was left out is counted")
    # Since the flush there is only KV of the new weights, and it is offloaded.
    new = stored(engine, daemon, LONG)
    assert (new.cached, new.tokens == old.tokens) == (0, False)
    assert new.tokens == computed.ask(LONG).tokens
    hit = engine.ask(further)
    assert (hit.host, hit.tokens) == (WHOLE, computed.ask(further).tokens)
    assert "until it is (/flush_cache)" in engine.text()


def test_an_engine_that_is_flushed_before_an_update_offloads_after_it(
    engine: SGLangProcess, daemon: DaemonProcess, computed: SGLangProcess, model: str, other_weights: str
) -> None:
    """The update is one of several calls, and none of them flushes: SGLang holds no KV all the while."""
    join(engine, daemon)
    engine.update(model)
    old = stored(engine, daemon, LONG)
    engine.update_in_session(other_weights)
    new = stored(engine, daemon, LONG)
    assert (new.cached, new.tokens == old.tokens) == (0, False)
    assert new.tokens == computed.ask(LONG).tokens
    hit = engine.ask(LONG)
    assert (hit.host, hit.tokens) == (WHOLE, new.tokens)


def test_sleep_and_wake(engine: SGLangProcess, daemon: DaemonProcess) -> None:
    """Without SGLang's memory saver the KV cache stays where it is."""
    join(engine, daemon)
    cold = stored(engine, daemon, LONG)
    engine.sleep_and_wake()
    hit = engine.ask(LONG)
    assert (hit.host, hit.tokens) == (WHOLE, cold.tokens)
