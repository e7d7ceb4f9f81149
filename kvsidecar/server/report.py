"""One reading of the daemon's parts, for Status, /status and the gauges of /metrics."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, fields
from heapq import nsmallest
from itertools import chain, islice
from operator import attrgetter
from typing import Any

from google.protobuf.message import Message

from kvsidecar import __version__
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.shares import Share
from kvsidecar.cache.space_blocks import Space
from kvsidecar.copier.copiers import Copiers
from kvsidecar.core.access import Caller
from kvsidecar.core.holds import Hold
from kvsidecar.core.jobs import JobRunner
from kvsidecar.core.metrics import Gauges, Metrics
from kvsidecar.core.readiness import DaemonReadiness
from kvsidecar.core.sessions import Instances, RankSession
from kvsidecar.core.tier_metrics import TierGauges
from kvsidecar.core.tiering import Tiering
from kvsidecar.core.watches import Watches
from kvsidecar.protocol.as_json import field_json, message_json
from kvsidecar.protocol.wire import namespace_from_wire, namespace_to_wire, readiness_to_wire
from kvsidecar.tiers.backend import ShareUse
from kvsidecar.types import Direction, Namespace
from kvsidecar.v1 import sidecar_pb2 as pb

NAMESPACES_BYTES = RANKS_BYTES = 1 << 20
"""The most bytes of each list in one answer: together half of a message. An entry with the longest texts has 8 KiB."""
_fields = attrgetter(*(field.name for field in fields(Namespace)))
"""Sort key of namespaces where all are listed."""
MAX_LISTED = 1024
"""The most entries of each list in one answer. Listing more would block the event loop for tens of milliseconds."""
FRAME_BYTES = 8
"""The most bytes that a message in a repeated field takes beside its own."""
SORTED_IN_A_STEP = 1024
SPACES_IN_A_STEP = 64
MESSAGES_IN_A_STEP = 4
"""This many take about a tenth of a millisecond."""


@dataclass(kw_only=True, eq=False)
class Report:
    """Reads all parts; changes none. Used from the event loop.

    Args:
        page_kind: how the pool's pages are backed, once it is reserved.
        numa_nodes: the nodes that the pool is split over.
    """

    epoch: int
    backend: str
    cache: BlockCache
    copiers: Copiers
    instances: Instances
    runner: JobRunner
    readiness: DaemonReadiness
    metrics: Metrics
    clock: Callable[[], float]
    tiering: Tiering | None
    watches: Watches
    holds: Iterable[Hold]
    page_kind: str = ""
    numa_nodes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._started_at = self.clock()
        self._used_by_model: dict[str, int] = {}

    def gauges(self) -> Gauges:
        """Values for a scrape of /metrics."""
        queued = dict.fromkeys(Direction, 0)
        running = dict.fromkeys(Direction, 0)
        for copier in self.copiers:
            for direction in Direction:
                waiting, in_flight = copier.copies(direction)
                queued[direction] += waiting
                running[direction] += in_flight
        return Gauges(
            readiness=self.readiness.now,
            cache=self.cache.stats(),
            attached_ranks=len(self.instances),
            jobs_queued=queued,
            jobs_running=running,
            oldest_inflight_seconds={direction: self.runner.oldest_seconds(direction) for direction in Direction},
            imported_bytes=self.instances.imported_bytes(),
            watchers=len(self.watches),
            notes_bytes=self.watches.notes.total_bytes,
            tiers=[] if self.tiering is None else self.tiering.gauges(),
            shares=self.cache.shares,
            used_by_model=self._used_by_model if self._shows_names else None,
            served_name=self.instances.options.served_name_of_model,
        )

    def count_models(self) -> Generator[None, None, None]:
        """Count what `gauges` shows by model, in steps: there may be very many namespaces."""
        used = Counter[str]()
        if self._shows_names:
            for number, space in enumerate(self.cache.each_space()):
                if number % SPACES_IN_A_STEP == 0:
                    yield
                used[space.namespace.model] += space.blocks.readable * space.block_bytes
        self._used_by_model = used

    @property
    def _shows_names(self) -> bool:
        """Whether unidentified clients, such as those of the HTTP port, may see names of tenants."""
        return self.instances.access.anonymous.grant.admin

    def tiers(self) -> dict[str, str]:
        """Why each tier is off, by its name, for /ready."""
        return {} if self.tiering is None else self.tiering.off()

    def reply(
        self, caller: Caller, page: pb.StatusPage | None = None, *, totals: bool = False
    ) -> Generator[None, None, pb.StatusReply]:
        """The reply of the Status RPC: all of it for an admin, what is the caller's own for others. In steps:
        namespaces and ranks may come and go between them.

        Args:
            page: the namespace and rank after which to continue; None for the largest namespaces.
            totals: include, for others too, totals over all clients, which name none.
        """
        everything = caller.grant.admin
        gauges = self.gauges()
        yield
        reply = pb.StatusReply(
            epoch=self.epoch,
            version=__version__,
            uptime_seconds=self.clock() - self._started_at,
            readiness=readiness_to_wire(self.readiness.now),
            pool=pb.PoolStatus(
                total_bytes=gauges.readiness.pool_bytes,
                page_kind=self.page_kind,
                numa_nodes=self.numa_nodes,
                carrier=self.readiness.warm_start.carrier,
                eviction=self.cache.eviction,
            ),
            backend=self.backend,
            partial=not everything,
        )
        if everything or totals:
            self._add_totals(reply, gauges)
            yield
        if everything:
            self._add_tenants(reply, gauges)
        visible = self._visible(caller)
        namespaces = yield from _by_namespace(self.cache.each_space(), visible)
        ranks = [session for session in self.instances if everything or session.peer.uid == caller.uid]
        reply.totals.namespaces, reply.totals.ranks = len(namespaces), len(ranks)
        reply.totals.blocks = sum([each.blocks for each in namespaces.values()])
        reply.totals.bytes = sum([each.bytes for each in namespaces.values()])
        reply.totals.jobs_running = sum([len(session.jobs) for session in ranks])
        if page is None:
            listed = yield from _in_order(namespaces.items(), _largest)
        else:
            ranks = sorted((each for each in ranks if each.id > page.after_session), key=lambda session: session.id)
            after = _fields(namespace_from_wire(page.after_namespace)) if page.HasField("after_namespace") else ()
            behind = (each for each in namespaces.items() if _fields(each[0]) > after)
            listed = yield from _in_order(behind, lambda each: _fields(each[0]))
        complete = yield from _fill(reply.ranks, map(self._rank, ranks), RANKS_BYTES)
        largest: dict[str, Namespace] = {}
        for number, (each, usage) in enumerate(namespaces.items()):
            if number % SPACES_IN_A_STEP == 0:
                yield
            if usage.bytes > namespaces[largest.setdefault(each.model, each)].bytes:
                largest[each.model] = each
        named = (self._named(each, usage, largest[each.model]) for each, usage in listed)
        complete &= yield from _fill(reply.namespaces, named, NAMESPACES_BYTES)
        reply.more = page is not None and not complete
        return reply

    def _named(self, namespace: Namespace, usage: _Usage, largest: Namespace) -> pb.NamespaceStatus:
        return pb.NamespaceStatus(
            namespace=namespace_to_wire(namespace),
            blocks=usage.blocks,
            bytes=usage.bytes,
            hits=usage.hits,
            misses=usage.misses,
            needed_tokens=usage.needed_tokens,
            loaded_tokens=usage.loaded_tokens,
            differs=self.instances.options.differences(namespace, largest),
            served_name=self.instances.options.served_name(namespace),
            digest=namespace.digest,
        )

    def _visible(self, caller: Caller) -> Callable[[Namespace], bool]:
        """A predicate for the namespaces to show. Without a policy the caller's own are those in which it has ranks."""
        if caller.grant.admin:
            return lambda _: True
        if self.instances.access.policy is None:
            return self.instances.attached_namespaces(caller.uid).__contains__
        return caller.grant.may_use

    def _add_totals(self, reply: pb.StatusReply, gauges: Gauges) -> None:
        value, cache, found = self.metrics.value, gauges.cache, self.readiness.warm_start
        reply.pool.MergeFrom(
            pb.PoolStatus(
                used_bytes=cache.used_bytes,
                free_bytes=cache.free_bytes,
                rounding_bytes=cache.wasted_bytes,
                reserved_bytes=cache.reserved_bytes,
                leased_bytes=cache.leased_bytes,
                quarantined_bytes=cache.quarantined_bytes,
                unzeroed_bytes=cache.unzeroed_bytes,
                blocks=cache.readable_blocks,
                leases=cache.leases,
                evicted_blocks=cache.evicted_blocks,
                evicted_bytes=cache.evicted_bytes,
                kept_blocks=found.kept_blocks,
                dropped_blocks=found.dropped_blocks,
                cold_start_reason=found.cold_reason,
            )
        )
        reply.jobs.CopyFrom(
            pb.JobsStatus(
                queued=sum(gauges.jobs_queued.values()),
                running=sum(gauges.jobs_running.values()),
                oldest_inflight_seconds=max(gauges.oldest_inflight_seconds.values()),
                stores_done=int(value("kvsidecar_jobs_total", direction="store", outcome="done")),
                loads_done=int(value("kvsidecar_jobs_total", direction="load", outcome="done")),
                stored_bytes=int(value("kvsidecar_copied_bytes_total", direction="store")),
                loaded_bytes=int(value("kvsidecar_copied_bytes_total", direction="load")),
                loaded_tokens=int(value("kvsidecar_loaded_tokens_total")),
            )
        )
        reply.lookups.CopyFrom(
            pb.LookupsStatus(
                hits=int(value("kvsidecar_lookup_blocks_total", result="hit")),
                misses=int(value("kvsidecar_lookup_blocks_total", result="miss")),
                needed_tokens=int(value("kvsidecar_prompt_tokens_needed_total")),
                loaded_tokens=int(value("kvsidecar_prompt_tokens_loaded_total")),
            )
        )
        reply.tiers.extend(map(_tier, gauges.tiers))
        reply.devices.extend(
            [pb.DeviceStatus(uuid=each.uuid, down=each.down, copier_deaths=each.deaths) for each in self.copiers]
        )
        reply.refusals.update(self.metrics.refusal_counts())
        reply.totals.attached_ranks = gauges.attached_ranks

    def _add_tenants(self, reply: pb.StatusReply, gauges: Gauges) -> None:
        """Add the parts that name tenants."""
        reply.pins.extend([self._hold(hold) for hold in self.holds])
        if len(gauges.shares) > 1:
            reply.shares.extend(_shares(gauges.shares))
        for status, tier in zip(reply.tiers, gauges.tiers, strict=True):
            if tier.stats is not None:
                status.shares.extend(_shares(tier.stats.shares))

    def _rank(self, session: RankSession) -> pb.RankStatus:
        registration = session.registration
        return pb.RankStatus(
            session=session.id,
            instance=registration.instance,
            rank=registration.rank,
            world_size=registration.world_size,
            device=registration.device,
            pid=session.peer.pid,
            imported_bytes=session.imported_bytes,
            jobs_running=len(session.jobs),
            attached_seconds=self.clock() - session.attached_at,
            namespace=namespace_to_wire(registration.namespace),
            idle=session.idle,
            stored_bytes=session.copied_bytes[Direction.STORE],
            loaded_bytes=session.copied_bytes[Direction.LOAD],
            served_name=registration.served_name,
        )

    def _hold(self, hold: Hold) -> pb.PinStatus:
        return pb.PinStatus(
            name=hold.name,
            owner=hold.owner,
            namespace=namespace_to_wire(hold.namespace),
            blocks=hold.blocks,
            bytes=hold.nbytes,
            seconds_left=max(0.0, hold.expires_at - self.clock()),
        )

    def json(self) -> Generator[None, None, bytes]:
        """The JSON of /status, which identifies nobody: what an anonymous client of the socket sees, and totals, which
        /metrics shows too. Renders it in steps."""
        reply = yield from self.reply(self.instances.access.anonymous, totals=True)
        return (yield from message_text(reply))


