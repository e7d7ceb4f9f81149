"""One screen of `kvsidecar top`, and the rates in it."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import pytest
from rich.console import Console

from kvsidecar.cli.operate.top_view import PRINTED_HEIGHT, Screen, render
from kvsidecar.cli.status_figures import Price, Sample, Worth, hit_rate, rates_between, short_device
from kvsidecar.cli.status_view import render as render_status
from kvsidecar.support.units import GiB
from kvsidecar.v1 import sidecar_pb2 as pb


def rank(session: int, name: str = "llama", **fields: Any) -> pb.RankStatus:
    device = "GPU-1a2b3c4d-0000-1111-2222-333344445555"
    return pb.RankStatus(session=session, instance=name, rank=session, world_size=9, device=device, pid=77, **fields)


def reply(epoch: int = 1, ranks: Iterable[pb.RankStatus] = (), **jobs: Any) -> pb.StatusReply:
    return pb.StatusReply(
        epoch=epoch,
        version="1.0",
        backend="cuda",
        uptime_seconds=7200,
        readiness=pb.Readiness(state=pb.Readiness.STATE_READY),
        pool=pb.PoolStatus(total_bytes=64 * GiB, used_bytes=32 * GiB, blocks=1000, page_kind="thp"),
        jobs=pb.JobsStatus(**jobs),
        ranks=ranks,
    )


def text(screen: Screen, width: int = 80, height: int = 24) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height)
    console.print(render(screen, width, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def screen(now: pb.StatusReply, before: pb.StatusReply | None = None, **fields: Any) -> Screen:
    rates = None if before is None else rates_between(Sample(10.0, before), Sample(12.0, now))
    history = () if rates is None else ((rates.stored_bytes, rates.loaded_bytes),)
    return Screen(**{"reply": now, "rates": rates, "history": history, "lost_for": None, **fields})


def test_rates_are_what_was_counted_between_two_looks_per_second() -> None:
    before = reply(ranks=[rank(1, stored_bytes=100)], stored_bytes=1000, loaded_bytes=0)
    before.lookups.loaded_tokens, before.lookups.needed_tokens, before.refusals["not_found"] = 10, 20, 1
    now = reply(ranks=[rank(1, stored_bytes=300), rank(2, loaded_bytes=50)], stored_bytes=3000, loaded_bytes=400)
    now.lookups.loaded_tokens, now.lookups.needed_tokens = 40, 60
    now.refusals["not_found"], now.refusals["pool_full"] = 1, 5
    now.pool.evicted_bytes = 2000
    rates = rates_between(Sample(10.0, before), Sample(12.0, now))
    assert rates is not None
    assert (rates.stored_bytes, rates.loaded_bytes, rates.evicted_bytes) == (1000, 200, 1000)
    assert (rates.hit_tokens, rates.needed_tokens, rates.hit_rate) == (15, 20, 0.75)
    assert rates.refusals == {"pool_full": 5}
    assert rates.ranks == {1: (100, 0)}  # what rank 2 did before it was first seen is no rate


def test_there_are_no_rates_over_a_restart_nor_over_no_time() -> None:
    assert rates_between(Sample(1.0, reply(epoch=1, stored_bytes=9)), Sample(2.0, reply(epoch=2))) is None
    assert rates_between(Sample(1.0, reply()), Sample(1.0, reply())) is None


def test_blocks_that_lookups_find_are_no_hits_unless_engines_needed_and_loaded_them() -> None:
    now = reply()
    now.lookups.hits, now.lookups.misses = 252, 28
    rates = rates_between(Sample(1.0, reply()), Sample(2.0, now))
    assert rates is not None
    assert rates.hit_rate is None
    assert "no prompt so far" in "\n".join(text(screen(now, reply())))
    now.lookups.needed_tokens = 448
    assert "0%  of 224 tokens/s  0% of 448 tokens so far" in "\n".join(text(screen(now, reply())))


def test_a_load_that_is_reported_later_than_its_prompt_makes_no_rate_of_more_than_all() -> None:
    assert hit_rate(20, 10) == 1
    assert hit_rate(5, 10) == 0.5
    assert hit_rate(0, 0) is None


def test_a_screen_shows_pool_rates_hits_jobs_refusals_and_engines() -> None:
    before = reply(ranks=[rank(1)])
    now = reply(
        ranks=[rank(1, jobs_running=3, stored_bytes=4_000_000_000)],
        running=2, queued=5, oldest_inflight_seconds=0.25, stored_bytes=20_000_000_000, loaded_bytes=2_000_000_000,
        stores_done=12,
    )  # fmt: skip
    now.lookups.loaded_tokens, now.lookups.needed_tokens = 75, 100
    now.refusals["pool_full"] = 4
    shown = "\n".join(text(screen(now, before), width=120))
    for word in (
        "kvsidecar ready", "32 GiB of 64 GiB used", "1,000 blocks", "10 GB/s", "1 GB/s", "18.63 GiB in 12 jobs", "75%",
        "2 running, 5 queued, oldest 250 ms", "pool_full 4 (+4)", "llama", "1/9", "2 GB/s", "GPU-1a2b3c4d", "77",
    ):  # fmt: skip
        assert word in shown, word


def test_what_is_evicted_now_is_shown_in_80_columns_whatever_was_computed_so_far() -> None:
    before, now = reply(), reply()
    before.lookups.needed_tokens, now.lookups.needed_tokens = 1_230_000_000, 1_234_567_890
    now.pool.evicted_bytes = 2_100_000_000
    (line,) = [line for line in text(screen(now, before)) if line.startswith("Hits")]
    assert line.rstrip().endswith("0%  of 2,283,945 tokens/s  evicting 1.1 GB/s  0% so far"), "nothing is cut"
    (line,) = [line for line in text(screen(now, before), width=120) if line.startswith("Hits")]
    assert "0% of 1,234,567,890 tokens so far" in line


def test_what_is_saved_is_tokens_and_with_a_rate_and_a_price_prefill_and_money() -> None:
    before, now = reply(loaded_tokens=0), reply(loaded_tokens=48_000_000)
    (line,) = [line for line in text(screen(now, before), width=120) if line.startswith("Saved")]
    assert line.split() == ["Saved", "24,000,000", "tokens/s", "48,000,000", "tokens", "so", "far"]
    (line,) = [
        line
        for line in text(screen(now, before, worth=Worth(8000, Price.parse("$20"))), width=160)
        if line.startswith("Saved")
    ]
    assert "the prefill of 3000.00 engines, $60,000.00/h" in line
    assert "1 h 40 min of prefill, $33.33" in line
    assert not [line for line in text(screen(now), height=15) if line.startswith("Saved")]


def test_a_disk_is_a_bar_or_why_it_is_off() -> None:
    now = reply()
    tier = now.tiers.add(name="disk", capacity_bytes=64 * GiB, used_bytes=16 * GiB, blocks=7, read_bytes=3 * GiB)
    shown = "\n".join(text(screen(now)))
    assert "16 GiB of 64 GiB used" in shown
    assert "7 shards, 3 GiB read, 0 B written" in shown
    assert "may be written" not in shown
    tier.off, tier.failures, tier.write_budget_bytes = "input/output error", 3, 5 * GiB
    shown = "\n".join(text(screen(now)))
    assert "Disk  off: input/output error" in shown
    assert "3 failures, 5 GiB may be written now" in shown


def test_the_name_of_a_tier_stands_apart_from_its_state() -> None:
    now = reply()
    now.tiers.add(name="cluster", off="no master")
    now.tiers.add(name="shared", capacity_bytes=GiB)
    shown = "\n".join(text(screen(now)))
    assert "Cluster off: no master" in shown
    assert "Shared ░" in shown


def test_the_largest_shares_have_a_line_each_if_there_is_room() -> None:
    now = reply()
    now.shares.add(name="chat", used_bytes=16 * GiB, guaranteed_bytes=8 * GiB, max_bytes=32 * GiB)
    for number in range(5):
        now.shares.add(name=f"share-{number}", used_bytes=GiB)
    shown = text(screen(now))
    (first,) = [number for number, line in enumerate(shown) if line.startswith("Shares")]
    assert shown[first] == "Shares  chat  16 GiB used, 8 GiB guaranteed, at most 32 GiB"
    assert shown[first + 3] == "        share-2  1 GiB used, 0 B guaranteed"
    assert shown[first + 4] == "        and 2 with less: kvsidecar status"
    assert "Shares" not in "\n".join(text(screen(now), height=23))
    assert "Shares" not in "\n".join(text(screen(reply())))


def test_the_bar_of_a_pin_shows_how_far_it_is() -> None:
    now = reply()
    now.readiness.state = pb.Readiness.STATE_PINNING
    now.readiness.pool_bytes, now.readiness.pinned_bytes = 100, 25
    now.readiness.pin_bytes_per_second, now.readiness.eta_seconds = 9.8e9, 73
    (bar,) = [line for line in text(screen(now)) if line.startswith("Pin")]
    assert "25%, 9.8 GB/s, 1 min 13 s left" in bar
    assert bar.count("█") * 3 == bar.count("░")


def test_a_daemon_that_is_gone_is_said_above_what_it_said_last() -> None:
    gone = Screen(reply=reply(), rates=None, history=(), lost_for=12.0, lost_reason="no kvsidecar answers")
    lines = text(gone)
    assert "No answer for 12 s" in lines[0]
    assert "no kvsidecar answers" in lines[1]
    assert "kvsidecar ready" in lines[2]
    never = Screen(reply=None, rates=None, history=(), lost_for=1.0, lost_reason="no kvsidecar answers")
    assert len(text(never)) == 2


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("height", [15, 24])
@pytest.mark.parametrize("ranks", [0, 1, 50])
def test_a_screen_fits_the_terminal(width: int, height: int, ranks: int) -> None:
    many = [rank(number, "an-engine-with-a-long-name-" + "x" * 60) for number in range(ranks)]
    now = reply(ranks=many, stored_bytes=10**15, loaded_bytes=10**15, stores_done=10**9, oldest_inflight_seconds=1)
    now.refusals.update({"pool_full": 10**6, "not_found": 10**6, "invalid_request": 1})
    now.readiness.reason = "r" * 300
    now.tiers.add(name="disk", off="o" * 300)
    lines = text(screen(now, reply(ranks=many), lost_for=1.0, lost_reason="e" * 300), width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_engines_that_do_not_fit_are_counted_and_the_busy_ones_stay() -> None:
    ranks = [rank(number, f"e{number:02}", stored_bytes=1000 if number == 37 else 0) for number in range(50)]
    before = [rank(number, f"e{number:02}") for number in range(50)]
    lines = text(screen(reply(ranks=ranks), reply(ranks=before)), height=20)
    assert any(line.startswith("e37") for line in lines)
    listed = [line for line in lines if line.startswith("e") and not line.startswith("engine")]
    assert f"and {50 - len(listed)} less busy" in lines[-1]


def test_a_name_cannot_steer_the_terminal() -> None:
    lines = text(screen(reply(ranks=[rank(1, "\x1b[2J[red]evil")])))
    assert not any("\x1b" in line for line in lines)
    assert any("[red]evil" in line for line in lines)


def test_a_gpu_is_told_by_the_start_of_its_uuid() -> None:
    assert short_device("GPU-1a2b3c4d-0000-1111-2222-333344445555") == "GPU-1a2b3c4d"
    assert short_device("host") == "host"


def test_the_reason_of_a_failure_is_wrapped_and_whole_where_there_is_room() -> None:
    now = reply()
    now.readiness.state = pb.Readiness.STATE_FAILED
    now.readiness.reason = " ".join(f"word{number}" for number in range(60)) + " is the remedy"
    printed = text(screen(now), height=PRINTED_HEIGHT)
    assert " ".join(" ".join(printed).split()).count(now.readiness.reason) == 1
    assert max(map(len, printed)) <= 80
    assert "is the remedy" not in "\n".join(text(screen(now), height=24)), "the rest of the screen has room, too"


def test_lines_of_status_keep_their_indent_where_they_are_wrapped() -> None:
    now = reply(stores_done=1000)
    now.readiness.state, now.readiness.reason = pb.Readiness.STATE_DRAINING, "a limit " * 20
    now.pool.carrier, now.pool.cold_start_reason = "directory", "the size has changed " * 6
    console = Console(file=io.StringIO(), width=80)
    console.print(render_status(now, 80))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    reason = [line for line in lines if "limit" in line]
    assert len(reason) == 3
    assert all(line.startswith(("  a limit", "  limit")) for line in reason)
    kept = [line for line in lines if "size" in line]
    assert len(kept) > 1
    assert all(line.startswith("      ") and line[6] != " " for line in kept)
    assert max(map(len, lines)) <= 80
    assert "stores 1,000 " in lines[-1]


def test_one_lease_and_one_block_are_not_several() -> None:
    now = reply()
    now.pool.blocks = now.pool.leases = 1
    assert "1 block, 0 B under 1 lease," in "\n".join(text(screen(now)))


def test_a_price_has_the_currency_that_the_user_has_written() -> None:
    written = {"20": "40.00", "20 €": "40.00 €", "$2.5": "$5.00", "2,50EUR": "5.00EUR", " 0 ": "0.00"}
    assert {text: Price.parse(text).times(2) for text in written} == written
    for text in ("", "free", "1e9", "2.5.1", "20\x1b[31m", "-1€", "1" * 17):
        with pytest.raises(ValueError, match="is not a price"):
            Price.parse(text)
