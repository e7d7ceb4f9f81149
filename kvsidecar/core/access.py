"""Access control: which client may use which namespace, and which is an admin.

The rules of the configuration are matched with the client's identity, as the kernel or a certificate gives it, once
per connection; a request only looks at its `Grant`. Pure but for `parse`, which looks up the ids of users and groups.
"""

from __future__ import annotations

import grp
import pwd
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from kvsidecar.errors import NotPermitted, UnknownPeer
from kvsidecar.support import config_files
from kvsidecar.support.patterns import EVERYTHING, covers
from kvsidecar.types import TOKEN_METADATA, Namespace

OVERFLOW_ID = 65534
"""The id that the kernel shows for every user and group without an id in this user namespace (user_namespaces(7))."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A client's identity: that of its process on this host, by SO_PEERCRED, or the names in its certificate."""

    uid: int | None = None
    gids: frozenset[int] = frozenset()
    """The primary group and the others."""
    certificate: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"uid {self.uid}" if self.uid is not None else f"the certificate of {', '.join(self.certificate)}"


@dataclass(frozen=True, slots=True)
class Grant:
    """The rights of a client."""

    namespaces: tuple[str, ...] = ()
    """Patterns, as in `Rule.namespaces`."""
    admin: bool = False

    def may_use(self, namespace: Namespace) -> bool:
        return covers(self.namespaces, namespace)


@dataclass(frozen=True, slots=True)
class Caller:
    """The client that sent a request. ``identity`` is None for a gRPC client of the Unix socket without a token."""

    identity: Identity | None
    grant: Grant
    token: bytes = b""
    """Names its connection to the attach socket, or its stream; empty without one."""

    @property
    def uid(self) -> int | None:
        return None if self.identity is None else self.identity.uid


@dataclass(frozen=True, slots=True)
class Rule:
    """The rights of a client that matches any of the uids, gids or certificates."""

    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()
    certificates: tuple[str, ...] = ()
    """Patterns of a certificate's names."""
    namespaces: tuple[str, ...] = ()
    """Patterns of a namespace's model, or of its full text, as ``kvsidecar clear --namespace`` takes them."""
    admin: bool = False

    @property
    def has_owners(self) -> bool:
        return bool(self.uids or self.gids or self.certificates)

    def fits(self, client: Identity) -> bool:
        if client.uid is not None and (client.uid in self.uids or not self.gids.isdisjoint(client.gids)):
            return True
        return any(fnmatchcase(name, pattern) for name in client.certificate for pattern in self.certificates)


@dataclass(frozen=True, slots=True)
class Policy:
    """All rules. A client that matches several gets all that they give, one that matches none gets nothing."""

    rules: tuple[Rule, ...] = ()

    @property
    def names_certificates(self) -> bool:
        return any(rule.certificates for rule in self.rules)


@dataclass(frozen=True, slots=True)
class Access:
    """The policy, and the rules without one.

    Args:
        policy: None: every client that can open the Unix socket may use every namespace.
        owner: the daemon's user. It and root are admins: they could as well kill the daemon or read its memory.
        admin_gid: a group whose members are admins too.
        private: only the owner and root can open the Unix socket.
    """

    policy: Policy | None
    owner: int
    admin_gid: int | None = None
    private: bool = False

    def grant(self, client: Identity) -> Grant:
        admin = client.uid in (0, self.owner) or (self.admin_gid is not None and self.admin_gid in client.gids)
        if self.policy is None:
            return Grant((EVERYTHING,) if client.uid is not None else (), admin)
        rules = [rule for rule in self.policy.rules if rule.fits(client)]
        patterns = dict.fromkeys(pattern for rule in rules for pattern in rule.namespaces)
        return Grant(tuple(patterns), admin or any(rule.admin for rule in rules))

    @property
    def anonymous(self) -> Caller:
        """A gRPC client of the Unix socket without a token: only the mode of the socket's file restricts it."""
        if self.policy is not None:
            return Caller(None, Grant())
        return Caller(None, Grant((EVERYTHING,), admin=self.private))


