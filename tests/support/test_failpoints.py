"""Failpoints: off unless asked for, exact about which hit, and deadly when they should be."""

from __future__ import annotations

import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import structlog

import kvsidecar
from kvsidecar.errors import ConfigError, KVSidecarError
from kvsidecar.support import failpoints
from kvsidecar.support.failpoints import FailpointError, hit
from tests.e2e.disks import disk_daemon, evict_all, fetched, keep_on_disk
from tests.failpoints import active
from tests.harness import Gate, Rank, eventually
from tests.marks import processes


@pytest.fixture(autouse=True)
def off_afterwards() -> Iterator[None]:
    yield
    failpoints.configure("")


def outcomes(name: str, hits: int) -> list[str]:
    """What each hit raised, "" for nothing."""
    seen = []
    for _ in range(hits):
        try:
            hit(name)
            seen.append("")
        except FailpointError as error:
            seen.append(str(error))
    return seen


def test_off_by_default() -> None:
    assert outcomes("pool.pin_chunk", 3) == [""] * 3


def test_every_hit_raises_without_a_number() -> None:
    with active("pool.pin_chunk=raise(out of memory)"):
        assert outcomes("pool.pin_chunk", 2) == ["out of memory"] * 2
        assert outcomes("pool.reserve", 2) == [""] * 2
    assert outcomes("pool.pin_chunk", 1) == [""]


def test_only_the_named_hit_raises_counted_from_0() -> None:
    with active("pool.pin_chunk@2=raise(third);pool.pin_chunk@0=raise(first)"):
        assert outcomes("pool.pin_chunk", 4) == ["first", "", "third", ""]


def test_each_name_counts_for_itself_and_configure_starts_again() -> None:
    spec = "pool.reserve@1=raise(a);pool.pin_chunk@0=raise(b)"
    failpoints.configure(spec)
    assert outcomes("pool.reserve", 2) == ["", "a"]
    assert outcomes("pool.pin_chunk", 1) == ["b"]
    failpoints.configure(spec)
    assert outcomes("pool.reserve", 2) == ["", "a"]


def test_a_delay_sleeps_and_rules_apply_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("kvsidecar.support.failpoints.time.sleep", slept.append)
    with active("pool.reserve=delay(0.05);pool.reserve@1=raise(x);pool.reserve=delay(2)"):
        assert outcomes("pool.reserve", 3) == ["", "x", ""]
    assert slept == [0.05, 2, 0.05, 0.05, 2]


def test_a_text_may_hold_a_semicolon_and_blanks_do_not_matter() -> None:
    with active(" pool.reserve@0=raise(no; really) ;; pool.pin_chunk=raise() ; "):
        assert outcomes("pool.reserve", 2) == ["no; really", ""]
        with pytest.raises(FailpointError):
            hit("pool.pin_chunk")


def test_a_failpoint_error_is_not_one_of_ours() -> None:
    assert not issubclass(FailpointError, KVSidecarError)


def test_of_many_threads_exactly_one_makes_the_named_hit() -> None:
    together = threading.Barrier(8, timeout=30)

    def work() -> list[str]:
        together.wait()
        return outcomes("store.before_copy", 50)

    with active("store.before_copy@123=raise(once)"), ThreadPoolExecutor(8) as threads:
        seen = [text for future in [threads.submit(work) for _ in range(8)] for text in future.result()]
    assert (seen.count("once"), len(seen)) == (1, 400)


