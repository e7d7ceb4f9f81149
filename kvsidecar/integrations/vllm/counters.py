"""The counters of the scheduler's side, each with its help text on vLLM's ``/metrics``."""

from __future__ import annotations

from dataclasses import dataclass

from kvsidecar.integrations import offload_condition
from kvsidecar.integrations.counting import Totals, counter, help_of


@dataclass(slots=True)
class Counters(Totals):
    lookups: int = counter("Lookups sent to the daemon.")
    unanswered_lookups: int = counter(
        "Lookups that were not answered in time, or not sent because the daemon is lost; they miss."
    )
    refused_lookups: int = counter("Lookups that the daemon refused as invalid; they miss, and the log says why.")
    offered_tokens: int = counter("Tokens of the hits offered to vLLM, counted each time they are offered.")
    fetch_waits: int = counter("Requests that waited for blocks that the daemon fetched from a slower tier.")
    loads: int = counter("Loads, one for each hit that vLLM accepted.")
    step_loads: int = counter("Those of them during which the engine computed the request, layer by layer.")
    loaded_tokens: int = counter("Tokens of the hits that vLLM accepted.")
    unleased_loads: int = counter("Loads without a lease: the daemon granted none, or could not be reached in time.")
    gone_loads: int = counter("Failed loads whose lease had ended before blocks were allocated for them.")
    failed_loads: int = counter("Loads that some rank did not complete; their requests are computed.")
    stores: int = counter("Store jobs.")
    stored_blocks: int = counter("Blocks that the ranks were instructed to store.")
    failed_stores: int = counter("Store jobs that some rank did not complete: declined or failed.")
    not_admitted_stores: int = counter(
        "Store jobs declined for some rank, because blocks that they would evict are expected to be used earlier "
        "(--eviction rhythm)."
    )
    unoffered_blocks: int = counter(
        "Blocks not offered to the daemon, because it had declined earlier blocks of their request."
    )
    refused_jobs: int = counter(
        "Loads and stores of a rank that the daemon refused as invalid or not permitted; the log says why."
    )
    held_back_stores: int = counter(
        "Times that stores were held back, because running stores hold as many GPU blocks as allowed or run for too "
        "long."
    )
    given_up_blocks: int = counter(
        "Blocks that were to be stored later but never were: the GPU evicted them first, or too many were waiting."
    )
    given_up_daemons: int = counter(
        "Times that the ranks gave up the daemon, because it ended no store and the engine needed the blocks."
    )
    resets: int = counter("Resets of the prefix cache.")
    refused_resets: int = counter(
        "Resets that vLLM refused because requests or stores held blocks; nothing is offloaded until one succeeds."
    )
    unnamed_resets: int = counter(
        "Resets without a new name for the weights; from then on the engine shares its blocks with no other engine."
    )
    unknown_adapters: int = counter(
        "Requests that were not offloaded because the content of their adapter was not known, or has changed."
    )
    changed_adapters: int = counter(
        "Times that the content of an adapter changed while requests used it; nothing of the old content is offloaded "
        "from then on, until the prefix cache is reset."
    )
    hints: int = counter("KV hints of requests that were followed: retain, demote, pin and prefetch.")
    pin_hints: int = counter("KV hints that ask for a pin. Only operators pin, so they count as retain.")
    ttl_requests: int = counter("Requests whose kv_transfer_params limit how long their blocks are kept.")
    bad_ttls: int = counter(
        "Invalid times in kv_transfer_params; the blocks of their requests are kept for at most a second."
    )
    pauses: int = counter(
        "Requests whose kv_transfer_params say when their prompt will be used next, or that it will not be."
    )
    bad_pauses: int = counter("Requests whose pause in kv_transfer_params is invalid, and therefore ignored.")
    unsent_touches: int = counter(
        "Ends of requests not reported to the daemon, neither the use of their blocks nor the pause: it is lost or "
        "hangs, or too many ended at once."
    )
    unknown_hints: int = counter("KV hints of other kinds, and those beyond the first 64 of a request; ignored.")


COUNTED = help_of(Counters)
"""Help texts of the counters, by name."""
OWN_HASHES = "own_hashes"
GAUGES = {
    OWN_HASHES: "1 if this engine's block hashes use a random seed: other engines and restarts cannot hit its blocks.",
    **offload_condition.GAUGES,
}
"""Help texts of the gauges, by name."""
