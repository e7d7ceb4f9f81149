"""Runs ``kvsidecar serve``, with a progress bar on a terminal.

Settings -> log -> lock -> probes are answered -> the daemon is imported, the first copier looks for GPUs ->
`kvsidecar.daemon.daemon`.

Most of a start is imports. So this module imports only the modules that answer probes. The others are imported in a
thread meanwhile: probes learn that the daemon is starting, and SIGTERM ends it at once.
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import resource
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING

import uvloop

from kvsidecar import copier
from kvsidecar.daemon.lifecycle import Lifecycle, exit_at_once
from kvsidecar.daemon.pool_geometry import PoolGeometry, pool_geometry, pool_spec
from kvsidecar.daemon.setting_sources import load_settings
from kvsidecar.daemon.settings import Settings
from kvsidecar.daemon.systemd import Notifier
from kvsidecar.errors import ConfigError, DeviceLost, DeviceNotFound, DriverUnusable, PoolRefused
from kvsidecar.support import extras, failpoints, kernel_calls, log, protobuf_trim, terminal
from kvsidecar.support.steps import Steps
from kvsidecar.support.supervised_child import ChildSetup, Launched, launch
from kvsidecar.support.threads import WORKERS, check_room, started_pool
from kvsidecar.support.units import format_duration, format_rate, format_size
from kvsidecar.support.young_objects import COLLECT, YoungObjects
from kvsidecar.types import Readiness, State

if TYPE_CHECKING:
    from kvsidecar.core.metrics import Metrics
    from kvsidecar.daemon.daemon import Daemon
    from kvsidecar.daemon.tracing import Tracing
    from kvsidecar.pool.kept_files import Carrier

    MakeDaemon = Callable[[Lifecycle, Launched], Awaitable[Daemon]]

DESCRIPTORS = 65536
"""Room in the table of descriptors from the start, if the limit allows as many: 512 KiB."""
LEAST_FILE_BYTES = 16 << 20
"""Size of the largest file that any daemon makes: a copier's ring."""
BAR_COLUMNS = 40
"""The width of the bar that shows how much of the pool is pinned."""


def serve(flags: Mapping[str, str | None]) -> int:
    """Run a daemon until it is asked to stop. Returns the exit code.

    Args:
        flags: the command line's, by option name; None for one that was not given.

    Raises:
        AddressUnavailable, ConfigError, DeviceError, KernelRefuses, PinFailed, PoolRefused, SocketInUse,
            TooManyProcesses: it cannot start; the text is one sentence, which the service manager has received.
    """
    notifier = Notifier.from_environment()
    try:
        return _serve(flags, notifier)
    except Exception as error:
        notifier.failed(error)
        raise


def _serve(flags: Mapping[str, str | None], notifier: Notifier) -> int:
    settings = load_settings(flags)
    failpoints.configure_from_environment()
    check_room()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of NumPy, here and in the children: they need none
    log.configure(log_format=settings.log_format, level=settings.log_level)
    kernel_calls.check()
    geometry = pool_geometry(settings)
    _raise_descriptor_limit()
    _raise_file_limit(geometry.pool_bytes)
    read_settings = None if terminal.sighup_is_its_end() else lambda: load_settings(flags)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(settings, geometry, read_settings, notifier))


