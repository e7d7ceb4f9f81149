"""Named points in the code at which a test or an operator can inject faults, by configuration.

Off by default; a hit then costs one truth test of an empty dict. Example::

    KVSIDECAR_FAILPOINTS="pool.pin_chunk=delay(0.05);pool.pin_chunk@3=raise(out of memory)"

Rules are separated by ``;``. ``name@N`` matches only the N-th hit of that name, counted from 0 since `configure`;
without ``@N`` a rule matches every hit. Actions: ``raise(text)``, ``delay(seconds)``, ``hold(path)`` (wait for a byte
from the named pipe at this path), ``kill`` (SIGKILL to this process, like the kernel's OOM killer: nothing is flushed,
no handler runs). All matching rules apply, in the order written.

Every rule is logged before it acts, so that an injected fault is recognised as one and a test knows that the point was
reached. A ``delay`` or ``hold`` blocks the thread that hits the point; if that is the event loop, everything stops.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from kvsidecar.errors import ConfigError
from kvsidecar.support import log

VARIABLE = "KVSIDECAR_FAILPOINTS"

KNOWN: dict[str, str] = {
    "pool.reserve": "before address space for the host pool is reserved",
    "pool.prefault_chunk": "before the pages of one chunk of the pool are faulted in",
    "pool.pin_chunk": "before one chunk of the pool is pinned",
    "store.after_reserve": "a store job has reserved its slots and has copied nothing",
    "store.before_copy": "before the copies of a store job are issued",
    "store.before_seal": "the copies of a store job are complete, its blocks are not readable yet",
    "load.before_copy": "before the copies of a load job are issued",
    "store.in_flight": "in the copier: the copies of a store job are issued but not complete",
    "load.in_flight": "in the copier: the copies of a load job are issued but not complete",
    "copy.device_lost": "in the copier, before a job's copies: raise() simulates a sticky CUDA error",
    "copier.pin": "in the copier, before it pins one chunk of the pool",
    "copier.hello": "in the copier, before it says which devices there are",
    "copier.import": "in the copier, before it imports one allocation of a rank",
    "copier.self_test": "in the copier, before it compares what the copies of its self-test have brought back",
    "copier.checksum": "in the copier, before it reads a part of the slots whose checksums it takes",
    "tier.before_find": "in a tier's process, before its backend looks for blocks",
    "tier.before_read": "in a tier's process, before its backend reads into slots",
    "tier.before_write": "in a tier's process, before its backend writes from slots",
    "attach.after_import": "a rank's memory is imported, its registration is not answered yet",
    "tier.read": "in a tier's process, before it reads: raise() simulates EIO",
    "tier.write": "in a tier's process, before it writes: raise() simulates EIO",
    "lookup.before_answer": "in the daemon's loop, before it answers a lookup",
    "zeroing.slice": "in the thread that zeroes what is freed, before each slice",
    "start.load": "in the thread that imports the rest of the daemon, before the imports; probes are answered",
}
"""All failpoints and where they are. Tests check that each occurs once in the code, is hit in ordinary use, and is used
by a test to inject a fault."""


class FailpointError(RuntimeError):
    """Raised by a ``raise(text)`` rule. Not a KVSidecarError: it stands for an unexpected fault."""


@dataclass(frozen=True, slots=True)
class _Rule:
    only_hit: int | None
    action: str
    argument: str


_log = log.get("failpoints")

_RULE = re.compile(
    r"\s*(?P<name>[\w.]+)(?:@(?P<only_hit>\d+))?=(?:(?P<kill>kill)|(?P<action>\w+)\((?P<argument>[^)]*)\))\s*"
)

_rules: dict[str, list[_Rule]] = {}
_hits: dict[str, int] = {}
_lock = threading.Lock()


def hit(name: str) -> None:
    """Apply the rules for this point, if any. Raises FailpointError if a ``raise(text)`` rule matches."""
    if _rules:
        _apply(name)


def is_set(name: str) -> bool:
    """Whether a rule names this point."""
    return name in _rules


def configure(spec: str) -> None:
    """Replace all rules by those of ``spec`` and count hits from 0 again. An empty spec turns everything off.

    Raises:
        ConfigError: the spec does not parse or names an unknown point; the previous rules stay in force.
    """
    rules: dict[str, list[_Rule]] = {}
    for part in re.split(r";(?![^(]*\))", spec):  # not at a ; inside parentheses
        if part.strip():
            name, rule = _parse(part)
            rules.setdefault(name, []).append(rule)
    with _lock:
        _rules.clear()
        _hits.clear()
        _rules.update(rules)


def configure_from_environment() -> None:
    """`configure` with ``KVSIDECAR_FAILPOINTS``; off if it is not set."""
    configure(os.environ.get(VARIABLE, ""))


def _apply(name: str) -> None:
    with _lock:
        number = _hits.get(name, 0)
        _hits[name] = number + 1
        matching = [rule for rule in _rules.get(name, ()) if rule.only_hit in (None, number)]
    # Outside the lock: a delay must not delay the hits of other threads.
    for rule in matching:
        _log.warning("failpoint", name=name, hit=number, action=rule.action)
        if rule.action == "delay":
            time.sleep(float(rule.argument))
        elif rule.action == "hold":
            with open(rule.argument, "rb", buffering=0) as pipe:
                pipe.read(1)
        elif rule.action == "kill":
            log.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise FailpointError(rule.argument)


def _parse(part: str) -> tuple[str, _Rule]:
    found = _RULE.fullmatch(part)
    if found is None:
        raise ConfigError(f"{VARIABLE}: {part.strip()!r} is not name=action or name@N=action: {_ACTIONS}")
    name = found["name"]
    if name not in KNOWN:
        near = get_close_matches(name, KNOWN, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(KNOWN)}"
        raise ConfigError(f"{VARIABLE}: {name!r} is not a failpoint: {hint}")
    only_hit = int(found["only_hit"]) if found["only_hit"] is not None else None
    action, argument = found["kill"] or found["action"], found["argument"] or ""
    valid = {
        "kill": found["kill"] is not None,
        "raise": True,
        "hold": Path(argument).is_fifo(),
        "delay": re.fullmatch(r"\d+(\.\d+)?", argument) is not None,
    }
    if not valid.get(action):
        raise ConfigError(f"{VARIABLE}: {part.strip()!r} has no known action: {_ACTIONS}")
    return name, _Rule(only_hit, action, argument)


_ACTIONS = "actions are raise(text), delay(seconds), hold(path of a named pipe) and kill"
