"""Numbers of the documents that are constants of the code: where a text says one, and which constant it is.

`{}` stands for the number with its unit. A text is looked for in the page as it is read: lines are joined, and the
marks of Markdown are left out."""

from __future__ import annotations

import importlib
import re
from functools import cache

from kvsidecar.daemon.settings import Settings
from kvsidecar.support.units import Size, parse_size
from tests.docs.pages import ROOT

PROTO = "proto/kvsidecar/v1/sidecar.proto"

SAID = (
    (PROTO, "width of one block hash, {}..64 bytes", "types.HASH_BYTES_MIN"),
    (PROTO, "width of one block hash, 16..{}", "types.HASH_BYTES_MAX"),
    (PROTO, "Of one namespace at most {} are kept, with names", "core.namespace_options.MAX_OPTIONS"),
    (PROTO, "with names of at most {} and values", "core.namespace_options.MAX_NAME"),
    (PROTO, "and values of at most {}. repeated Option", "core.namespace_options.MAX_VALUE"),
    (PROTO, "as many bytes for each, at most {}; empty: nothing", "core.watches.MAX_NOTE_BYTES"),
    (PROTO, "More than {} (48 days) count as these", "types.MAX_IDLE_SECONDS"),
    (PROTO, "size limit of gRPC messages, {}.", "protocol.framing.MAX_MESSAGE_BYTES"),
    ("docs/wire.md", "Hello is not complete within {},", "server.attach_socket.HELLO_SECONDS"),
    ("docs/wire.md", "a stream with {} unread replies", "server.service.MAX_UNREAD"),
    ("docs/wire.md", "unread replies, or {} of them, is ended", "server.attachment.MAX_UNREAD_BYTES"),
    ("docs/wire.md", "Changes are collected for {}.", "core.watches.INTERVAL"),
    ("docs/wire.md", "A watcher with {} unread is sent nothing", "server.watch_stream.MAX_UNREAD_BYTES"),
    ("docs/wire.md", "as after more than {} of changes at once", "cache.change_log.MAX_LOG_BYTES"),
    ("docs/wire.md", "of a snapshot; the daemon keeps the latest {}.", "core.block_notes.MAX_NOTES_BYTES"),
    ("docs/wire.md", "A user may have {}. ### Who", "core.sessions.MAX_WATCHES"),
    ("docs/wire.md", "lookups with more than {} of hashes take turns", "server.service.LARGE_LOOKUP_BYTES"),
    ("docs/wire.md", "or is incomplete {} after its first byte", "server.partial_messages.MESSAGE_SECONDS"),
    ("docs/wire.md", "this time counts towards the {}.", "server.partial_messages.MESSAGE_SECONDS"),
    ("docs/wire.md", "the daemon buffers {} per user", "server.partial_messages.MAX_PARTIAL_BYTES"),
    ("docs/client.md", "has answered nothing at all for {}:", "support.breaker.SILENT_SECONDS"),
    ("docs/concepts.md", "by a slice of a copy (at most {})", "copier.recipes.SLICE_BYTES"),
    ("docs/concepts.md", "when it has not ended a job {} after", "client.supervisor.HANG_SECONDS"),
    ("docs/design.md", "after a pause that grows to {}.", "support.supervised_child.LONGEST_PAUSE_SECONDS"),
    ("docs/design.md", "/health fails after {}, and the daemon", "daemon.daemon.COPIER_END_SECONDS"),
    ("docs/design.md", "the end of a copy) for {} at most", "support.loop_time.SECONDS"),
    ("docs/design.md", "confirm it within two seconds", "copier.quiesce.QUIESCE_SECONDS"),
    ("docs/design.md", "each sealed slot has a record of {}:", "tiers.disk.directory.RECORD_BYTES"),
    ("docs/operating.md", "after a pause that grows to {}. Then", "support.supervised_child.LONGEST_PAUSE_SECONDS"),
    ("docs/operating.md", "If a copier does not end within {} although", "daemon.daemon.COPIER_END_SECONDS"),
    ("docs/operating.md", "that was killed has not ended after {}; no answer", "daemon.daemon.COPIER_END_SECONDS"),
    ("docs/operating.md", "The log buffers up to {} for a slow reader", "support.log_writer.MAX_WAITING_BYTES"),
    ("docs/operating.md", "keeps at most {} of them and of", "core.namespace_options.MAX_BYTES"),
    ("docs/operating.md", "requests give models, {} per user, and", "core.namespace_options.MAX_BYTES_OF_USER"),
    ("docs/operating.md", "with flood, more than {} of changes", "cache.change_log.MAX_LOG_BYTES"),
    ("docs/security.md", "Hello or Register | {}, then", "server.attach_socket.HELLO_SECONDS"),
    ("docs/security.md", "Hello or Register | {}, then", "server.service.FIRST_MESSAGE_SECONDS"),
    ("docs/security.md", "of the local protocol | {}, then", "server.partial_messages.MESSAGE_SECONDS"),
    ("docs/security.md", "bytes of such messages | {};", "server.partial_messages.MAX_PARTIAL_BYTES"),
    ("docs/security.md", "response that is not read | {}, then", "server.http_connection.CLIENT_SECONDS"),
    ("docs/security.md", "does it, at most {} at a time", "core.zeroing.SLICE_BYTES"),
    ("docs/security.md", "client texts are bounded ({})", "types.MAX_TEXT_BYTES"),
    ("docs/security.md", "hashes below {} are refused", "types.HASH_BYTES_MIN"),
    ("docs/sharing.md", "idle_ttl is at most {} (48 days)", "types.MAX_IDLE_SECONDS"),
    ("docs/sharing.md", "at most --pin-max ({} % of the pool)", "--pin_max"),
    ("docs/sharing.md", "in flight, {} of the link", "copier.copy_queue.AHEAD_SECONDS"),
    ("docs/tiers.md", "free, at most {}: stores take", "core.tier_writes.AHEAD_BYTES"),
    ("docs/tiers.md", "Blocks are read in pieces of {}, so", "core.tier_fetches.CHUNK_BYTES"),
    ("docs/tiers.md", "the usual ones of {}; and one page", "tiers.disk.backend.SLAB_BYTES"),
    ("docs/tiers.md", "its last use. {} each; a hole", "tiers.disk.directory.RECORD_BYTES"),
    ("docs/tiers.md", "with pauses of up to {} |", "support.supervised_child.LONGEST_PAUSE_SECONDS"),
    ("docs/tiers.md", "swept at most every {}.", "tiers.shared_directory.sweep.EARLY_SECONDS"),
    ("docs/vllm.md", "Lookups of more than {} get proportionally", "integrations.time_limits.BUDGETED_HASHES"),
    ("docs/vllm.md", "2, 4, and then every {})", "integrations.vllm.stores.MAX_RETRY_SECONDS"),
    ("docs/vllm.md", "has answered nothing for {}, a circuit breaker", "support.breaker.SILENT_SECONDS"),
    ("docs/vllm.md", "has not ended some {} after its timeout", "client.supervisor.HANG_SECONDS"),
    ("docs/vllm.md", "the hit, and at most {} longer; if", "integrations.vllm.lookups.UNCLAIMED_SECONDS"),
    ("docs/vllm.md", "if the engine stalls, {}.", "integrations.vllm.lookups.OFFER_SECONDS"),
    ("docs/vllm.md", "If no store ends for {} then", "integrations.vllm.stores.GIVE_UP_SECONDS"),
    ("docs/vllm.md", "vLLM waits at most {} for the end", "integrations.vllm.stores.SOON_SECONDS"),
    ("docs/vllm.md", "If no store ends within {}, none", "integrations.vllm.stores.HUNG_SECONDS"),
    ("docs/vllm.md", "for everything, {} of each group", "integrations.residency.announcements.RETRACTED_PER_STEP"),
    ("docs/vllm.md", "keeps the latest {} in its own memory", "core.block_notes.MAX_NOTES_BYTES"),
    ("docs/vllm.md", "or learned of, up to {} in each group", "integrations.residency.known_blocks.MAX_KNOWN_BYTES"),
    ("docs/vllm.md", "An engine announces at most {};", "integrations.residency.announcements.MAX_ANNOUNCED"),
    ("docs/sglang.md", "a lookup of up to {} may keep", "integrations.time_limits.BUDGETED_HASHES"),
    ("docs/sglang.md", "each further failure, at most {} |", "integrations.sglang.loads.MAX_PAUSE_SECONDS"),
    ("docs/sglang.md", "pages with pieces below {} into slots", "integrations.sglang.staged_load.SMALL_PIECE_BYTES"),
    ("docs/sglang.md", "when SGLang has its pool: {}, at most an", "integrations.sglang.staged_load.DEFAULT_BYTES"),
    ("docs/sglang.md", "has answered nothing for {}, a circuit breaker", "support.breaker.SILENT_SECONDS"),
    ("docs/sglang.md", "and after {} none are sent", "integrations.sglang.offloads.HUNG_SECONDS"),
    ("docs/routers.md", "hear it again: at most every {},", "publisher.publisher.AGAIN_SECONDS"),
    ("docs/routers.md", "5 seconds, {} a message", "publisher.publisher.MESSAGE_BLOCKS"),
    ("docs/routers.md", "The latest {} messages are kept", "publisher.sequence.MAX_KEPT"),
    ("docs/routers.md", "are kept, and at most {}.", "publisher.sequence.MAX_KEPT_BYTES"),
    ("docs/routers.md", "beyond the {} largest", "publisher.publisher.MAX_FOLLOWED"),
    ("docs/routers.md", "it is disconnected after {}; it delays no other", "publisher.publisher.REPLAY_SECONDS"),
    ("docs/routers.md", "the gap; after {} it is disconnected", "publisher.endpoint.SILENCE_SECONDS"),
    ("docs/routers.md", "a frame of more than {}, more than", "publisher.zmtp.MAX_FRAME_BYTES"),
    ("docs/routers.md", "more than {} subscriptions or", "publisher.endpoint.MAX_SUBSCRIPTIONS"),
    ("docs/routers.md", "subscriptions or {} of them on one", "publisher.endpoint.MAX_SUBSCRIPTION_BYTES"),
    ("docs/routers.md", "more than {} connections of one address", "publisher.endpoint.MAX_CONNECTIONS_EACH"),
    ("docs/routers.md", "of one user), or {} of one endpoint", "publisher.endpoint.MAX_CONNECTIONS"),
    ("docs/routers.md", "Tokens take {} at most", "publisher.publisher.MAX_KNOWN_BYTES"),
    ("docs/security.md", "until it ends: at most {} for all users", "core.block_notes.MAX_NOTES_BYTES"),
    ("docs/security.md", "connections of an endpoint | {} of one address", "publisher.endpoint.MAX_CONNECTIONS_EACH"),
    ("docs/security.md", "one more is closed. {} of all", "publisher.endpoint.MAX_CONNECTIONS"),
    ("docs/security.md", "a frame that a router sends | {}, then", "publisher.zmtp.MAX_FRAME_BYTES"),
    ("docs/security.md", "subscriptions of a connection | {}, and", "publisher.endpoint.MAX_SUBSCRIPTIONS"),
    ("docs/security.md", "and {} of topics", "publisher.endpoint.MAX_SUBSCRIPTION_BYTES"),
    ("docs/security.md", "has asked for and not got | {}, then", "publisher.publisher.MAX_REPLAYS"),
    ("docs/security.md", "no answer to heartbeats | {};", "publisher.endpoint.GREETING_SECONDS"),
    ("docs/security.md", "heartbeats | 10 s; {}, then", "publisher.endpoint.SILENCE_SECONDS"),
    ("docs/security.md", "a message that is not read | {}, in", "publisher.endpoint.SILENCE_SECONDS"),
    ("docs/security.md", "in a replay {}, then", "publisher.publisher.REPLAY_SECONDS"),
    ("docs/security.md", "for all routers together | {} messages", "publisher.sequence.MAX_KEPT"),
    ("docs/security.md", "10,000 messages, and {};", "publisher.sequence.MAX_KEPT_BYTES"),
    ("docs/security.md", "whatever engines note | {} in all", "publisher.publisher.MAX_KNOWN_BYTES"),
    ("docs/security.md", "namespaces, of which {} are followed", "publisher.publisher.MAX_FOLLOWED"),
    ("docs/security.md", "gRPC connections of one user take at most {} of", "server.grpc_front.USER_BYTES"),
    ("docs/security.md", "those of all users together {}, however", "server.grpc_front.ALL_BYTES"),
    ("docs/security.md", "One user takes at most {}, and", "server.tls_front.USER_BYTES"),
    ("docs/security.md", "and all who reach the port {}, including", "server.tls_front.ALL_BYTES"),
    ("docs/security.md", "TLS handshakes | {} from one address", "server.handshakes.MAX_HANDSHAKES"),
    ("docs/security.md", "/64 network), and {} in total;", "server.handshakes.MAX_ALL_HANDSHAKES"),
    ("docs/security.md", "a TLS handshake | {}, counted as", "server.handshakes.HANDSHAKE_SECONDS"),
    ("docs/security.md", "counted as unfinished; {} | | a TLS client", "server.tls_front.MAX_HANDSHAKE_BYTES"),
    ("docs/faults.md", "is ended when {} replies are queued", "server.service.MAX_UNREAD"),
    ("docs/faults.md", "replies are queued, or {} of them; other", "server.attachment.MAX_UNREAD_BYTES"),
    ("docs/faults.md", "silent connections are closed after {} |", "server.attach_socket.HELLO_SECONDS"),
    ("docs/runbook.md", "The daemon tries again every {}, so", "support.supervised_child.LONGEST_PAUSE_SECONDS"),
)
"""(page, what it says, the constant below kvsidecar, or the option that has it as its default)."""

