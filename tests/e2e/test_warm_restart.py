"""The cache outlives the daemon: kept by a directory in memory, or by a stand-in for systemd's descriptor store."""

from __future__ import annotations

import fcntl
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from kvsidecar.client import Blocks, Outcome
from kvsidecar.daemon.kept_pool import MAX_STARTS
from kvsidecar.pool.kept_files import FILES
from kvsidecar.pool.record_table import Owner, RecordTable, map_table
from kvsidecar.support import child_process
from kvsidecar.support.file_lock import RUNNING_SECONDS
from kvsidecar.support.process_ids import process_id
from tests.e2e.pid_namespaces import UNSHARE, needs_pid_namespaces
from tests.e2e.restarts import all_there, cold_reason, kill, owners_in, started
from tests.harness import FIRST, SECONDS, DaemonProcess, Gate, Rank, done, hashes, layout
from tests.marks import promise
from tests.service_manager import ServiceManager

ROUNDS = int(os.environ.get("KVSIDECAR_KILLS", "12"))
LATEST = 40
"""Blocks that a pool of 80 slots has for sure, whatever was evicted."""
FIRST_TIME = "there is no pool of an earlier daemon"


def store(daemon: DaemonProcess, *names: str) -> None:
    rank = Rank(daemon)
    done(rank.store(*names))
    rank.close()


# -- a directory -----------------------------------------------------------------------------------------------------


@promise("yes, and a crash: systemd or a directory in memory holds the pool")
def test_the_cache_outlives_a_crash_and_a_stop_and_everything_says_so(short_dir: Path, pool_dir: Path) -> None:
    flags = ("--pool-dir", str(pool_dir))
    with started(short_dir, *flags) as daemon:
        assert (cold_reason(daemon), daemon.get("/ready")[1]["carrier"]) == (FIRST_TIME, "directory")
        store(daemon, "a", "b", "c")
        kill(daemon)
    with started(short_dir, *flags) as daemon:
        ready = daemon.get("/ready")[1]
        assert (ready["carrier"], ready["cold_start_reason"]) == ("directory", "")
        assert (ready["kept_blocks"], ready["dropped_blocks"]) == (3, 0)
        assert daemon.metric('kvsidecar_warm_start_blocks{result="kept"}') == 3
        assert daemon.metric('kvsidecar_warm_start_blocks{result="dropped"}') == 0
        assert 0 < daemon.metric("kvsidecar_warm_start_seconds") < SECONDS
        (line,) = [line for line in daemon.log if line["event"] == "warm start"]
        assert (line["carrier"], line["kept_blocks"]) == ("directory", 3)
        pool = daemon.get("/status")[1]["pool"]
        assert pool["carrier"] == "directory"
        shown = subprocess.run(
            [sys.executable, "-m", "kvsidecar", "status", "--socket", daemon.socket],
            capture_output=True, text=True, timeout=SECONDS, env=child_process.environment(COLUMNS="200"),
        )  # fmt: skip
        assert "outlives the daemon (directory); kept 3 blocks of an earlier daemon\n" in shown.stdout
        all_there(daemon, "a", "b", "c")
        store(daemon, "d")
        assert daemon.terminate() == 0
    with started(short_dir, *flags) as daemon:
        all_there(daemon, "a", "b", "c", "d")


def test_a_copy_of_the_directory_is_taken_over_at_another_path(short_dir: Path, pool_dir: Path) -> None:
    with started(short_dir, "--pool-dir", str(pool_dir)) as daemon:
        store(daemon, "a", "b", "c")
        assert daemon.terminate() == 0
    moved = pool_dir.with_name("moved")
    shutil.copytree(pool_dir, moved)
    shutil.rmtree(pool_dir)
    with started(short_dir, "--pool-dir", str(moved)) as daemon:
        assert cold_reason(daemon) == ""
        all_there(daemon, "a", "b", "c")


