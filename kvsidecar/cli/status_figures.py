"""The figures that `kvsidecar status` and `kvsidecar top` show of a status reply; server/page/page.js has the same."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvsidecar.support.units import count, format_duration, format_size
from kvsidecar.types import Eviction
from kvsidecar.v1 import sidecar_pb2 as pb


@dataclass(frozen=True, slots=True)
class Sample:
    """A status reply and the time of its arrival."""

    at: float
    """Seconds on a monotonic clock."""
    reply: pb.StatusReply


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes and tokens per second, unless stated otherwise."""

    stored_bytes: float
    loaded_bytes: float
    loaded_tokens: float
    needed_tokens: float
    """Tokens of prompts that engines did not have in their own caches."""
    hit_tokens: float
    """The needed tokens that engines have loaded."""
    evicted_bytes: float
    refusals: Mapping[str, int]
    """New refusals by reason: counts, not rates. Only reasons that occurred."""
    ranks: Mapping[int, tuple[float, float]]
    """Bytes stored and loaded per second, by session; without ranks that have just attached."""

    @property
    def hit_rate(self) -> float | None:
        """The share of the needed tokens that was loaded; None if engines needed nothing."""
        return hit_rate(self.hit_tokens, self.needed_tokens)


def hit_rate(hit_tokens: float, needed_tokens: float) -> float | None:
    """The share that engines have loaded of what they did not have themselves; None if they needed nothing. An engine
    may report the load of a prompt later than what the prompt needed."""
    return min(1.0, hit_tokens / needed_tokens) if needed_tokens else None


def rates_between(before: Sample, after: Sample) -> Rates | None:
    """The rates; None if no time has passed, or if the daemon was restarted, which resets its counters."""
    seconds = after.at - before.at
    old, new = before.reply, after.reply
    if seconds <= 0 or old.epoch != new.epoch:
        return None
    ranks_before = {rank.session: rank for rank in old.ranks}
    return Rates(
        stored_bytes=(new.jobs.stored_bytes - old.jobs.stored_bytes) / seconds,
        loaded_bytes=(new.jobs.loaded_bytes - old.jobs.loaded_bytes) / seconds,
        loaded_tokens=(new.jobs.loaded_tokens - old.jobs.loaded_tokens) / seconds,
        needed_tokens=(new.lookups.needed_tokens - old.lookups.needed_tokens) / seconds,
        hit_tokens=(new.lookups.loaded_tokens - old.lookups.loaded_tokens) / seconds,
        evicted_bytes=(new.pool.evicted_bytes - old.pool.evicted_bytes) / seconds,
        refusals=Counter(new.refusals) - Counter(old.refusals),
        ranks={
            rank.session: (
                (rank.stored_bytes - ranks_before[rank.session].stored_bytes) / seconds,
                (rank.loaded_bytes - ranks_before[rank.session].loaded_bytes) / seconds,
            )
            for rank in new.ranks
            if rank.session in ranks_before
        },
    )


def busiest(reply: pb.StatusReply, rates: Rates | None, limit: int) -> list[pb.RankStatus]:
    """The ranks that copy most, at most ``limit``, ordered by instance and rank."""
    by_rank = {} if rates is None else rates.ranks
    ranks = sorted(
        reply.ranks,
        key=lambda rank: (-sum(by_rank.get(rank.session, (0.0, 0.0))), -rank.jobs_running, rank.instance, rank.rank),
    )
    return sorted(ranks[:limit], key=lambda rank: (rank.instance, rank.rank))


def namespace_names(namespaces: Sequence[pb.NamespaceStatus]) -> list[str]:
    """A name for each namespace: its model's name in requests, or else that of the weights; with the namespace's digest
    if others have the same name."""
    names = [each.served_name or each.namespace.model for each in namespaces]
    counted = Counter(names)
    digests = [f" #{each.digest}" if counted[name] > 1 else "" for name, each in zip(names, namespaces, strict=True)]
    return [name + digest for name, digest in zip(names, digests, strict=True)]


def has_pool(readiness: pb.Readiness) -> bool:
    """Whether the pool can hold blocks. A pool that is not pinned yet is not shown as an empty one."""
    if readiness.state == pb.Readiness.STATE_DRAINING:
        return readiness.pinned_bytes >= readiness.pool_bytes
    return readiness.serves_kept or readiness.state == pb.Readiness.STATE_READY


