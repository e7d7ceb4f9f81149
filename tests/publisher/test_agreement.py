"""A router that applies every event agrees with what lookups say at each quiescent moment, whatever has happened."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvsidecar.cache.grants import StoreGrant
from kvsidecar.client import ResidencyChange
from kvsidecar.client.inbox import Inbox
from kvsidecar.core.changes import Update
from kvsidecar.core.metrics import Metrics
from kvsidecar.core.tier_fetches import shard_space
from kvsidecar.core.watches import Watches
from kvsidecar.integrations.residency.known_blocks import BlockInfo, KnownBlocks
from kvsidecar.publisher.engine_dialects import VLLM
from kvsidecar.publisher.events import Topic
from kvsidecar.publisher.follower import Follower
from kvsidecar.server import convert
from kvsidecar.tiers.backend import ShardSpace
from kvsidecar.types import LookupMode, Residency
from tests.cache.support import PAGE, namespace, new_cache
from tests.integrations.engine import chain, full
from tests.marks import examples
from tests.router import View

WIDTH = 32
NAMES = ("one", "other")
"""Of namespaces. They have one topic, and share blocks."""
CHAINS = [chain([start, *range(1, 4 * 4)]) for start in (1, 2)]
POOL = 6
"""Blocks, in both namespaces: fewer than there are."""

KNOWN = KnownBlocks([full(0)], WIDTH)
for _hashes in CHAINS:
    for _i, _each in enumerate(_hashes):
        KNOWN.add(0, _each, BlockInfo(array("i", range(4)).tobytes(), _hashes[_i - 1] if _i else None))


class Node:
    """The daemon's cache, disk and watches, as the daemon joins them."""

    def __init__(self) -> None:
        self.cache = new_cache(POOL)
        self.due: list[Callable[[], None]] = []
        self.watches = Watches(self.cache, Metrics("host"), lambda _, call: self.due.append(call), lambda: True, self)
        self.disk: dict[str, set[bytes]] = {name: set() for name in NAMES}
        self.noted: dict[str, set[bytes]] = {name: set() for name in NAMES}
        """What it could tell a new publisher."""
        self._tells: dict[ShardSpace, Callable[[Residency, bytes], object]] = {}
        self.spaces = {name: self.cache.open_space(namespace(name), 0, 1, 0, PAGE) for name in NAMES}

    def store(self, name: str, hashes: list[bytes], *, notes: bool = True) -> None:
        if notes:
            self.watches.note(namespace(name), 0, b"".join(hashes), KNOWN.notes(0, hashes), user=0)
            self.noted[name] |= set(hashes)
        grant = self.cache.begin_store([(self.spaces[name], 0, hashes)])
        if isinstance(grant, StoreGrant):
            self.cache.seal_all(grant)

    def clear(self, name: str, hashes: list[bytes] | None = None) -> None:
        """As `Lookups` does."""
        self.disk[name] = set()
        self._tell(name, Residency.CLEARED)
        self.watches.notes.forget(namespace(name))
        self.noted[name] = set()
        if hashes is None:
            self.cache.clear(namespace(name))
        else:
            self.cache.clear_blocks(self.spaces[name], hashes)

    def write(self, name: str, hashes: list[bytes], *, gone: bool) -> None:
        self.disk[name] = self.disk[name] - set(hashes) if gone else self.disk[name] | set(hashes)
        self._tell(name, Residency.REMOVED if gone else Residency.STORED, hashes)

    def readable(self, name: str) -> set[bytes]:
        everything = [each for hashes in CHAINS for each in hashes]
        found = self.cache.lookup(self.spaces[name], everything, LookupMode.BITMAP)
        return {each for each, hit in zip(everything, found, strict=True) if hit}

    # -- its disk, as `Watches` sees it

    def watch(self, space: object, tell: Callable[[Residency, bytes], object]) -> ShardSpace:
        (name,) = [each for each, other in self.spaces.items() if other is space]
        self._tells[shard_space(self.spaces[name], 0)] = tell
        if self.disk[name]:
            tell(Residency.STORED, b"".join(sorted(self.disk[name])))
        tell(Residency.COMPLETE, b"")
        return shard_space(self.spaces[name], 0)

    def unwatch(self, watched: ShardSpace) -> None:
        self._tells.pop(watched, None)

    def _tell(self, name: str, what: Residency, hashes: list[bytes] | None = None) -> None:
        if (tell := self._tells.get(shard_space(self.spaces[name], 0))) is not None:
            tell(what, b"".join(hashes or []))


class Watcher:
    """What a publisher's client is to a namespace: it outlives the daemon."""

    def __init__(self, name: str, node: Node) -> None:
        self.name, self.inbox = name, Inbox(lambda: None)
        self._watch = node.watches.begin(namespace(name), self)

    def has_room(self) -> bool:
        return True

    def send(self, update: Update) -> None:
        self.inbox.put(convert.residency_to(update))

    def move(self, node: Node) -> None:
        """The daemon was killed; another is there."""
        self.inbox.lost()
        self._watch = node.watches.begin(namespace(self.name), self)

    def end(self, node: Node) -> None:
        node.watches.end(self._watch)

    @property
    def has_residency(self) -> bool:
        return bool(self.inbox)

    def take_residency(self, most_bytes: int) -> list[ResidencyChange]:
        return self.inbox.take(most_bytes)


