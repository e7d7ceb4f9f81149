"""The daemon: builds every part, starts them in order, serves, and stops them in the opposite order.

Start, after `kvsidecar.daemon.serve`: RPC and attach socket listen -> pin in a thread -> self-test -> ready.
Stop: not ready -> refuse new jobs -> finish running ones -> unmap -> unpin -> exit.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvsidecar import __version__
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.slots import SlotAllocator
from kvsidecar.copier.hub import DeviceHub
from kvsidecar.core.access import Access
from kvsidecar.core.checksums import Checksums
from kvsidecar.core.jobs import JobRunner
from kvsidecar.core.lookups import LookupService
from kvsidecar.core.metrics import Metrics
from kvsidecar.core.sessions import ID_BITS, Instances, Peer
from kvsidecar.daemon.config import Settings
from kvsidecar.daemon.lifecycle import Lifecycle, exit_at_once
from kvsidecar.daemon.reload import Reloader
from kvsidecar.device.base import COPY, CopyList, Platform
from kvsidecar.errors import DeviceError, DeviceLost, PinFailed, PinStopped, PoolRefused
from kvsidecar.pool.host_pool import HostPool, PinProgress
from kvsidecar.server.attach_socket import AttachSocket
from kvsidecar.server.grpc_server import RpcServer
from kvsidecar.server.handler import Handler
from kvsidecar.server.http import Sources
from kvsidecar.server.local_protocol import LocalConnection
from kvsidecar.server.partial_messages import PartialMessages
from kvsidecar.server.report import Report
from kvsidecar.server.service import Service
from kvsidecar.server.socket_files import group_id
from kvsidecar.support import log
from kvsidecar.support.cpu_sleep import CORES_TO_SPARE, SleepGuard
from kvsidecar.support.tasks import TaskSet
from kvsidecar.types import Direction, Verify

if TYPE_CHECKING:
    from kvsidecar.daemon.tracing import Tracing
    from kvsidecar.server.tcp import RemoteServer

TICK_SECONDS = 0.25
"""How often leases are expired and the loop's lag is measured."""

SELF_TEST_BYTES = 64 * 1024

EXIT_UNSETTLED = 74
"""sysexits.h EX_IOERR: a copy's outcome is unknown, and only the end of the process ends it. Start again."""
HUNG_TICKS = 8
"""A copy that is older than ``stuck_after`` for this many ticks hangs. Not at once: after the process was suspended,
every copy looks old until its worker has had time to see that it is over."""
LAST_WORDS_SECONDS = 1.0
"""From a copy of unknown outcome to the exit: time for other copies, replies on their way, and probes."""

_log = log.get("daemon")


