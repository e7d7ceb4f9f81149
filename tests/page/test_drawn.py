"""What the page draws of /status, and that `kvsidecar top` shows the same. In a real browser, without a daemon."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from kvsidecar.cli.operate.top_view import Screen, render
from kvsidecar.cli.status_figures import Sample, namespace_names, rates_between
from kvsidecar.cli.status_view import pool_bar
from kvsidecar.protocol.as_json import message_json
from kvsidecar.server.http import PAGE, SHARED
from kvsidecar.support.units import GiB, MiB, format_size
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.harness import eventually
from tests.page.browser import Browser

GPU = "GPU-1a2b3c4d-0000-1111-2222-333344445555"
FORGOTTEN_SECONDS, COLUMN_SECONDS, HISTORY, RANKS, SPACES, TEXT = 10, 5, 60, 32, 8, 96
"""As in page.js."""
TORN = r"""
const torn = [], range = new Range();
const walk = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  for (const found of walk.currentNode.data.matchAll(/[\d.]+\s([kKMGT]?i?B(\/s)?|h|min|s)\b/g)) {
    range.setStart(walk.currentNode, found.index);
    range.setEnd(walk.currentNode, found.index + found[0].length);
    if (new Set([...range.getClientRects()].map((each) => each.top)).size > 1) torn.push(found[0]);
  }
}
return torn;
"""
"""Numbers with a unit of which a reader sees the two on two lines."""


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
            quarantined_bytes=2 * GiB, unzeroed_bytes=3 * MiB, blocks=1000, leases=3, eviction="rhythm",
            numa_nodes=[0, 1], page_kind="thp", carrier="systemd", kept_blocks=7, dropped_blocks=2,
            evicted_bytes=seconds * 3 * MiB,
        ),
        jobs=pb.JobsStatus(
            queued=4, running=2, stores_done=1 + seconds * 1000, loads_done=1, stored_bytes=(5 + seconds) * GiB,
            loaded_bytes=(7 + 2 * seconds) * GiB, loaded_tokens=1000 * seconds,
        ),
        lookups=pb.LookupsStatus(loaded_tokens=900 + 30 * seconds, needed_tokens=1000 + 40 * seconds, hits=1),
        refusals={"pool_full": 5 + seconds, "quota": 9},
        tiers=[
            pb.TierStatus(
                name="disk", capacity_bytes=1024 * GiB, used_bytes=256 * GiB, blocks=9, read_bytes=GiB, kept_blocks=4,
                failures=1, write_budget_bytes=0,
            ),
            pb.TierStatus(name="cluster", off="no master"),
        ],
        shares=[
            pb.ShareStatus(name="chat", used_bytes=16 * GiB, guaranteed_bytes=8 * GiB),
            pb.ShareStatus(name="batch", used_bytes=GiB, max_bytes=32 * GiB),
        ],
        totals=pb.StatusTotals(ranks=ranks, attached_ranks=ranks),
    )  # fmt: skip
    for number in range(ranks):
        made.ranks.add(
            session=number, instance=f"engine-{number}", rank=number, world_size=9, device=GPU, pid=77,
            stored_bytes=(seconds + 1) * (number + 1) * GiB, attached_seconds=60 + seconds, idle=number == 1,
        )  # fmt: skip
    return made


class Page:
    """The page. It asks nobody: what it shows is what a test gives it."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        browser.show_as(1280, 800)
        browser.open((PAGE / "index.html").as_uri())
        eventually(self.asked, "its script runs")
        browser.complaints()  # of the page of an earlier test, whose daemon has ended
        browser.run("sessionStorage.clear()")  # of an earlier test

    def again(self) -> Page:
        """The same after a reload."""
        self._browser.run("window.old = true; location.reload()")
        eventually(lambda: self.run("return !window.old && window.asked"), "its script runs")
        return self

    def run(self, script: str) -> Any:
        return self._browser.run(script)

    def show(self, *replies: pb.StatusReply) -> Page:
        for each in replies:
            self._browser.run(f"show({json.dumps(message_json(each))})")
        return self

    def show_as(self, width: int, height: int) -> None:
        self._browser.show_as(width, height)

    def asked(self) -> Any:
        """What the page asks for, and how."""
        return self._browser.run("return window.asked")

    def texts(self, selector: str) -> list[str]:
        """What a reader sees of all elements that match."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})]"
        shown = self._browser.run(f"return {found}.map((each) => each.innerText)")
        return [str(each).replace("\N{NO-BREAK SPACE}", " ") for each in shown]

    def text(self, selector: str) -> str:
        (only,) = self.texts(selector)
        return only

    def sizes(self, selector: str, side: str = "width") -> list[float]:
        """Percentages of the whole, of all elements that match."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return [float(each) for each in self._browser.run(f"return {found}.map((i) => parseFloat(i.style.{side}))")]


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with browser.beginning_with("window.fetch = (...asked) => (window.asked = asked, new Promise(() => {}))"):
        yield Page(browser)
    assert browser.complaints() == []


