"""The environment of all measurements: the device, the daemon, sizes that fit, and how long to measure."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvsidecar.bench import machine
from kvsidecar.bench.driver import Cuda
from kvsidecar.bench.engine import AttachedEngine, attached
from kvsidecar.bench.errors import BadOption, Skipped
from kvsidecar.bench.layouts import ALL_LAYOUTS, LAYOUTS, MOST_BLOCKS, Layout
from kvsidecar.bench.options import BenchOptions
from kvsidecar.bench.processes import BenchChild, Daemon, PrivateDaemon, RunningDaemon, private_daemon
from kvsidecar.device.host import HostPlatform
from kvsidecar.errors import DriverUnusable
from kvsidecar.support import cuda_driver
from kvsidecar.support.units import GiB, MiB, format_size
from kvsidecar.types import Direction

CUDA_POOL = 12 * GiB
"""Pool of a run on a GPU. Holds four jobs of 512 blocks of the largest layout, and lets stores run for a while before
they evict."""
HOST_POOL, HOST_POOL_QUICK = 1 * GiB, 48 * MiB
PIN_CUDA, PIN_HOST, PIN_HOST_QUICK = 64 * GiB, 1 * GiB, 32 * MiB
POOL_SHARE = 0.6
"""The share of the pool that jobs in flight may fill: the rest is room for slabs of other size classes."""


class Setting:
    """The environment of a run. Opened once per run; closing it ends everything that it started.

    Args:
        say: shows progress, one short line at a time.

    Raises:
        DriverUnusable: CUDA was requested and does not work.
        DaemonUnreachable, BenchError: there is no daemon at ``--socket``, or it is not ready.
    """

    def __init__(self, options: BenchOptions, directory: Path, say: Callable[[str], None]) -> None:
        self.options = options
        self.directory = directory
        self.say = say
        self.run = secrets.token_hex(4)
        """Part of every namespace, so that no run finds the blocks of another one."""
        self.rng = np.random.default_rng(options.seed)
        self._stack = ExitStack()
        self._private: PrivateDaemon | None = None
        self._daemon_stack = self._stack.enter_context(ExitStack())
        self._probe: BenchChild | None = None
        self._running = RunningDaemon(options.socket) if options.socket is not None else None
        self.device = _device(options.device, self._running)
        self.cuda = Cuda() if self.device == "cuda" else None
        if self.cuda is not None:
            self._stack.callback(self.cuda.close)
        self.pool_bytes = self._pool_bytes() if self._running is None else self._running.pool_bytes
        self.divisor = 1 if self.cuda else self._divisor()

    # -- sizes and times -----------------------------------------------------------------------------------------------

    @property
    def repeat(self) -> int:
        """Least number of rounds of every bandwidth figure."""
        return self.options.repeat or (1 if self.options.quick else 7)

    @property
    def cell_seconds(self) -> float:
        """Least duration of the rounds: short jobs are then measured many times."""
        return 0.0 if self.options.quick else 0.2

    def samples(self, full: int) -> int:
        """How many samples of a latency to take."""
        return max(20, full // 20) if self.options.quick else full

    def seconds(self, full: float) -> float:
        """How long to watch something that runs by itself."""
        return full / 8 if self.options.quick else full

    @property
    def in_flight_bytes(self) -> int:
        """The most bytes of jobs in flight: what the pool can hold besides other blocks."""
        return int(self.pool_bytes * POOL_SHARE)

    def layouts(self) -> tuple[Layout, ...]:
        """The layouts to measure, scaled for this device, but not yet limited to blocks that fit its memory."""
        named = self.options.layouts
        chosen = [each for each in ALL_LAYOUTS if each.name in named] if named else LAYOUTS
        return tuple(layout.scaled(self.divisor) for layout in chosen)

    def sized(self, layout: Layout) -> Layout:
        """The layout with blocks that fit the GPU. Raises Skipped if none do."""
        return layout.sized(self.cuda.memory_info()[0] if self.cuda else None)

    def _pool_bytes(self) -> int:
        if self.options.pool_bytes is not None:
            return self.options.pool_bytes
        if self.cuda:
            return _whole_mib(min(CUDA_POOL, machine.available_bytes() // 3))
        wanted = HOST_POOL_QUICK if self.options.quick else HOST_POOL
        return _whole_mib(min(wanted, machine.available_bytes() // 3, self._lockable()))

    def pin_bytes(self) -> int:
        """Size of the pool that the pin measurement pins."""
        if self.options.pin_bytes is not None:
            return self.options.pin_bytes
        if self.cuda:
            wanted = GiB if self.options.quick else PIN_CUDA
            return _whole_mib(min(wanted, machine.available_bytes() * 2 // 3))
        wanted = PIN_HOST_QUICK if self.options.quick else PIN_HOST
        return _whole_mib(min(wanted, machine.available_bytes() // 3, self._lockable()))

    def _lockable(self) -> int:
        """Memory that mlock allows an ordinary user, often 8 MiB, minus what else a process locks."""
        limit = HostPlatform().pin_limit()
        return 1 << 62 if limit is None else limit * 3 // 4

    def _divisor(self) -> int:
        """How much narrower rows are on the host: a power of two with which four jobs of 512 blocks fit the pool."""
        largest = max(layout.block_bytes for layout in LAYOUTS)
        divisor = 1
        while largest // divisor * MOST_BLOCKS > self.in_flight_bytes:
            divisor *= 2
        return divisor

    # -- processes -----------------------------------------------------------------------------------------------------

    def daemon(self) -> Daemon:
        """The daemon of this run; starts it, or starts another one if it has died."""
        if self._running is not None:
            return self._running
        if self._private is not None and self._private.ended:
            self.say(f"the daemon has ended; its log ends:\n{self._private.log_end()}")
            self._private = None
        if self._private is None:
            self._daemon_stack.close()
            self.say(f"starting a daemon that pins {format_size(self.pool_bytes)}")
            self._private = self._daemon_stack.enter_context(self.private_daemon(self.pool_bytes))
        return self._private

    @property
    def is_private(self) -> bool:
        return self._running is None

    def private_daemon(
        self, pool_bytes: int, flags: Sequence[str] = (), *, device: str = "", cores: frozenset[int] | None = None
    ) -> AbstractContextManager[PrivateDaemon]:
        """Another ready daemon, until the end of the block."""
        flags = [*self.options.serve_flags, *flags]
        return private_daemon(self.directory, device or self.device, pool_bytes, flags, cores=cores)

    def engine(self, layout: Layout) -> AbstractContextManager[AttachedEngine]:
        """An attached engine of this process, with blocks in the layout."""
        return attached(self.daemon().socket, layout, self.cuda, run=self.run, rng=self.rng)

    @contextmanager
    def rank(
        self,
        layout: Layout,
        blocks: int,
        in_flight: int,
        directions: Sequence[Direction],
        *,
        daemon: Daemon | None = None,
        device: str = "",
        cores: frozenset[int] | None = None,
        number: int = 0,
        on: str | None = None,
    ) -> Iterator[BenchChild]:
        """A rank in a process of its own, attached; see `kvsidecar.bench.rank` for what it answers.

        Args:
            on: the daemon's name of the device; None: the first GPU, or ``host``.
        """
        config: dict[str, Any] = {
            "socket": (daemon or self.daemon()).socket,
            "cuda": (device or self.device) == "cuda",
            "on": on,
            "layout": layout.to_json(),
            "blocks": blocks,
            "in_flight": in_flight,
            "directions": [direction.value for direction in directions],
            "run": self.run,
            "seed": [self.options.seed, number],
            "name": f"kvsidecar-bench-rank-{number}",
        }
        with closing(BenchChild("kvsidecar.bench.rank", config, self.directory, cores=cores)) as child:
            child.answer()
            yield child

    def probe(self) -> BenchChild:
        """The process that plays an engine's own GPU work on the first GPU; started once."""
        if self._probe is None:
            self._probe = self._stack.enter_context(self.probe_on(0))
        return self._probe

    def probe_on(self, ordinal: int) -> AbstractContextManager[BenchChild]:
        """A process like `probe`, on this GPU."""
        config = {"cuda": self.cuda is not None, "ordinal": ordinal}
        return closing(BenchChild("kvsidecar.bench.probe", config, self.directory))

    def need_private(self, what: str) -> None:
        """Check that the run has a daemon of its own. Raises Skipped with --socket."""
        if not self.is_private:
            raise Skipped(f"{what} can only be measured with a daemon that the benchmark starts: leave out --socket")

    def close(self) -> None:
        self._stack.close()


def _device(wanted: str, running: RunningDaemon | None) -> str:
    """``cuda`` or ``host``."""
    if running is not None:
        if wanted not in ("auto", running.backend):
            raise BadOption(f"--device={wanted} but the daemon at {running.socket} serves the {running.backend} device")
        return running.backend
    if wanted != "auto":
        return wanted
    try:
        return "cuda" if cuda_driver.device_count() else "host"
    except DriverUnusable:
        return "host"


def _whole_mib(nbytes: int) -> int:
    return max(MiB, nbytes // MiB * MiB)
