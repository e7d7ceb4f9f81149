"""The offloading of one rank: its registration, lookups, loads and stores. Imports neither SGLang nor torch.

Everything but the client's own threads runs on the scheduler's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from kvsidecar.client import BreakerState, Client, JobDone
from kvsidecar.integrations.namespace_facts import EngineIdentity
from kvsidecar.integrations.next_use import pause_after, said_in
from kvsidecar.integrations.offload_condition import ATTACHED, BREAKER_OPEN, PENDING_JOBS, WhyNot, reason_gauges
from kvsidecar.integrations.rank_memory import RankMemory
from kvsidecar.integrations.refused_jobs import UnfitJobs
from kvsidecar.integrations.sglang.counters import RankCounters
from kvsidecar.integrations.sglang.groups import Groups
from kvsidecar.integrations.sglang.loads import BatchLoads, Detour, PoolPages
from kvsidecar.integrations.sglang.lookups import RankLookups
from kvsidecar.integrations.sglang.offloads import Offered, Offloads
from kvsidecar.integrations.sglang.options import LinkerOptions
from kvsidecar.integrations.sglang.shared import RankState
from kvsidecar.integrations.sglang.staged_load import Staging
from kvsidecar.integrations.sglang.touches import PageTouches
from kvsidecar.integrations.sglang.transfers import PageIds, RecentHashes, name_of, read_now
from kvsidecar.integrations.sglang.weights import Weights
from kvsidecar.integrations.waited_jobs import WaitedJobs

if TYPE_CHECKING:  # they need torch
    from kvsidecar.integrations.sglang.pools import SlotReader
    from kvsidecar.integrations.sglang.ranks import Ranks

_log = logging.getLogger("kvsidecar.sglang")

CLOSE_SECONDS = 10.0


def no_notes(_group: int, _keys: bytes) -> bytes:
    """Notes for an engine whose pages no other one announces: none."""
    return b""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """The facts that the linker has found out about a rank."""

    identity: EngineIdentity
    instance: str
    """Name of the engine, the same for all of its ranks and unique on the node."""
    groups: Groups
    memory: RankMemory
    page_size: int
    """Tokens in a page."""
    reader: SlotReader | None = None
    """Reads slots after the kernels; None if kernels are synchronous."""
    staging: Staging | None = None
    """The staging memory; None: the daemon loads directly into the pages."""
    trailing: Mapping[str, int] = field(default_factory=dict)
    """How many pages at the end of a request a hit needs, by pool. It needs all pages of other pools."""


class RankSide:
    """The offloading of one rank.

    Args:
        notes: returns what other engines need to know about a group's blocks with these keys, joined.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        options: LinkerOptions,
        facts: RankFacts,
        ranks: Ranks,
        weights: Weights,
        counters: RankCounters,
        notes: Callable[[int, bytes], bytes] = no_notes,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        namespace = facts.identity.namespace
        self._read = read_now if facts.reader is None else facts.reader.read
        self._options, self._ranks, self._page_size = options, ranks, facts.page_size
        self._weights, self._counters = weights, counters
        self._client = Client(
            options.socket,
            name=f"{facts.instance} rank {ranks.rank}",
            step_budget=options.lookup_budget,
            local_protocol=options.local_protocol,
            quiet=ranks.rank != 0,
        )
        self._clients = [self._client]
        self._identity, self._layouts, self._epoch = facts.identity, facts.memory.groups, 0
        self._unfit_jobs = UnfitJobs(_log)
        self._jobs = WaitedJobs(self._client, self._note_unfit)
        hashes = RecentHashes()
        shared = RankState(
            self._jobs, facts.groups, namespace, lambda pages: weights.keys(hashes(pages)), counters, clock
        )
        self._known, self._keys, self._gains = shared.known, shared.keys, shared.gains
        self._lookups = RankLookups(shared, options.lookup_budget, alone=ranks.size == 1)
        detour = None if facts.staging is None else Detour(facts.staging, self._jobs_of_staging(facts, facts.staging))
        self.loads = BatchLoads(shared, options.load_timeout, detour)
        self._touches = PageTouches(shared, facts.trailing)
        self._tool_tokens = frozenset(options.tool_tokens)
        num_pages = max(layout.num_blocks for layout in self._layouts)
        self._offloads = Offloads(shared, notes, num_pages, rank=ranks.rank)
        self._failures: set[str] = set()
        """Failures that were logged already."""
        self._attach(self._client, facts.instance, facts.memory)

    def _attach(self, client: Client, instance: str, memory: RankMemory) -> None:
        identity, ranks = self._identity, self._ranks
        client.attach(
            instance=instance,
            namespace=identity.namespace,
            buffers=memory.buffers,
            groups=memory.groups,
            rank=ranks.rank,
            world_size=ranks.size,
            options=identity.options,
            served_name=identity.served_name,
            retry=True,
        )

    def _jobs_of_staging(self, facts: RankFacts, staging: Staging) -> WaitedJobs:
        """The jobs of the staging memory, with a client of their own: to the daemon, it is the KV cache of another
        engine that only loads what this one has stored."""
        name = f"{facts.instance} staging"
        client = Client(
            self._options.socket,
            name=f"{name} rank {self._ranks.rank}",
            local_protocol=self._options.local_protocol,
            quiet=True,
        )
        self._clients.append(client)
        self._attach(client, name, staging.memory)
        return WaitedJobs(client, self._note_unfit)

    def _note_unfit(self, done: JobDone) -> None:
        self._counters.refused_jobs += self._unfit_jobs.note(done)

    def _watch_epoch(self) -> None:
        """Forget, after a change of the daemon, the blocks that the earlier one had."""
        epoch = self._client.attached_epoch
        if epoch and epoch != self._epoch:
            self._epoch = epoch
            self._known.clear()
            pool_bytes = self._client.readiness.pool_bytes
            self._known.fit(max(each.num_blocks + each.most_blocks(pool_bytes) for each in self._layouts))

    def lookup(self, rid: str, transfers: Sequence[Any]) -> list[int]:
        """Never raises: an error would end SGLang's scheduler."""
        try:
            self._watch_epoch()
            if self._weights.mixed:
                self._counters.unflushed_lookups += 1
                return []
            return [] if self.loads.may_fail else self._lookups.restorable(rid, transfers)
        except Exception as error:  # noqa: BLE001 - see above; it is logged and counted
            self._counters.refused_lookups += 1
            self._log_once("a lookup has failed, and counts as a miss", error)
            return []

    def load(self, rid: str, transfers: Sequence[Any]) -> bool:
        """Queue a load. False if the lease on any rank has ended: SGLang then computes the request."""
        renewal = self._lookups.take(rid, self._options.lease_seconds)
        if not self._ranks.agree(renewal is not None):
            if renewal is not None:
                renewal.release()
            self._counters.gone_leases += 1
            return False
        assert renewal is not None
        self.loads.queue(rid, self._pages(transfers), renewal)
        return True

    def offload(self, transfers: Sequence[Any]) -> bool:
        """Store these pages as soon as the kernels that write them have completed. Pages that cannot be stored are
        reported as not stored. Returns the result of `Offloads.may_hold`, which is equal on all ranks."""
        self._watch_epoch()
        self._counters.unflushed_offloads += self._weights.mixed
        count = sum(len(each.keys or ()) for each in transfers)
        if not self._offloads.may_hold(count):
            return False
        if self._weights.mixed:
            self._offloads.decline(count)
            return True
        self._offloads.submit(
            [
                Offered(
                    name_of(each),
                    self._keys(each.keys),
                    len(each.keys),
                    partial(PageIds, each, self._page_size, self._read),
                )
                for each in transfers
                if each.keys
            ]
        )
        return True

    def _pages(self, transfers: Sequence[Any]) -> Mapping[str, PoolPages]:
        return {
            name_of(each): PoolPages(self._keys(each.keys), PageIds(each, self._page_size, self._read))
            for each in transfers
            if each.keys
        }

    def request_ended(
        self, hashes: Callable[[], Sequence[str]], session: str | None, params: Any, answer: Collection[int]
    ) -> None:
        """Note the end of a request. Never raises: an error would end SGLang's scheduler.

        Args:
            hashes: returns the hashes of all its pages that SGLang has.
            session: see `PageTouches.request_ended`.
            params: the request's custom parameters.
            answer: the answer's tokens.
        """
        try:
            pause = pause_after(said_in(params), answer, self._counters, self._tool_tokens)
            if not self._weights.mixed:
                self._touches.request_ended(hashes(), session, pause)
        except Exception as error:  # noqa: BLE001 - see above; it is logged and counted
            self._counters.unsent_touches += 1
            self._log_once("the daemon is not told of the end of a request", error)

    def _log_once(self, failure: str, error: Exception) -> None:
        if failure not in self._failures:
            self._failures.add(failure)
            _log.exception("kvsidecar: %s: %s", failure, error)

    def session_ended(self, session: str) -> None:
        """Note that a session has been closed, or has expired."""
        self._touches.session_ended(session)

    def completed(self) -> int:
        self._touches.step()
        if self._ranks.rank == 0:  # the pages are the same on all ranks
            self._gains.tell(self._report_pages)
        return self._offloads.completed()

    def _report_pages(self, needed: int, loaded: int) -> None:
        tokens = self._page_size
        self._client.report_prompts_nowait(self._identity.namespace, needed * tokens, loaded * tokens)

    def pop(self) -> bool:
        return self._offloads.pop()

    def weights_changing(self, method: str) -> None:
        """Note that SGLang calls this method, which changes weights. Earlier offers belong to the old weights: stores
        that run are right, because SGLang keeps their pages as they are."""
        self._weights.changing(method)
        if self._weights.mixed:
            self._lookups.forget_all()

    def weights_changed(self, holds_no_kv: Callable[[], bool]) -> None:
        """Note that the method has ended, on all ranks."""
        self._weights.changed(lambda: self._ranks.agree(holds_no_kv()))
        self._counters.unnamed_weights = self._weights.unnamed

    def reset(self) -> None:
        """Wait until nothing reads or writes the pages: SGLang forgets its KV and reuses all of them."""
        self._counters.resets += 1
        self.loads.reset()
        self._lookups.forget_all()
        self._offloads.reset(self._options.reset_timeout)
        self._weights.reset()
        self._counters.unnamed_weights = self._weights.unnamed

    def gauges(self) -> dict[str, int]:
        """Gauges by name that show whether this rank offloads, and if not, why."""
        why_not = None
        if not self._client.attached:
            why_not = WhyNot.NOT_ATTACHED
        elif self._weights.mixed:
            why_not = WhyNot.RESET_REFUSED
        return {
            ATTACHED: int(self._client.attached),
            BREAKER_OPEN: int(self._client.breaker_state is not BreakerState.CLOSED),
            PENDING_JOBS: self._jobs.num_running + self.loads.num_staged,
            **reason_gauges(why_not),
        }

    def close(self) -> None:
        self.loads.reset()
        self._lookups.forget_all()
        deadline = time.monotonic() + CLOSE_SECONDS
        unmapped = [client.close(max(0.0, deadline - time.monotonic())) for client in self._clients]
        if all(unmapped):
            self.loads.end_staging()
        else:
            _log.error("kvsidecar: the daemon has not unmapped the KV cache within %g s", CLOSE_SECONDS)