def _tier(tier: TierGauges) -> pb.TierStatus:
    stats, copied = tier.stats, tier.counts.copied
    status = pb.TierStatus(
        name=tier.name,
        off=tier.off,
        read_bytes=int(copied["read", "bytes"]),
        written_bytes=int(copied["write", "bytes"]),
        failures=tier.counts.failures,
        write_budget_bytes=tier.write_budget_bytes,
    )
    if stats is not None:
        status.capacity_bytes, status.used_bytes, status.blocks = stats.capacity_bytes, stats.used_bytes, stats.blocks
        status.kept_blocks, status.evicted_blocks = stats.kept_blocks, stats.evicted_blocks
    return status


def _shares(shares: Iterable[Share | ShareUse]) -> list[pb.ShareStatus]:
    """Status of the shares, the largest first."""
    return [
        pb.ShareStatus(
            name=share.name,
            used_bytes=share.used,
            guaranteed_bytes=share.guaranteed,
            max_bytes=share.most,
            pinned_bytes=share.busy,
            evicted_bytes=share.evicted,
        )
        for share in sorted(shares, key=lambda share: -share.used)
    ]


@dataclass(slots=True)
class _Usage:
    blocks: int = 0
    bytes: int = 0
    hits: int = 0
    misses: int = 0
    needed_tokens: int = 0
    loaded_tokens: int = 0


