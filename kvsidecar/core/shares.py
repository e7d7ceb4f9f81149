"""The shares of the configuration: which namespaces each covers, and what it may have of the pool.

A share covers namespaces by pattern, or by owner: those that the policy gives to a user, group or certificate. Blocks
belong to a namespace, whichever user stored them, so bytes are counted per namespace; a restart finds them there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvsidecar.core.access import Policy, Rule, read_owners, read_tables, read_texts
from kvsidecar.errors import ConfigError
from kvsidecar.support.patterns import covers
from kvsidecar.support.units import Size, format_size
from kvsidecar.tiers.backend import TierShare
from kvsidecar.types import UNASSIGNED

if TYPE_CHECKING:
    from kvsidecar.cache.shares import ShareLimits

MAX_SHARES: Final = 1024
REST: Final = "other"
"""Label of all shares together that have none of their own in the metrics."""
MAX_TTL: Final = 366 * 86400
MAX_WEIGHT: Final = 100
MAX_DISK_PATTERNS: Final = 1 << 17
"""Characters of all patterns that the disk tier's process is sent: its messages are bounded."""
_NOBODY: Final = Rule()
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class ShareRule:
    """One ``[[share]]`` table."""

    name: str
    namespaces: tuple[str, ...] = ()
    """Patterns, as in `Rule.namespaces`."""
    owners: Rule = _NOBODY
    """Its users, groups and certificates: the share covers what the policy gives them."""
    guaranteed: Size | None = None
    most: Size | None = None
    ttl: float | None = None
    """Seconds after which its blocks expire."""
    idle_ttl: float | None = None
    """Seconds after their last use until its blocks expire."""
    weight: int = 1
    """How many turns each of its engines gets on the link."""
    disk_most: Size | None = None
    """The most that it may have of the disk tier."""
    disk_guaranteed: Size | None = None
    """What it is guaranteed of the disk tier."""

    @property
    def disk_keys(self) -> list[str]:
        """The keys of the table that are about the disk tier."""
        keys = {"disk_max": self.disk_most, "disk_guaranteed": self.disk_guaranteed}
        return [key for key, size in keys.items() if size is not None]


def parse(value: object) -> tuple[ShareRule, ...]:
    """The shares of a TOML file's ``[[share]]`` tables, or of these tables as TOML text (a flag, a variable).

    Raises:
        ValueError: the end of a sentence that begins with the option: which share, and what is wrong with it.
    """
    if value is None:
        return ()
    if isinstance(value, tuple):
        return value
    rules = tuple(_rule(f"share {number}", each) for number, each in enumerate(read_tables("share", value), 1))
    if len(rules) > MAX_SHARES:
        raise ValueError(f"has {len(rules)} shares; at most {MAX_SHARES} are allowed")
    names = [rule.name for rule in rules]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"has two shares with the name {twice[0]!r}")
    return rules


def resolve(rules: Sequence[ShareRule], policy: Policy | None, pool_bytes: int) -> list[ShareLimits]:
    """What each share covers, and its bytes of this pool.

    Raises:
        ConfigError: the pool cannot keep them all, or an owner has no namespace.
    """
    from kvsidecar.cache.shares import ShareLimits  # probes are answered before this is imported

    limits = []
    for rule in rules:
        covered = partial(covers, _patterns(rule, policy))
        guaranteed, most = _least_and_most(rule.name, rule.guaranteed, rule.most, pool_bytes)
        limits.append(ShareLimits(rule.name, covered, guaranteed, most, rule.ttl, rule.idle_ttl, rule.weight))
    total = sum(each.guaranteed for each in limits)
    if total > pool_bytes:
        raise ConfigError(
            f"the shares are guaranteed {format_size(total)} together; the pool has {format_size(pool_bytes)}"
        )
    return limits