async def _run(
    settings: Settings, geometry: PoolGeometry, read_settings: Callable[[], Settings] | None, notifier: Notifier
) -> int:
    asyncio.get_running_loop().set_default_executor(started_pool(WORKERS))
    async with Lifecycle(settings, geometry.pool_bytes, notifier=notifier, at_terminal=read_settings is None) as life:
        if terminal.can_redraw(sys.stderr) and settings.log_format != "json":
            # One column less than the terminal has, for the cursor: else the line would wrap.
            life.readiness.listen(lambda now: log.show(bar(now, terminal.width(sys.stderr) - 1)))
        if not await life.open():
            return 0
        from kvsidecar.daemon.carriers import open_carrier  # not before probes are answered

        life.carrier = carrier = await open_carrier(settings, notifier.listener, life.stop)
        if life.stop.is_set():
            return 0
        # In this thread, which lives as long as the daemon; it starts while this process imports.
        first = _launch()
        loading = _in_thread(lambda: _load(settings, geometry, read_settings, carrier))
        making = asyncio.ensure_future(_make(loading, life, first))
        told_to_stop = asyncio.ensure_future(life.stop.wait())
        await asyncio.wait((making, told_to_stop), return_when=asyncio.FIRST_COMPLETED)
        if making.done():
            told_to_stop.cancel()
            daemon = making.result()
            # Modules and parts stay for good: a full collection would walk over them for 25 ms in the event loop.
            gc.freeze()
            gc.set_threshold(*COLLECT)
            gc.enable()
            life.loop_time.at_end_of_iteration = YoungObjects()
            if not protobuf_trim.keep_from_trimming():
                log.get("daemon").debug("protobuf still trims the heap: lookups may wait for it now and then")
            await daemon.run()
            return 0
        first.process.kill()
    # The thread cannot be stopped, and an import or a driver that hangs must not delay the end.
    return exit_at_once(0)


def _launch() -> Launched:
    """A copier's process, for any device. Raises DriverUnusable, TooManyProcesses."""
    try:
        return launch(copier.PROGRAM)
    except OSError as error:
        raise DriverUnusable(f"no copier's process can be started: {error.strerror}") from error


async def _make(loading: asyncio.Future[MakeDaemon], life: Lifecycle, first: Launched) -> Daemon:
    try:
        return await (await loading)(life, first)
    except BaseException:
        first.process.kill()
        raise


def _in_thread(load: Callable[[], MakeDaemon]) -> asyncio.Future[MakeDaemon]:
    """Call ``load`` in a daemon thread: unlike `asyncio.to_thread`, the end of the event loop does not wait for it."""
    loaded: Future[MakeDaemon] = Future()

    def run() -> None:
        try:
            loaded.set_result(load())
        except BaseException as error:  # noqa: BLE001 - raised by the future
            loaded.set_exception(error)

    threading.Thread(target=run, name="kvsidecar-load", daemon=True).start()
    return asyncio.wrap_future(loaded)


def _load(
    settings: Settings,
    geometry: PoolGeometry,
    read_settings: Callable[[], Settings] | None,
    carrier: Carrier | None = None,
) -> MakeDaemon:
    """Import the daemon. Returns the function that makes it, in the event loop. Raises ConfigError: it cannot start."""
    failpoints.hit("start.load")
    from kvsidecar.copier.copiers import START_ATTEMPTS, Copiers, Options
    from kvsidecar.copier.link import CopierLink
    from kvsidecar.copier.pins_in_copiers import PinsInCopiers
    from kvsidecar.daemon.daemon import Daemon
    from kvsidecar.daemon.kept_pool import KeptPool
    from kvsidecar.daemon.tier_plans import tier_plans
    from kvsidecar.pool.host_pool import HostPool
    from kvsidecar.support.cpu_sleep import CORES_TO_SPARE, SleepGuard

    tracing = tracing_of(settings)

    async def make(life: Lifecycle, first: Launched) -> Daemon:
        """Raises ConfigError, DriverUnusable."""
        light_seconds = settings.light_sleep if CORES_TO_SPARE else 0.0
        guard = SleepGuard(light_seconds)
        if guard.problem:
            log.get("daemon").warning("cores are not kept awake", reason=guard.problem)
        options = Options(
            settings.device,
            settings.devices,
            light_seconds=light_seconds,
            given=ChildSetup(
                (life.endpoint.lock, *(() if carrier is None else carrier.locks)),
                settings.log_format,
                settings.log_level,
            ),
        )
        steps = Steps(life.loop_time)
        for attempt in range(1, START_ATTEMPTS + 1):
            link = CopierLink(first if attempt == 1 else _launch(), guard, steps)
            try:
                hello = await link.hello(options.device, options.devices, options.given)
                break
            except DeviceNotFound as error:
                raise ConfigError(f"{settings.called('devices')}={','.join(settings.devices)!r}: {error}") from error
            except DeviceLost as error:
                if attempt == START_ATTEMPTS:
                    raise DriverUnusable(f"no copier starts: {error}") from error
        log.get("daemon").info("device", backend=hello.platform, why=hello.why, devices=list(hello.devices))
        copiers = Copiers(
            hello, link, options, store_chunk=settings.store_chunk, guard=guard, steps=steps, on_error=life.unexpected
        )
        pins = PinsInCopiers(copiers)
        spec = pool_spec(settings, geometry, list(hello.devices.values()))
        pins.pool = pool = HostPool(spec, pins)
        kept = None
        if carrier is not None:
            kept = KeptPool(carrier, pool, geometry.slab_bytes, settings)
            await kept.open()
        tiers = tier_plans(settings, pool, options.given)
        try:
            return Daemon(
                settings,
                copiers,
                pool,
                geometry.slab_bytes,
                life=life,
                guard=guard,
                kept=kept,
                tiers=tiers,
                read_settings=read_settings,
                open_tracing=tracing,
            )
        except MemoryError:
            size = format_size(geometry.pool_bytes)
            why = f"the tables of a pool of {size} alone need more memory than there is: lower --pool-size"
            raise PoolRefused(why, lasting=True) from None

    return make


