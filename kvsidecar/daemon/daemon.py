"""The daemon: builds every part, starts them in order, serves, and stops them in the opposite order.

Start, after `kvsidecar.daemon.serve`: the copiers are started -> RPC and attach socket listen -> the pool is pinned in
every copier -> self-test of each -> ready. With blocks of an earlier daemon, the self-test follows the first chunk, and
from then on the blocks that lie in pinned chunks are looked up and loaded.
Stop: not ready -> refuse new jobs -> finish running ones -> unmap -> the copiers end -> exit.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvsidecar import __version__
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.freed import Freed
from kvsidecar.cache.records import Records
from kvsidecar.cache.slots import SlotAllocator
from kvsidecar.cache.space_blocks import Space
from kvsidecar.copier.copiers import Copier, Copiers
from kvsidecar.core.access import Access
from kvsidecar.core.checksums import Checksums
from kvsidecar.core.holds import Holds
from kvsidecar.core.jobs import JobRunner
from kvsidecar.core.lookups import LookupService
from kvsidecar.core.metrics import Metrics
from kvsidecar.core.readiness import WarmStart
from kvsidecar.core.sessions import ID_BITS, Instances
from kvsidecar.core.shares import resolve, resolve_disk
from kvsidecar.core.tiering import Tiering, TierPlan
from kvsidecar.core.watches import Watches
from kvsidecar.core.zeroing import Zeroing
from kvsidecar.daemon.kept_pool import KeptPool
from kvsidecar.daemon.lifecycle import Lifecycle, exit_at_once
from kvsidecar.daemon.listeners import Listeners
from kvsidecar.daemon.pool_start import PoolStart
from kvsidecar.daemon.reload import Reloader
from kvsidecar.daemon.settings import Settings
from kvsidecar.errors import DeviceError, KVSidecarError, PinFailed, PinStopped, PoolRefused
from kvsidecar.pool.host_pool import HostPool
from kvsidecar.server.handler import Handler
from kvsidecar.server.http import Sources
from kvsidecar.server.report import Report
from kvsidecar.server.socket_files import group_id
from kvsidecar.support import free_memory, log
from kvsidecar.support.boot import boot_time
from kvsidecar.support.cpu_sleep import SleepGuard
from kvsidecar.support.tasks import TaskSet
from kvsidecar.support.units import format_size
from kvsidecar.types import Verify

if TYPE_CHECKING:
    from kvsidecar.daemon.tracing import Tracing

TICK_SECONDS = 0.25
"""How often leases are expired and the loop's lag is measured."""

EXIT_COPIERS_LEFT = 74
"""sysexits.h EX_IOERR: a copier did not end although it was killed."""
COPIER_END_SECONDS = 10.0
"""A killed copier's process, which unpins the pool as it ends, has this long."""

_log = log.get("daemon")
_caused = log.limited("daemon")