def test_the_self_test_writes_over_no_kept_block_also_of_a_full_pool(short_dir: Path, pool_dir: Path) -> None:
    """85 slots of 12 KiB fill the pool. All blocks are kept but the oldest, whose slot the self-test takes, and what is
    evicted with it."""
    flags = ("--pool-dir", str(pool_dir))
    names = [f"{number}" for number in range(85)]
    wide = layout(num_blocks=100)
    with started(short_dir, *flags) as daemon:
        rank = Rank(daemon, groups=wide)
        for name in names:
            done(rank.store(name, at=[0]))
        assert daemon.metric("kvsidecar_blocks") == len(names)
        rank.close()
        kill(daemon)
    for _ in range(3):
        with started(short_dir, *flags) as daemon:
            rank = Rank(daemon, groups=wide)
            there = [name for name in names if rank.hits(name)]
            assert 0 < len(names) - len(there) <= 2, "in later starts the slot of the first one is free"
            done(rank.load(*there, at=list(range(len(there)))))
            assert all(rank.holds(block_id, name) for block_id, name in enumerate(there))
            rank.close()
            kill(daemon)


@pytest.mark.parametrize("seconds", ["0", "600"])
def test_a_second_daemon_on_the_directory_is_refused_soon_in_one_sentence(
    short_dir: Path, pool_dir: Path, seconds: str
) -> None:
    other = short_dir / "other"
    other.mkdir()
    flags = ("--pool-dir", str(pool_dir), "--lock-wait", seconds)
    with started(short_dir, *flags) as first:
        store(first, "a")
        with DaemonProcess(other, *flags, until="stderr") as second:
            assert second.process.wait(SECONDS) == 73
            last = second.log[-1]["text"]
        assert last.endswith(
            f"another kvsidecar has its pool in {pool_dir}: stop it, or set --pool-dir to another directory\n"
        )
        all_there(first, "a")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("--pool-size", "2MiB"), "the pool had 1 MiB; now it is 2 MiB"),
        (("--slab-size", "64KiB"), "its slabs had 1 MiB; now it is 64 KiB"),
        (("--cold-start", "on"), "--cold-start is set"),
    ],
)
def test_what_does_not_fit_is_a_cold_start_on_new_memory(
    short_dir: Path, pool_dir: Path, change: tuple[str, ...], reason: str
) -> None:
    flags = ("--pool-dir", str(pool_dir), "--slab-size", "1MiB")
    with started(short_dir, *flags) as daemon:
        store(daemon, "a")
        kill(daemon)
    old = os.open(pool_dir / FILES[0], os.O_RDONLY)
    assert any(os.pread(old, 1 << 20, 0)), "nothing to forget"
    with started(short_dir, *flags, *change) as daemon:
        assert cold_reason(daemon) == reason
        assert os.fstat(old).st_nlink == 0, "what was in the pool is still in the directory"
        rank = Rank(daemon)
        assert rank.hits("a") == 0
        done(rank.store("b"))
        rank.close()
        assert {path.name for path in pool_dir.iterdir()} == set(FILES)
    os.close(old)


@promise("a cold start on new memory, with the reason in the log; never a failed start")
@pytest.mark.parametrize(
    ("file", "damage"), [*itertools.product(FILES, ["missing", "empty"]), (FILES[1], "garbage"), (FILES[1], "zeros")]
)
def test_damage_is_a_cold_start_and_never_a_failed_one(short_dir: Path, pool_dir: Path, file: str, damage: str) -> None:
    flags = ("--pool-dir", str(pool_dir))
    with started(short_dir, *flags) as daemon:
        store(daemon, "a")
        kill(daemon)
    path = pool_dir / file
    size = path.stat().st_size
    if damage == "missing":
        path.unlink()
    elif damage == "empty":
        os.truncate(path, 0)
    else:
        path.write_bytes(random.Random(7).randbytes(size) if damage == "garbage" else bytes(size))
    with started(short_dir, *flags) as daemon:
        assert cold_reason(daemon)
        store(daemon, "b")
        kill(daemon)
    with started(short_dir, *flags) as daemon:
        all_there(daemon, "b")


