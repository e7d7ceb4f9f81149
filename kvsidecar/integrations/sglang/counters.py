"""The linker's counters, each with its help text on SGLang's ``/metrics``."""

from __future__ import annotations

from dataclasses import dataclass

from kvsidecar.integrations.counting import Totals, counter, help_of


@dataclass(slots=True)
class RankCounters(Totals):
    """The counters of one rank."""

    lookups: int = counter("Lookups sent to the daemon.")
    unanswered_lookups: int = counter("Lookups not answered in time, or not sent because the daemon is lost or hangs.")
    refused_lookups: int = counter("Lookups that failed with an error, which is in the log; they miss.")
    offered_pages: int = counter("Pages of the longest prefixes found by lookups.")
    loads: int = counter("Requests whose load was queued.")
    staged_loads: int = counter("Batches loaded by way of the staging memory; the others are loaded directly.")
    loaded_pages: int = counter("Pages of loads that succeeded.")
    gone_leases: int = counter("Loads that were not queued because the lease had ended; their requests are computed.")
    failed_loads: int = counter(
        "Requests whose load failed after it had started; SGLang aborts them, or computes them if it is patched."
    )
    overdue_loads: int = counter("Batches whose load had not ended at its deadline.")
    offloads: int = counter("Stores sent to the daemon.")
    known_offloads: int = counter("Stores of pages that the daemon already has, answered without asking it.")
    failed_offloads: int = counter("Stores that were declined or failed.")
    not_admitted_offloads: int = counter(
        "Stores declined because blocks that they would evict are expected to be used earlier (--eviction rhythm)."
    )
    refused_jobs: int = counter(
        "Loads and stores that the daemon refused as invalid or not permitted; the log says why."
    )
    held_back_offloads: int = counter("Stores not sent: earlier ones hold half of the pool, or run for too long.")
    pauses: int = counter(
        "Requests whose custom_params say when their prompt will be used next, or that it will not be."
    )
    bad_pauses: int = counter("Requests whose pause in custom_params is invalid, and therefore ignored.")
    touches: int = counter("Ends of requests and sessions reported to the daemon: their pages count as used.")
    unsent_touches: int = counter(
        "Ends of requests and sessions not reported to the daemon: it is lost or hangs, or too many ended at once."
    )
    unflushed_lookups: int = counter(
        "Lookups not sent: the weights have changed, and the cache has not been flushed since."
    )
    unflushed_offloads: int = counter(
        "Stores not sent: the weights have changed, and the cache has not been flushed since."
    )
    resets: int = counter("Calls of flush_cache, including those of weight updates.")
    unnamed_weights: int = counter(
        "Changes of the weights without a new weight_version: blocks have not been shared since."
    )


HELP = help_of(RankCounters)
"""The counters' help texts, by name."""
