"""One seed, from the first engine to the last: choose, step, check."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field

from benchmarks.simulation.copiers import SimWorker
from benchmarks.simulation.engine import Engine, Rank
from benchmarks.simulation.loop import SimLoop
from benchmarks.simulation.machine import Violation
from benchmarks.simulation.shapes import NUM_KEYS, SHAPES
from benchmarks.simulation.world import Lease, World, quiet_and_repeatable
from kvsidecar.core.peer import Peer

STEPS = 500
"""Choices of the scheduler before everything is ended."""
END_STEPS = 20_000
"""More steps than any end has ever needed."""
SHOWN = 40
"""Last lines of the trace that a failure shows."""


class Failed(AssertionError):
    """A run broke a promise. The text says which, and how to see it again."""


@dataclass
class Report:
    seed: int
    trace: list[str] = field(default_factory=list)

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()


def simulate(seed: int) -> Report:
    """Run one seed.

    Raises:
        Failed: with the seed and the end of the trace.
    """
    report = Report(seed)
    Violation.seen.clear()
    with quiet_and_repeatable():
        run = _Run(seed, report)
        with run.loop:
            try:
                run.play()
            except Exception as error:  # whatever it is, it needs the seed
                run.loop.keep()
                raise Failed(
                    f"seed {seed}: {type(error).__name__}: {error}\n"
                    f"again: python -m pytest tests/benchmarks/test_simulation.py --seed {seed}\nthe last steps:\n  "
                    + "\n  ".join(report.trace[-SHOWN:])
                ) from error
    return report


class _Run:
    def __init__(self, seed: int, report: Report) -> None:
        self.rng = random.Random(seed)
        self.trace = report.trace
        self.loop = SimLoop(self.rng, shuffled=self.rng.random() < 0.5)  # type: ignore[abstract]
        with self.loop:
            self.world = World(self.rng, self.loop, self.trace.append)
        self.engines: list[Engine] = []
        self.news: list[tuple[str, Rank]] = []
        """Ends of dead engines' connections that the daemon has not heard of."""
        self.old: list[Peer] = []
        """Connections of ranks that have lost their streams. They close them."""
        self.half_gone: list[Rank] = []
        """Dead ranks of whose end the daemon has heard in one way or two."""
        self.patient = self.rng.random() < 0.5
        """At the end, let the daemon finish with one piece of news before the next one comes."""
        self.closing: list[Rank] = []
        self.started = 0
        self.fault_rate = self.rng.choice((0.0, 0.0, 0.02, 0.1))
        """Of a step of a copy: it fails, or its copier dies."""
        self.death_rate = self.rng.choice((0.0, 0.0, 0.002, 0.02))
        """Of any step: a copier dies."""
        self.shared = self.rng.random() < 0.5
        """Shares are reloaded now and then."""
        self.kill_rate = self.rng.choice((0.0, 0.02, 0.08))

    def play(self) -> None:
        for _ in range(STEPS):
            self._step()
            self.world.check()
        self._end()

    # -- one step --------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        rng, loop = self.rng, self.loop
        self._maybe_kill()
        choice = rng.random()
        if choice < 0.50 and loop.num_ready:
            loop.run_one()
        elif choice < 0.54 and loop.num_threads:
            loop.run_thread()
        elif choice < 0.80 and (workers := self._workers()):
            rng.choice(workers).step(self._fault())
        elif choice < 0.83 and self.news:
            self._tell(self.news.pop(rng.randrange(len(self.news))))
        elif choice < 0.835 and self.old:
            self.world.handler.peer_gone(self.old.pop(rng.randrange(len(self.old))))
        elif choice < 0.84:
            self._pass_time()
        elif choice < 0.87 and self.world.wire:
            self._deliver()
        else:
            self._act()
        self._see_ends()

    def _workers(self) -> list[SimWorker]:
        return self.world.copiers.workers()

    def _maybe_kill(self) -> None:
        if self.rng.random() < self.death_rate and (living := self.world.copiers.living):
            self.rng.choice(living).kill()

    def _fault(self) -> str | None:
        if self.rng.random() >= self.fault_rate:
            return None
        return self.rng.choice(("failure", "failure", "failure", "death"))

    def _pass_time(self) -> None:
        self.loop.advance(self.rng.choice((0.001, 0.1, 0.2, 0.2, 0.5, 1.0, 10.0, 70.0)))
        self.world.lookups.expire()
        if self.closing:  # what an engine has launched still runs while it leaves
            self.rng.choice(self.closing).run_kernel()

    def _deliver(self) -> None:
        assert self.world.wire is not None
        call, message = self.world.wire.popleft()
        call.arrive(message)

    def _tell(self, news: tuple[str, Rank]) -> None:
        kind, rank = news
        self.half_gone.append(rank)
        self.trace.append(f"{rank.name}: the {kind} ends")
        if kind == "stream":
            rank.task.cancel()
        else:
            self.world.handler.peer_gone(rank.peer)

    def _act(self) -> None:
        rng = self.rng
        alive = [engine for engine in self.engines if not engine.over]
        if len(alive) < 3 and (not alive or rng.random() < 0.1):
            self.started += 1
            engine = Engine(self.world, f"e{self.started}", rng.choice(SHAPES))
            self.trace.append(f"{engine.name} starts: {engine.shape.namespace.model}")
            self.engines.append(engine)
            return
        engine = rng.choice(alive)
        for rank in engine.ranks:
            if rank.detached and rng.random() < 0.3:
                self.trace.append(f"{rank.name} attaches again")
                rank.attach()
                return
        if rng.random() < self.kill_rate:
            if rng.random() < 0.5:
                for rank in engine.ranks:  # with its last breath
                    if rank.attached:
                        rank.store(self._chains(engine))
                self.trace.append(f"{engine.name} is killed")
                self.news += engine.die()
            else:
                self.trace.append(f"{engine.name} closes")
                engine.close()
                self.closing += engine.ranks
            return
        self._work(engine)

    def _work(self, engine: Engine) -> None:
        rng = self.rng
        choice = rng.random()
        ranks = [rank for rank in engine.ranks if rank.attached]
        if choice < 0.27:
            chains = self._chains(engine)
            for rank in ranks:
                rank.store(chains)
        elif choice < 0.57 and ranks:
            self._load(engine, rng.choice(ranks))
        elif choice < 0.75:
            engine.lookup()
        elif choice < 0.82 and ranks:
            rng.choice(ranks).flush()
        elif choice < 0.92 and ranks:
            rng.choice(ranks).run_kernel()
        elif choice < 0.95:
            engine.release()
        elif choice < 0.98:
            engine.renew()
        elif choice < 0.985:
            engine.clear()
        elif choice < 0.99 and self.shared:
            self.world.reload_shares()

    def _load(self, engine: Engine, rank: Rank) -> None:
        lease: Lease | None = self.rng.choice(engine.leases) if engine.leases else None
        choice = self.rng.random()
        if lease is not None and choice < 0.5:
            rank.load({group: keys[:3] for group, keys in lease.keys.items() if keys}, lease)
        elif choice < 0.9:
            rank.load({group: keys[:3] for group, keys in engine.found.items()}, None)
        else:
            rank.load(self._chains(engine), None)

    def _chains(self, engine: Engine) -> dict[int, list[int]]:
        """Some keys of some groups; a few twice in one job, as an engine might."""
        rng = self.rng
        groups = rng.sample(engine.shape.groups, rng.randint(1, len(engine.shape.groups)))
        return {group.group: [rng.randrange(NUM_KEYS) for _ in range(rng.randint(1, 3))] for group in groups}

    # -- ends ------------------------------------------------------------------------------------------------------

    def _see_ends(self) -> None:
        """Streams that have ended: what that promised must be true by now."""
        for rank in [rank for engine in self.engines if not engine.over for rank in engine.ranks]:
            if rank.task.done() and not rank.detached:
                self.trace.append(f"{rank.name} has lost its stream: {rank.call.refused}")
                rank.detach()
                self.old.append(rank.peer)
        for rank in [rank for rank in self.closing if rank.task.done()]:
            self.closing.remove(rank)
            self.trace.append(f"{rank.name} has closed")
            if not rank.task.cancelled() and rank.task.exception() is None:
                mapped = [each.name for each in rank.allocations if each.mapped_by]
                if mapped:
                    raise Violation(f"the stream of {rank.name} has ended, and {mapped} is still mapped")
                if rank.jobs:
                    raise Violation(f"the stream of {rank.name} has ended without a word on jobs {sorted(rank.jobs)}")
            self._tell(("attach socket", rank))
        if self._busy():
            return
        self.world.check_at_rest()
        if self.half_gone:
            # Either end of a rank's connections is enough: the daemon has nothing left to do but this.
            for rank in self.half_gone:
                mapped = [each.name for each in rank.allocations if each.mapped_by]
                if mapped:
                    raise Violation(f"{rank.name} has gone, nothing is in flight, and {mapped} is still mapped")
            self.half_gone.clear()

    def _end(self) -> None:
        """Every engine goes, one way or another; then nothing may be left."""
        if self.rng.random() < 0.3:
            self.trace.append("the daemon shuts down")
            self.world.end_all()
        alive = [engine for engine in self.engines if not engine.over]
        steps = 0
        while alive or self.news or self.old or self.closing or self._busy():
            steps += 1
            if steps > END_STEPS:
                raise Violation(f"it does not end: {len(self.closing)} streams, {self.loop.num_ready} callbacks")
            if alive and self.rng.random() < 0.05:
                self._leave(alive.pop())
            self._go_on()
            self._see_ends()
            self.world.check()
        if leases := self.world.cache.stats().leases:
            raise Violation(f"{leases} leases have outlived their owners")
        self.loop.advance(1000.0)  # deadlines of jobs that are over
        while self._busy():
            self._go_on()
        self.world.check()
        self.world.check_end()
        # The next random number depends on every choice that was made.
        self.trace.append(f"end: {self.world.cache.stats()} {self.rng.random()}")

    def _leave(self, engine: Engine) -> None:
        if self.rng.random() < 0.5:
            self.news += engine.die()
        else:
            engine.close()
            self.closing += engine.ranks

    def _busy(self) -> bool:
        return bool(self.loop.num_ready or self.loop.num_threads or self.world.wire or self._workers())

    def _go_on(self) -> None:
        """Something that brings the end nearer."""
        loop = self.loop
        self._maybe_kill()
        choices = [loop.run_one] * 3 * (loop.num_ready > 0) + [loop.run_thread] * (loop.num_threads > 0)
        choices += [lambda: self.rng.choice(self._workers()).step(self._fault())] * 2 * bool(self._workers())
        choices += [self._deliver] * 2 * bool(self.world.wire)
        if self.news and not (self.patient and choices):
            choices.append(lambda: self._tell(self.news.pop(self.rng.randrange(len(self.news)))))
        if self.old:
            choices.append(lambda: self.world.handler.peer_gone(self.old.pop(self.rng.randrange(len(self.old)))))
        if choices:
            self.rng.choice(choices)()
        else:
            self._pass_time()