def shown_by_top(now: pb.StatusReply, before: pb.StatusReply) -> str:
    console = Console(file=io.StringIO(), width=200, height=60)
    rates = rates_between(Sample(10.0, before), Sample(12.0, now))
    assert rates is not None
    console.print(render(Screen(now, rates, ((rates.stored_bytes, rates.loaded_bytes),), None), 200, 60))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_page_and_top_show_the_same_figures(page: Page) -> None:
    before, now = reply(), reply(seconds=2)
    page.show(before, now)
    top = shown_by_top(now, before)
    texts = [page.text("#state"), page.text("#about"), *page.text("#pool-details").split("; ")]
    single = ("#pool-text", "#hits-now", "#hits-total", "#saved-now", "#saved-total", "#jobs", "#evicting")
    texts += [page.text(each) for each in single]
    for each in ("#flow b", "#flow span.quiet", "#tiers p", "#shares b", "#shares p", "#refused li", "#engines td"):
        found = page.texts(each)
        assert len(found) >= 2
        texts += found
    assert [text for text in texts if text not in top] == []
    assert len(texts) > 40
    assert page.text("#hits-now") == "75%"
    assert page.texts("#flow b") == ["1.1 GB/s", "2.1 GB/s"]
    assert page.texts("#flow .span") == ["last 2 s\nat most 1.1 GB/s", "last 2 s\nat most 2.1 GB/s"]
    assert page.sizes("#hits-spark .spark i", "height") == [75]
    assert page.texts("#refused li") == ["quota 9", "pool_full 7 (+2)"]


def test_it_asks_for_a_reading_that_all_who_look_share(page: Page) -> None:
    path, how = page.asked()
    assert (path, how["headers"], how["cache"]) == ("status", {"Cache-Control": SHARED}, "no-store")


def test_the_parts_of_a_bar_are_those_of_the_pool(page: Page) -> None:
    now = reply()
    page.show(now)
    assert page.sizes("#pool-bar i") == pytest.approx([37.5, 12.5, 1.5625, 3.125, 1.5625], abs=0.01)
    parts = ["used 50%", "of which leased 13%", "reserved 2%", "quarantined 3%", "rounding 2%", "free 44%"]
    assert page.texts("#legend li") == parts
    assert page.sizes("#shares .bar i") == pytest.approx([25, 1.5625], abs=0.01)
    assert page.sizes("#tiers .bar i") == [25, 0]


def test_a_namespace_is_a_part_of_the_pool_with_its_hits(page: Page) -> None:
    now = reply()
    now.namespaces.add(
        namespace=pb.Namespace(model="m" * 200),
        blocks=3000,
        bytes=16 * GiB,
        loaded_tokens=1,
        needed_tokens=4,
        differs=["dtype: fp8"],
    )
    page.show(now)
    assert page.text("#namespaces b") == "m" * (TEXT - 1) + "…"
    assert page.sizes("#namespaces .bar i") == [25]
    assert page.text("#namespaces p") == "3,000 blocks, 16 GiB, hits 25% of 4 tokens, differs: dtype: fp8"


