"""Which events the linker adds to SGLang's own. Without SGLang, whose classes have the same fields."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from kvsidecar.client import Residency, ResidencyChange
from kvsidecar.integrations.sglang.events import PageEvents, names_of
from kvsidecar.integrations.weights_version import WeightsVersion
from tests.linker.events import Watch, wire

PAGE, GROUP = 4, 2
TOKENS = list(range(32))


def chain(tokens: Sequence[int] = TOKENS) -> list[bytes]:
    """The hashes of the pages of these tokens."""
    found: list[bytes] = []
    for i in range(0, len(tokens), PAGE):
        found.append(hashlib.sha256((found[-1] if found else b"") + bytes(tokens[i : i + PAGE])).digest())
    return found


def number(page: bytes) -> int:
    return int.from_bytes(page[:8], "big", signed=True)


def on_gpu(tokens: Sequence[int] = TOKENS, first: int = 0, **different: Any) -> Any:
    """SGLang's event of the pages of these tokens from the ``first`` on."""
    pages = chain(tokens)
    parent = number(pages[first - 1]) if first else None
    fields = {"token_ids": list(tokens[first * PAGE :]), "block_size": PAGE, "medium": wire.StorageMedium.GPU}
    return wire.BlockStored([number(each) for each in pages[first:]], parent, **{**fields, **different})


class Router:
    """Follows an engine's events."""

    def __init__(self) -> None:
        self.pages: dict[str, dict[int, tuple[int, ...]]] = {}
        self.ignored: list[Any] = []

    def take(self, event: Any) -> None:
        if isinstance(event, wire.AllBlocksCleared):
            self.pages = {}
            return
        mine = self.pages.setdefault(str(event.medium), {})
        if isinstance(event, wire.BlockRemoved):
            for each in event.block_hashes:
                del mine[each]
            return
        known = {each for pages in self.pages.values() for each in pages}
        if event.parent_block_hash is not None and event.parent_block_hash not in known:
            self.ignored.append(event)
            return
        assert len(event.token_ids) == PAGE * len(event.block_hashes)
        for i, each in enumerate(event.block_hashes):
            assert event.medium == "GPU" or each not in mine, "said twice"
            mine[each] = tuple(event.token_ids[i * PAGE : (i + 1) * PAGE])

    @property
    def cpu(self) -> dict[int, tuple[int, ...]]:
        return self.pages.get("CPU_PINNED", {})


class Engine:
    def __init__(self) -> None:
        self.version = WeightsVersion(32)
        self.watch = Watch()
        self.events = PageEvents(wire, GROUP, PAGE, self.watch, lambda hashes: self.version.keys(hashes))
        self.router = Router()
        self.tell(Residency.RESET)
        self.tell(Residency.COMPLETE)
        self.publish()

    def tell(self, kind: Residency, pages: Iterable[bytes] = (), notes: bytes = b"", group: int = GROUP) -> None:
        """Of the daemon, which knows pages by the keys of their weights."""
        joined = b"".join(pages)
        keys = self.version.keys(joined) if joined else b""
        self.watch.news.append(ResidencyChange(kind, group, keys, notes))

    def publish(self, *own: Any) -> list[Any]:
        """Until nothing comes any more."""
        made = self.events.take(list(own))
        while self.watch.news or (more := self.events.take([])):
            made += self.events.take([]) if self.watch.news else more
        for each in made:
            self.router.take(each)
        return made


def pages_of(tokens: Sequence[int]) -> dict[int, tuple[int, ...]]:
    return {number(each): tuple(tokens[i * PAGE : (i + 1) * PAGE]) for i, each in enumerate(chain(tokens))}


def test_a_chain_that_the_daemon_holds_is_one_event_with_its_tokens() -> None:
    engine = Engine()
    own = on_gpu()
    assert engine.publish(own) == [own]
    engine.tell(Residency.STORED, chain())
    (made,) = engine.publish()
    assert made == on_gpu(medium=wire.StorageMedium.CPU)
    assert engine.router.cpu == pages_of(TOKENS)


def test_pages_without_known_tokens_wait_for_them() -> None:
    engine = Engine()
    engine.tell(Residency.STORED, chain())
    assert engine.publish() == []
    engine.publish(on_gpu(TOKENS[:8]))
    assert engine.router.cpu == pages_of(TOKENS[:8])
    engine.publish(on_gpu(first=2))
    assert engine.router.cpu == pages_of(TOKENS)
    assert engine.router.ignored == []


def test_an_eviction_is_told_once() -> None:
    engine = Engine()
    engine.publish(on_gpu())
    engine.tell(Residency.STORED, chain())
    engine.publish()
    engine.tell(Residency.REMOVED, chain()[6:])
    (gone,) = engine.publish()
    assert gone == wire.BlockRemoved([number(each) for each in chain()[6:]], wire.StorageMedium.CPU)
    engine.tell(Residency.REMOVED, chain()[6:])
    assert engine.publish() == []


@pytest.mark.parametrize("weights", [None, "named"])
def test_engines_learn_tokens_from_each_others_notes(weights: str | None) -> None:
    storing, other = Engine(), Engine()
    for each in (storing, other):
        if weights is not None:
            each.version.advance(weights)
            each.publish()
    storing.publish(on_gpu())
    notes = storing.events.notes(GROUP, storing.version.keys(b"".join(chain())))
    other.tell(Residency.NOTES, chain(), notes)
    other.tell(Residency.STORED, chain())
    other.publish()
    assert other.router.cpu == pages_of(TOKENS)
    assert other.router.ignored == []
    assert storing.events.notes(GROUP + 1, b"".join(chain())) == b""


