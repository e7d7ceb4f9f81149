"""What the page of the HTTP port shows: the figures of `kvsidecar top`, as texts and shares."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple

from kvsidecar.protocol.status_figures import (
    Rates,
    Sample,
    busiest,
    copied_so_far,
    has_pool,
    hits_so_far,
    jobs_now,
    namespace_details,
    pool_details,
    pool_parts,
    pool_text,
    rates_between,
    share_details,
    short_device,
    tier_details,
    tokens_so_far,
    used_of,
)
from kvsidecar.support.units import format_duration, format_rate, format_size
from kvsidecar.v1 import sidecar_pb2 as pb

SAMPLE_SECONDS = 1.0
"""How long an answer stays valid, however many ask: the interval of the rates while somebody looks."""
FORGOTTEN_SECONDS = 10.0
"""How long nobody may have looked for the rates to go on."""
HISTORY = 60
"""How many rates are kept."""
SHOWN = 32
"""The most engines that are listed, the busiest."""
NAMESPACES_SHOWN = 8
"""The most namespaces that are listed, the largest."""
SHARES_SHOWN = 8
"""The most shares that are listed, the largest."""
TEXT = 96
"""The most characters of a client's text."""


class Device(NamedTuple):
    """A GPU that the daemon serves.

    Args:
        down: why it takes no copies; empty while it does.
        deaths: how many of its copiers have died.
    """

    uuid: str
    down: str
    deaths: int


class Overview:
    """Samples the daemon while somebody looks at its page. Used from the event loop.

    Args:
        read: returns in steps a status reply with everything, and whether anonymous clients may see names.
        devices: the devices that the daemon serves.
    """

    def __init__(
        self,
        read: Callable[[], Generator[None, None, tuple[pb.StatusReply, bool]]],
        devices: Callable[[], Iterable[Device]],
        clock: Callable[[], float],
    ) -> None:
        self._read, self._devices, self._clock = read, devices, clock
        self._last: Sample | None = None
        self._history: deque[tuple[float, Rates]] = deque(maxlen=HISTORY)
        """The seconds that the rates are of, and these."""
        self._body = b""

    def steps(self) -> Generator[None, None, bytes]:
        """Returns the JSON of the page, at most `SAMPLE_SECONDS` old. Only one caller at a time."""
        now, before = self._clock(), self._last
        if before is not None and now - before.at < SAMPLE_SECONDS:
            return self._body
        if before is not None and now - before.at > FORGOTTEN_SECONDS:
            before = None
            self._history.clear()
        reply, names = yield from self._read()
        self._last = Sample(now, reply)
        rates = None if before is None else rates_between(before, self._last)
        if before is not None and rates is not None:
            self._history.append((now - before.at, rates))
        shown = overview(reply, rates, list(self._history), self._devices(), names=names)
        self._body = json.dumps(shown).encode()
        return self._body