def resolve_disk(rules: Sequence[ShareRule], policy: Policy | None, disk_bytes: int) -> list[TierShare]:
    """What each share covers, and what it may have of the disk tier: all shares up to the last that mentions the disk,
    because the first share that covers a namespace is its share.

    Args:
        disk_bytes: size of the tier; 0 if there is none.

    Raises:
        ConfigError: a share has a part of a disk that is not there, the disk cannot keep all guarantees, an owner has
            no namespace, or the patterns are too long together.
    """
    limited = [number for number, rule in enumerate(rules, 1) if rule.disk_keys]
    if not limited:
        return []
    first, last = rules[limited[0] - 1], rules[limited[-1] - 1]
    if not disk_bytes:
        raise ConfigError(f"share {first.name!r} has {first.disk_keys[0]}, but there is no disk tier (--disk-dir)")
    shares = []
    for rule in rules[: limited[-1]]:
        guaranteed, most = _least_and_most(
            rule.name, rule.disk_guaranteed, rule.disk_most, disk_bytes, " of the disk", "disk_max"
        )
        shares.append(TierShare(rule.name, _patterns(rule, policy), most, guaranteed))
    if (total := sum([each.guaranteed for each in shares])) > disk_bytes:
        raise ConfigError(
            f"the shares are guaranteed {format_size(total)} of the disk together; it has {format_size(disk_bytes)}"
        )
    if (characters := sum(len(pattern) for each in shares for pattern in each.patterns)) > MAX_DISK_PATTERNS:
        raise ConfigError(
            f"the shares up to {last.name!r}, which has {last.disk_keys[0]}, have patterns of {characters} characters; "
            f"at most {MAX_DISK_PATTERNS} are allowed"
        )
    return shares


def _least_and_most(
    name: str, guaranteed: Size | None, most: Size | None, nbytes: int, of: str = "", option: str = "max"
) -> tuple[int, int | None]:
    """A share's guaranteed bytes and its most, out of ``nbytes``. Raises ConfigError."""
    least = 0 if guaranteed is None else guaranteed.of(nbytes)
    limit = None if most is None else most.of(nbytes)
    if limit is not None and limit < least:
        raise ConfigError(
            f"share {name!r} is guaranteed {format_size(least)}{of}, more than its {option} ({format_size(limit)})"
        )
    return least, limit


def _patterns(rule: ShareRule, policy: Policy | None) -> tuple[str, ...]:
    """Patterns of the namespaces that the share covers. Raises ConfigError."""
    owners = rule.owners
    if not owners.has_owners:
        return rule.namespaces
    owned = dict.fromkeys(
        pattern
        for each in (() if policy is None else policy.rules)
        if each.uids & owners.uids or each.gids & owners.gids or set(each.certificates) & set(owners.certificates)
        for pattern in each.namespaces
    )
    if not owned:
        raise ConfigError(f"share {rule.name!r} names owners to whom no policy rule grants a namespace")
    return (*rule.namespaces, *owned)


def _rule(where: str, table: Mapping[str, Any]) -> ShareRule:
    limits = {"guaranteed", "max", "disk_guaranteed", "disk_max", "ttl", "idle_ttl", "weight"}
    known = {"name", "namespaces", "uids", "gids", "certificates", *limits}
    if unknown := [key for key in table if key not in known]:
        raise ValueError(f"has a {where} with {unknown[0]!r}; known are {', '.join(sorted(known))}")
    name = table.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in (UNASSIGNED, REST):
        raise ValueError(
            f"has a {where} whose name is {name!r}; it must have 1 to 64 letters, digits, dots, dashes and "
            f"underscores, and not be {UNASSIGNED!r} or {REST!r}"
        )
    rule = ShareRule(
        name,
        namespaces=read_texts(where, "namespaces", table),
        owners=read_owners(where, table),
        guaranteed=_size(where, "guaranteed", table),
        most=_size(where, "max", table),
        ttl=_seconds(where, "ttl", table),
        idle_ttl=_seconds(where, "idle_ttl", table),
        weight=_weight(where, table),
        disk_most=_size(where, "disk_max", table),
        disk_guaranteed=_size(where, "disk_guaranteed", table),
    )
    if not rule.namespaces and not rule.owners.has_owners:
        raise ValueError(f"has a {where} that covers nothing: give namespaces, uids, gids or certificates")
    return rule


def _size(where: str, key: str, table: Mapping[str, Any]) -> Size | None:
    if key not in table:
        return None
    try:
        return Size.parse(table[key])
    except ValueError as error:
        raise ValueError(f"has a {where} whose {key} {error}") from None


def _seconds(where: str, key: str, table: Mapping[str, Any]) -> float | None:
    value = table.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= MAX_TTL:
        raise ValueError(f"has a {where} whose {key} is {value!r}; it must be a number of seconds, 1 to {MAX_TTL}")
    return float(value)


def _weight(where: str, table: Mapping[str, Any]) -> int:
    value = table.get("weight", 1)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_WEIGHT:
        raise ValueError(f"has a {where} whose weight is {value!r}; it must be a whole number, 1 to {MAX_WEIGHT}")
    return value
