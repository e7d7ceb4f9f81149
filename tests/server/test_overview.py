"""What the page shows, and that `kvsidecar top` shows the same."""

from __future__ import annotations

import io
import json
from collections.abc import Generator
from typing import Any

import pytest
from rich.console import Console

from kvsidecar.cli.operate.top_view import Screen, render
from kvsidecar.cli.status_view import pool_bar
from kvsidecar.protocol.status_figures import Sample, rates_between
from kvsidecar.server.overview import (
    FORGOTTEN_SECONDS,
    HISTORY,
    SAMPLE_SECONDS,
    SHARES_SHOWN,
    SHOWN,
    TEXT,
    Device,
    Overview,
    overview,
)
from kvsidecar.support.tasks import in_one
from kvsidecar.support.units import GiB, MiB, format_size
from kvsidecar.v1 import sidecar_pb2 as pb

GPU = "GPU-1a2b3c4d-0000-1111-2222-333344445555"


def reply(*, ranks: int = 2, seconds: int = 0, **readiness: Any) -> pb.StatusReply:
    """Of a daemon that has run for some seconds more than another one."""
    made = pb.StatusReply(
        epoch=1,
        version="1.0",
        backend="cuda",
        uptime_seconds=7200 + seconds,
        readiness=pb.Readiness(**{"state": pb.Readiness.STATE_READY, **readiness}),
        pool=pb.PoolStatus(
            total_bytes=64 * GiB, used_bytes=32 * GiB, leased_bytes=8 * GiB, reserved_bytes=GiB, rounding_bytes=GiB,
            blocks=1000, leases=3,
            page_kind="thp", carrier="systemd", kept_blocks=7, evicted_bytes=seconds * 3 * MiB,
        ),
        jobs=pb.JobsStatus(
            queued=4, running=2, stores_done=100 + seconds, loads_done=50, stored_bytes=(5 + seconds) * GiB,
            loaded_bytes=(7 + 2 * seconds) * GiB, loaded_tokens=1000 * seconds,
        ),
        lookups=pb.LookupsStatus(hits=900 + 30 * seconds, misses=100 + 10 * seconds),
        refusals={"pool_full": 5 + seconds},
        tiers=[pb.TierStatus(name="disk", capacity_bytes=1024 * GiB, used_bytes=256 * GiB, blocks=9, read_bytes=GiB)],
        shares=[
            pb.ShareStatus(name="chat", used_bytes=16 * GiB, guaranteed_bytes=8 * GiB),
            pb.ShareStatus(name="batch", used_bytes=GiB, max_bytes=32 * GiB),
        ],
    )  # fmt: skip
    for number in range(ranks):
        made.ranks.add(
            session=number, instance=f"engine-{number}", rank=number, world_size=9, device=GPU, pid=77,
            stored_bytes=(seconds + 1) * (number + 1) * GiB, attached_seconds=60,
        )  # fmt: skip
    return made


def shown_by_top(now: pb.StatusReply, before: pb.StatusReply) -> str:
    console = Console(file=io.StringIO(), width=200, height=60)
    rates = rates_between(Sample(10.0, before), Sample(12.0, now))
    assert rates is not None
    console.print(render(Screen(now, rates, ((rates.stored_bytes, rates.loaded_bytes),), None), 200, 60))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_page_and_top_show_the_same_figures() -> None:
    before, now = reply(), reply(seconds=2)
    rates = rates_between(Sample(10.0, before), Sample(12.0, now))
    assert rates is not None
    page = overview(now, rates, [(2.0, rates)], [], names=True)
    top = shown_by_top(now, before)
    texts = [page["state"], page["version"], page["uptime"], page["pool"]["text"], *page["pool"]["details"]]
    texts += [each[field] for each in page["flow"] for field in ("rate", "total")]
    texts += [
        page["hits"]["now"],
        page["hits"]["total"],
        page["saved"]["text"],
        page["jobs"],
        f"evicting {page['evicting']}",
    ]
    texts += [each[field] for each in page["tiers"] for field in ("text", "details")]
    texts += [each[field] for each in page["shares"] for field in ("name", "details")]
    texts += [f"{each['reason']} {each['count']} (+{each['new']})" for each in page["refused"]]
    texts += [str(each[field]) for each in page["engines"] for field in each]
    assert len(texts) > 30
    assert [text for text in texts if text not in top] == []
    assert page["hits"]["now"] == "75%"
    assert page["flow"][0]["rate"] == "1.1 GB/s"
    assert page["flow"][0] | {"history": [1.0], "seconds": 2, "highest": "at most 1.1 GB/s"} == page["flow"][0]
    assert (page["hits"]["history"], page["hits"]["seconds"]) == ([0.75], 2)
    assert (page["saved"]["tokens"], page["saved"]["rate"]) == (2000, 1000)


def test_the_parts_of_the_bar_are_those_of_the_pool() -> None:
    shares = {each["name"]: each["share"] for each in overview(reply(), None, [], [], names=True)["pool"]["parts"]}
    assert shares == {"leased": 0.125, "used": 0.375, "reserved": 0.0156, "quarantined": 0.0, "rounding": 0.0156}


def test_a_share_is_a_part_of_the_pool() -> None:
    shown = overview(reply(), None, [], [], names=True)["shares"]
    assert shown == [
        {"name": "chat", "share": 0.25, "details": "16 GiB used, 8 GiB guaranteed"},
        {"name": "batch", "share": 0.0156, "details": "1 GiB used, 0 B guaranteed, at most 32 GiB"},
    ]


