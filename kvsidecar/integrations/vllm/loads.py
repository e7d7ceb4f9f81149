"""The scheduler's load jobs, and the leases on their blocks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvsidecar.client import LeaseRenewal, pack_ids
from kvsidecar.integrations.stored_filter import tags_of
from kvsidecar.integrations.vllm.events import Events, Loaded
from kvsidecar.integrations.vllm.groups import Group, GroupKind
from kvsidecar.integrations.vllm.lookups import Lookups, Offer
from kvsidecar.integrations.vllm.metadata import GroupBlocks, LoadJob, RankReport, all_of, traceparent_of
from kvsidecar.integrations.vllm.shared import SchedulerState


@dataclass(slots=True)
class _Load:
    request_id: str
    blocks: tuple[GroupBlocks, ...]
    unreported: int
    """Ranks that have not reported yet, as in `RankReport.loaded`."""
    lease: LeaseRenewal | None
    begun: int
    """`StoredFilter.age` when it was planned."""
    needed: int
    tokens: int
    """Tokens of the request: those that the GPU did not have, and those of them that are loaded."""
    tables: Sequence[Sequence[Any]] | None = None
    """Loads within a step only: `RequestProgress.tables` of its request, which is computed meanwhile."""
    failed: bool = False
    unannounced: dict[int, Loaded] = field(default_factory=dict)
    """The contents of KV events for the blocks, by group."""


class Loads:
    """Plans one load job for each hit that vLLM accepts. A job may outlive its request: ranks may still be writing.

    A hit's lease is renewed when vLLM has allocated blocks for it, and released when the load has ended. Neither waits
    for an answer: a load references its blocks itself when it starts.
    """

    def __init__(self, shared: SchedulerState, lookups: Lookups) -> None:
        self._groups, self._world_size = shared.engine.groups, shared.engine.world_size
        self._unknown_hash = bytes(shared.engine.hash_bytes)
        self._stored_filter, self._counters, self._numbers = shared.stored_filter, shared.counters, shared.numbers
        self._gains, self._events, self._lookups = shared.gains, shared.events, lookups
        self.planned: list[LoadJob] = []
        """Jobs that were not sent to the ranks yet."""
        self.running: dict[int, _Load] = {}
        """Loads that some rank has not reported, by job."""
        self._unheard: dict[str, bool] = {}
        """Requests whose loads all ranks have reported since the last `take_unheard`, and whether these failed."""

    @property
    def outstanding(self) -> bool:
        return bool(self.planned or self.running)

    @property
    def in_step(self) -> bool:
        """Whether a load within a step has not ended: until then, the GPU's prefix cache is wrong about its request,
        and about others that have hit its blocks."""
        return any(load.tables is not None for load in self.running.values())

    def plan(
        self,
        request: Any,
        block_ids: Sequence[Sequence[int]],
        offer: Offer,
        external: int,
        null_block: int,
        *,
        needed: int = 0,
        tables: Sequence[Sequence[Any]] | None = None,
    ) -> int:
        """Plan the load of the first ``external`` offered tokens into the request's GPU blocks.

        Args:
            block_ids: all block ids of the request, by group index.
            null_block: the id of vLLM's null block.
            needed: tokens of the request that the GPU does not have.
            tables: for a load within a step: `RequestProgress.tables`.

        Returns:
            The number of blocks to load.
        """
        packed = []
        for group in self._groups:
            hashes, ids = self._blocks(group, request.block_hashes, block_ids, offer, external, null_block)
            if hashes:
                packed.append(GroupBlocks(group.index, hashes, pack_ids(ids)))
        number = next(self._numbers)
        lease = self._lookups.renew_lease(offer)
        load = self.running[number] = _Load(
            request.request_id,
            tuple(packed),
            all_of(self._world_size),
            lease,
            self._stored_filter.age,
            needed,
            external,
            tables,
        )
        if self._events is not None:
            load.unannounced = self._unannounced(self._events, request, load.blocks, offer.local)
        adapter = request.lora_request.lora_int_id if request.lora_request is not None else 0
        traceparent = traceparent_of(request)
        self.planned.append(
            LoadJob(number, request.request_id, load.blocks, traceparent, adapter, in_step=tables is not None)
        )
        self._counters.loads += 1
        self._counters.step_loads += tables is not None
        self._counters.loaded_tokens += external
        return sum(map(len, packed))

    def _unannounced(
        self, events: Events, request: Any, blocks: Sequence[GroupBlocks], local: int
    ) -> dict[int, Loaded]:
        groups, found = {group.index: group for group in self._groups}, {}
        for each in blocks:
            group, hashes = groups[each.group], set(each.split())
            first = local // group.block_tokens
            known = group.hashes(request.block_hashes, first, len(request.block_hashes))
            places = {name: first + i for i, name in enumerate(known) if name in hashes}
            found[each.group] = events.unannounced(request, group, places)
        return found

    def forget_events(self) -> None:
        """Announce none of the running loads: the daemon may no longer have the blocks, or not for these weights."""
        for load in self.running.values():
            load.unannounced = {}

    def _blocks(
        self,
        group: Group,
        block_hashes: Sequence[bytes],
        block_ids: Sequence[Sequence[int]],
        offer: Offer,
        external: int,
        null_block: int,
    ) -> tuple[bytes, Sequence[int]]:
        """The joined hashes to load, and the GPU block for each.

        A load covers the blocks from the end of the local prefix to the end of the external tokens. With full attention
        all of them are needed. In other groups the blocks before `Group.first_needed` are null blocks, which are
        skipped. vLLM caches all others when the load has ended, so every one of them must be loaded.

        If one of them has no hash or no GPU block, the request would run on wrong KV. The result is then a single hash
        that no block has: the load fails, and vLLM computes the request.
        """
        tokens, width = offer.local + external, len(self._unknown_hash)
        first, end = offer.local // group.block_tokens, -(-tokens // group.block_tokens)
        ids = block_ids[group.index][first:end]
        last = offer.last.get(group.index, b"") if external == offer.tokens else b""
        whole = end - bool(last)
        hashes = offer.hashes.get(group.index, b"")[: (whole - first) * width]
        # The lookup's hashes are joined already. If the last one is the request's, all are: a hash covers its prefix.
        if [hashes[-width:]] != group.hashes(block_hashes, whole - 1, whole):
            hashes = b"".join(group.hashes(block_hashes, first, whole))
        hashes += last
        complete = len(ids) * width == len(hashes) == (end - first) * width
        if complete and group.kind is not GroupKind.FULL:
            complete = null_block not in ids[max(0, group.first_needed(tokens) - first) :]
            kept = [i for i, block in enumerate(ids) if block != null_block]
            hashes, ids = b"".join([hashes[i * width : (i + 1) * width] for i in kept]), [ids[i] for i in kept]
        return (hashes, ids) if complete else (self._unknown_hash, [null_block])

    def take_jobs(self) -> tuple[LoadJob, ...]:
        """Remove and return the planned jobs, to send them to the ranks."""
        planned, self.planned = self.planned, []
        return tuple(planned)

    def take_report(self, report: RankReport) -> tuple[list[str], list[int]]:
        """Record which loads have ended. Call `take_unheard` afterwards.

        Returns:
            The requests whose loads failed, and the GPU blocks that were computed on what they did not load.
        """
        failed: list[str] = []
        wrong: list[int] = []
        for number, ranks in report.loaded.items():
            load = self.running.get(number)
            if load is None:
                continue
            load.failed |= number in report.not_loaded
            load.unreported &= ~ranks
            if load.unreported:
                continue
            del self.running[number]
            if load.tables is None:
                self._unheard[load.request_id] = load.failed
            if load.lease is not None:
                load.lease.release()
                # The answer to the renewal arrived before the end of the load.
                self._counters.gone_loads += load.failed and load.lease.renewed is False
            self._gains.count(load.needed, 0 if load.failed else load.tokens)
            if load.failed:
                self._counters.failed_loads += 1
                failed.append(load.request_id)
                wrong += [block.block_id for table in load.tables or () for block in table]
            elif self._events is not None:
                for index, blocks in load.unannounced.items():
                    self._events.loaded(index, blocks)
            for each in load.blocks:
                # Before vLLM runs the request: loaded blocks need not be stored, those of a failed load must be.
                tags = tags_of(each.group, each.hashes, len(each))
                if load.failed:
                    self._stored_filter.discard(tags)
                else:
                    self._stored_filter.add(tags, begun=load.begun)
        return failed, wrong

    def take_unheard(self, heard: Collection[str]) -> dict[str, bool]:
        """Requests whose loads have ended according to the last report, but not according to vLLM, and whether these
        failed.

        A rank reports to both at the same time. If vLLM loses that step, only the report is repeated, and a request
        that is aborted meanwhile would hold its blocks for ever.

        Args:
            heard: requests whose ends vLLM receives with this report.
        """
        unheard, self._unheard = self._unheard, {}
        return {request_id: failed for request_id, failed in unheard.items() if request_id not in heard}