class Daemon:
    """One run of the daemon.

    Args:
        copiers: not started yet.
        pool: not pinned yet; it is pinned in the copiers.
        guard: keeps the loop awake around jobs.
        kept: takes over the pool of an earlier daemon; None: the pool ends with this one.
        tiers: slower memory behind the pool, the fastest first.
        life: the process's signals, lock and probes, already open.
        read_settings: reads the settings again, for a reload; None: reload is not supported.
        open_tracing: creates the tracing of jobs; None for no tracing.

    Raises:
        ConfigError: from ``open_tracing``, or for a group, certificates or shares that cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        copiers: Copiers,
        pool: HostPool,
        slab_bytes: int,
        *,
        life: Lifecycle,
        guard: SleepGuard,
        kept: KeptPool | None = None,
        tiers: Sequence[TierPlan] = (),
        read_settings: Callable[[], Settings] | None = None,
        open_tracing: Callable[[Metrics], Tracing] | None = None,
    ) -> None:
        # Of all processes of a boot: the times in a kept pool are on it, too, whatever the wall clock is set to. What
        # is promised to go after an hour goes then, even if the machine slept through most of it.
        clock = boot_time
        self._settings = settings
        self._life = life
        self._reloader = None if read_settings is None else Reloader(settings, read_settings, self._apply)
        self._copiers = copiers
        copiers.on_change = self._copier_changed
        backend = copiers.hello.platform
        self._pool = pool
        self._kept = kept
        self._failed: KVSidecarError | None = None
        """Why the daemon ends although nobody has asked it to."""
        self.epoch = secrets.randbits(ID_BITS) | 1
        self.readiness = life.readiness
        self._metrics = Metrics(backend)
        for uuid in copiers.hello.devices:
            self._metrics.copier_deaths.labels(uuid)  # 0 from the start: an alert sees the first one
            self._metrics.devices.of(uuid)
        self._tracing = None if open_tracing is None else open_tracing(self._metrics)
        self._tasks = TaskSet(life.unexpected)
        self._guard = guard

        def make_cache(records: Records | None) -> BlockCache:
            unknown = kept is not None and kept.found.warm
            freed = Freed(pool.nbytes, unknown=unknown) if settings.zero_freed else None
            return BlockCache(
                SlotAllocator(pool.nbytes, slab_bytes, pool.numa_of_slab(), freed),
                next_id=lambda: secrets.randbits(ID_BITS) | 1,
                seed=secrets.randbits(64),
                records=records,
                eviction=settings.eviction,
            )

        self._cache = make_cache(None) if kept is None else kept.fill(make_cache)
        self._cache.left.on_cleared = self._left_cleared
        self._tiers = [plan.tier for plan in tiers]
        self._share_out(settings)
        if kept is not None:
            self._started_with(kept.found)
        self._instances = Instances(
            self._cache, copiers, clock, life.unexpected, self._access(settings), life.loop_time
        )
        checksums = None if settings.verify is Verify.OFF else Checksums(settings.verify, self._cache)
        for tier in self._tiers:
            tier.on_change = lambda _: self._own()
        freed = self._cache.freed
        self._zeroing = None if freed is None else Zeroing(freed, pool, self._metrics)
        tiering = Tiering(self._cache, tiers, self._metrics, clock, zeroing=self._zeroing) if tiers else None
        self._runner = JobRunner(
            self._cache,
            copiers,
            self.readiness,
            self._metrics,
            clock,
            later=copiers.steps.later,
            checksums=checksums,
            guard=self._guard,
            on_ended=None if self._tracing is None else self._tracing.record,
            tiering=tiering,
            zeroing=self._zeroing,
        )
        self._watches = Watches(
            self._cache,
            self._metrics,
            self._soon_or_later,
            lambda: self._cache.reader.below is None and self.readiness.read_refusal is None,
            tiering,
        )
        kept_holds = None if kept is None else kept.holds
        self._holds = Holds(self._cache, clock, settings.pin_max.of(pool.nbytes), kept_holds)
        self._holds.restore()
        self._pool_start = PoolStart(pool, copiers, self._cache, self._runner, self._holds, self.readiness)
        self._lookups = LookupService(
            self._cache,
            self.readiness,
            self._metrics,
            clock,
            lease_max=settings.lease_max,
            guard=self._guard,
            owners_of=self._instances.tokens_of,
            tiering=tiering,
            holds=self._holds,
            notes=self._watches.notes,
        )
        self._report = Report(
            epoch=self.epoch,
            backend=backend,
            cache=self._cache,
            copiers=copiers,
            instances=self._instances,
            runner=self._runner,
            readiness=self.readiness,
            metrics=self._metrics,
            clock=clock,
            tiering=tiering,
            watches=self._watches,
            holds=self._holds,
        )
        self._metrics.read_gauges_from(self._report.gauges, self._report.count_models)
        life.unexpected.count_with(self._metrics.unexpected_errors.inc)
        self._handler = Handler(
            epoch=self.epoch,
            instances=self._instances,
            runner=self._runner,
            lookups=self._lookups,
            readiness=self.readiness,
            metrics=self._metrics,
            tasks=self._tasks,
            make_status=self._report.reply,
            watches=self._watches,
            steps=copiers.steps,
        )
        self._listeners = Listeners(settings, self._handler, life, copiers.pidfds)
        life.probes.answer_from(Sources(self._metrics, self._stuck, self._report.json, self._report.tiers))

    def _soon_or_later(self, seconds: float, call: Callable[[], None]) -> None:
        if seconds:
            asyncio.get_running_loop().call_later(seconds, call)
        else:
            self._life.loop_time.later(call)

    async def run(self) -> None:
        """Start, serve until asked to stop, shut down.

        Raises:
            AddressUnavailable, ConfigError, SocketInUse: the daemon cannot start; nothing is left behind.
            DeviceError, PinFailed, PoolRefused: the pool cannot be pinned, and the daemon is not to stay.
        """
        try:
            await self._start()
            await self._life.stop.wait()
            if self._failed is not None:
                raise self._failed
        except Exception as error:
            self._life.notifier.failed(error)  # before the shutdown, which may take long
            raise
        finally:
            await self._shut_down()

    @staticmethod
    def _access(settings: Settings) -> Access:
        return Access(
            policy=settings.policy,
            owner=os.geteuid(),
            admin_gid=group_id(settings.called("admin_group"), settings.admin_group),
            private=settings.socket_mode_bits & 0o077 == 0,
        )

    # -- start -----------------------------------------------------------------------------------------------------

    def _started_with(self, found: WarmStart) -> None:
        self.readiness.warm_start = found
        self._metrics.warm_started(found)
        _log.info(
            "warm start" if found.warm else "cold start",
            carrier=found.carrier or "none",
            reason=found.cold_reason,
            kept_blocks=found.kept_blocks,
            dropped_blocks=dict(found.dropped),
            seconds=round(found.seconds, 3),
        )

    async def _start(self) -> None:
        # First: a client that connects is sent the pidfds of all copiers.
        self._copiers.launch()
        tcp_port = await self._listeners.start()
        _log.info(
            "listening",
            socket=str(self._life.endpoint.grpc_path),
            http=self._life.http,
            tcp_port=tcp_port,
            backend=self._copiers.hello.platform,
            pool=format_size(self._life.readiness.now.pool_bytes),
            version=__version__,
        )
        self._tasks.keep(self._tick, name="tick")
        self._tasks.keep(self._sweep, name="sweep")
        self._tasks.keep(partial(self._life.notifier.watch, self._stuck), name="watchdog")
        if self._reloader is not None:
            self._tasks.keep(partial(self._reload_when_told, self._reloader), name="reload")
        self._tasks.spawn(self._become_ready(), name="become-ready")

    async def _become_ready(self) -> None:
        self.readiness.pinning()
        started = time.monotonic()
        try:
            # Apart from pinning, so that the log and a benchmark can tell them apart: to make a context delays an
            # engine's step by a millisecond or two, to pin does not (docs/benchmarks.md).
            await self._copiers.start()
            _log.info(
                "copiers started",
                devices={copier.uuid: copier.pid for copier in self._copiers},
                seconds=round(time.monotonic() - started, 3),
            )
            self._own()
            await self._pool_start.pin()
            self._begin_to_serve()
        except PinStopped:
            return
        except (PoolRefused, PinFailed, DeviceError) as error:
            self._fail(error)
            return
        except Exception as error:
            # Otherwise the daemon would stay in "pinning" for ever without a reason.
            self._fail(PinFailed(f"the start failed unexpectedly: {type(error).__name__}: {error}"))
            raise
        self._say_ready(time.monotonic() - started)

    def _begin_to_serve(self) -> None:
        for tier in self._tiers:
            self._tasks.keep(tier.run, name=f"tier-{tier.name}")  # nobody waits for it
        if self._zeroing is not None:
            self._tasks.keep(self._zeroing.run, name="zeroing")
        self.readiness.become_ready()
        if self._kept is not None:
            self._kept.started()

    def _say_ready(self, seconds: float) -> None:
        pinned = self._pool_start.progress
        self._metrics.pin_seconds.observe(seconds)
        self._metrics.register_seconds.set(pinned.register_seconds)
        self._report.page_kind = self._pool.page_kind
        self._report.numa_nodes = self._pool.numa_nodes
        _log.info(
            "ready",
            pool_bytes=self._pool.nbytes,
            pages=self._pool.page_kind,
            seconds=round(seconds, 3),
            pin_seconds=round(pinned.seconds, 3),
            register_seconds=round(pinned.register_seconds, 3),
            prefault_seconds=round(pinned.faulted_seconds, 3),
        )

    def _own(self) -> None:
        """Name the processes that may write to the pool."""
        if self._kept is not None:
            children = [*self._copiers, *self._tiers]
            self._kept.set_owners([os.getpid(), *(child.pid for child in children)])

    def _fail(self, error: KVSidecarError) -> None:
        self.readiness.fail(str(error))
        _log.error("not ready", reason=str(error))
        wish = self._settings.on_pin_failure
        # A manager that waits for READY=1 would show nothing but a start that takes long, until it ends the daemon.
        if wish == "exit" or (wish == "auto" and self._life.notifier.listener.listens):
            self._failed = error
            self._life.stop.set()

    # -- while it serves -------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        notes = free_memory.Peak()
        while True:
            due = time.monotonic() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            self._metrics.loop_lag_seconds.observe(max(0.0, time.monotonic() - due))
            stuck_after = self._settings.stuck_after
            calls: dict[str, Callable[[], object]] = {
                "expire": self._lookups.expire,
                "check-copiers": partial(self._copiers.check, stuck_after),
                **{f"check-{tier.name}": partial(tier.check, stuck_after) for tier in self._tiers},
                "look": self._watches.look,
            }
            for name, call in calls.items():
                self._tasks.attempt(call, name=name)
            await notes.used(self._watches.notes.held_bytes)

    def _left_cleared(self, space: Space, groups: int) -> None:
        self._metrics.spaces_cleared.inc(groups)
        _caused.warning(
            "a namespace without engines was cleared, as its user has left too many",
            model=space.namespace.model,
            uid=space.user,
            share=space.share.name,
        )

    async def _sweep(self) -> None:
        """Free cleared blocks, a few at a time."""
        while True:
            more = self._cache.sweep()
            await asyncio.sleep(0 if more else TICK_SECONDS)

    def _stuck(self) -> str | None:
        """Why this process cannot go on, or None."""
        return self._copiers.unkillable(COPIER_END_SECONDS) or None

    def _copier_changed(self, copier: Copier) -> None:
        down = {each.uuid: each.down for each in self._copiers if each.down}
        self.readiness.devices_down(down, all_down=len(down) == len(self._copiers.hello.devices))
        if not copier.down:
            self._own()  # before it is given a copy
            _log.info("the copier works", device=copier.uuid, pid=copier.pid)
            return
        _log.error("a copier is down", device=copier.uuid, reason=copier.down)
        if copier.deaths:
            self._metrics.copier_deaths.labels(copier.uuid).inc()
        self._handler.copier_lost(copier)

    async def _reload_when_told(self, reloader: Reloader) -> None:
        while True:
            await self._life.hung_up.wait()
            self._life.hung_up.clear()
            # One reload after the other: the service manager expects RELOADING and READY in pairs.
            await self._life.notifier.reloading(reloader.reload)

    def _share_out(self, settings: Settings) -> None:
        """Divide the pool and the tiers among the shares. Raises ConfigError, and changes nothing then."""
        of_pool = resolve(settings.share, settings.policy, self._pool.nbytes)
        of_disk = resolve_disk(settings.share, settings.policy, settings.disk_size or 0)
        self._cache.set_shares(of_pool)
        for tier in self._tiers:
            tier.set_shares(of_disk)

    def _apply(self, settings: Settings) -> None:
        self._share_out(settings)
        # Next what takes rights away.
        self._instances.access = replace(self._instances.access, policy=settings.policy)
        self._handler.permit_watches()
        self._settings = settings
        log.configure(log_format=settings.log_format, level=settings.log_level)
        self._copiers.set_log_level(settings.log_level)
        for tier in self._tiers:
            tier.set_log_level(settings.log_level)
        self._copiers.pacing.set_chunk(settings.store_chunk)

    # -- stop ------------------------------------------------------------------------------------------------------

    async def _shut_down(self) -> None:
        deadline = time.monotonic() + self._settings.drain_timeout
        self._life.begin_stop(self._settings.drain_timeout)
        self._pool_start.stop()
        # A session ends when its running jobs are over; its client sees the end of the stream.
        ends = [
            self._tasks.spawn(self._instances.end(session, gone=False), name="end-session")
            for session in self._instances
        ]
        if ends:
            _, pending = await asyncio.wait(ends, timeout=max(0.0, deadline - time.monotonic()))
            if pending:
                _log.error("sessions did not drain in time", sessions=len(pending))
        await self._listeners.stop()
        await self._tasks.cancel()
        if self._tracing is not None:
            await self._tracing.close(max(0.0, deadline - time.monotonic()))
        try:
            async with asyncio.timeout(COPIER_END_SECONDS):
                await self._copiers.close()
                for tier in self._tiers:
                    await tier.close()
        except TimeoutError:
            _log.error("processes have not ended although they were killed", exit_code=EXIT_COPIERS_LEFT)
            exit_at_once(EXIT_COPIERS_LEFT)
        if self._kept is not None:
            self._kept.started()
            self._kept.set_owners(())  # nothing writes to the pool any more
        await asyncio.to_thread(self._pool.close)
        self._guard.close()