UNITS = {"ms": 1e-3, "s": 1.0, "second": 1.0, "seconds": 1.0, "minutes": 60.0}
WORDS = {"half a": 0.5, "two": 2, "ten": 10}
_NUMBER = (
    r"(?P<number>\d[\d,]*(?:\.\d+)?|half a|two|ten)"
    r"(?: (?P<unit>KiB|MiB|GiB|TiB|ms|seconds?|s|minutes|bytes|blocks|hashes)\b)?"
)


@cache
def as_read(page: str) -> str:
    text = re.sub(r"^\s*//|//", " ", (ROOT / page).read_text(), flags=re.MULTILINE)
    return " ".join(re.sub(r"[`*]", "", re.sub(r"\]\([^)\s]+\)|\[", "", text)).split())


def said(page: str, phrase: str) -> list[float]:
    """The numbers that a page says there, in bytes, seconds or pieces."""
    before, _, after = phrase.partition("{}") if "{}" in phrase else _around_word(phrase)
    found = re.finditer(re.escape(before) + _NUMBER + re.escape(after), as_read(page))
    return [_value(each["number"], each["unit"]) for each in found]


def _around_word(phrase: str) -> tuple[str, str, str]:
    word = next(word for word in ("two seconds", "ten seconds") if word in phrase)
    return phrase.partition(word)


def _value(number: str, unit: str | None) -> float:
    plain = WORDS[number] if number in WORDS else float(number.replace(",", ""))
    if unit is not None and unit.endswith("iB"):
        return plain * parse_size(f"1{unit}")
    return plain * UNITS.get(unit or "", 1)


def constant(name: str) -> float:
    if name.startswith("--"):
        default = Settings.model_fields[name.removeprefix("--")].default
        return float(default.percent if isinstance(default, Size) else default)
    module, _, last = name.rpartition(".")
    return float(getattr(importlib.import_module(f"kvsidecar.{module}"), last))