class Tree:
    """SGLang's, which holds its events back until it is asked."""

    def __init__(self) -> None:
        self.queue: list[Any] = []

    def take_events(self) -> list[Any]:
        taken, self.queue = self.queue, []
        return taken


def test_notes_know_what_sglang_has_not_published_yet_and_lose_none_of_it() -> None:
    engine, mine, other = Engine(), Tree(), Tree()
    original = Tree.take_events
    end = engine.events.wrap(Tree, lambda tree: tree is mine)
    assert mine.take_events() == []
    mine.queue = [on_gpu(TOKENS[:16])]
    notes = engine.events.notes(GROUP, b"".join(chain(TOKENS[:16])))
    assert any(notes)
    mine.queue += [on_gpu(first=4)]
    assert mine.take_events() == [on_gpu(TOKENS[:16]), on_gpu(first=4)]
    assert mine.take_events() == []
    other.queue = [on_gpu()]
    assert other.take_events() == [on_gpu()], "another tree of this process"
    end()
    assert Tree.take_events is original


def test_what_the_daemon_has_is_announced_again_after_sglang_has_cleared_everything() -> None:
    engine = Engine()
    engine.publish(on_gpu())
    engine.tell(Residency.STORED, reversed(chain()))
    engine.publish()
    cleared, *again = engine.publish(wire.AllBlocksCleared())
    assert cleared == wire.AllBlocksCleared()
    assert again
    assert engine.router.cpu == pages_of(TOKENS)
    assert engine.router.ignored == [], "children before their parents"


def test_new_weights_retract_what_is_of_the_old_ones() -> None:
    engine = Engine()
    engine.publish(on_gpu())
    engine.tell(Residency.STORED, chain())
    engine.publish()
    old = b"".join(chain())
    engine.version.advance("new")
    engine.publish()
    assert engine.router.cpu == {}
    engine.tell(Residency.STORED, chain()[:3])
    engine.publish()
    assert engine.router.cpu == pages_of(TOKENS[:12])
    # What is evicted of the old ones concerns nobody.
    engine.watch.news.append(ResidencyChange(Residency.REMOVED, GROUP, old, b""))
    engine.publish()
    assert engine.router.cpu == pages_of(TOKENS[:12])


def test_what_others_have_stored_of_the_new_weights_is_announced_with_the_change() -> None:
    engine = Engine()
    engine.publish(on_gpu())
    new = WeightsVersion(32)
    new.advance("new")
    engine.watch.news.append(ResidencyChange(Residency.STORED, GROUP, new.keys(b"".join(chain())), b""))
    assert engine.publish() == []
    engine.version.advance("new")
    engine.publish()
    assert engine.router.cpu == pages_of(TOKENS)


@pytest.mark.parametrize(
    "different",
    [
        {"cache_salt": "salt"},
        {"lora_name": "adapter"},
        {"token_ids": [(each, each + 1) for each in TOKENS]},
        {"block_size": PAGE // 2},
        {"token_ids": TOKENS[:-1]},
        {"medium": wire.StorageMedium.CPU},
    ],
    ids=["salt", "adapter", "pairs of tokens", "another size", "not whole", "not of the GPU"],
)
def test_events_that_do_not_describe_pages_teach_nothing(different: dict[str, Any]) -> None:
    engine = Engine()
    own = on_gpu(**different)
    assert engine.events.take([own]) == [own]
    engine.tell(Residency.STORED, chain())
    assert engine.publish() == []


def test_the_disk_and_other_pools_are_not_announced() -> None:
    engine = Engine()
    engine.publish(on_gpu())
    engine.tell(Residency.TIER_STORED, chain())
    engine.tell(Residency.STORED, chain(), group=GROUP + 1)
    assert engine.publish() == []
    engine.tell(Residency.STORED, chain())
    engine.publish()
    engine.tell(Residency.TIER_REMOVED, chain())
    engine.tell(Residency.TIER_CLEARED)
    engine.tell(Residency.CLEARED, group=GROUP + 1)
    assert engine.publish() == []


def test_a_daemon_that_is_lost_takes_its_pages_with_it() -> None:
    engine = Engine()
    engine.publish(on_gpu())
    engine.tell(Residency.STORED, chain())
    engine.publish()
    engine.tell(Residency.LOST)
    engine.publish()
    assert engine.router.cpu == {}
    assert len(engine.router.pages["GPU"]) == len(chain())


def test_an_error_costs_sglang_none_of_its_own_events(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    engine.watch.news.append(ResidencyChange(Residency.STORED, GROUP, b"no whole hash", b""))
    with caplog.at_level(logging.ERROR):
        assert engine.events.take([on_gpu()]) == [on_gpu()]
        assert engine.events.take([on_gpu()]) == [on_gpu()]
        assert engine.events.notes(GROUP, b"".join(chain())) == b""
    assert len(caplog.records) == 1, "it is said once"


def test_a_name_is_what_sglang_publishes() -> None:
    page = hashlib.sha256(b"page").hexdigest()
    number_of_sglang = int(page[:16], 16)
    number_of_sglang -= (number_of_sglang >> 63) << 64
    assert number(names_of(bytes.fromhex(page))) == number_of_sglang