def test_what_is_held_goes_on_with_one_pass_each_and_holds_up_nothing_else(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    passed: queue.SimpleQueue[int] = queue.SimpleQueue()

    def pass_three_times() -> None:
        for number in range(3):
            hit("pool.reserve")
            passed.put(number)

    with active(f"pool.reserve={gate}"):
        held = threading.Thread(target=pass_three_times)
        gate.let_pass()
        held.start()
        assert passed.get(timeout=30) == 0
        hit("pool.pin_chunk")
        assert passed.empty()
        gate.let_pass(2)
        held.join(30)
    assert not held.is_alive()
    gate.close()


def test_a_delay_in_one_thread_does_not_hold_up_another(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeping, go_on = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        sleeping.set()
        assert go_on.wait(30)

    monkeypatch.setattr("kvsidecar.support.failpoints.time.sleep", sleep)
    with active("pool.reserve=delay(1)"):
        sleeper = threading.Thread(target=hit, args=["pool.reserve"])
        sleeper.start()
        assert sleeping.wait(30)
        hit("pool.pin_chunk")
        go_on.set()
        sleeper.join(30)
    assert not sleeper.is_alive()


@processes
def test_kill_ends_the_process_at_once() -> None:
    program = (
        "import atexit; from kvsidecar.support import failpoints\n"
        "atexit.register(print, 'handlers ran')\n"
        "failpoints.configure('store.before_seal@1=kill')\n"
        "failpoints.hit('store.before_seal'); print('alive', flush=True); failpoints.hit('store.before_seal')\n"
        "print('still alive')\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    # The log of a process that has not configured it goes to standard output too.
    said = [line for line in ran.stdout.splitlines() if "failpoint" not in line]
    assert (ran.returncode, said) == (-signal.SIGKILL, ["alive"])


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("pool.pin_chunks=kill", "'pool.pin_chunks' is not a failpoint: did you mean pool.pin_chunk?"),
        ("x=kill", "'x' is not a failpoint: there are pool.reserve, "),
        ("pool.reserve", "'pool.reserve' is not name=action or name@N=action: actions are"),
        ("pool.reserve=explode()", "'pool.reserve=explode()' has no known action: actions are raise(text)"),
        ("pool.reserve=raise", "is not name=action"),
        ("pool.reserve@x=kill", "is not name=action"),
        ("pool.reserve@-1=kill", "is not name=action"),
        ("pool.reserve=delay(soon)", "has no known action"),
        ("pool.reserve=delay(-1)", "has no known action"),
        ("pool.reserve=delay(nan)", "has no known action"),
        ("pool.reserve=hold()", "has no known action"),
        ("pool.reserve=hold(/dev/null)", "hold(path of a named pipe)"),
    ],
)
def test_a_wrong_spec_is_refused_and_changes_nothing(spec: str, said: str) -> None:
    with active("pool.reserve@1=raise(kept)"):
        hit("pool.reserve")
        with pytest.raises(ConfigError, match=re.escape(said)) as raised:
            failpoints.configure(f"pool.pin_chunk=kill;{spec}")
        assert str(raised.value).startswith("KVSIDECAR_FAILPOINTS: ")
        assert outcomes("pool.reserve", 1) == ["kept"]
        assert outcomes("pool.pin_chunk", 1) == [""]


def test_the_environment_turns_them_on_and_without_the_variable_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSIDECAR_FAILPOINTS", "pool.reserve=raise(x)")
    failpoints.configure_from_environment()
    assert outcomes("pool.reserve", 1) == ["x"]
    monkeypatch.delenv("KVSIDECAR_FAILPOINTS")
    failpoints.configure_from_environment()
    assert outcomes("pool.reserve", 1) == [""]


def test_the_log_says_which_rule_applied() -> None:
    with structlog.testing.capture_logs() as said, active("pool.reserve@1=delay(0)"):
        outcomes("pool.reserve", 3)
        outcomes("pool.pin_chunk", 1)
    wanted = {"name": "pool.reserve", "hit": 1, "action": "delay", "part": "failpoints"}
    assert said == [{"event": "failpoint", "log_level": "warning", **wanted}]


PACKAGE = Path(kvsidecar.__file__).parent
TESTS = Path(__file__).parents[1]


def test_the_code_has_every_point_once() -> None:
    """A typo in a name would be a point that no test can reach; of two places with one name, a test reaches either."""
    calls = [
        call
        for file in PACKAGE.rglob("*.py")
        if file.name != "failpoints.py"
        for call in re.findall(r"failpoints\.hit\((.*)\)", file.read_text())
    ]
    names = [name for call in calls for name in re.findall(r'"([^"]+)"', call)]
    assert all('"' in call for call in calls), "a name that is put together cannot be found by who looks for it"
    assert sorted(names) == sorted(failpoints.KNOWN)


def test_some_test_goes_wrong_at_every_point() -> None:
    texts = [file.read_text() for file in TESTS.rglob("*.py") if file.name != Path(__file__).name]
    unused = {name for name in failpoints.KNOWN if not any(name in text for text in texts)}
    assert not unused, "no test injects a fault there: write one, or delete the point"


@processes
def test_an_engines_ordinary_day_passes_every_point(short_dir: Path) -> None:
    everywhere = ";".join(f"{name}=delay(0)" for name in failpoints.KNOWN)
    with disk_daemon(short_dir, "--verify", "always", "--zero-freed", "on", KVSIDECAR_FAILPOINTS=everywhere) as daemon:
        rank = Rank(daemon.wait_ready())
        keep_on_disk(daemon, rank, "a")
        evict_all(rank)
        assert fetched(rank, "a").groups[0].hits == 1
        rank.client.clear(rank.namespace)
        eventually(lambda: daemon.metric("kvsidecar_zeroed_bytes_total") > 0)
        rank.close()
        assert daemon.terminate() == 0
        daemon.wait_log("stopped")
        passed = {line["name"] for line in daemon.log if line["event"] == "failpoint"}
    assert passed == failpoints.KNOWN.keys()