def test_namespaces_have_the_names_that_kvsidecar_status_shows(page: Page) -> None:
    now = reply()
    for model, served, digest in (("A", "chat", "0a"), ("B", "chat", "0b"), ("C", "code", "0c"), ("D", "", "0d")):
        now.namespaces.add(namespace=pb.Namespace(model=model), served_name=served, digest=digest)
    page.show(now)
    assert page.texts("#namespaces b") == namespace_names(now.namespaces) == ["chat #0a", "chat #0b", "code", "D"]


def test_the_pin_is_shown_while_it_goes_on(page: Page) -> None:
    readiness = {"state": pb.Readiness.STATE_PINNING, "pool_bytes": 64 * GiB, "pinned_bytes": 16 * GiB}
    page.show(reply(**readiness, pin_bytes_per_second=2e9, eta_seconds=24.0))
    assert (page.text("#state"), page.text("#pin")) == ("pinning", "pinned 25%, 2 GB/s, 24 s left")
    assert page.sizes("#pin i") == [25]
    assert page.show(reply()).texts("#pin:not([hidden])") == []


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
def test_a_pool_that_holds_no_blocks_is_not_an_empty_one(
    page: Page, state: Any, pinned: int, kept: bool, usable: bool
) -> None:
    now = reply(state=state, pool_bytes=64 * GiB, pinned_bytes=pinned, serves_kept=kept)
    page.show(now)
    for each in ("#pool-bar i", "#legend li"):
        assert bool(page.texts(each)) == usable
    assert bool(page.text("#pool-details")) == usable
    wanted = "32 GiB of 64 GiB used" if usable else f"{format_size(pinned)} of 64 GiB pinned"
    assert page.text("#pool-text") == wanted
    console = Console(file=io.StringIO(), width=100)
    console.print(pool_bar(now))
    assert isinstance(console.file, io.StringIO)
    assert wanted in console.file.getvalue()
    assert ("░" in console.file.getvalue()) == usable


def test_engines_are_counted_where_they_are_not_named(page: Page) -> None:
    now = reply(ranks=0)
    now.partial, now.totals.attached_ranks = True, 2
    note = page.show(now).text("#engines-note")
    assert note.startswith("2 attached. Their names are hidden here")


def test_the_busiest_are_shown_and_no_text_is_long(page: Page) -> None:
    before, now = reply(ranks=500), reply(ranks=500, seconds=2)
    for rank in (*before.ranks, *now.ranks):
        rank.instance, rank.device = f"{rank.rank:03}" + "x" * 1000, "y" * 1000
    for _ in range(1000):
        now.shares.add(name="z" * 64)
        now.namespaces.add(namespace=pb.Namespace(model="m"))
    page.show(before, now)
    names = page.texts("#engines td:first-child")
    assert [int(name[:3]) for name in names] == list(range(500 - RANKS, 500))
    assert {*map(len, names), *map(len, page.texts("#engines td:nth-child(6)"))} == {TEXT}
    assert page.text("#engines-note") == f"and {500 - RANKS} less busy: kvsidecar engines lists all"
    assert (len(page.texts("#shares b")), len(page.texts("#namespaces b"))) == (SPACES, SPACES)


def test_a_device_that_is_down_says_why(page: Page) -> None:
    now = reply()
    now.devices.add(uuid=GPU, down="the copier was killed", copier_deaths=2)
    now.devices.add(uuid="host")
    page.show(now)
    assert page.texts("#devices li") == ["GPU-1a2b3c4d: the copier was killed, its copier died 2x", "host: works"]
    assert page.text("#devices .bad").startswith("GPU")


def test_rates_need_two_readings_of_one_daemon_and_end_when_nobody_looks(page: Page) -> None:
    assert page.show(reply()).texts("#flow b") == ["-", "-"]
    assert page.show(reply(seconds=2)).texts("#flow b") == ["1.1 GB/s", "2.1 GB/s"]
    page.show(reply(seconds=4), reply(seconds=4))
    assert page.texts("#flow b") == ["1.1 GB/s", "2.1 GB/s"], "the same reading again"
    assert page.sizes("#flow .row:first-child .spark i", "height") == [100], "a column that is not full"
    late = reply(seconds=4 + FORGOTTEN_SECONDS + 1)
    assert page.show(late).texts("#flow b") == ["-", "-"]
    page.show(reply(seconds=16))
    assert page.texts("#flow b") == ["1.1 GB/s", "2.1 GB/s"]
    other = reply(seconds=17)
    other.epoch = 2
    assert (page.show(other).texts("#flow b"), page.texts("#flow .spark i")) == (["-", "-"], [])