def test_a_table_that_cannot_be_read_is_heard_and_replaced(short_dir: Path, pool_dir: Path) -> None:
    """Whatever is wrong with it: otherwise no daemon would start any more."""
    broken = short_dir / "sitecustomize.py"
    broken.write_text(
        "import sys, importlib.abc\n"
        "class Breaks(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'kvsidecar.daemon.daemon':\n"
        "            from kvsidecar.cache.records import Records\n"
        "            find, calls = Records.find_sealed, []\n"
        "            def once(*arguments):\n"
        "                calls.append(1)\n"
        "                if len(calls) == 1: raise IndexError('nobody has thought of this')\n"
        "                return find(*arguments)\n"
        "            Records.find_sealed = once\n"
        "sys.meta_path.insert(0, Breaks())\n"
    )
    flags = ("--pool-dir", str(pool_dir))
    with started(short_dir, *flags) as daemon:
        store(daemon, "a")
        kill(daemon)
    with started(short_dir, *flags, PYTHONPATH=f"{short_dir}:{Path(__file__).parents[2]}") as daemon:
        assert cold_reason(daemon) == "its table cannot be read: IndexError: nobody has thought of this"
        assert any(line["event"] == "the blocks of an earlier daemon cannot be read" for line in daemon.log)
        store(daemon, "b")
        kill(daemon)
    with started(short_dir, *flags) as daemon:
        all_there(daemon, "b")


def test_files_with_which_no_daemon_becomes_ready_are_given_up(short_dir: Path, pool_dir: Path) -> None:
    flags = ("--pool-dir", str(pool_dir))
    with started(short_dir, *flags) as daemon:
        store(daemon, "a")
        kill(daemon)

    def end_in_the_start() -> None:
        with DaemonProcess(short_dir, *flags, KVSIDECAR_FAILPOINTS="pool.pin_chunk=kill", until="failpoint") as daemon:
            daemon.process.wait(SECONDS)

    for _ in range(MAX_STARTS - 1):
        end_in_the_start()
    with started(short_dir, *flags) as daemon:  # the last one that may try
        all_there(daemon, "a")
        kill(daemon)
    for _ in range(MAX_STARTS):
        end_in_the_start()
    with started(short_dir, *flags) as daemon:
        assert cold_reason(daemon) == "5 daemons in a row have ended before they were ready with it"
        store(daemon, "b")
        kill(daemon)
    with started(short_dir, *flags) as daemon:
        all_there(daemon, "b")


# -- the former owner ------------------------------------------------------------------------------------------------


def name_owner(pool_dir: Path, pid: int) -> None:
    """As if this process, too, might still write to the pool."""
    owner = process_id(pid)
    assert owner is not None
    fd = os.open(pool_dir / FILES[1], os.O_RDWR)
    memory = map_table(fd)
    os.close(fd)
    # The words of `RecordTable.set_owners`, without an object that would need the facts.
    assert RecordTable.owners(memory)
    memory[512 + 2 * 5 + 1], memory[512 + 2 * 5] = owner.start_time, owner.pid
    assert Owner(*owner) in RecordTable.owners(memory)


def test_the_new_daemon_waits_for_every_process_that_may_still_write(short_dir: Path, pool_dir: Path) -> None:
    flags = ("--pool-dir", str(pool_dir))
    with started(short_dir, *flags) as daemon:
        store(daemon, "a")
        (copier,) = daemon.copiers()
        owners = owners_in(pool_dir)
        assert {owner.pid for owner in owners} == {daemon.process.pid, copier}
        os.kill(copier, signal.SIGKILL)
        daemon.wait_log("the copier works")
        (copier,) = daemon.copiers()
        owners = owners_in(pool_dir)
        assert {owner.pid for owner in owners} == {daemon.process.pid, copier}, "the new copier is not waited for"
        kill(daemon)
    until = "waiting for the processes of the earlier daemon to end"
    with child_process.start(["sleep", "infinity"]) as stays:
        try:
            name_owner(pool_dir, stays.pid)
            with DaemonProcess(short_dir, *flags, "--lock-wait", str(SECONDS), until=until) as daemon:
                stays.kill()  # not reaped: its end is enough
                daemon.wait_ready()
                daemon.http = next(line["http"] for line in daemon.log if line["event"] == "listening")
                assert cold_reason(daemon) == ""
                all_there(daemon, "a")
                assert daemon.terminate() == 0
        finally:
            stays.kill()
    assert owners_in(pool_dir) == [], "nobody writes after a stop"


def test_an_owner_that_does_not_end_has_the_old_memory_for_itself(short_dir: Path, pool_dir: Path) -> None:
    flags = ("--pool-dir", str(pool_dir), "--lock-wait", "0")
    with started(short_dir, *flags) as daemon:
        store(daemon, "a")
        kill(daemon)
    old = os.open(pool_dir / FILES[0], os.O_RDWR)
    name_owner(pool_dir, os.getpid())  # this one lives
    with started(short_dir, *flags) as daemon:
        assert cold_reason(daemon) == "a process of the earlier daemon is still alive and may write to its pool"
        store(daemon, "b")
        os.pwrite(old, b"\xff" * (1 << 20), 0)  # what a copier that lives may do
        all_there(daemon, "b")
    os.close(old)