def pool_details(pool: pb.PoolStatus) -> list[str]:
    """Lines below the bar of the pool."""
    details = [count(pool.blocks, "block"), f"{format_size(pool.leased_bytes)} under {count(pool.leases, 'lease')}"]
    details += [f"{format_size(pool.reserved_bytes)} reserved"] if pool.reserved_bytes else []
    details += [f"{format_size(pool.quarantined_bytes)} quarantined"] if pool.quarantined_bytes else []
    details += [f"{format_size(pool.rounding_bytes)} lost to rounding"] if pool.rounding_bytes else []
    details += [f"{format_size(pool.unzeroed_bytes)} to be zeroed"] if pool.unzeroed_bytes else []
    details += [f"eviction by {pool.eviction}"] if pool.eviction not in ("", Eviction.LRU) else []
    details += [f"{pool.page_kind} pages"] if pool.page_kind else []
    details += [f"NUMA nodes {', '.join(map(str, pool.numa_nodes))}"] if len(pool.numa_nodes) > 1 else []
    lines = [", ".join(details)]
    if pool.carrier:
        kept = f"kept {count(pool.kept_blocks, 'block')} of an earlier daemon"
        kept += f", lost {pool.dropped_blocks}" if pool.dropped_blocks else ""
        start = f"cold start: {pool.cold_start_reason}" if pool.cold_start_reason else kept
        lines.append(f"outlives the daemon ({pool.carrier}); {start}")
    return lines


def tier_details(tier: pb.TierStatus) -> str:
    """The line below the bar of a tier."""
    details = [count(tier.blocks, "shard")]
    details += [f"{tier.kept_blocks} of an earlier run"] if tier.kept_blocks else []
    details += [f"{format_size(tier.read_bytes)} read", f"{format_size(tier.written_bytes)} written"]
    details += [count(tier.failures, "failure")] if tier.failures else []
    if tier.HasField("write_budget_bytes"):
        details.append(f"{format_size(tier.write_budget_bytes)} may be written now")
    return ", ".join(details)


def share_details(share: pb.ShareStatus) -> str:
    """How much of the pool a share uses and may use."""
    details = [f"{format_size(share.used_bytes)} used", f"{format_size(share.guaranteed_bytes)} guaranteed"]
    details += [f"at most {format_size(share.max_bytes)}"] if share.HasField("max_bytes") else []
    return ", ".join(details)


@dataclass(frozen=True, slots=True)
class Price:
    """An amount of money, with its currency before or behind it as the user has written it."""

    amount: float
    before: str = ""
    behind: str = ""

    @classmethod
    def parse(cls, text: str) -> Price:
        """Read a price, such as ``20``, ``$20`` or ``20 EUR``.

        Raises:
            ValueError: the text is no price.
        """
        found = _PRICE.fullmatch(text.strip())
        if found is None or len(text) > MAX_PRICE or not text.isprintable():
            raise ValueError(f"{text!r} is not a price, such as 20, $20 or 20EUR")
        return cls(float(found[2].replace(",", ".")), found[1], found[3])

    def times(self, factor: float) -> str:
        return f"{self.before}{self.amount * factor:,.2f}{self.behind}"


_PRICE = re.compile(r"([^\d+-]*)(\d+(?:[.,]\d+)?)([^\d+-]*)", re.ASCII)
MAX_PRICE = 16
"""Longest text of a price, in characters."""


@dataclass(frozen=True, slots=True)
class Worth:
    """The worth of tokens that need not be computed.

    Args:
        prefill_rate: prompt tokens that one engine computes in a second.
        engine_price: price of one engine for an hour, with all of its GPUs; None: it is not shown.
    """

    prefill_rate: float
    engine_price: Price | None = None

    def of(self, tokens: float) -> str:
        """The worth of this many tokens: ``1.5 h of prefill, $12.30``"""
        seconds = tokens / self.prefill_rate
        price = f", {self.engine_price.times(seconds / 3600)}" if self.engine_price else ""
        return f"{format_duration(seconds)} of prefill{price}"

    def hourly(self, tokens: float) -> str:
        """The savings by this many tokens a second: ``the prefill of 2.40 engines, $28.80/h``."""
        engines = tokens / self.prefill_rate
        price = f", {self.engine_price.times(engines)}/h" if self.engine_price else ""
        return f"the prefill of {engines:.2f} engines{price}"


def jobs_now(jobs: pb.JobsStatus) -> str:
    """Jobs that have not ended."""
    return f"{jobs.running} running, {jobs.queued} queued"


def short_device(device: str) -> str:
    """``GPU-1a2b3c4d`` for a GPU UUID: enough to distinguish the GPUs of a machine."""
    return "-".join(device.split("-")[:2])
