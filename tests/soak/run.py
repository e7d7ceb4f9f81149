"""The soak's stage: one daemon, engines that come and go, and a count of what is left when all have gone."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
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


class EngineProcess:
    """One engine and what it says."""

    def __init__(self, socket: str, namespace: str, ranks: int, *, seed: int, cuda: bool, rounds: int = 0) -> None:
        self.kind = (namespace, ranks)
        command = [sys.executable, "-m", "tests.soak.engine", "--socket", socket, "--namespace", namespace]
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
    """Args: seed: of who is killed when. The processes' own timing is not from it."""

    def __init__(self, directory: Path, *, device: str, seed: int, progress: Callable[[str], None]) -> None:
        self._rng = random.Random(seed)
        self._cuda = device == "cuda"
        self._progress = progress
        self._engines: list[EngineProcess] = []
        self._result = Result()
        self._daemon = DaemonProcess(
            directory, "--pool-size", POOL, "--slab-size", "1MiB", "--lease-max", "2", device=device
        )

    def run(self, seconds: float, *, until: Iterable[str] = (), progress_seconds: float = 5.0) -> Result:
        """As long as this, and until each of these counts is above 0."""
        result = self._result
        with self._daemon as daemon:
            daemon.wait_ready()
            # What a daemon opens once, for its first engine, is no leak.
            self._gone(self._start(ENGINES[0], rounds=3))
            before = self._settled({})
            started = time.monotonic()
            self._engines = [self._start(kind) for kind in ENGINES]
            next_act = next_line = started
            while daemon.process.poll() is None:
                now = time.monotonic()
                counts = self._counts()
                if now >= started + seconds and all(counts[what] for what in until):
                    break
                if now >= next_line:
                    self._say(now - started)
                    next_line = now + progress_seconds
                if now >= next_act:
                    self._act()
                    next_act = now + self._rng.choice((0.2, 1.0, 2.0, 4.0))
                time.sleep(0.05)
            for engine in self._engines:
                engine.process.send_signal(self._rng.choice((signal.SIGKILL, signal.SIGTERM)))
            for engine in self._engines:
                self._gone(engine)
            self._engines.clear()
            result.seconds = time.monotonic() - started
            self._say(result.seconds)
            if daemon.process.poll() is None:
                after = self._settled(before)
                result.leaks = {name: max(0.0, after[name] - before[name]) for name in after}
                result.counts["evicted_blocks"] = int(daemon.metric("kvsidecar_evicted_blocks_total"))
                self._clear()
            self._end()
        return result

    def _start(self, kind: tuple[str, int], *, rounds: int = 0) -> EngineProcess:
        self._result.counts["engines"] += 1
        namespace, ranks = kind
        seed = self._rng.randrange(2**32)
        return EngineProcess(self._daemon.socket, namespace, ranks, seed=seed, cuda=self._cuda, rounds=rounds)

    def _act(self) -> None:
        """Something happens to one engine, or to a copier; an engine that ends gets a successor of its kind."""
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
        elif choice < 0.9:
            engine.process.send_signal(signal.SIGTERM)
        else:
            self._kill_copier()
            return
        self._gone(engine)
        self._engines[index] = self._start(engine.kind)

    def _kill_copier(self) -> None:
        for pid in self._daemon.copiers()[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self._result.counts["copier_kills"] += 1

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
        self._result.leaks["lost slots (bytes)"] = metric("kvsidecar_pool_total_bytes") - metric(
            "kvsidecar_pool_free_bytes"
        )

    def _end(self) -> None:
        daemon, problems = self._daemon, self._result.problems
        if daemon.process.poll() is not None:
            problems.append(f"the daemon ended with exit code {daemon.process.returncode}")
            return
        if (code := daemon.terminate()) != 0:
            problems.append(f"the daemon ended with exit code {code}")
        daemon.wait_log("stopped")
        if (deaths := sum(line["event"] == "a copier is down" for line in daemon.log)) > self._result.counts[
            "copier_kills"
        ]:
            problems.append(f"{deaths} copiers have ended")
        for line in daemon.log:
            expected = line["event"] == "a copier is down"
            if line["event"] in ("task failed", "stderr") or (line.get("level") == "error" and not expected):
                problems.append(f"the daemon's log: {line}")

    def _counts(self) -> Counter[str]:
        """So far, of those that run too."""
        return self._result.counts + sum((engine.counts for engine in self._engines), Counter())

    def _say(self, seconds: float) -> None:
        counts = self._counts()
        self._progress(
            f"{seconds:6.0f} s  {counts['stores']} stores  {counts['loads']} loads  "
            f"{counts['checked_bytes'] / 1e6:.0f} MB checked  {counts['hits']} hits  {counts['kills']} kills  "
            f"{counts['wrong_bytes']} wrong bytes"
        )