_Used = tuple[Namespace, _Usage]


def _largest(used: _Used) -> int:
    return -used[1].bytes


def _in_order(found: Iterable[_Used], key: Callable[[_Used], Any]) -> Generator[None, None, list[_Used]]:
    """The first ones in this order, and one more than an answer can have, in steps."""
    first: list[_Used] = []
    found = iter(found)
    while some := list(islice(found, SORTED_IN_A_STEP)):
        first = nsmallest(MAX_LISTED + 1, chain(first, some), key)
        yield
    return first


def _by_namespace(
    spaces: Iterable[Space], visible: Callable[[Namespace], bool]
) -> Generator[None, None, dict[Namespace, _Usage]]:
    """What each namespace uses, all groups together. Names are made only when listed: there may be very many."""
    found: dict[Namespace, _Usage] = {}
    for number, space in enumerate(spaces):
        if number % SPACES_IN_A_STEP == 0:
            yield
        if not visible(space.namespace):
            continue
        usage = found.setdefault(space.namespace, _Usage())
        usage.blocks += space.blocks.readable
        usage.bytes += space.blocks.readable * space.block_bytes
        usage.hits += space.hits
        usage.misses += space.misses
        usage.needed_tokens += space.needed_tokens
        usage.loaded_tokens += space.loaded_tokens
    return found


def _fill(field: Any, messages: Iterable[Message], nbytes: int) -> Generator[None, None, bool]:
    """Add messages to a repeated field while they fit. False if one did not."""
    for number, message in enumerate(messages):
        if number % MESSAGES_IN_A_STEP == 0:
            yield
        nbytes -= message.ByteSize() + FRAME_BYTES
        if nbytes < 0 or len(field) == MAX_LISTED:
            return False
        field.append(message)
    return True


def message_text(message: Message) -> Generator[None, None, bytes]:
    """`message_json` as text, with a newline, in steps."""
    fields = []
    for field in message.DESCRIPTOR.fields:
        if field.is_repeated and not (field.message_type and field.message_type.GetOptions().map_entry):
            entries = []
            for number, each in enumerate(getattr(message, field.name)):
                if number % MESSAGES_IN_A_STEP == 0:
                    yield
                entries.append(json.dumps(message_json(each) if field.message_type else each))
            value = f"[{', '.join(entries)}]"
        else:
            value = json.dumps(field_json(message, field))
        fields.append(f"{json.dumps(field.name)}: {value}")
    return f"{{{', '.join(fields)}}}\n".encode()
