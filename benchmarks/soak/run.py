"""The soak's stage: one daemon, engines that come and go, and a count of what is left when all have gone."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from kvsidecar.support import child_process
from tests.harness import SECONDS, DaemonProcess, eventually

ENGINES = (("a", 1), ("a", 1), ("b", 2), ("b", 2))
"""Namespace and ranks of the engines that run at any time."""
POOL = "4MiB"
"""A fifth of what the engines' prompts need, and within what an ordinary user may lock."""
DISK = "8MiB"
"""Of the disk tier: eviction never rests there either."""
DISK_TIER = "kvsidecar.tiers.process"
OF_DAEMON = ("daemon_kills", "copier_kills", "tier_kills")
DISK_COUNTS = {
    "disk_writes": 'kvsidecar_tier_copied_blocks_total{direction="write",tier="disk"}',
    "disk_reads": 'kvsidecar_tier_copied_blocks_total{direction="read",tier="disk"}',
    "disk_corrupt": 'kvsidecar_tier_corrupt_blocks_total{tier="disk"}',
}
"""By the name of our count: shards that daemons have counted before they were killed."""


class EngineProcess:
    """One engine and what it says."""

    def __init__(self, socket: str, namespace: str, ranks: int, *, seed: int, cuda: bool, rounds: int = 0) -> None:
        self.kind = (namespace, ranks)
        command = [sys.executable, "-m", "benchmarks.soak.engine", "--socket", socket, "--namespace", namespace]
        command += ["--ranks", str(ranks), "--seed", str(seed), "--rounds", str(rounds)]
        self.process = child_process.start([*command, "--cuda"] if cuda else command, stdout=subprocess.PIPE, text=True)
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                said = json.loads(line)
            except ValueError:
                continue  # killed in the middle of a line
            if "error" in said:
                self.errors.append(said.pop("error"))
            self.counts.update(said)

    def kill(self) -> None:
        self.process.kill()

    def wait(self) -> int:
        code = self.process.wait(SECONDS)
        self._reader.join()
        return code


@dataclass
class Result:
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    """What the engines have counted, and what was done to them."""
    leaks: dict[str, float] = field(default_factory=dict)
    """What the daemon still holds; all 0."""
    problems: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not self.problems and not any(self.leaks.values()) and not self.counts["wrong_bytes"]