@needs_pid_namespaces
def test_a_daemon_in_another_pid_namespace_takes_over_when_the_other_is_gone(short_dir: Path, pool_dir: Path) -> None:
    """A container that is restarted: each daemon has the PID values of the one before."""
    flags = ("--pool-dir", str(pool_dir))
    for start in range(3):
        with started(short_dir, *flags, under=UNSHARE) as daemon:
            assert cold_reason(daemon) == ("" if start else FIRST_TIME)
            if start == 0:
                store(daemon, "a")
            all_there(daemon, "a")
            kill(daemon)  # unshare, whose end kills all of the namespace
        lock = os.open(pool_dir, os.O_RDONLY)  # a runtime starts a container when the one before has ended
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.close(lock)


@pytest.mark.parametrize("under", [(), pytest.param(UNSHARE, marks=needs_pid_namespaces)], ids=["same", "other"])
@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_a_daemon_that_waits_for_another_takes_over_unless_that_was_a_stranger_and_killed(
    short_dir: Path, pool_dir: Path, gate: Gate, under: Sequence[str], end: str
) -> None:
    """Two pods on one directory: the ends of the other's processes cannot be waited for. A stop says that all have
    ended."""
    other = short_dir / "other"
    other.mkdir()
    flags = ("--pool-dir", str(pool_dir), "--lock-wait", "600")
    failpoints = f"store.in_flight@{FIRST + 1}={gate}"
    with started(short_dir, *flags, "--drain-timeout", "600", KVSIDECAR_FAILPOINTS=failpoints) as first:
        store(first, "a")
        rank = Rank(first)
        rank.client.store([Blocks(0, hashes("b"), [0])])
        first.wait_log("failpoint")
        first.process.send_signal(signal.SIGTERM)
        first.wait_log("stopping")
        until = "waiting for another daemon to leave the pool's directory"
        with DaemonProcess(other, *flags, under=under, until=until) as second:
            time.sleep(2 * RUNNING_SECONDS)  # after which one that stays is not waited for any more
            assert second.process.poll() is None
            if end == "killed":
                kill(first)
            else:
                gate.let_pass()
                assert first.process.wait(SECONDS) == 0
            rank.close()
            second.wait_ready()
            second.http = next(line["http"] for line in second.log if line["event"] == "listening")
            if under and end == "killed":
                assert cold_reason(second).startswith("another daemon has just left it")
            else:
                assert cold_reason(second) == ""
                all_there(second, "a")


# -- systemd's store, by a stand-in (test_systemd.py has the real one) ------------------------------------------------


@promise("It also outlives the daemon if systemd's descriptor store")
def test_the_cache_outlives_the_daemon_in_the_managers_store(short_dir: Path) -> None:
    with ServiceManager(short_dir) as manager:
        for start in range(3):
            variables = {"NOTIFY_SOCKET": manager.address}
            with started(short_dir, under=manager.under(), **variables) as daemon:
                assert daemon.get("/ready")[1]["carrier"] == "systemd"
                assert cold_reason(daemon) == (FIRST_TIME if start == 0 else "")
                assert "LISTEN_FDS" not in Path(f"/proc/{daemon.copiers()[0]}/environ").read_text()
                if start == 0:
                    store(daemon, "a", "b")
                all_there(daemon, "a", "b")
                if start == 1:
                    assert daemon.terminate() == 0
                else:
                    kill(daemon)
            assert set(manager.stored) == set(FILES)
        manager.drain()
        assert len(manager.fields("FDSTORE")) == len(FILES), "stored again although they were there"


