"""A copier may die at any instant: its copies are over, its ranks attach again, the daemon and the cache live on."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from kvsidecar.client import Blocks, Outcome
from kvsidecar.copier.copiers import START_ATTEMPTS
from tests.e2e.endings import attached_again, deaths, job_ends, no_leaks, quick, until_queued, works
from tests.e2e.leftovers import nothing_is_left_of
from tests.e2e.policies import needs_root
from tests.harness import FIRST, SECONDS, DaemonProcess, Gate, Rank, done, eventually, hashes
from tests.marks import both_protocols, promise

pytestmark = both_protocols

CAUSES = {
    "a lost device": (f"copy.device_lost@{2 * FIRST + 1}=raise(Xid 79)", "Xid 79"),
    "a bug in its thread": (f"load.in_flight@{FIRST}=raise(a bug)", "a bug"),
    "a copy that hangs": (f"load.in_flight@{FIRST}=delay(3600)", "a load has been in flight"),
    "a thread that hangs": (f"copy.device_lost@{2 * FIRST + 1}=delay(3600)", "has been in one call"),
    "the kernel": (f"load.in_flight@{FIRST}=kill", "SIGKILL"),
}
"""Of a load after one store: the failpoint, and what the daemon says."""


def alive(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has waited for yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill(daemon: DaemonProcess) -> None:
    (copier,) = daemon.copiers()
    os.kill(copier, signal.SIGKILL)


@promise("only the jobs of that device fail; its copier is replaced, the cache stays")
@pytest.mark.parametrize("cause", CAUSES)
def test_a_load_fails_settled_and_what_was_stored_is_still_there(short_dir: Path, cause: str, local: bool) -> None:
    failpoint, reason = CAUSES[cause]
    # Longer than a machine stands still: the start of a copier, and a copy that does not hang, are measured by it too.
    stuck_after = ("--stuck-after", "3") if "hangs" in cause else ()
    with no_leaks(), DaemonProcess(short_dir, *stuck_after, KVSIDECAR_FAILPOINTS=failpoint, local=local) as daemon:
        rank = Rank(daemon.wait_ready(), client=quick(daemon.socket, local))
        done(rank.store("a"))
        load = rank.client.load([Blocks(0, hashes("a"), [5])])
        (end,) = job_ends(rank.client, 1)
        assert (end.job, end.outcome, end.reason) == (load, Outcome.FAILED, "device_lost")
        assert reason in end.error
        assert reason in daemon.wait_log("a copier is down")["reason"]
        attached_again(rank, daemon)
        assert deaths(daemon) == 1
        assert rank.hits("a") == 1, "the cache outlives a copier"
        works(rank, "a")
        assert rank.client.poll() == [], "a job was reported twice"
        rank.close()
        nothing_is_left_of(daemon)
        assert daemon.terminate() == 0


@pytest.mark.parametrize("direction", ["store", "load"])
def test_the_jobs_of_a_killed_copier_give_back_what_they_held(
    short_dir: Path, gate: Gate, direction: str, local: bool
) -> None:
    failpoint = f"{direction}.in_flight@{FIRST}={gate}"
    with no_leaks(), DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=failpoint, local=local) as daemon:
        rank = Rank(daemon.wait_ready(), client=quick(daemon.socket, local))
        if direction == "load":
            done(rank.store("a"))
        for number in range(3):  # one runs, two wait
            blocks = [Blocks(0, hashes("a" if direction == "load" else number), [5])]
            getattr(rank.client, direction)(blocks)
        until_queued(daemon, direction, 2)
        kill(daemon)
        assert {end.reason for end in job_ends(rank.client, 3)} == {"device_lost"}
        attached_again(rank, daemon)
        rank.close()
        nothing_is_left_of(daemon)


@promise("a new copier pins the pool, the ranks attach again, the cache stays")
def test_an_idle_copier_is_replaced_and_ready_names_its_device_meanwhile(short_dir: Path, local: bool) -> None:
    with DaemonProcess(short_dir, local=local) as daemon:
        rank = Rank(daemon.wait_ready(), client=quick(daemon.socket, local))
        done(rank.store("a"))
        (copier,) = daemon.copiers()
        os.kill(copier, signal.SIGSTOP)  # so that its successor does not pin before it was looked
        answers: list[tuple[int, str]] = []

        def named() -> bool:
            code, body = daemon.get("/ready")
            answers.append((code, body["reason"]))
            return code == 503

        os.kill(copier, signal.SIGKILL)
        eventually(lambda: named() or copier not in daemon.copiers())
        attached_again(rank, daemon)
        assert all("host: the copier has ended (SIGKILL)" in reason for code, reason in answers if code == 503)
        assert daemon.get("/ready") == (200, {**daemon.get("/ready")[1], "ready": True, "reason": ""})
        assert daemon.copiers() != [copier]
        works(rank, "a")
        rank.close()


def kill_and_let_pass(daemon: DaemonProcess, gate: Gate) -> None:
    """Kill the copier that the gate holds, and let its successor pass when it comes there."""
    kill(daemon)
    daemon.wait_log("failpoint")
    gate.let_pass()
    daemon.wait_ready()


def test_a_copier_killed_while_it_pins_is_replaced_by_one_that_pins_all(
    short_dir: Path, gate: Gate, local: bool
) -> None:
    flags = ("--pool-size", "1MiB", "--chunk-size", "256KiB", "--slab-size", "256KiB", "--huge-pages", "none")
    with DaemonProcess(short_dir, *flags, KVSIDECAR_FAILPOINTS=f"copier.pin@2={gate}", local=local) as daemon:
        daemon.wait_log("failpoint")
        kill_and_let_pass(daemon, gate)
        assert deaths(daemon) == 1
        assert daemon.locked_kib() == 1024
        nothing_is_left_of(daemon)


def test_the_first_copier_killed_before_it_says_which_devices_there_are_is_followed_by_another(
    short_dir: Path, gate: Gate, local: bool
) -> None:
    failpoints = f"copier.hello={gate}"
    with DaemonProcess(short_dir, until="failpoint", KVSIDECAR_FAILPOINTS=failpoints, local=local) as daemon:
        kill_and_let_pass(daemon, gate)
        assert daemon.terminate() == 0


def test_a_copier_killed_during_the_self_test_is_tested_in_the_next_process(
    short_dir: Path, gate: Gate, local: bool
) -> None:
    with DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=f"store.in_flight@0={gate}", local=local) as daemon:
        daemon.wait_log("failpoint")
        kill_and_let_pass(daemon, gate)
        assert deaths(daemon) == 1
        nothing_is_left_of(daemon)


def test_a_device_that_no_copier_survives_the_self_test_of_is_said(short_dir: Path, local: bool) -> None:
    with DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS="store.in_flight@0=kill", local=local) as daemon:
        reason = daemon.wait_log("not ready")["reason"]
        assert reason == "host: the self-test was not over: the copier has ended (SIGKILL)"
        eventually(lambda: deaths(daemon) == START_ATTEMPTS)
        assert daemon.get("/ready")[1]["state"] == "failed"


def test_a_copier_killed_while_it_imports_costs_the_rank_one_attempt(short_dir: Path, gate: Gate, local: bool) -> None:
    with DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=f"copier.import@1={gate}", local=local) as daemon:
        client = quick(daemon.wait_ready().socket, local)
        attaching = threading.Thread(target=lambda: ranks.append(Rank(daemon, client=client, retry=True)))
        ranks: list[Rank] = []
        attaching.start()
        daemon.wait_log("failpoint")
        kill(daemon)
        daemon.wait_log("the copier works")
        attaching.join(SECONDS)
        (rank,) = ranks
        assert client.wait_attached(SECONDS)
        works(rank, "a")
        rank.close()
        gate.let_pass()  # the second import of the new process
        nothing_is_left_of(daemon)


@promise("the other device's ranks and jobs continue, and the daemon stays ready")
def test_the_device_of_another_copier_does_not_notice(short_dir: Path, gate: Gate, local: bool) -> None:
    with DaemonProcess(
        short_dir, "--devices", "host,host-1", KVSIDECAR_FAILPOINTS=f"load.in_flight@{2 * FIRST}={gate}", local=local
    ) as daemon:
        daemon.wait_ready()
        one, two = Rank(daemon, device="host"), Rank(daemon, device="host-1", instance="other")
        done(two.store("a"))
        first, second = daemon.copiers()
        os.kill(first, signal.SIGKILL)
        daemon.wait_log("a copier is down")
        done(two.load("a", at=[3]))
        assert two.holds(3, "a")
        attached_again(one, daemon)
        assert second in daemon.copiers()
        done(one.load("a", at=[4]))
        one.close()
        two.close()


def test_sigterm_does_not_wait_for_ever_for_a_copy(short_dir: Path, local: bool) -> None:
    failpoint = f"load.in_flight@{FIRST}=delay(3600)"
    with DaemonProcess(short_dir, "--drain-timeout", "0.3", KVSIDECAR_FAILPOINTS=failpoint, local=local) as daemon:
        rank = Rank(daemon.wait_ready(), client=quick(daemon.socket, local))
        done(rank.store("a"))
        load = rank.client.load([Blocks(0, hashes("a"), [5])])
        daemon.wait_log("failpoint")
        copiers = daemon.copiers()
        daemon.process.send_signal(signal.SIGTERM)
        assert rank.finish(load).outcome is Outcome.FAILED
        assert not any(map(alive, copiers)), "reported though a copy may still run"
        assert daemon.process.wait(SECONDS) == 0
        rank.close()


def test_a_client_that_leaves_before_the_daemon_has_ended_learns_of_it_later(short_dir: Path, local: bool) -> None:
    failpoint = f"load.in_flight@{FIRST}=delay(3600)"
    with no_leaks(), DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=failpoint, local=local) as daemon:
        rank = Rank(daemon.wait_ready(), client=quick(daemon.socket, local))
        done(rank.store("a"))
        rank.client.load([Blocks(0, hashes("a"), [5])])
        daemon.wait_log("failpoint")
        assert not rank.client.close(0.1)
        assert not rank.client.unmapped()
        daemon.process.send_signal(signal.SIGKILL)
        daemon.process.wait(SECONDS)
        eventually(rank.client.unmapped)
        assert rank.client.close()


def test_a_daemon_that_is_killed_takes_its_copiers_with_it(short_dir: Path, gate: Gate, local: bool) -> None:
    with DaemonProcess(
        short_dir, "--devices", "host,host-1", KVSIDECAR_FAILPOINTS=f"load.in_flight@{FIRST}={gate}", local=local
    ) as daemon:
        rank = Rank(daemon.wait_ready(), client=quick(daemon.socket, local))
        done(rank.store("a"))
        # A load: what a store still reads goes nowhere once its daemon is gone, so that a store may end before.
        rank.client.load([Blocks(0, hashes("a"), [1])])
        daemon.wait_log("failpoint")
        copiers = daemon.copiers()
        assert len(copiers) == 2
        daemon.process.kill()
        (end,) = job_ends(rank.client, 1)
        assert end.reason == "daemon_lost"
        assert not any(map(alive, copiers)), "reported before its copy was over"
        rank.close()


@needs_root
def test_a_copier_that_cannot_be_replaced_for_a_while_is_replaced_then(short_dir: Path, local: bool) -> None:
    """Its user has as many processes as it may."""
    user = ("setpriv", "--reuid=41004", "--clear-groups", "--inh-caps=+dac_override", "--ambient-caps=+dac_override")
    os.chown(short_dir, 41004, -1)
    with DaemonProcess(short_dir, under=user, local=local) as daemon:
        daemon.wait_ready()

        def allow(processes: int) -> None:
            subprocess.run([*user, "prlimit", f"--pid={daemon.process.pid}", f"--nproc={processes}:"], check=True)

        allow(1)
        kill(daemon)
        eventually(lambda: "may start no more processes" in daemon.wait_log("a copier is down")["reason"])
        assert daemon.get("/health")[0] == 200
        allow(1000)
        daemon.wait_log("the copier works")
        assert daemon.copiers()
        assert daemon.terminate() == 0