def permit(caller: Caller, namespace: Namespace) -> None:
    """Refuse a namespace that is not the caller's, whether or not it has blocks.

    Raises:
        NotPermitted, UnknownPeer
    """
    if caller.grant.may_use(namespace):
        return
    if caller.identity is None:
        raise unidentified()
    raise NotPermitted(f"the policy grants {caller.identity} no namespace {str(namespace)!r}")


def unidentified() -> UnknownPeer:
    """The refusal of a client without a token by a daemon with a policy."""
    return UnknownPeer(
        "this daemon has a policy: send the token of an open Attach stream or connection to the attach socket in the "
        f"metadata {TOKEN_METADATA}"
    )


# -- reading it --------------------------------------------------------------------------------------------------


def parse(value: object) -> Policy | None:
    """The rules of a TOML file's ``[[policy]]`` tables, or of these tables as TOML text (a flag, a variable).

    Raises:
        ValueError: the end of a sentence that begins with the option: which rule, and what is wrong with it.
    """
    if value is None or isinstance(value, Policy):
        return value
    return Policy(tuple(_rule(f"rule {number}", each) for number, each in enumerate(read_tables("policy", value), 1)))


def read_tables(option: str, value: object) -> list[dict[str, Any]]:
    """The tables of an option, from the file or as TOML text. Raises ValueError, as `parse`."""
    if isinstance(value, str):
        text = f"{option} = {value}"
        try:
            value = tomllib.loads(text)[option]
        except tomllib.TOMLDecodeError as error:
            problem = config_files.toml_problem(text, error)
            raise ValueError(f"is not a TOML array of tables, [{{key = value, ...}}, ...]: {problem}") from None
        except RecursionError:
            raise ValueError("is not a TOML array of tables: it is nested too deeply") from None
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ValueError(f"must be tables: [[{option}]]")
    return value


def read_owners(name: str, table: Mapping[str, Any]) -> Rule:
    """The users, groups and certificates of a table, as a rule that gives nothing. Raises ValueError, as `parse`."""
    return Rule(
        uids=_ids(name, "uids", table.get("uids", []), lambda user: pwd.getpwnam(user).pw_uid),
        gids=_ids(name, "gids", table.get("gids", []), lambda group: grp.getgrnam(group).gr_gid),
        certificates=read_texts(name, "certificates", table),
    )


def _rule(name: str, table: Mapping[str, Any]) -> Rule:
    known = {"uids", "gids", "certificates", "namespaces", "admin"}
    if unknown := [key for key in table if key not in known]:
        raise ValueError(f"has a {name} with {unknown[0]!r}; known are {', '.join(sorted(known))}")
    admin = table.get("admin", False)
    if not isinstance(admin, bool):
        raise ValueError(f"has a {name} whose admin is {admin!r}; it must be true or false")  # noqa: TRY004
    rule = replace(read_owners(name, table), namespaces=read_texts(name, "namespaces", table), admin=admin)
    if not rule.has_owners:
        raise ValueError(f"has a {name} that matches no client: give uids, gids or certificates")
    if not (rule.namespaces or rule.admin):
        raise ValueError(f"has a {name} that grants nothing: give namespaces or admin = true")
    return rule


def read_texts(name: str, key: str, table: Mapping[str, Any]) -> tuple[str, ...]:
    """A list of texts of a table. Raises ValueError, as `parse`."""
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise ValueError(f"has a {name} whose {key} is {value!r}; it must be a list of texts")
    return tuple(value)


def _ids(name: str, key: str, value: object, number_of: Callable[[str], int]) -> frozenset[int]:
    if not isinstance(value, list):
        raise ValueError(f"has a {name} whose {key} is {value!r}; it must be a list of numbers or names")  # noqa: TRY004
    return frozenset(_id(name, key, each, number_of) for each in value)


def _id(name: str, key: str, value: object, number_of: Callable[[str], int]) -> int:
    found: int | None = None
    if isinstance(value, str):
        try:
            found = number_of(value)
        except KeyError:
            raise ValueError(f"has a {name} whose {key} have {value!r}, which this machine does not know") from None
    elif isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32 - 1:
        found = value
    if found is None:
        raise ValueError(f"has a {name} whose {key} have {value!r}; it must be a number or a name")
    if found == OVERFLOW_ID:
        raise ValueError(f"has a {name} whose {key} have {OVERFLOW_ID}, the id of everyone without an id on this host")
    return found
