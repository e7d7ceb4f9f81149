"""What an engine announces of what the daemon tells, with what it knows about the blocks. Without vLLM."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Iterable, Sequence

import pytest

from kvsidecar.client import Residency, ResidencyChange
from kvsidecar.integrations.residency import known_blocks, residents
from kvsidecar.integrations.residency.known_blocks import BlockInfo, KnownBlocks
from kvsidecar.integrations.residency.residents import DISK, Residents, media
from kvsidecar.integrations.vllm.groups import GroupKind
from kvsidecar.integrations.weights_version import WeightsVersion
from tests.integrations.engine import chain, full, group

WIDTH = 32
TOKENS = list(range(24))
CHAIN = chain(TOKENS)


def info(number: int, *, own: bool = True, tokens: Sequence[int] = TOKENS) -> BlockInfo:
    """Of the block with this number in the chain of these tokens."""
    packed = array("i", tokens[4 * number : 4 * number + 4]).tobytes()
    return BlockInfo(packed, chain(tokens)[number - 1] if number else None, own=own)


class Node:
    """An engine that follows a scripted daemon, and a router that follows the engine."""

    def __init__(self, *, kind: GroupKind = GroupKind.FULL) -> None:
        groups = [full(0), group(1, kind, 4)]
        self.news: list[ResidencyChange] = []
        self.known = KnownBlocks(groups, WIDTH)
        self.version = WeightsVersion(WIDTH)
        self.residents = Residents(groups, self, self.known, self, lambda hashes: self.version.keys(hashes))
        self.announced: dict[int, set[bytes]] = {index: set() for index in media(groups)}
        self.doubted: dict[int, set[bytes]] = {index: set() for index in media(groups)}
        self.events: list[tuple[str, bytes]] = []

    # -- the watch

    @property
    def has_residency(self) -> bool:
        return bool(self.news)

    def take_residency(self, most_bytes: int) -> list[ResidencyChange]:
        assert most_bytes > 0
        taken, self.news = self.news[:2], self.news[2:]
        return taken

    def tell(self, kind: Residency, hashes: Iterable[bytes] = (), notes: bytes = b"", index: int = 0) -> None:
        self.news.append(ResidencyChange(kind, index, b"".join(hashes), notes))

    def snapshot(self, hashes: Iterable[bytes] = ()) -> None:
        self.tell(Residency.RESET)
        self.tell(Residency.STORED, hashes)
        self.tell(Residency.COMPLETE)
        self.settle()

    def settle(self) -> None:
        for _ in range(10_000):
            if not self.residents.pending:
                return
            self.residents.step()
        raise AssertionError("it never comes to rest")

    # -- the announcer

    def is_announced(self, index: int, block_hash: bytes) -> bool:
        return block_hash in self.announced[index]

    def confirm(self, index: int, block_hash: bytes) -> bool:
        doubted = block_hash in self.doubted[index]
        if doubted:
            self.doubted[index].remove(block_hash)
            self.announced[index].add(block_hash)
        return doubted

    def announce(self, index: int, block_hash: bytes, info: BlockInfo) -> None:
        assert block_hash not in self.announced[index], "said twice"
        assert len(info.tokens) == 4
        self.announced[index].add(block_hash)
        self.events.append(("stored", block_hash))

    def retract(self, index: int, hashes: Iterable[bytes]) -> None:
        for each in hashes:
            if each in self.announced[index] | self.doubted[index]:
                self.events.append(("removed", each))
            self.announced[index].discard(each)
            self.doubted[index].discard(each)

    def retract_all(self, index: int) -> None:
        self.retract(index, sorted(self.announced[index] | self.doubted[index]))

    def doubt(self) -> None:
        for index, announced in self.announced.items():
            self.doubted[index] |= announced
            announced.clear()

    def doubt_no_more(self) -> None:
        for index, doubted in self.doubted.items():
            self.retract(index, sorted(doubted))


def test_blocks_are_announced_once_both_the_daemon_has_them_and_their_tokens_are_known() -> None:
    node = Node()
    node.known.add(0, CHAIN[0], info(0))
    node.snapshot([CHAIN[0], CHAIN[1]])
    assert node.events == [("stored", CHAIN[0])], "nobody knows the tokens of the other"
    node.known.add(0, CHAIN[1], info(1))
    node.residents.announce(0, CHAIN[1])
    assert node.events[1:] == [("stored", CHAIN[1])]
    node.residents.announce(0, CHAIN[2])
    node.tell(Residency.REMOVED, [CHAIN[1], CHAIN[2]])
    node.settle()
    node.residents.announce(0, CHAIN[1])
    assert node.events[2:] == [("removed", CHAIN[1])]


def test_notes_make_blocks_of_other_engines_known_and_parents_come_first() -> None:
    storing, node = Node(), Node()
    for i, name in enumerate(CHAIN):
        storing.known.add(0, name, info(i))
    node.snapshot()
    notes = storing.known.notes(0, CHAIN)
    node.tell(Residency.NOTES, CHAIN, notes)
    node.tell(Residency.STORED, reversed(CHAIN))
    node.settle()
    assert node.events == [("stored", each) for each in CHAIN]
    late = Node()
    late.snapshot(reversed(CHAIN))
    late.tell(Residency.NOTES, CHAIN, notes)
    late.settle()
    assert late.events == [("stored", each) for each in CHAIN]


def test_a_block_whose_parent_is_gone_is_announced_only_where_the_router_knows_it() -> None:
    other, own = Node(), Node()
    for node in (other, own):
        node.known.add(0, CHAIN[1], info(1, own=node is own))
        node.snapshot([CHAIN[1]])
    assert other.events == []
    assert own.events == [("stored", CHAIN[1])]
    other.known.add(0, CHAIN[0], info(0, own=False))
    other.tell(Residency.STORED, [CHAIN[0]])
    other.settle()
    assert other.events == [("stored", CHAIN[0]), ("stored", CHAIN[1])]


def test_groups_that_need_no_whole_prefix_do_not_wait_for_it() -> None:
    node = Node(kind=GroupKind.SLIDING_WINDOW)
    node.known.add(1, CHAIN[1], info(1, own=False))
    node.snapshot()
    node.tell(Residency.STORED, [CHAIN[1]], index=1)
    node.tell(Residency.STORED, [CHAIN[1]], index=7)
    node.settle()
    assert node.announced == {0: set(), 1: {CHAIN[1]}, DISK: set(), 1 | DISK: set()}


def test_the_disk_is_announced_for_itself() -> None:
    node = Node()
    for i, name in enumerate(CHAIN[:3]):
        node.known.add(0, name, info(i))
    node.snapshot(CHAIN[:3])
    node.tell(Residency.TIER_STORED, CHAIN[:4])
    node.tell(Residency.REMOVED, CHAIN[:2])
    node.settle()
    assert (node.announced[0], node.announced[DISK]) == ({CHAIN[2]}, set(CHAIN[:3]))
    node.tell(Residency.TIER_REMOVED, [CHAIN[2]])
    node.tell(Residency.TIER_STORED, [CHAIN[0]])
    node.settle()
    assert (node.announced[0], node.announced[DISK]) == ({CHAIN[2]}, set(CHAIN[:2]))
    node.tell(Residency.TIER_CLEARED)
    node.settle()
    assert (node.announced[0], node.announced[DISK]) == ({CHAIN[2]}, set())
    node.tell(Residency.TIER_STORED, [CHAIN[1]])
    node.tell(Residency.LOST)
    node.settle()
    assert not any(node.announced.values())


def test_a_block_on_the_disk_may_follow_its_parent_in_the_pool() -> None:
    node = Node()
    for i, name in enumerate(CHAIN[:4]):
        node.known.add(0, name, info(i, own=False))
    node.snapshot()
    node.tell(Residency.TIER_STORED, [CHAIN[1], CHAIN[3]])
    node.settle()
    assert not any(node.announced.values()), "the router would not know their parents"
    node.tell(Residency.STORED, [CHAIN[0], CHAIN[2]])
    node.settle()
    assert (node.announced[0], node.announced[DISK]) == ({CHAIN[0], CHAIN[2]}, {CHAIN[1], CHAIN[3]})
    assert [each for _, each in node.events] == list(CHAIN[:4])


def test_own_blocks_that_come_back_in_any_order_are_announced_parents_first() -> None:
    """The GPU may have evicted them long ago, and with the daemon the router has forgotten all."""
    for kind, index in ((Residency.STORED, 0), (Residency.TIER_STORED, DISK)):
        node = Node()
        for i, name in enumerate(CHAIN):
            node.known.add(0, name, info(i, own=True))
        node.snapshot()
        node.tell(kind, reversed(CHAIN[1:]))
        node.settle()
        assert [each for _, each in node.events] == list(CHAIN[1:]), "the first one's parent is on the GPU at best"
        assert node.announced[index] == set(CHAIN[1:])


def test_notes_make_blocks_on_the_disk_known() -> None:
    storing, node = Node(), Node()
    for i, name in enumerate(CHAIN):
        storing.known.add(0, name, info(i))
    node.snapshot()
    node.tell(Residency.TIER_STORED, CHAIN)
    node.tell(Residency.NOTES, CHAIN, storing.known.notes(0, CHAIN))
    node.settle()
    assert node.announced[DISK] == set(CHAIN)


def test_a_lost_daemon_takes_everything_back_and_the_next_one_brings_what_it_kept() -> None:
    node = Node()
    for i, name in enumerate(CHAIN):
        node.known.add(0, name, info(i))
    node.snapshot(CHAIN)
    assert node.residents.live
    node.tell(Residency.LOST)
    node.settle()
    assert node.announced[0] == set()
    assert not node.residents.live
    node.snapshot(CHAIN[:2])
    assert node.announced[0] == set(CHAIN[:2])
    node.tell(Residency.CLEARED)
    node.settle()
    assert node.announced[0] == set()


def test_blocks_of_other_weights_are_not_announced_and_those_of_the_same_are() -> None:
    storing, node, old = Node(), Node(), Node()
    for each in (storing, node):
        each.version.advance("step 1")
    storing.known.add(0, CHAIN[0], info(0))
    keys, notes = storing.version.keys(CHAIN[0]), storing.known.notes(0, CHAIN[:1])
    for each in (node, old):
        each.tell(Residency.NOTES, [keys], notes)
        each.snapshot([keys])
    assert node.announced[0] == {CHAIN[0]}
    assert old.announced[0] == set()
    assert len(old.known) == 0, "a hash that no engine has"


@pytest.mark.parametrize("field", ["lora_name", "extra_keys"])
def test_what_tokens_do_not_say_is_not_noted(field: str) -> None:
    node, other = Node(), Node()
    node.known.add(0, CHAIN[0], BlockInfo(info(0).packed, None, **{field: "secret"}))  # type: ignore[arg-type]
    notes = node.known.notes(0, CHAIN[:2])
    assert set(notes) == {0}
    other.tell(Residency.NOTES, CHAIN[:2], notes)
    other.snapshot(CHAIN[:2])
    assert other.events == []


@pytest.mark.parametrize("notes", [b"", b"x", bytes(range(100)), b"\x09" * 57])
def test_notes_of_another_make_are_ignored(notes: bytes) -> None:
    node = Node()
    node.tell(Residency.NOTES, CHAIN[:1], notes)
    node.snapshot(CHAIN[:1])
    assert node.events == []


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_blocks, "MAX_KNOWN_BYTES", 10 * (known_blocks.INFO_BYTES + 16))
    monkeypatch.setattr(residents, "MAX_HELD", 20)
    node = Node()
    names = [hashlib.sha256(str(i).encode()).digest() for i in range(100)]
    for each in names:
        node.known.add(0, each, BlockInfo(info(0).packed, names[0], own=False))
    node.snapshot(names)
    assert len(node.known) <= 10
    assert len(node.residents._held[0]) <= 10
    assert node.residents._num_orphans <= 20
    assert node.known.get(0, names[-1]) is not None


def test_a_step_looks_at_some_blocks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residents, "STEP_BLOCKS", 3)
    node = Node()
    for i, name in enumerate(CHAIN):
        node.known.add(0, name, info(i))
    node.tell(Residency.RESET)
    node.tell(Residency.STORED, CHAIN)
    for _ in range(2):
        node.residents.step()
    assert 0 < len(node.events) <= 3
    node.settle()
    assert len(node.events) == len(CHAIN)


def test_no_step_announces_all_children_of_a_block_at_once() -> None:
    """Clients choose how many there are."""
    node, most = Node(), residents.STEP_BLOCKS
    children = [hashlib.sha256(str(i).encode()).digest() for i in range(3 * most)]
    for each in children:
        node.known.add(0, each, BlockInfo(info(0).packed, CHAIN[0], own=False))
    node.snapshot(children)
    node.known.add(0, CHAIN[0], info(0))
    node.tell(Residency.STORED, CHAIN[:1])
    node.settle()
    assert set(node.announced[0]) == {CHAIN[0], *children}
    node = Node()
    for each in children:
        node.known.add(0, each, BlockInfo(info(0).packed, CHAIN[0], own=False))
    node.snapshot([*children, CHAIN[0]])
    node.known.add(0, CHAIN[0], info(0))
    node.residents.announce(0, CHAIN[0])
    assert node.residents.pending
    lengths = []
    while node.residents.pending:
        before = len(node.events)
        node.residents.step()
        lengths.append(len(node.events) - before)
    assert max(lengths) <= most, "a step announces as many as wait"
    assert set(node.announced[0]) == {CHAIN[0], *children}
    assert node.residents._num_orphans == 0


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_told_a_router_believes_in_what_is_there_and_known(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residents, "STEP_BLOCKS", 2)
    choose, node = random.Random(seed), Node()
    prompts = [[*range(8), *range(8 * i, 8 * i + 16)] for i in range(3)]
    infos = {name: info(n, tokens=each, own=False) for each in prompts for n, name in enumerate(chain(each))}
    names, there = list(infos), set[bytes]()
    node.snapshot()
    for _ in range(200):
        some = choose.sample(names, choose.randint(1, 4))
        match choose.randrange(8):
            case 0 | 1:
                there |= set(some)
                node.tell(Residency.STORED, some)
            case 2 | 3:
                there -= set(some)
                node.tell(Residency.REMOVED, some)
            case 4:
                node.known.add(0, some[0], infos[some[0]])
                node.residents.announce(0, some[0])
            case 5:
                node.residents.step()
            case 6 if choose.random() < 0.2:
                if choose.random() < 0.5:
                    node.tell(Residency.LOST)
                node.tell(Residency.RESET)
                node.tell(Residency.STORED, sorted(there))
                node.tell(Residency.COMPLETE)
            case 7 if choose.random() < 0.1:
                there.clear()
                node.tell(Residency.CLEARED)
    for each in names:
        node.known.add(0, each, infos[each])
    node.settle()
    node.snapshot(sorted(there))

    def reachable(name: bytes) -> bool:
        parent = infos[name].parent
        return name in there and (parent is None or reachable(parent))

    assert {name for name in names if reachable(name)} <= node.announced[0] <= there


def test_a_removal_that_overtakes_the_report_of_a_store_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residents, "MAX_GONE", 8)
    node = Node()
    node.snapshot()
    node.tell(Residency.STORED, CHAIN[:1])
    node.settle()
    assert node.residents.is_held(0, CHAIN[0])
    assert not node.residents.was_removed(0, CHAIN[0])
    node.tell(Residency.REMOVED, CHAIN[:2])
    node.settle()
    assert not node.residents.is_held(0, CHAIN[0])
    assert node.residents.was_removed(0, CHAIN[0])
    node.tell(Residency.STORED, CHAIN[:1])
    node.settle()
    assert not node.residents.was_removed(0, CHAIN[0])
    node.tell(Residency.REMOVED, [hashlib.sha256(bytes([i])).digest() for i in range(4)])
    node.settle()
    assert not node.residents.was_removed(0, CHAIN[1]), "it is remembered for ever"