class Soak:
    """One daemon after another on one disk.

    Args:
        seed: of who is killed when. The processes' own timing is not from it.
    """

    def __init__(
        self,
        directory: Path,
        *,
        device: str,
        seed: int,
        progress: Callable[[str], None],
    ) -> None:
        self._rng = random.Random(seed)
        self._cuda = device == "cuda"
        self._progress = progress
        self._engines: list[EngineProcess] = []
        self._result = Result()
        self._directory, self._device = directory, device

    def _start_daemon(self, until: str = "listening") -> DaemonProcess:
        self._result.counts["daemons"] += 1
        sizes = ("--pool-size", POOL, "--slab-size", "1MiB", "--lease-max", "2")
        disk = ("--disk-dir", str(self._directory / "disk"), "--disk-size", DISK, "--disk-deadline", "0.5")
        admission = ("--disk-admission", self._rng.choice(("all", "on_evict", "second_use")))
        pool: tuple[str, ...] = ()
        if self._kills_daemon:
            pool = ("--pool-dir", str(self._pool_dir), "--lock-wait", str(SECONDS))
            if self._rng.random() < 0.5:  # the others find a pool whose slots a tier may have been filling
                shutil.rmtree(self._pool_dir, ignore_errors=True)
        return DaemonProcess(self._directory, *sizes, *disk, *admission, *pool, device=self._device, until=until)

    def run(
        self, seconds: float, *, until: Iterable[str] = (), daemon_kills: int = 0, progress_seconds: float = 5.0
    ) -> Result:
        """As long as this, and until each of these counts is above 0.

        Args:
            daemon_kills: how often the daemon, a copier or the tier's process is killed, at least; a daemon that was
                killed is followed by another. 0: the daemon is never killed.
        """
        result = self._result
        self._kills_daemon = daemon_kills > 0
        with contextlib.ExitStack() as stack:
            shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
            self._pool_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvs-", dir=shm))) / "pool"
            self._daemon = self._start_daemon()
            stack.callback(self._kill_what_runs)
            self._daemon.wait_ready()
            # What a daemon opens once, for its first engine, is no leak.
            self._gone(self._start(ENGINES[0], rounds=3))
            eventually(lambda: self._daemon.metric('kvsidecar_tier_up{tier="disk"}'))
            before = self._settled({})
            started = time.monotonic()
            self._engines = [self._start(kind) for kind in ENGINES]
            next_act = next_line = started
            while self._daemon.process.poll() is None:
                now = time.monotonic()
                counts = self._counts()
                killed = sum(counts[what] for what in OF_DAEMON)
                if now >= started + seconds and killed >= daemon_kills and all(counts[what] for what in until):
                    break
                if now >= next_line:
                    self._say(now - started)
                    next_line = now + progress_seconds
                if now >= next_act:
                    self._act()
                    pauses = (0.05, 0.2, 0.5, 1.0) if daemon_kills else (0.2, 1.0, 2.0, 4.0)
                    next_act = time.monotonic() + self._rng.choice(pauses)
                time.sleep(0.05)
            self._continue_tier()
            for engine in self._engines:
                engine.process.send_signal(self._rng.choice((signal.SIGKILL, signal.SIGTERM)))
            for engine in self._engines:
                self._gone(engine)
            self._engines.clear()
            result.seconds = time.monotonic() - started
            self._say(result.seconds)
            if self._daemon.process.poll() is None:
                after = self._settled(before)
                result.leaks = {name: max(0.0, after[name] - before[name]) for name in after}
                self._count_daemon()
                self._clear()
            self._end()
        return result

    def _kill_what_runs(self) -> None:
        for engine in self._engines:
            engine.process.send_signal(signal.SIGCONT)
            engine.kill()
        self._daemon.__exit__(None, None, None)

    def _start(self, kind: tuple[str, int], *, rounds: int = 0) -> EngineProcess:
        self._result.counts["engines"] += 1
        namespace, ranks = kind
        seed = self._rng.randrange(2**32)
        return EngineProcess(self._daemon.socket, namespace, ranks, seed=seed, cuda=self._cuda, rounds=rounds)

    def _act(self) -> None:
        """Something happens to one engine, or to a process of the daemon; an engine that ends gets a successor of its
        kind."""
        self._continue_tier()
        if self._rng.random() < (0.7 if self._kills_daemon else 0.35):
            self._act_on_daemon()
            return
        index = self._rng.randrange(len(self._engines))
        engine = self._engines[index]
        choice = self._rng.random()
        if choice < 0.15:
            # Stopped, not dead: its leases end by time, its jobs go on. It is let go at the next act, or killed.
            engine.process.send_signal(signal.SIGSTOP)
            self._result.counts["stops"] += 1
            return
        for each in self._engines:
            each.process.send_signal(signal.SIGCONT)
        if choice < 0.75:
            engine.kill()
            self._result.counts["kills"] += 1
        else:
            engine.process.send_signal(signal.SIGTERM)
        self._gone(engine)
        self._engines[index] = self._start(engine.kind)

    def _act_on_daemon(self) -> None:
        choice = self._rng.random()
        if choice < 0.3:
            self._kill_copier()
        elif choice < 0.4:
            for pid in self._daemon.children(DISK_TIER):  # until the next act; its calls are late by then, or not
                self._result.counts["tier_stops"] += _send(pid, signal.SIGSTOP)
        elif choice < 0.7 or not self._kills_daemon:
            self._kill_tier()
        else:
            self._kill_daemon()

    def _kill_daemon(self) -> None:
        """And its children, in some order; the kernel kills those that are left."""
        self._count_daemon()
        others = [*self._daemon.copiers(), *self._daemon.children(DISK_TIER)]
        before = self._rng.sample(others, self._rng.randint(0, len(others)))
        for pid in [*before, self._daemon.process.pid]:
            _send(pid, signal.SIGKILL)
        self._daemon.process.wait(SECONDS)
        self._result.counts["daemon_kills"] += 1
        self._read_log()
        if self._rng.random() < 0.2:  # another one, in its start
            self._daemon = self._start_daemon("starting")
            time.sleep(self._rng.uniform(0.0, 1.0))  # whatever it has come to by then
            self._daemon.process.kill()
            self._daemon.process.wait(SECONDS)
            self._result.counts["daemon_kills"] += 1
            self._read_log()
        self._daemon = self._start_daemon()

    def _kill_tier(self) -> None:
        for pid in self._daemon.children(DISK_TIER):
            self._result.counts["tier_kills"] += _send(pid, signal.SIGKILL)

    def _continue_tier(self) -> None:
        for pid in self._daemon.children(DISK_TIER):
            _send(pid, signal.SIGCONT)

    def _kill_copier(self) -> None:
        for pid in self._daemon.copiers()[:1]:
            self._result.counts["copier_kills"] += _send(pid, signal.SIGKILL)

    def _gone(self, engine: EngineProcess) -> None:
        engine.process.send_signal(signal.SIGCONT)
        code = engine.wait()
        self._result.counts.update(engine.counts)
        self._result.problems += engine.errors
        if code not in (0, -signal.SIGKILL, -signal.SIGTERM):
            self._result.problems.append(f"an engine ended with exit code {code}")

    # -- what is left ----------------------------------------------------------------------------------------------

    def _holdings(self) -> dict[str, float]:
        """What must be the same when no engine is there."""
        daemon = self._daemon
        process = Path(f"/proc/{daemon.process.pid}")
        metric = daemon.metric
        total = metric("kvsidecar_pool_total_bytes")
        return {
            "leases": metric("kvsidecar_leases"),
            "sessions": metric("kvsidecar_attached_ranks"),
            "slots in use by nobody (bytes)": total
            - metric("kvsidecar_pool_used_bytes")
            - metric("kvsidecar_pool_rounding_bytes")
            - metric("kvsidecar_pool_free_bytes"),
            "shared mappings": daemon.mapped_buffers(),
            "GPU mappings (bytes)": sum(
                float(line.rpartition(" ")[2])
                for line in daemon.get("/metrics")[1].splitlines()
                if line.startswith("kvsidecar_imported_gpu_bytes{")
            ),
            "file descriptors": len(os.listdir(process / "fd")),
        }

    def _settled(self, before: dict[str, float]) -> dict[str, float]:
        """What the daemon holds once it has noticed every end: what is more than ``before`` after that is a leak."""
        now: dict[str, float] = {}

        def quiet() -> bool:
            nonlocal now
            last, now = now, self._holdings()
            settled = now == last and not (now["leases"] or now["sessions"])
            return settled and all(now[name] <= value for name, value in before.items())

        with contextlib.suppress(AssertionError):  # what is left then is the soak's result
            eventually(quiet, pause=0.3)
        return now

    def _clear(self) -> None:
        """With every block forgotten the whole pool must be free: a slot that is not has been lost."""
        client = self._daemon.client()
        client.clear()
        client.close()
        metric = self._daemon.metric

        def used() -> float:
            return metric("kvsidecar_pool_total_bytes") - metric("kvsidecar_pool_free_bytes")

        with contextlib.suppress(AssertionError):  # what the disk tier is given stays until it has been written
            eventually(lambda: not used())
        self._result.leaks["lost slots (bytes)"] = used()

    def _end(self) -> None:
        daemon, problems = self._daemon, self._result.problems
        if daemon.process.poll() is not None:
            problems.append(f"the daemon ended with exit code {daemon.process.returncode}")
        elif (code := daemon.terminate()) != 0:
            problems.append(f"the daemon ended with exit code {code}")
        self._read_log()
        counts = self._result.counts
        if counts["copier_deaths"] > counts["copier_kills"] + counts["daemon_kills"]:
            problems.append(f"{counts['copier_deaths']} copiers have ended")

    def _read_log(self) -> None:
        """Of a daemon that has ended."""
        for line in self._daemon.read_log():
            expected = line["event"] == "a copier is down"
            self._result.counts["copier_deaths"] += expected
            if line["event"] in ("task failed", "stderr") or (line.get("level") == "error" and not expected):
                self._result.problems.append(f"the daemon's log: {line}")
        self._daemon.__exit__(None, None, None)

    def _count_daemon(self) -> None:
        """What a daemon has counted until now."""
        with contextlib.suppress(OSError, AssertionError):  # it may still be starting
            self._result.counts["evicted_blocks"] += int(self._daemon.metric("kvsidecar_evicted_blocks_total"))
            for name, series in DISK_COUNTS.items():
                self._result.counts[name] += int(self._daemon.metric(series))

    def _counts(self) -> Counter[str]:
        """So far, of those that run too."""
        return self._result.counts + sum((engine.counts for engine in self._engines), Counter())

    def _say(self, seconds: float) -> None:
        counts = self._counts()
        self._progress(
            f"{seconds:6.0f} s  {counts['stores']} stores  {counts['loads']} loads  "
            f"{counts['checked_bytes'] / 1e6:.0f} MB checked  {counts['hits']} hits  {counts['kills']} kills  "
            f"{sum(counts[what] for what in OF_DAEMON)} of the daemon  {counts['disk_hits']} from disk  "
            f"{counts['wrong_bytes']} wrong bytes"
        )


def _send(pid: int, number: signal.Signals) -> bool:
    """False: it has ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