class Agreement(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.node, self.view = Node(), View()
        self._publish()

    def _publish(self) -> None:
        self.topic = Topic("t")
        self.watchers = {name: Watcher(name, self.node) for name in NAMES}
        self.followers = {name: Follower(WIDTH, self.watchers[name], self.topic) for name in NAMES}
        self.heard: dict[str, set[bytes]] = {name: set() for name in NAMES}

    names = st.sampled_from(NAMES)
    blocks = st.builds(
        lambda which, first, count: CHAINS[which][first : first + count],
        st.integers(0, 1), st.integers(0, 3), st.integers(1, 4),
    )  # fmt: skip

    @rule(name=names, hashes=blocks)
    def store(self, name: str, hashes: list[bytes]) -> None:
        self.node.store(name, hashes)

    @rule(name=names)
    def clear(self, name: str) -> None:
        self.node.clear(name)

    @rule(name=names, hashes=blocks)
    def clear_and_store(self, name: str, hashes: list[bytes]) -> None:
        """Within one telling."""
        self.node.clear(name)
        self.node.store(name, hashes)

    @rule(name=names, hashes=blocks)
    def clear_by_hash(self, name: str, hashes: list[bytes]) -> None:
        self.node.clear(name, hashes)

    @rule(name=names, hashes=blocks, gone=st.booleans())
    def write_to_the_disk(self, name: str, hashes: list[bytes], gone: bool) -> None:
        self.node.write(name, hashes, gone=gone)

    @rule(kept=st.booleans())
    def kill_the_daemon(self, kept: bool) -> None:
        before, self.node = self.node, Node()
        for name in NAMES:
            if kept:
                self.node.disk[name] = before.disk[name]
                self.node.store(name, sorted(before.readable(name)), notes=False)
            self.watchers[name].move(self.node)

    @rule()
    def restart_the_publisher(self) -> None:
        for watcher in self.watchers.values():
            watcher.end(self.node)
        self._publish()

    @rule(name=names)
    def let_the_namespace_go(self, name: str) -> None:
        """It is not listed any more for a moment."""
        self.followers[name].end()
        self.watchers[name].end(self.node)
        self._settle_topic()
        self.followers[name].release()
        self.watchers[name] = Watcher(name, self.node)
        self.followers[name] = Follower(WIDTH, self.watchers[name], self.topic)
        self.heard[name] = set()

    @rule(lost=st.booleans())
    def come_late(self, lost: bool) -> None:
        self._take(512)
        self.view = self.view if lost else View()
        self.topic.say_again()

    @rule(most=st.integers(1, 4))
    def turn(self, most: int) -> None:
        self._turn(most)

    def _turn(self, most: int) -> bool:
        due, self.node.due = self.node.due, []
        self.node.watches.look()
        for call in due:
            call()
        for name, follower in self.followers.items():
            follower.step()
            if follower.needs_snapshot:
                self.watchers[name].end(self.node)
                self.watchers[name] = Watcher(name, self.node)
                follower.watch_again(self.watchers[name])
        self._take(most)
        return bool(self.node.due or self.topic.pending or any(each.pending for each in self.followers.values()))

    def _take(self, most: int) -> None:
        for event in self.topic.take(most):
            self.view.take(event)

    def _settle_topic(self) -> None:
        for _ in range(1000):
            for follower in self.followers.values():
                follower.step()
            self._take(512)
            if not self.topic.pending and not any(each.pending for each in self.followers.values()):
                return
        raise AssertionError("it never comes to rest")

    @rule()
    def agree(self) -> None:
        turns = 0
        while self._turn(512) or turns < 2:
            turns += 1
            assert turns < 1000, "it never comes to rest"
        wanted: dict[str, set[int]] = {"CPU": set(), "STORAGE": set()}
        held: dict[str, set[int]] = {"CPU": set(), "STORAGE": set()}
        for name in NAMES:
            self.heard[name] |= self.node.noted[name]
            there = {"CPU": self.node.readable(name), "STORAGE": self.node.disk[name]}
            for medium, hashes in there.items():
                held[medium] |= {VLLM.number(each) for each in hashes}
            for blocks in CHAINS:
                for each in blocks:
                    if each not in self.heard[name] or each not in there["CPU"] | there["STORAGE"]:
                        break  # a hit ends here
                    for medium, hashes in there.items():
                        wanted[medium] |= {VLLM.number(each)} & {VLLM.number(other) for other in hashes}
        for medium, names in held.items():
            believed = set(self.view.of(medium))
            assert believed <= names, f"believed to be lost in {medium}"
            assert wanted[medium] <= believed, f"not known in {medium}"

    @invariant()
    def everything_said_has_a_parent(self) -> None:
        assert self.view.ignored == []

    def teardown(self) -> None:
        self.agree()
        for name in NAMES:
            self.node.clear(name)
        self.agree()
        assert self.view.of("CPU") == self.view.of("STORAGE") == {}
        assert len(self.topic) == 0


TestAgreement = pytest.mark.filterwarnings("ignore")(Agreement.TestCase)
TestAgreement.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
