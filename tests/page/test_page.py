"""The page of the HTTP port, in a real browser."""

from __future__ import annotations

import http.client
import json
from pathlib import Path

import pytest

from kvsidecar.protocol.as_json import message_json
from tests.harness import NAMESPACE, SECONDS, DaemonProcess, Gate, Rank, done, eventually, wait_until_ready
from tests.marks import processes
from tests.page.browser import Browser

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
PHONE, DESKTOP = (360, 740), (1280, 800)
PATHS = ("/", "/page.css", "/page.js")


def ask(daemon: DaemonProcess, path: str, method: str = "GET") -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(daemon.http.removeprefix("http://"), timeout=SECONDS)
    connection.request(method, path)
    reply = connection.getresponse()
    reply.read()
    connection.close()
    return reply


def test_it_shows_what_the_daemon_does(daemon: DaemonProcess, browser: Browser) -> None:
    browser.show_as(*DESKTOP)
    browser.open(daemon.http + "/")
    assert "No engine is attached." in browser.until("#engines-note", "No engine")
    browser.until("#state", "ready")
    browser.until("#pool-text", "0 B of 1 MiB used")
    browser.until("#devices", "host: works")
    with daemon.client() as client:
        rank = Rank(daemon, client=client, instance="newcomer")
        wait_until_ready(client)
        browser.until("#engines", "newcomer")
        rank.store("a", "b")
        assert rank.client.report_prompts_nowait(NAMESPACE, 4, 2)
        browser.until("#flow", "in 1 job")
        browser.until("#namespaces", "2 blocks")
        browser.until("#hits-total", "50% of 4 tokens so far")
        browser.until("#legend", "free")
        browser.until("#flow", "last ")
        begins = "return document.querySelector('#flow {}').getBoundingClientRect().left"
        assert browser.run(begins.format(".spark i")) == browser.run(begins.format(".span")), "the time is below them"
        used = daemon.get("/status")[1]["pool"]["used_bytes"]
        assert used > 0
        width = browser.run("return document.querySelector('#pool-bar .used').getBoundingClientRect().width")
        whole = browser.run("return document.querySelector('#pool-bar').getBoundingClientRect().width")
        assert width / whole == pytest.approx(used / (1 << 20), abs=0.02)
        rank.close()
    assert browser.complaints() == []


def test_what_is_saved_is_worth_what_the_reader_says(daemon: DaemonProcess, browser: Browser) -> None:
    browser.show_as(*DESKTOP)
    type_in = "const i = document.querySelector('{}'); i.value = '{}'; i.dispatchEvent(new Event('input'));"
    with daemon.client() as client:
        rank = Rank(daemon, client=client)
        done(rank.store("a", "b"))
        done(rank.load("a", "b", at=[5, 6]))
        browser.open(daemon.http + "/")
        browser.until("#saved-total", f"{2 * NAMESPACE.block_size} tokens so far")
        browser.complaints()  # of the daemon of an earlier test, which has ended under its page
        assert browser.text("#saved-worth") == ""
        for where, value in (("#prefill", 0.01), ("#price", "9 CHF")):
            browser.run(type_in.format(where, value))
        hours = 2 * NAMESPACE.block_size / 0.01 / 3600
        browser.until("#saved-total", f"of prefill, {9 * hours:.2f} CHF")
        browser.until("#saved-worth", "CHF/h")
        browser.open(daemon.http + "/")
        browser.until("#saved-total", f"of prefill, {9 * hours:.2f} CHF")  # it is kept
        for price, said in (("$9", f"${9 * hours:.2f}"), ("9,5", f"{9.5 * hours:.2f}"), ("much", "of prefill")):
            browser.run(type_in.format("#price", price))
            eventually(lambda said=said: browser.text("#saved-total").endswith(said))  # type: ignore[misc]
        rank.close()
    assert browser.complaints() == []