class Daemon:
    """One run of the daemon.

    Args:
        settings: validated.
        platform: the devices.
        pool: not pinned yet.
        life: the process's signals, lock and probes, already open.
        read_settings: reads the settings again, for a reload; None: reload is not supported.
        open_tracing: creates the tracing of jobs; None for no tracing.

    Raises:
        ConfigError: from ``open_tracing``, or for a group or certificates that cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        platform: Platform,
        pool: HostPool,
        slab_bytes: int,
        *,
        life: Lifecycle,
        read_settings: Callable[[], Settings] | None = None,
        open_tracing: Callable[[Metrics], Tracing] | None = None,
    ) -> None:
        clock = time.monotonic
        self._settings = settings
        self._life = life
        self._reloader = None if read_settings is None else Reloader(settings, read_settings, self._apply)
        self._platform = platform
        self._pool = pool
        self._stop_pinning = threading.Event()
        self._exit_code = 0
        self._unsettled = ""
        """Why this process must end as soon as it can; empty while it need not."""
        self._hung_ticks = 0
        self._pinned = PinProgress(pool.nbytes, 0, 0.0, None, 0.0)
        self.epoch = secrets.randbits(ID_BITS) | 1
        self.readiness = life.readiness
        self._metrics = Metrics(platform.name)
        self._tracing = None if open_tracing is None else open_tracing(self._metrics)
        self._tasks = TaskSet(self._task_failed)
        self._guard = SleepGuard(settings.light_sleep if CORES_TO_SPARE else 0.0)
        self._hub = DeviceHub(
            platform, self._worker_failed_in_thread, store_chunk=settings.store_chunk, guard=self._guard
        )
        self._cache = BlockCache(
            SlotAllocator(pool.nbytes, slab_bytes, pool.numa_of_slab()),
            next_id=lambda: secrets.randbits(ID_BITS) | 1,
            seed=secrets.randbits(64),
        )
        self._instances = Instances(self._cache, self._hub, clock, self._task_failed, self._access(settings))
        checksums = None if settings.verify is Verify.OFF else Checksums(settings.verify, pool.view)
        self._runner = JobRunner(
            self._cache,
            self._hub,
            self.readiness,
            self._metrics,
            clock,
            slab_bytes=slab_bytes,
            checksums=checksums,
            guard=self._guard,
            on_ended=None if self._tracing is None else self._tracing.record,
            on_unsettled=self._end_soon,
        )
        self._lookups = LookupService(
            self._cache,
            self.readiness,
            self._metrics,
            clock,
            lease_max=settings.lease_max,
            guard=self._guard,
            owners_of=self._instances.tokens_of,
        )
        self._report = Report(
            epoch=self.epoch,
            backend=platform.name,
            cache=self._cache,
            hub=self._hub,
            instances=self._instances,
            runner=self._runner,
            readiness=self.readiness,
            metrics=self._metrics,
            clock=clock,
        )
        self._metrics.read_gauges_from(self._report.gauges)
        endpoint = life.endpoint
        self._handler = Handler(
            epoch=self.epoch,
            instances=self._instances,
            runner=self._runner,
            lookups=self._lookups,
            readiness=self.readiness,
            metrics=self._metrics,
            tasks=self._tasks,
            status=self._report.reply,
        )
        self._attach = AttachSocket(
            endpoint.attach_path,
            mode=endpoint.mode,
            gid=endpoint.gid,
            epoch=self.epoch,
            instances=self._instances,
            on_gone=self._peer_gone,
            local_connection=partial(LocalConnection, self._handler, PartialMessages())
            if settings.local_protocol
            else None,
            refuse=self._metrics.refuse,
            tasks=self._tasks,
        )
        self._rpc = RpcServer(endpoint, Service(self._handler), self.readiness, self._tasks, self._metrics.refuse)
        self._remote = self._remote_server(settings)
        life.probes.answer_from(Sources(self._metrics, self._stuck, self._report.json))

    async def run(self) -> int:
        """Start, serve until told to stop, shut down. Returns the exit code.

        Raises:
            AddressUnavailable, ConfigError, SocketInUse: the daemon cannot start; nothing is left behind.
        """
        self._loop = asyncio.get_running_loop()
        try:
            await self._start()
            await self._life.stop.wait()
        finally:
            await self._shut_down()
        return self._exit_code

    def _remote_server(self, settings: Settings) -> RemoteServer | None:
        """None if TCP is off. Raises ConfigError for files that cannot be used."""
        if settings.tcp_listen is None:
            return None
        from kvsidecar.server.tcp import RemoteServer
        from kvsidecar.server.tls import Certificates, TlsFiles

        paths = (settings.tls_certificate, settings.tls_key, settings.tls_client_ca)
        files = TlsFiles(*(Path(path) for path in paths if path is not None))
        return RemoteServer(settings.tcp_listen, Certificates(files), self._handler, self._rpc.health)

    @staticmethod
    def _access(settings: Settings) -> Access:
        return Access(
            policy=settings.policy,
            owner=os.geteuid(),
            admin_gid=group_id("admin_group", settings.admin_group),
            private=settings.socket_mode_bits & 0o077 == 0,
        )

    # -- start -----------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        await self._rpc.start()
        self._attach.start()
        self._life.endpoint.secure_grpc_socket()
        tcp_port = None if self._remote is None else await self._remote.start()
        _log.info(
            "listening",
            socket=str(self._life.endpoint.grpc_path),
            http=self._life.http,
            tcp_port=tcp_port,
            backend=self._platform.name,
            version=__version__,
        )
        self._tasks.spawn(self._tick(), name="tick")
        self._tasks.spawn(self._sweep(), name="sweep")
        self._tasks.spawn(self._life.notifier.watch(self._stuck), name="watchdog")
        if self._reloader is not None:
            self._tasks.spawn(self._reload_when_told(self._reloader), name="reload")
        self._tasks.spawn(self._become_ready(), name="become-ready")

    async def _become_ready(self) -> None:
        self.readiness.pinning()
        started = time.monotonic()

        def progressed(progress: PinProgress) -> None:
            self._loop.call_soon_threadsafe(self._pin_progressed, progress)

        try:
            # Apart from pinning, so that the log and a benchmark can tell them apart: to make a context delays an
            # engine's step by a millisecond or two, to pin does not (docs/benchmarks.md).
            await self._hub.device(self._platform.device_uuids()[0])
            _log.info("device context created", seconds=round(time.monotonic() - started, 3))
            await asyncio.to_thread(self._pool.pin, progressed, self._stop_pinning)
            self._metrics.pin_seconds.observe(time.monotonic() - started)
            self._metrics.register_seconds.set(self._pinned.register_seconds)
            self._report.page_kind = self._pool.page_kind
            self._report.numa_nodes = self._pool.numa_nodes
            self._hub.pool_address = self._pool.address
            await self._self_test()
        except PinStopped:
            return
        except (PoolRefused, PinFailed, DeviceError) as error:
            self._fail(str(error))
            return
        except Exception as error:
            # Otherwise the daemon would stay in "pinning" for ever without a reason.
            self._fail(f"the start failed unexpectedly: {type(error).__name__}: {error}")
            raise
        self.readiness.become_ready()
        _log.info(
            "ready",
            pool_bytes=self._pool.nbytes,
            pages=self._pool.page_kind,
            seconds=round(time.monotonic() - started, 3),
            pin_seconds=round(self._pinned.seconds, 3),
            register_seconds=round(self._pinned.register_seconds, 3),
            prefault_seconds=round(self._pinned.faulted_seconds, 3),
        )

    def _pin_progressed(self, progress: PinProgress) -> None:
        self.readiness.pinning(
            pinned_bytes=progress.pinned_bytes,
            bytes_per_second=progress.bytes_per_second,
            eta_seconds=progress.eta_seconds,
        )
        self._pinned = progress
        _log.debug("pinning", pinned_bytes=progress.pinned_bytes, total_bytes=progress.total_bytes)

    async def _self_test(self) -> None:
        """Copy a random pattern from the pool to a device and back, at both ends of the pool.

        Raises:
            DeviceError: the copy failed or came back different.
        """
        uuid = self._platform.device_uuids()[0]
        device = await self._hub.device(uuid)
        nbytes = min(SELF_TEST_BYTES, self._pool.nbytes)
        memory = await asyncio.to_thread(device.allocate, nbytes)
        try:
            for offset in {0, self._pool.nbytes - nbytes}:
                window = self._pool.view()[offset : offset + nbytes]
                pattern = np.frombuffer(secrets.token_bytes(nbytes), np.uint8)
                copies = np.array([(memory.address, nbytes, offset, nbytes, nbytes, 1)], COPY)
                window[:] = pattern
                load = (await self._hub.worker(uuid, Direction.LOAD)).submit(CopyList(copies, nbytes))
                await asyncio.wrap_future(load)
                window[:] = 0
                store = (await self._hub.worker(uuid, Direction.STORE)).submit(CopyList(copies, nbytes))
                await asyncio.wrap_future(store)
                if not np.array_equal(window, pattern):
                    raise DeviceError(f"the self-test copy to {uuid} and back returned different bytes")
        finally:
            await asyncio.to_thread(device.release_memory, memory)

    def _fail(self, reason: str) -> None:
        self.readiness.fail(reason)
        _log.error("not ready", reason=reason)
        if self._settings.on_pin_failure == "exit":
            self._exit_code = 1
            self._life.stop.set()

    # -- while it serves -------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            due = time.monotonic() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            self._metrics.loop_lag_seconds.observe(max(0.0, time.monotonic() - due))
            self._lookups.expire()
            stuck = self._hub.stuck(self._settings.stuck_after)
            self._hung_ticks = 0 if stuck is None else self._hung_ticks + 1
            if stuck is not None and self._hung_ticks == HUNG_TICKS:
                self._metrics.unsettled_copies.labels(stuck.direction.value).inc()
                self._end_soon(str(stuck))

    async def _sweep(self) -> None:
        """Free cleared blocks, a few at a time."""
        while True:
            more = self._cache.sweep()
            await asyncio.sleep(0 if more else TICK_SECONDS)

    def _stuck(self) -> str | None:
        """Why this process cannot go on, or None."""
        if self._unsettled:
            return self._unsettled
        stuck = self._hub.stuck(self._settings.stuck_after)
        return None if stuck is None else str(stuck)

    def _end_soon(self, reason: str) -> None:
        """End the process: a copy of unknown outcome may write to an engine's memory until then, and the engine waits
        for it. Wait for nothing that the copy could hold up, such as unmapping the memory that it uses."""
        if self._unsettled:
            return
        self._unsettled = f"{reason}: the daemon ends, and its copies with it"
        _log.error("a copy has an unknown outcome: the daemon exits", reason=reason, exit_code=EXIT_UNSETTLED)
        self.readiness.fail(self._unsettled)
        self._tasks.spawn(self._end(), name="end-process")

    async def _end(self) -> None:
        await asyncio.sleep(LAST_WORDS_SECONDS)
        exit_at_once(EXIT_UNSETTLED)

    def _peer_gone(self, peer: Peer) -> None:
        for session in self._instances.remove_peer(peer):
            self._tasks.spawn(self._handler.drop(session), name="end-session-of-gone-peer")

    def _worker_failed_in_thread(self, uuid: str, direction: Direction, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._worker_failed, uuid, direction, error)

    def _worker_failed(self, uuid: str, direction: Direction, error: BaseException) -> None:
        _log.error("copy worker ended", device=uuid, direction=direction.value, error=str(error))
        if isinstance(error, DeviceLost):
            self._hub.lost.setdefault(uuid, str(error))
            self._metrics.devices_lost.inc()
        if set(self._hub.lost) >= set(self._platform.device_uuids()):
            self.readiness.fail(f"every device is lost; the last one was {uuid}: {error}")

    def _task_failed(self, name: str, error: BaseException) -> None:
        _log.error("task failed", task=name, error=str(error), exc_info=error)

    async def _reload_when_told(self, reloader: Reloader) -> None:
        while True:
            await self._life.hung_up.wait()
            self._life.hung_up.clear()
            # One reload after the other: the service manager expects RELOADING and READY in pairs.
            await self._life.notifier.reloading(reloader.reload)

    def _apply(self, settings: Settings) -> None:
        self._settings = settings
        log.configure(log_format=settings.log_format, level=settings.log_level)
        self._hub.store_chunk = settings.store_chunk
        self._instances.access = replace(self._instances.access, policy=settings.policy)

    # -- stop ------------------------------------------------------------------------------------------------------

    async def _shut_down(self) -> None:
        deadline = time.monotonic() + self._settings.drain_timeout
        self._life.begin_stop(self._settings.drain_timeout)
        self._stop_pinning.set()
        # A session ends when its running jobs are over; its client sees the end of the stream.
        ends = [
            self._tasks.spawn(self._instances.end(session, gone=False), name="end-session")
            for session in self._instances
        ]
        if ends:
            _, pending = await asyncio.wait(ends, timeout=max(0.0, deadline - time.monotonic()))
            if pending:
                _log.error("sessions did not drain in time", sessions=len(pending))
        if self._remote is not None:
            await self._remote.stop(grace=0.2)
        await self._rpc.stop(grace=0.2)
        await self._attach.stop()
        await self._tasks.cancel()
        if self._tracing is not None:
            await self._tracing.close(max(0.0, deadline - time.monotonic()))
        ended = await self._hub.close(max(0.1, deadline - time.monotonic()))
        if self._unsettled or not ended:
            _log.error("copies are still running: the process exits without unpinning", exit_code=EXIT_UNSETTLED)
            exit_at_once(EXIT_UNSETTLED)
        try:
            await asyncio.to_thread(self._pool.close)
        except PinFailed as error:
            # The process ends next, and the kernel unpins the rest.
            _log.error("unpinning failed", error=str(error))
        await asyncio.to_thread(self._platform.close)
        self._guard.close()
