"""`python -m benchmarks.turns`: what it says of measured values, and a short run of this version against itself."""

from __future__ import annotations

import json
import math
import os
import random
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.turns import __main__ as command
from benchmarks.turns import counters
from benchmarks.turns.__main__ import NEW, NULL, OLD, Ratio, ratio_of, verdict

SOFTWARE, PAGE_FAULTS, UNKNOWN = 1, 2, 1 << 31


def test_the_interval_has_the_true_median_in_it_in_95_of_100_cases() -> None:
    rng, inside = random.Random(7), 0
    for _ in range(2000):
        found = ratio_of([1.0] * 20, [rng.lognormvariate(0.1, 0.5) for _ in range(20)])
        assert found.low <= found.middle <= found.high
        inside += found.low <= math.exp(0.1) <= found.high
    assert 0.94 <= inside / 2000 <= 0.98  # of 20 ranks none gives 0.95 exactly; the next narrower ones give 0.88


def test_a_ratio_is_of_the_same_round() -> None:
    found = ratio_of([1.0, 100.0, 7.0, 3.0, 50.0, 2.0], [2.0, 200.0, 14.0, 6.0, 100.0, 4.0])
    assert [found.middle, found.low, found.high] == pytest.approx([2.0, 2.0, 2.0])
    assert found.known


def test_too_few_rounds_tell_nothing() -> None:
    few = ratio_of([1.0] * (command.FEWEST_ROUNDS - 1), [2.0] * (command.FEWEST_ROUNDS - 1))
    assert not few.known
    assert verdict(few, few) == ""
    assert ratio_of([1.0] * command.FEWEST_ROUNDS, [2.0] * command.FEWEST_ROUNDS).known


@pytest.mark.parametrize(
    ("change", "null", "said"),
    [
        (Ratio(1.10, 1.08, 1.12), Ratio(1.00, 0.98, 1.02), "worse"),
        (Ratio(0.90, 0.88, 0.92), Ratio(1.00, 0.98, 1.02), "better"),
        (Ratio(1.04, 1.03, 1.05), Ratio(1.00, 0.99, 1.01), ""),
        (Ratio(0.96, 0.95, 0.97), Ratio(1.00, 0.99, 1.01), ""),
        (Ratio(1.10, 1.02, 1.18), Ratio(1.00, 0.95, 1.05), ""),
        (Ratio(0.90, 0.80, 1.00), Ratio(0.97, 0.95, 1.00), ""),
    ],
    ids=["worse", "better", "little worse", "little better", "perhaps worse", "perhaps better"],
)
def test_a_change_is_said_if_it_is_large_and_apart_from_the_null(change: Ratio, null: Ratio, said: str) -> None:
    assert verdict(change, null) == said


def sampled(old: float, new: float) -> dict[str, list[float]]:
    return {OLD: [old] * 8, NEW: [new] * 8, NULL: [old] * 8}


def test_what_is_worse_is_named_but_for_times_of_the_clock() -> None:
    results = {
        "lookup, 1 hit": {"daemon, us": sampled(10, 12), "client, us": sampled(10, 8), "wall, us": sampled(1, 2)}
    }
    assert command.worse(results) == ["lookup, 1 hit: daemon, us"]
    lines = list(command.table(results, {"store, 1 block"}))
    assert [line.split()[-1] for line in lines[1:4]] == ["worse", "better", "worse"]
    assert lines[4].startswith("store, 1 block")
    assert "not measured" in lines[4]


def test_system_calls_that_an_older_version_did_not_make_are_worse_and_none_on_both_sides_are_the_same() -> None:
    assert command.judged(sampled(0, 1))[2] == "worse"
    assert command.judged(sampled(0, 0))[0] == Ratio(1.0, 1.0, 1.0)


class StandIn:
    """A side that measures nothing, of a version whose lookups know no tails."""

    knows_tails = False

    def __init__(self, *_: object, **__: object) -> None: ...


def test_a_row_is_measured_until_it_is_known_or_to_the_last_round(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(7)

    def measure(_: object, order: tuple[str, ...], work: command.Work) -> dict[str, dict[str, float]]:
        return {"daemon, us": {side: 10.0 if work[0] == "hits" else rng.uniform(1, 100) for side in order}}

    monkeypatch.setattr(command, "ROWS", {"steady": ("hits", 1, 1), "noisy": ("load", 1, 1), "new": ("windows", 1, 1)})
    monkeypatch.setattr(command, "Side", StandIn)
    monkeypatch.setattr(command, "measure", measure)
    watch = command.Watch(dict.fromkeys(command.SIDES, Path()), local=True)
    watch.run(20)
    rounds = {row: len(measured["daemon, us"][NEW]) for row, measured in watch.results.items()}
    assert (rounds, watch.missing) == ({"steady": command.FEWEST_ROUNDS, "noisy": 20}, {"new"})


def test_without_a_release_tag_a_commit_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "git", lambda *_: b"")
    with pytest.raises(SystemExit, match="--against"):
        command.commit_of(None)


def test_counters_count_what_this_thread_does() -> None:
    thread = os.getpid()
    time, calls = counters.microseconds([thread]), counters.reads_and_writes(thread)
    began, called = time(), calls()
    with open("/dev/zero", "rb", buffering=0) as zero:
        for _ in range(100):
            zero.read(1 << 20)
    assert time() > began
    assert 100 <= calls() - called < 200
    with ExitStack() as stack:
        if (exact := counters.system_calls(stack, thread)) is not None:
            called = exact()
            for _ in range(100):
                os.getppid()
            assert 100 <= exact() - called < 200


def test_the_kernel_counts_events_of_a_thread_or_there_is_no_counter() -> None:
    with ExitStack() as stack:
        faults = counters.perf_counter(stack, SOFTWARE, PAGE_FAULTS, [os.getpid()], counters.EXCLUDE_KERNEL)
        if faults is None:
            pytest.skip("perf_event_open is not allowed here")
        before = faults()
        bytearray(os.urandom(1) * (8 << 20))
        assert faults() > before
    assert counters.perf_counter(ExitStack(), UNKNOWN, 0, [os.getpid()]) is None


def test_a_run_against_itself_measures_every_row_and_leaves_nothing(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_dir))
    monkeypatch.setattr(command, "ROWS", {row: (kind, blocks, 1) for row, (kind, blocks, _) in command.ROWS.items()})
    monkeypatch.setattr(command, "TURNS", 2)
    file = short_dir / "results.json"
    code = command.main(["--against", "HEAD", "--rounds", str(command.FEWEST_ROUNDS), "--json", str(file)])
    results = json.loads(file.read_text())["rows"]
    assert set(results) == set(command.ROWS)
    for measured in results.values():
        kinds = [what.split(",")[0] for what in measured]
        assert kinds[:2] + kinds[3:] == ["daemon", "client", "wall"]
        for what, samples in measured.items():
            assert {side: len(values) for side, values in samples.items()} == dict.fromkeys(command.SIDES, 6), what
            assert all(value > 0 for values in samples.values() for value in values), what
    # One operation a turn may be called worse: how long it takes is not what this shows.
    said = capsys.readouterr().out
    assert ("nothing is worse" in said) == (code == 0)
    assert [each.name for each in short_dir.iterdir()] == [file.name]