def test_the_history_is_bounded(page: Page) -> None:
    page.show(*(reply(seconds=second) for second in range(0, 2 * HISTORY * COLUMN_SECONDS, COLUMN_SECONDS)))
    assert len(page.texts("#hits-spark .spark i")) == page.run("return charts.columns.length") == HISTORY
    assert page.run("return readings.length") <= COLUMN_SECONDS + 2, "of which each may have a megabyte"
    assert page.text("#hits-spark .span") == "last 5 min\nof 100 %"


def test_a_rate_is_an_average_that_a_single_second_does_not_make_jump(page: Page) -> None:
    """Of the window, in which one of the readings is far from the others."""
    replies = [reply(seconds=second) for second in range(20)]
    for each in replies[10:]:
        each.jobs.stored_bytes += 5 * GiB
    page.show(*replies[:10])
    assert page.texts("#flow b")[0] == "1.1 GB/s"
    page.show(replies[10])
    assert page.texts("#flow b")[0] == "2.1 GB/s", "not 6.1: a fifth of it"
    page.show(*replies[11:15])
    assert page.texts("#flow b")[0] == "2.1 GB/s"
    page.show(*replies[15:])
    assert page.texts("#flow b")[0] == "1.1 GB/s"
    heights = page.sizes("#flow .row:first-child .spark i", "height")
    assert heights == pytest.approx([50, 100, 50, 50]), "one for each five seconds, of which the last one has four"


def test_a_chart_goes_on_where_nobody_looked_and_after_a_reload(page: Page) -> None:
    page.show(reply(), reply(seconds=5), reply(seconds=30))
    assert len(page.texts("#flow .row:first-child .spark i")) == 6, "the average of what nobody saw"
    again = page.again().show(reply(seconds=32))
    assert len(again.texts("#flow .row:first-child .spark i")) == 7
    assert again.texts("#flow .row:first-child .span") == ["last 32 s\nat most 1.1 GB/s"]
    assert again.texts("#flow b") == ["-", "-"]
    other = reply(seconds=40)
    other.epoch = 2
    assert page.again().show(other).texts("#flow .spark i") == []
    again.run("sessionStorage.setItem('kvsidecar charts 1', 'nonsense')")
    assert page.again().show(reply(seconds=41)).texts("#flow .spark i") == []


def test_before_anything_is_known_nothing_is_drawn(page: Page) -> None:
    is_seen = "return document.querySelector('main').checkVisibility()"
    assert (page.text("#state"), page.run(is_seen)) == ("asking", False)
    assert page.show(reply()).run(is_seen)


def test_one_of_a_kind_is_one(page: Page) -> None:
    now = reply()
    now.pool.blocks = now.pool.leases = now.pool.kept_blocks = 1
    now.pool.carrier, now.pool.cold_start_reason = "directory", ""
    now.tiers[0].blocks = now.tiers[0].failures = 1
    page.show(now)
    top = shown_by_top(now, reply())
    for text in ("1 block, ", "under 1 lease, ", "kept 1 block of an earlier daemon", "1 shard, ", "1 failure"):
        assert text in page.text("#pool-details") + page.texts("#tiers p")[1]
        assert text in top


def test_no_line_ends_between_a_number_and_its_unit(page: Page) -> None:
    readiness = {"state": pb.Readiness.STATE_PINNING, "pool_bytes": 64 * GiB, "pinned_bytes": 16 * GiB}
    page.run("document.querySelector('#prefill').value = 8")
    page.show(reply(), reply(**readiness, seconds=29, pin_bytes_per_second=2e9, eta_seconds=4000.0, serves_kept=True))
    torn = set()
    for width in range(320, 480, 5):
        page.show_as(width, 800)
        torn.update(page.run(TORN))
    assert torn == set()
