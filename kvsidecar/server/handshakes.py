"""Limits the TLS handshakes under way. Pure.

Anybody who reaches the port can begin one, so they are limited by address and in all. Beyond a limit the oldest one is
given up, not the new one: an honest client needs milliseconds, and one that never ends keeps nobody out.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from kvsidecar.errors import LimitExceeded, Unfinished

MAX_HANDSHAKES, MAX_ALL_HANDSHAKES = 64, 256
"""Limit per address, and of all addresses together."""
HANDSHAKE_SECONDS = 10
"""Time limit, counted in `Handshakes.second`, so that a daemon that stood still does not count its own pause."""
_NETWORK_BITS = 64
"""Bits of an IPv6 address that identify a client's network; the client chooses the rest."""


@dataclass(eq=False, slots=True)
class Handshake:
    """Made by `Handshakes.begin`."""

    address: str
    network: str
    """The network or address that it counts for."""
    seconds: int = 0
    """How long it has been under way."""


class Handshakes:
    def __init__(self) -> None:
        self._of: dict[str, dict[Handshake, None]] = {}
        """Handshakes of each network, the oldest first."""

    def begin(self, address: str) -> tuple[Handshake, tuple[Handshake, LimitExceeded] | None]:
        """Returns the new handshake, and the one given up for it with the reason, or None."""
        network = network_of(address)
        given_up = self._beyond(network)
        if given_up is not None:
            self.end(given_up[0])
        handshake = Handshake(address, network)
        self._of.setdefault(network, {})[handshake] = None
        return handshake, given_up

    def _beyond(self, network: str) -> tuple[Handshake, LimitExceeded] | None:
        what = "TLS handshakes under way: the oldest is given up"
        if len(of := self._of.get(network, {})) >= MAX_HANDSHAKES:
            return next(iter(of)), LimitExceeded(f"one address may have {MAX_HANDSHAKES} {what}")
        if sum(map(len, self._of.values())) >= MAX_ALL_HANDSHAKES:
            of = max(self._of.values(), key=len)
            return next(iter(of)), LimitExceeded(f"all addresses together may have {MAX_ALL_HANDSHAKES} {what}")
        return None

    def end(self, handshake: Handshake) -> None:
        """Remove a handshake that is over or was given up; may be called again."""
        of = self._of.get(handshake.network, {})
        of.pop(handshake, None)
        if not of:
            self._of.pop(handshake.network, None)

    def second(self) -> list[tuple[Handshake, Unfinished]]:
        """Count a second. Returns the handshakes that are given up."""
        late = []
        for of in tuple(self._of.values()):
            for handshake in tuple(of):
                handshake.seconds += 1
                if handshake.seconds > HANDSHAKE_SECONDS:
                    self.end(handshake)
                    why = f"a TLS handshake was not complete within {HANDSHAKE_SECONDS} s"
                    late.append((handshake, Unfinished(why)))
        return late


def network_of(address: str) -> str:
    """The network that an IP address counts for: itself, or its network of IPv6."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, _NETWORK_BITS), strict=False))