def test_a_start_with_another_pool_puts_it_in_the_place_of_the_old_one(short_dir: Path, pool_dir: Path) -> None:
    with ServiceManager(short_dir) as manager:
        variables = {"NOTIFY_SOCKET": manager.address}
        sizes = []
        for size in ("1MiB", "2MiB"):
            with started(short_dir, "--pool-size", size, under=manager.under(), **variables) as daemon:
                assert cold_reason(daemon) == (FIRST_TIME if size == "1MiB" else "the pool had 1 MiB; now it is 2 MiB")
                kill(daemon)
            manager.drain()
            sizes.append(os.fstat(manager.stored[FILES[0]]).st_size)
        assert sizes == [1 << 20, 2 << 20]
        with started(
            short_dir, "--pool-size", "2MiB", "--pool-dir", str(pool_dir), under=manager.under(), **variables
        ) as daemon:
            assert daemon.get("/ready")[1]["carrier"] == "directory"
            manager.drain()
            assert manager.stored == {}, "systemd holds a pool that no daemon will ever take back"


def test_a_descriptor_of_another_name_is_not_used_and_said(short_dir: Path) -> None:
    with ServiceManager(short_dir) as manager:
        manager.stored["http"] = os.memfd_create("http")
        with DaemonProcess(
            short_dir, under=manager.under(), until="a descriptor from the service manager is not used",
            NOTIFY_SOCKET=manager.address,
        ) as daemon:  # fmt: skip
            assert daemon.log[-1]["name"] == "http"
            daemon.wait_ready()


# -- killed at random ------------------------------------------------------------------------------------------------


def test_killed_at_random_under_load_every_block_that_is_kept_is_right(short_dir: Path, pool_dir: Path) -> None:
    """Daemon and copiers are killed at random instants: under stores, loads and evictions, and while they start. A
    client stays, and attaches again. Every block that is found is compared with what was stored under its name."""
    seed = int(os.environ.get("KVSIDECAR_KILL_SEED", random.randrange(1 << 32)))
    chance = random.Random(seed)
    print(f"KVSIDECAR_KILL_SEED={seed}")
    flags = ("--pool-dir", str(pool_dir), "--slab-size", "128KiB", "--lock-wait", str(SECONDS))
    rank: Rank | None = None
    stored: list[str] = []  # all jobs that were reported as done, or may have been
    sealed: list[str] = []  # those that were
    found: list[str] = []
    wanted = kept = compared = in_start = 0
    for _ in range(ROUNDS):
        if stored and chance.random() < 0.3:
            with DaemonProcess(short_dir, *flags, until="starting") as daemon:
                time.sleep(chance.uniform(0.0, 1.0))  # whatever it has come to by then
                kill(daemon)
                in_start += 1
        with started(short_dir, *flags) as daemon:
            assert not stored or cold_reason(daemon) == ""
            if rank is None:
                rank = Rank(daemon, groups=layout(num_blocks=16), client=daemon.client(name="stays"))
            assert rank.client.wait_ready(SECONDS).ready
            # Of older ones only those that were there the last time can be.
            found = [name for name in dict.fromkeys([*found, *stored[-800:]]) if rank.hits(name)]
            latest = sealed[-LATEST:]
            wanted, kept = wanted + len(latest), kept + len(set(latest) & set(found))
            for name in found:
                done(rank.load(name, at=[15]))
                assert rank.holds(15, name), f"block {name} has other bytes"
                compared += 1
            fate = threading.Timer(chance.uniform(0.0, 0.4), _kill_all, (daemon, chance.random() < 0.5))
            fate.start()
            while daemon.process.poll() is None:
                names = [str(len(stored) + index) for index in range(chance.randrange(1, 8))]
                stored += names
                if _try_store(rank, names):
                    sealed += names
                if found:
                    rank.finish(rank.client.load([Blocks(0, hashes(chance.choice(found)), [14])]))
            fate.join()
    assert rank is not None
    rank.close()
    print(
        f"{ROUNDS + in_start} kills, {in_start} of them in a start; {compared} blocks compared, {kept} of {wanted} kept"
    )
    assert kept == wanted, "blocks that were stored are lost"
    assert compared >= wanted > 0


def _try_store(rank: Rank, names: list[str]) -> bool:
    ids = list(range(len(names)))
    for block_id, name in zip(ids, names, strict=True):
        rank.fill(block_id, name)
    return rank.finish(rank.client.store([Blocks(0, hashes(*names), ids)])).outcome is Outcome.DONE


def _kill_all(daemon: DaemonProcess, copiers_first: bool) -> None:
    pids = [daemon.process.pid]
    if copiers_first:
        pids = daemon.copiers() + pids
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
