"""Load jobs of the scheduler's side, and the leases that keep their blocks in the daemon."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvsidecar.client import pack_ids
from kvsidecar.integrations.vllm.counters import Counters
from kvsidecar.integrations.vllm.groups import Group, Kind
from kvsidecar.integrations.vllm.known import Known, tags_of
from kvsidecar.integrations.vllm.lookups import Lease, Lookups, Offer
from kvsidecar.integrations.vllm.metadata import GroupBlocks, LoadJob, RankReport, traceparent_of


@dataclass(slots=True)
class _Load:
    request_id: str
    blocks: tuple[GroupBlocks, ...]
    ranks: int
    """That have not reported."""
    lease: Lease | None
    failed: bool = False


class Loads:
    """Plans one load job for each hit that vLLM takes. A job outlives its request: ranks may still be writing.

    The lease of the hit is renewed when vLLM has allocated its blocks, and released when the load is over. Neither is
    waited for: a load pins its blocks itself when it starts.

    Args:
        hash_bytes: width of a block hash.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        hash_bytes: int,
        world_size: int,
        lookups: Lookups,
        known: Known,
        counters: Counters,
        numbers: Iterator[int],
    ) -> None:
        self._groups, self._world_size = tuple(groups), world_size
        self._nothing = bytes(hash_bytes)
        self._lookups, self._known, self._counters, self._numbers = lookups, known, counters, numbers
        self.planned: list[LoadJob] = []
        """Not given to the ranks yet."""
        self._running: dict[int, _Load] = {}

    @property
    def outstanding(self) -> bool:
        return bool(self.planned or self._running)

    def plan(
        self, request: Any, block_ids: Sequence[Sequence[int]], offer: Offer, external: int, null_block: int
    ) -> int:
        """Load ``external`` tokens of those that were offered into a request's blocks.

        Args:
            block_ids: by vLLM's index of the group; all of the request's.
            null_block: stands in them where vLLM needs no block.

        Returns:
            How many blocks are loaded.
        """
        packed = []
        for group in self._groups:
            hashes, ids = self._blocks(group, request.block_hashes, block_ids, offer, external, null_block)
            if hashes:
                packed.append(GroupBlocks(group.index, hashes, pack_ids(ids)))
        number = next(self._numbers)
        lease = self._lookups.keep(offer)
        load = self._running[number] = _Load(request.request_id, tuple(packed), self._world_size, lease)
        self.planned.append(LoadJob(number, request.request_id, load.blocks, traceparent_of(request)))
        self._counters.loads += 1
        self._counters.loaded_tokens += external
        return sum(map(len, packed))

    def _release(self, load: _Load) -> None:
        if load.lease is None:
            return
        load.lease.release()
        # What became of the renewal is known by now, for the load's own end came behind it.
        self._counters.gone_loads += load.failed and load.lease.kept is False

    def _blocks(
        self,
        group: Group,
        block_hashes: Sequence[bytes],
        block_ids: Sequence[Sequence[int]],
        offer: Offer,
        external: int,
        null_block: int,
    ) -> tuple[bytes, Sequence[int]]:
        """Hashes, joined, and the blocks that these are loaded to."""
        tokens, width = offer.local + external, len(self._nothing)
        first, end = offer.local // group.block_tokens, -(-tokens // group.block_tokens)
        ids = block_ids[group.index][first:end]
        hashes = offer.asked.get(group.index, b"")[: (end - first) * width]
        # A hash is made of all those before it: where the last one is the request's, all are.
        if [hashes[-width:]] != group.hashes(block_hashes, end - 1, end):
            hashes = b"".join(group.hashes(block_hashes, first, end))
        whole = len(ids) * width == len(hashes) == (end - first) * width
        if whole and group.kind is not Kind.FULL:
            # All that are not null: vLLM enters them in its cache when the load is over, needed or not.
            whole = null_block not in ids[max(0, group.first_needed(tokens) - first) :]
            kept = [i for i, block in enumerate(ids) if block != null_block]
            hashes, ids = b"".join([hashes[i * width : (i + 1) * width] for i in kept]), [ids[i] for i in kept]
        # Blocks without a place to go to would be wrong KV later: then ask for what nobody has, so that the load fails.
        return (hashes, ids) if whole else (self._nothing, [null_block])

    def take_jobs(self) -> tuple[LoadJob, ...]:
        """What is planned, for the ranks."""
        planned, self.planned = self.planned, []
        return tuple(planned)

    def take_report(self, report: RankReport) -> list[str]:
        """Returns the requests whose loads have failed."""
        failed = []
        for number, count in report.loaded.items():
            load = self._running.get(number)
            if load is None:
                continue
            load.failed |= number in report.not_loaded
            load.ranks -= count
            if load.ranks > 0:
                continue
            del self._running[number]
            self._release(load)
            if load.failed:
                self._counters.failed_loads += 1
                failed.append(load.request_id)
            for each in load.blocks:
                # Before vLLM runs the request: it does not store again what it has loaded, unless that was not there.
                tags = tags_of(each.group, each.hashes, len(each))
                (self._known.discard if load.failed else self._known.add)(tags)
        return failed