def overview(
    reply: pb.StatusReply,
    rates: Rates | None,
    history: list[tuple[float, Rates]],
    devices: Iterable[Device],
    *,
    names: bool,
) -> dict[str, Any]:
    """What the page shows of a reply. Texts are as `kvsidecar top` has them; shares are between 0 and 1.

    Args:
        history: rates, oldest first, and the seconds that each is of.
        names: show which engines are attached, not only how many, the namespaces, and the shares.
    """
    state = pb.Readiness.State.Name(reply.readiness.state).partition("_")[2].lower()
    jobs = reply.jobs
    span = round(sum(seconds for seconds, _ in history))
    past = [each for _, each in history]
    stored, loaded = [each.stored_bytes for each in past], [each.loaded_bytes for each in past]
    return {
        "state": state,
        "reason": reply.readiness.reason,
        "version": reply.version,
        "backend": reply.backend,
        "uptime": format_duration(reply.uptime_seconds),
        "pin": _pin(reply.readiness) if state == "pinning" else None,
        "pool": {
            "text": pool_text(reply),
            "parts": [
                {"name": name, "share": _share(nbytes, reply.pool.total_bytes)}
                for name, nbytes in (pool_parts(reply.pool).items() if has_pool(reply.readiness) else ())
            ],
            "details": pool_details(reply.pool) if has_pool(reply.readiness) else [],
        },
        "tiers": [
            {
                "name": tier.name,
                "off": tier.off,
                "text": used_of(tier.used_bytes, tier.capacity_bytes),
                "share": _share(tier.used_bytes, tier.capacity_bytes),
                "details": tier_details(tier),
            }
            for tier in reply.tiers
        ],
        "shares": [
            {
                "name": each.name,
                "share": _share(each.used_bytes, reply.pool.total_bytes),
                "details": share_details(each),
            }
            for each in (reply.shares[:SHARES_SHOWN] if names else ())
        ],
        "namespaces": [_namespace(each, reply) for each in (reply.namespaces[:NAMESPACES_SHOWN] if names else ())],
        "flow": [
            _flow("Store", stored, span, rates, copied_so_far(jobs.stored_bytes, jobs.stores_done)),
            _flow("Load", loaded, span, rates, copied_so_far(jobs.loaded_bytes, jobs.loads_done)),
        ],
        "hits": {
            "now": "-" if rates is None or rates.hit_rate is None else f"{rates.hit_rate:.0%}",
            "total": hits_so_far(reply.lookups),
            "history": [None if each.hit_rate is None else round(each.hit_rate, 3) for each in past],
            "seconds": span,
        },
        "saved": {
            "text": tokens_so_far(jobs),
            "tokens": jobs.loaded_tokens,
            "rate": None if rates is None else round(rates.loaded_tokens, 1),
        },
        "jobs": jobs_now(jobs),
        "evicting": format_rate(rates.evicted_bytes) if rates is not None and rates.evicted_bytes else "",
        "refused": [
            {"reason": reason, "count": count, "new": 0 if rates is None else rates.refusals.get(reason, 0)}
            for reason, count in sorted(reply.refusals.items(), key=lambda item: -item[1])
        ],
        "devices": [{"name": short_device(uuid), "down": down, "deaths": deaths} for uuid, down, deaths in devices],
        "engines": [_engine(rank, rates) for rank in busiest(reply, rates, SHOWN)] if names else [],
        "attached": max(len(reply.ranks), reply.totals.ranks),
        "names": names,
    }


def _pin(readiness: pb.Readiness) -> dict[str, Any]:
    share = _share(readiness.pinned_bytes, readiness.pool_bytes)
    text = f"{share:.0%}, {format_rate(readiness.pin_bytes_per_second)}"
    if readiness.HasField("eta_seconds"):
        text += f", {format_duration(readiness.eta_seconds)} left"
    return {"share": share, "text": text}


def _flow(name: str, history: list[float], span: int, rates: Rates | None, total: str) -> dict[str, Any]:
    highest = max(history, default=0.0)
    return {
        "name": name,
        "rate": "-" if rates is None else format_rate(history[-1]),
        "total": total,
        "history": [round(value / highest, 3) if highest else 0.0 for value in history],
        "seconds": span,
        "highest": f"at most {format_rate(highest)}" if highest else "",
    }


def _namespace(each: pb.NamespaceStatus, reply: pb.StatusReply) -> dict[str, Any]:
    return {
        "name": _cut(each.namespace.model),
        "share": _share(each.bytes, reply.pool.total_bytes),
        "details": _cut(namespace_details(each)),
    }


def _cut(text: str) -> str:
    return text if len(text) <= TEXT else text[: TEXT - 1] + "…"


def _engine(rank: pb.RankStatus, rates: Rates | None) -> dict[str, Any]:
    stored, loaded = (None, None) if rates is None else rates.ranks.get(rank.session, (None, None))
    return {
        "engine": _cut(rank.instance) + (" (idle)" if rank.idle else ""),
        "rank": f"{rank.rank}/{rank.world_size}",
        "store": "-" if stored is None else format_rate(stored),
        "load": "-" if loaded is None else format_rate(loaded),
        "jobs": rank.jobs_running,
        "device": short_device(rank.device)[:TEXT],
        "mapped": format_size(rank.imported_bytes),
        "attached": format_duration(rank.attached_seconds),
    }


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0