def _raise_descriptor_limit() -> None:
    """Allow as many descriptors as the system does: a shell's default of 1024 is enough for a few hundred clients.
    (It is low for programs that use select(), which this one does not.)"""
    with suppress(OSError, ValueError):  # it may be forbidden to ask, and to change it
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with suppress(OSError, ValueError):
        # The kernel doubles the table when it is full, and in a process with several threads waits for a grace period
        # of RCU each time: 10 to 20 ms of the event loop. It never makes it smaller.
        os.close(fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, min(kernel_calls.descriptor_limit(), DESCRIPTORS) - 1))


def _raise_file_limit(pool_bytes: int) -> None:
    """Raises PoolRefused: memory that processes share is a file to the kernel, and the pool exceeds its limit."""
    with suppress(OSError, ValueError):  # it may be forbidden to ask, and to change it
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        if hard != resource.RLIM_INFINITY and hard < (needed := max(pool_bytes, LEAST_FILE_BYTES)):
            raise PoolRefused(
                f"files may have {format_size(hard)} (RLIMIT_FSIZE), and memory that is shared needs one of "
                f"{format_size(needed)}: raise it (ulimit -f unlimited, or LimitFSIZE=infinity)",
                lasting=True,
            )


def tracing_of(settings: Settings) -> Callable[[Metrics], Tracing] | None:
    """The function that opens tracing, if it is on. Raises ConfigError if it is not installed."""
    if settings.tracing == "off":
        return None
    try:
        from kvsidecar.daemon.tracing import Tracing
    except ModuleNotFoundError as error:
        needs = f"{settings.called('tracing')}={settings.tracing} needs what the extra tracing brings"
        raise ConfigError(f"{needs}: {extras.install('tracing')} ({error})") from error
    return Tracing


def bar(now: Readiness, columns: int) -> str:
    """The progress bar while the pool is being pinned, at most ``columns`` wide; empty at any other time."""
    if now.state is not State.PINNING:
        return ""
    text = f" {format_size(now.pinned_bytes)} of {format_size(now.pool_bytes)}"
    if now.pin_bytes_per_second:
        text += f", {format_rate(now.pin_bytes_per_second)}"
    if now.eta_seconds is not None:
        text += f", {format_duration(now.eta_seconds)} left"
    room = max(0, min(BAR_COLUMNS, columns - len("pinning ") - len(text)))
    filled = now.pinned_bytes * room // now.pool_bytes
    return f"pinning {'█' * filled}{'░' * (room - filled)}{text}"[:columns]