def test_a_namespace_is_a_part_of_the_pool_with_its_hits() -> None:
    now = reply()
    now.namespaces.add(
        namespace=pb.Namespace(model="m" * 200), blocks=3, bytes=16 * GiB, hits=1, misses=3, differs=["dtype: fp8"]
    )
    (shown,) = overview(now, None, [], [], names=True)["namespaces"]
    assert (len(shown["name"]), shown["share"]) == (TEXT, 0.25)
    assert shown["details"] == "3 blocks, 16 GiB, hits 25% of 4, differs: dtype: fp8"
    assert overview(now, None, [], [], names=False)["namespaces"] == []


def test_the_pin_is_shown_while_it_goes_on() -> None:
    readiness = {"state": pb.Readiness.STATE_PINNING, "pool_bytes": 64 * GiB, "pinned_bytes": 16 * GiB}
    shown = overview(reply(**readiness, pin_bytes_per_second=2e9, eta_seconds=24.0), None, [], [], names=True)
    assert shown["state"] == "pinning"
    assert shown["pin"] == {"share": 0.25, "text": "25%, 2 GB/s, 24 s left"}
    assert overview(reply(), None, [], [], names=True)["pin"] is None


@pytest.mark.parametrize(
    ("state", "pinned", "kept", "usable"),
    [
        (pb.Readiness.STATE_STARTING, 0, False, False),
        (pb.Readiness.STATE_PINNING, 16 * GiB, False, False),
        (pb.Readiness.STATE_PINNING, 16 * GiB, True, True),
        (pb.Readiness.STATE_READY, 64 * GiB, False, True),
        (pb.Readiness.STATE_DRAINING, 64 * GiB, False, True),
        (pb.Readiness.STATE_DRAINING, 16 * GiB, False, False),
        (pb.Readiness.STATE_FAILED, 16 * GiB, False, False),
    ],
)
def test_a_pool_that_holds_no_blocks_is_not_an_empty_one(state: Any, pinned: int, kept: bool, usable: bool) -> None:
    now = reply(state=state, pool_bytes=64 * GiB, pinned_bytes=pinned, serves_kept=kept)
    pool = overview(now, None, [], [], names=True)["pool"]
    assert (bool(pool["parts"]), bool(pool["details"])) == (usable, usable)
    wanted = "32 GiB of 64 GiB used" if usable else f"{format_size(pinned)} of 64 GiB pinned"
    assert pool["text"] == wanted
    console = Console(file=io.StringIO(), width=100)
    console.print(pool_bar(now))
    assert isinstance(console.file, io.StringIO)
    assert pool["text"] in console.file.getvalue()
    assert ("░" in console.file.getvalue()) == usable


def test_engines_are_counted_but_not_named_to_clients_that_may_not_see_them() -> None:
    shown = overview(reply(), None, [], [Device(GPU, "", 0)], names=False)
    assert (shown["engines"], shown["attached"], shown["names"], shown["shares"]) == ([], 2, False, [])
    assert "engine-" not in json.dumps(shown)


def test_the_answer_is_bounded() -> None:
    many = reply(ranks=500)
    for rank in many.ranks:
        rank.instance, rank.device = "x" * 100_000, "y" * 100_000
    for _ in range(1000):
        many.shares.add(name="z" * 64)
    rates = rates_between(Sample(10.0, reply()), Sample(12.0, reply(seconds=2)))
    assert rates is not None
    shown = overview(many, None, [(1.0, rates)] * HISTORY, [], names=True)
    assert len(shown["engines"]) == SHOWN
    assert len(shown["shares"]) == SHARES_SHOWN
    assert shown["attached"] == 500
    assert len(shown["engines"][0]["engine"]) == TEXT
    assert len(json.dumps(shown)) < 32 << 10


def test_a_device_that_is_down_says_why() -> None:
    shown = overview(reply(), None, [], [Device(GPU, "the copier was killed", 2)], names=True)
    assert shown["devices"] == [{"name": "GPU-1a2b3c4d", "down": "the copier was killed", "deaths": 2}]


class Daemon:
    """Replies of a daemon that stores 1 GiB a second, at times that a test chooses."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reads = 0
        self.overview = Overview(self.read, list, lambda: self.now)

    def read(self) -> Generator[None, None, tuple[pb.StatusReply, bool]]:
        self.reads += 1
        yield
        return reply(seconds=int(self.now)), True

    def at(self, seconds: float) -> dict[str, Any]:
        self.now = seconds
        shown: dict[str, Any] = json.loads(in_one(self.overview.steps()))
        return shown


def test_the_daemon_is_read_once_a_second_however_many_look() -> None:
    daemon = Daemon()
    for _ in range(100):
        daemon.at(0.5 * SAMPLE_SECONDS)
    assert daemon.reads == 1
    daemon.at(2 * SAMPLE_SECONDS)
    assert daemon.reads == 2


def test_rates_need_two_looks_and_end_when_nobody_looks() -> None:
    daemon = Daemon()
    assert daemon.at(0)["flow"][0]["rate"] == "-"
    assert daemon.at(2)["flow"][0]["rate"] == "1.1 GB/s"
    assert daemon.at(4)["flow"][0]["history"] == [1.0, 1.0]
    late = daemon.at(4 + FORGOTTEN_SECONDS + 1)
    assert (late["flow"][0]["rate"], late["flow"][0]["history"]) == ("-", [])


def test_the_history_is_bounded() -> None:
    daemon = Daemon()
    for second in range(2 * HISTORY):
        shown = daemon.at(second)
    assert len(shown["flow"][0]["history"]) == HISTORY