def test_a_phone_has_the_columns_that_fit(daemon: DaemonProcess, browser: Browser) -> None:
    shown = "return [...document.querySelectorAll('th')].filter((e) => e.offsetWidth).map((e) => e.innerText)"
    with daemon.client() as client:
        rank = Rank(daemon, client=client)
        for size, count in ((PHONE, 4), (DESKTOP, 8)):
            browser.show_as(*size)
            browser.open(daemon.http + "/")
            browser.until("#engines", "0/1")
            assert len(browser.run(shown)) == count
            rates = "document.querySelectorAll('td:nth-child(3), td:nth-child(4)')"
            busy = f"for (const e of {rates}) e.textContent = '999.9 MB/s';"
            wide = "const s = document.querySelector('.scroll'); return s.scrollWidth <= s.clientWidth"
            assert browser.run(busy + wide), "a column is out of sight"
        rank.close()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_nothing_is_wider_than_the_screen(
    daemon: DaemonProcess, browser: Browser, size: tuple[int, int], dark: bool
) -> None:
    browser.show_as(*size, dark=dark)
    with daemon.client() as client:
        rank = Rank(daemon, client=client, instance="a-deployment-with-a-name-that-does-not-end-" * 3)
        browser.open(daemon.http + "/")
        browser.until("#engines", "a-deployment")
        assert browser.run("return document.documentElement.scrollWidth") <= size[0]
        back = browser.run("return getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, back.removeprefix("rgb(").rstrip(")").split(","))) < 3 * 128) == dark
        rank.close()


def test_shares_are_shown_where_there_are_any(short_dir: Path, browser: Browser) -> None:
    browser.show_as(*PHONE)
    share = "[{name='chat', namespaces=['*'], guaranteed='512KiB', max='100%'}]"
    with DaemonProcess(short_dir, "--share", share) as daemon:
        rank = Rank(daemon.wait_ready())
        rank.store("a", "b")
        browser.open(daemon.http + "/")
        assert "chat" in browser.until("#shares", "512 KiB guaranteed, at most 1 MiB")
        assert browser.run("return document.querySelector('#shares-section').hidden") is False
        assert browser.run("return document.documentElement.scrollWidth") <= PHONE[0]
        rank.close()


def test_an_engines_name_is_text(daemon: DaemonProcess, browser: Browser) -> None:
    browser.show_as(*DESKTOP)
    with daemon.client() as client:
        rank = Rank(daemon, client=client, instance=HOSTILE)
        browser.open(daemon.http + "/")
        assert HOSTILE in browser.until("#engines", "onerror")
        assert browser.run("return document.title") == "kvsidecar ready"
        assert browser.run("return document.querySelectorAll('#engines img, #engines script').length") == 0
        rank.close()


def test_a_script_that_is_not_the_daemons_does_not_run(daemon: DaemonProcess, browser: Browser) -> None:
    browser.open(daemon.http + "/")
    browser.until("#state", "ready")
    added = "const s = document.createElement('script'); s.textContent = 'window.owned = 1'; document.head.append(s);"
    assert browser.run(added + "return window.owned === undefined")
    assert any("Content Security Policy" in each for each in browser.complaints())


def test_it_says_when_the_daemon_is_gone_and_shows_the_next_one(short_dir: Path, browser: Browser) -> None:
    with DaemonProcess(short_dir) as first:
        first.wait_ready()
        browser.open(first.http + "/")
        browser.until("#state", "ready")
        port = first.http.rpartition(":")[2]
        first.process.kill()
        first.process.wait()
        browser.until("#state", "lost")
        browser.until("#lost", "No answer for")
        grey = "return getComputedStyle(document.querySelector('main')).filter"
        assert browser.run(grey) == "grayscale(1)", "rates of a daemon that is gone are not of now"
    with DaemonProcess(short_dir, "--http-port", port) as second:
        second.wait_ready()
        browser.until("#state", "ready")
        assert browser.run("return document.querySelector('#lost').hidden")
        assert browser.run(grey) == "none"
    browser.complaints()


def test_a_failed_pool_does_not_look_like_an_empty_one(short_dir: Path, browser: Browser) -> None:
    with DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS="pool.pin_chunk=raise(no more pages)") as daemon:
        browser.open(daemon.http + "/")
        browser.until("#state", "failed")
        browser.until("#reason", "no more pages")
        browser.until("#pool-text", "0 B of 1 MiB pinned")
        assert browser.text("#legend") == ""
        assert "gradient" in browser.run("return getComputedStyle(document.querySelector('#pool-bar')).backgroundImage")


@processes
def test_before_the_daemon_is_built_it_says_so(short_dir: Path, gate: Gate) -> None:
    with DaemonProcess(short_dir, until="starting", KVSIDECAR_FAILPOINTS=f"start.load={gate}") as daemon:
        daemon.wait_log("failpoint")
        assert daemon.get("/status") == (503, {"reason": "the daemon is starting"})
        assert ask(daemon, "/").status == 200


@pytest.mark.parametrize("path", PATHS)
def test_each_part_forbids_what_the_page_does_not_need(daemon: DaemonProcess, path: str) -> None:
    reply = ask(daemon, path)
    assert reply.status == 200
    policy = dict(rule.split(" ", 1) for rule in str(reply.getheader("Content-Security-Policy")).split("; "))
    assert policy.pop("default-src") == "'none'"
    assert set(" ".join(policy.values()).split()) == {"'self'", "'none'", "data:"}
    assert reply.getheader("X-Content-Type-Options") == "nosniff"
    assert ask(daemon, path, "POST").status == 405


@processes
def test_it_can_be_turned_off(short_dir: Path) -> None:
    with DaemonProcess(short_dir, "--http-page", "off") as daemon:
        assert {ask(daemon, path).status for path in PATHS} == {404}
        assert ask(daemon, "/ready").status in (200, 503)


def test_a_daemon_that_others_may_use_names_no_engine(short_dir: Path, browser: Browser) -> None:
    with DaemonProcess(short_dir, "--socket-mode", "0660") as daemon:
        rank = Rank(daemon.wait_ready(), instance="somebody")
        done(rank.store("a", "b"))
        browser.open(daemon.http + "/")
        browser.until("#engines-note", "1 attached. Their names are hidden here")
        browser.until("#pool-details", "2 blocks")
        browser.until("#flow", "in 1 job")
        browser.until("#devices", "host: works")
        assert "somebody" not in browser.text("body")
        rank.close()
    browser.complaints()


@processes
def test_status_has_the_totals_for_all_and_shares_for_nobody_else(short_dir: Path) -> None:
    share = "[{name='chat', namespaces=['*'], guaranteed='512KiB', disk_guaranteed='1MiB'}]"
    flags = ["--socket-mode", "0660", "--share", share, "--disk-dir", str(short_dir / "disk"), "--disk-size", "16MiB"]
    with DaemonProcess(short_dir, *flags) as daemon:
        rank = Rank(daemon.wait_ready(), instance="somebody")
        done(rank.store("a", "b"))
        with daemon.client() as client:
            eventually(lambda: client.status().tiers[0].shares, "the disk works")
            whole = message_json(client.status())  # as an admin sees it
        assert whole["shares"][0]["name"] == whole["tiers"][0]["shares"][0]["name"] == "chat"
        code, shown = daemon.get("/status")
        assert (code, shown["partial"], shown["shares"], shown["tiers"][0]["shares"]) == (200, True, [], [])
        assert shown["pool"] == whole["pool"]
        assert shown["jobs"]["stores_done"] == 1
        assert "chat" not in json.dumps(shown)
        assert "somebody" not in json.dumps(shown)
        rank.close()
