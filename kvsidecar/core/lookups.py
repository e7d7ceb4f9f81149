"""Lookups and leases: the cache's answers, gated by readiness and counted."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import repeat
from typing import Any

from kvsidecar.cache.arrays import Bools
from kvsidecar.cache.block_cache import BlockCache, Part
from kvsidecar.cache.space_blocks import Space
from kvsidecar.core.block_notes import Notes
from kvsidecar.core.hashes import PackedHashes, as_keys
from kvsidecar.core.holds import Holding, Holds
from kvsidecar.core.metrics import Metrics
from kvsidecar.core.readiness import DaemonReadiness
from kvsidecar.core.tier_fetches import NOTHING, ExpectedHits, FetchGain
from kvsidecar.core.tiering import Tiering
from kvsidecar.errors import InvalidRequest, Refusal, Unavailable
from kvsidecar.support.cpu_sleep import NO_GUARD, SleepGuard
from kvsidecar.tiers.messages import MAX_BLOCKS
from kvsidecar.types import LookupMode, Namespace

MAX_LEASES = 16384
"""Leases that one user may have; clients without a token count as one user."""
MAX_LEASED_BLOCKS = 1 << 22
"""Blocks in the leases of one user, 8 bytes each; a block that is in two counts twice."""
MAX_LOOKUP_BLOCKS = 8192
"""The most blocks that one lookup looks for, in three milliseconds. Clients split longer ones into parts of this
size."""
CLEAR_STEP = 2048
"""Blocks that one step of a clear looks for, and deletes: about two milliseconds."""

Clearing = Generator[None, None, int]
"""The steps of a clear; they return how many blocks can no longer be looked up. Anything may happen between two steps;
blocks that a step has cleared are not found any more."""


@dataclass(frozen=True, slots=True)
class GroupAnswer:
    """The readable ones of one group's hashes."""

    group: int
    hits: int
    found: Sequence[bool] = ()
    """One flag per hash in `LookupMode.BITMAP`; empty in `LookupMode.PREFIX`."""
    coming: int = 0
    """Blocks from the first miss on, or of those that were wanted, that are being fetched from a slower tier."""
    first: int = 0
    """The place of the first flag among the group's hashes: more than 0 only with a tail."""
    held: Sequence[bool] = ()
    """If the caller chooses: one flag per hash, true if it is missing and a slower tier has it; empty for none."""


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    ready: bool
    """True if the cache has answered; otherwise the daemon declines lookups, and there are no hits."""
    groups: tuple[GroupAnswer, ...]
    lease: int | None = None
    lease_seconds: float = 0.0
    asking: bool = False
    """A slower tier is being asked: more may be coming."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The misses that the caller of a lookup wants fetched."""

    wanted: Sequence[Sequence[int]]
    """For each group, in the order of the lookup: 0 or 1 per hash; hashes beyond these are not wanted."""
    tokens: int
    """Tokens that the caller need not compute if all of it comes."""


@dataclass(slots=True)
class _Missing:
    """A lookup that has missed some blocks, which may come from a slower tier."""

    tiering: Tiering
    parts: Sequence[Part]
    groups: Sequence[tuple[int, Sequence[bytes]]]
    found: Sequence[list[bool]]
    answers: tuple[GroupAnswer, ...]
    seconds: float
    prefill_rate: float

    def fetch(self) -> tuple[tuple[GroupAnswer, ...], bool]:
        """The answers with what is coming, and whether a tier is being asked."""
        answers, asking = self.answers, False
        for i, hits in enumerate(self.found):
            if False in hits:
                coming = self._expected(i, self.groups[i][1], hits.index(False))
                if coming is not NOTHING:
                    asking |= coming.asking
                    answers = (*answers[:i], replace(answers[i], coming=coming.blocks), *answers[i + 1 :])
        return answers, asking

    def fetch_chosen(self, choice: Choice) -> tuple[tuple[GroupAnswer, ...], bool]:
        """`fetch` the blocks that the caller has chosen. The answers contain those that it may choose."""
        result, asking, chosen, nbytes = list(self.answers), False, [], 0
        for i, hits in enumerate(self.found):
            space, hashes = self.parts[i][0], self.groups[i][1]
            if False in hits:
                held = self.tiering.held(space, hashes, hits)
                asking |= held.asking
                flags = [False] * len(hits)
                for place in held.places:
                    flags[place] = True
                result[i] = replace(result[i], held=flags if held.places else ())
            wanted = [place for place, want in enumerate(choice.wanted[i][: len(hits)]) if want and not hits[place]]
            chosen.append([hashes[place] for place in wanted[:MAX_BLOCKS]])
            nbytes += len(chosen[i]) * space.block_bytes
        gain = FetchGain(nbytes, choice.tokens)
        for i, hashes in enumerate(chosen):
            if hashes:
                coming = self._expected(i, hashes, 0, gain)
                asking |= coming.asking
                result[i] = replace(result[i], coming=coming.blocks)
        return tuple(result), asking

    def _expected(self, i: int, hashes: Sequence[bytes], start: int, gain: FetchGain | None = None) -> ExpectedHits:
        return self.tiering.coming(self.parts[i][0], hashes, start, self.seconds, self.prefill_rate, gain)


@dataclass(eq=False)
class LookupService:
    """Answers at once, whatever the state of the pool. Used from the event loop.

    Args:
        clock: seconds, the clock of leases.
        lease_max: the longest lease granted, in seconds.
        guard: kept awake by each lookup: loads follow.
        owners_of: the tokens of all clients of one user, by one of them.
        tiering: fetches what a lookup misses; None: there is no slower tier.
        holds: None: none can be made.
        notes: notes on blocks, which are cleared with them.
    """

    cache: BlockCache
    readiness: DaemonReadiness
    metrics: Metrics
    clock: Callable[[], float]
    _: KW_ONLY
    lease_max: float
    guard: SleepGuard = NO_GUARD
    owners_of: Callable[[bytes], Sequence[bytes]] = lambda owner: [owner]
    tiering: Tiering | None = None
    holds: Holds | None = None
    notes: Notes = field(default_factory=Notes)

    def __post_init__(self) -> None:
        # By hash width, a space to look up in for a namespace without blocks: an answer that came sooner than for one
        # with blocks would tell a tenant which models the node serves (benchmarks/lookup_timing.py).
        self._nobodys: dict[int, Space] = {}
        self._holds = Holds(self.cache, self.clock, 0) if self.holds is None else self.holds
        self._hits = self.metrics.lookup_blocks.labels("hit")
        self._misses = self.metrics.lookup_blocks.labels("miss")

    def lookup(
        self,
        namespace: Namespace,
        groups: Sequence[tuple[int, Sequence[bytes]]],
        mode: LookupMode,
        *,
        lease_seconds: float = 0.0,
        owner: bytes | None = None,
        lease: int = 0,
        lease_last: Sequence[int] = (),
        touch: bool = False,
        pause: float = 0.0,
        fetch_seconds: float = 0.0,
        prefill_rate: float = 0.0,
        choice: Choice | None = None,
        tails: Sequence[int] = (),
    ) -> LookupAnswer:
        """Find the readable ones of the first `MAX_LOOKUP_BLOCKS` blocks. All blocks after these are misses.

        Args:
            groups: (group, block hashes) pairs.
            lease_seconds: length of the lease on the hits; 0 for no lease. None is granted to a user with too many, or
                if it would take what is guaranteed to other shares.
            owner: token of the client; the lease ends when the client disconnects.
            lease: a lease of this client that the hits are added to; 0 for a new one.
            lease_last: see `BlockCache.lookup_and_lease`.
            touch: the blocks were used elsewhere: what is there counts as used, and not as looked up. No lease is
                taken, and nothing is fetched.
            pause: for a touch, see `BlockCache.touch`.
            fetch_seconds: how long the caller can wait for misses that are fetched; 0: nothing is fetched.
            prefill_rate: tokens a second that the caller computes; 0 if unknown.
            choice: what is to be fetched, in `LookupMode.BITMAP`; None: each group's first misses in a row.
            tails: by group, in `LookupMode.BITMAP`: how many blocks to look for before the end of what all groups
                without a tail have in a row, beside the one behind it; all, if the group has no more. 0, or nothing for
                any group: it has no tail.

        Raises:
            InvalidRequest: no group is without a tail, or together they name more than `MAX_LOOKUP_BLOCKS`.
        """
        if any(tails):
            return self._lookup_with_tails(
                namespace,
                groups,
                tails,
                mode,
                lease=lease,
                lease_last=lease_last,
                choice=choice,
                lease_seconds=lease_seconds,
                owner=owner,
                fetch_seconds=fetch_seconds,
                prefill_rate=prefill_rate,
            )
        self.guard.keep_awake()
        asked = sum([len(hashes) for _, hashes in groups])
        if asked > MAX_LOOKUP_BLOCKS:
            self.metrics.refuse(Refusal.LIMIT)
            answer = self.lookup(
                namespace,
                _first_of(groups),
                mode,
                lease_seconds=lease_seconds,
                owner=owner,
                lease=lease,
                lease_last=lease_last,
                touch=touch,
                pause=pause,
                fetch_seconds=fetch_seconds,
                prefill_rate=prefill_rate,
                choice=choice,
            )
            return replace(answer, groups=_padded(answer.groups, groups))
        if (refusal := self.readiness.read_refusal) is not None:
            self.metrics.refuse(refusal)
            nothing = tuple(_hits(group, [False] * len(hashes), mode) for group, hashes in groups)
            return LookupAnswer(False, nothing)
        self.expire()
        parts = [(self._space(namespace, group), as_keys(hashes)) for group, hashes in groups]
        if touch:
            found = self.cache.touch(parts, pause)
            return LookupAnswer(True, _answers(groups, found, mode))
        granted = None
        lease_seconds = min(lease_seconds, self.lease_max)
        if lease_seconds > 0 and self._has_too_many(owner, asked):
            self.metrics.refuse(Refusal.LIMIT)
            lease_seconds = 0.0
        if lease_seconds > 0:
            now = self.clock()
            granted, found = self.cache.lookup_and_lease(parts, mode, now, lease_seconds, owner, lease, lease_last)
        else:
            found = [self.cache.lookup(space, hashes, mode) for space, hashes in parts]
        result = _answers(groups, found, mode)
        hits = sum([each.hits for each in result])
        misses = asked - hits
        self._hits.inc(hits)
        self._misses.inc(misses)
        self.metrics.models.looked_up(namespace.model, hits, misses)
        if lease_seconds > 0 and granted is None and hits:
            self.metrics.refuse(Refusal.QUOTA)
        asking = False
        if (tiering := self.tiering) is not None and fetch_seconds > 0 and misses:
            missing = tiering, parts, groups, found, result, fetch_seconds, prefill_rate
            if choice is not None:
                result, asking = _Missing(*missing).fetch_chosen(choice)
            else:
                for (space, _), (_, hashes), there in zip(parts, groups, found, strict=True):
                    # Here, not in `fetch`: nearly every miss ends here, and the call would take a third of the time.
                    if False in there and tiering.may_come(space, hashes[there.index(False)]):
                        result, asking = _Missing(*missing).fetch()
                        break
        return LookupAnswer(True, result, granted.id if granted else None, lease_seconds if granted else 0.0, asking)

    def _lookup_with_tails(
        self,
        namespace: Namespace,
        groups: Sequence[tuple[int, Sequence[bytes]]],
        tails: Sequence[int],
        mode: LookupMode,
        *,
        lease: int,
        lease_last: Sequence[int],
        choice: Choice | None,
        **options: Any,
    ) -> LookupAnswer:
        """Look up the groups without a tail, and then the others' tails at the end of the prefix that those have."""
        lengths = [len(hashes) for _, hashes in groups]
        counts = [min(each, tail + 1) if tail else each for each, tail in zip(lengths, tails, strict=True)]
        whole, cut = [i for i, tail in enumerate(tails) if not tail], [i for i, tail in enumerate(tails) if tail]
        if not whole or sum(counts) > MAX_LOOKUP_BLOCKS:
            raise InvalidRequest(
                f"a lookup with tails has a group without one, and looks for at most {MAX_LOOKUP_BLOCKS} blocks"
            )

        def look_up(which: Sequence[int], named: Sequence[tuple[int, Sequence[bytes]]], lease: int) -> LookupAnswer:
            return self.lookup(
                namespace,
                named,
                mode,
                lease=lease,
                lease_last=[lease_last[i] for i in which] if lease_last else (),
                choice=replace(choice, wanted=[choice.wanted[i] for i in which]) if choice is not None else None,
                **options,
            )

        head = look_up(whole, [groups[i] for i in whole], lease)
        if not head.ready:
            return LookupAnswer(False, tuple(GroupAnswer(group, 0) for group, _ in groups))
        run = min([*each.found, False].index(False) for each in head.groups)
        ranges = {i: _tail(run, tails[i], lengths[i]) for i in cut}
        named = [(groups[i][0], _part(groups[i][1], ranges[i].start, ranges[i].stop)) for i in cut]
        end = look_up(cut, named, head.lease or lease)
        answers = dict(zip(whole, head.groups, strict=True))
        answers |= {i: replace(each, first=ranges[i].start) for i, each in zip(cut, end.groups, strict=True)}
        return LookupAnswer(
            True,
            tuple(answers[i] for i in range(len(groups))),
            end.lease or head.lease,
            end.lease_seconds or head.lease_seconds,
            head.asking or end.asking,
        )

    def report(self, namespace: Namespace, needed_tokens: int, loaded_tokens: int) -> None:
        """Count an engine's report on prompts that it has begun: tokens that it did not have itself, and those of them
        that it has loaded."""
        self.metrics.prompt_tokens_needed.inc(needed_tokens)
        self.metrics.prompt_tokens_loaded.inc(loaded_tokens)
        self.metrics.models.reported(namespace.model, needed_tokens, loaded_tokens)
        if (space := self.cache.first_space(namespace)) is not None:
            space.needed_tokens += needed_tokens
            space.loaded_tokens += loaded_tokens

    def _has_too_many(self, owner: bytes | None, blocks: int) -> bool:
        held = [self.cache.held(each) for each in ([None] if owner is None else self.owners_of(owner))]
        leases, leased = sum([each[0] for each in held]), sum([each[1] for each in held])
        return leases >= MAX_LEASES or leased + blocks > MAX_LEASED_BLOCKS

    def _space(self, namespace: Namespace, group: int) -> Space:
        space = self.cache.find_space(namespace, group)
        if space is None:
            width = namespace.hash_bytes
            space = self._nobodys.get(width) or self._nobodys.setdefault(width, self.cache.empty_space(width))
        return space

    def release(self, lease: int) -> bool:
        """End a lease. False if it has ended already."""
        return self.cache.release(lease)

    def renew(self, lease: int, lease_seconds: float) -> float:
        """Extend a lease to ``lease_seconds`` from now. Returns the seconds granted, 0 if it has ended already."""
        self.expire()
        granted = min(lease_seconds, self.lease_max)
        return granted if self.cache.renew(lease, self.clock(), granted) else 0.0

    def expire(self) -> None:
        """End the leases whose time is over."""
        if expired := self.cache.expire(self.clock()):
            self.metrics.refuse(Refusal.LEASE_EXPIRED, len(expired) - self._holds.expired(expired))

    def hold(
        self, name: str, owner: str, namespace: Namespace, groups: Sequence[tuple[int, PackedHashes]], seconds: float
    ) -> Holding:
        """Keep the readable ones of these blocks: see `Holds.hold`.

        Raises:
            Unavailable: the daemon is not ready.
        """
        if (refusal := self.readiness.read_refusal) is not None:
            self.metrics.refuse(refusal)
            raise Unavailable("the daemon cannot pin: it is not serving blocks", refusal=refusal)
        self.expire()
        parts = [(self._space(namespace, group), hashes) for group, hashes in groups]
        return self._holds.hold(name, owner, namespace, parts, seconds)

    def end_hold(self, name: str) -> bool:
        """End a hold. False if there is none."""
        return self._holds.end(name)

    # -- clears: in steps, of which each leaves no block that it has cleared to be found again -----------------------

    def clear(self, namespace: Namespace | None, share: str = "") -> Clearing:
        """Forget the blocks of one namespace, of a share's, or of all. Returns how many can no longer be looked up."""
        cleared = 0
        if namespace is None and not share:
            self._forget_behind(None)  # also what no namespace of the pool is
        for each in self._chosen(namespace, share):
            self._forget_behind(each)
            self.notes.forget(each)
            self._holds.clear(each)
            cleared += self.cache.clear(each, sweep=0)
            yield
        if namespace is None and not share:
            for each in self.notes.namespaces:
                if not self.cache.spaces_of(each):
                    self.notes.forget(each)
                yield
        self.cache.sweep()
        return cleared

    def clear_blocks(self, namespace: Namespace, groups: Sequence[tuple[int, PackedHashes]]) -> Clearing:
        """Forget these blocks. A slower tier forgets the whole namespace: it has no order for less."""
        cleared = 0
        self._forget_behind(namespace)
        for group, hashes in groups:
            for piece in hashes.pieces(CLEAR_STEP):
                if (space := self.cache.find_space(namespace, group)) is not None:
                    self._forget_behind(namespace)  # also what was given to it since the last step
                    cleared += self.cache.clear_blocks(space, piece)
                yield
            if (space := self.cache.find_space(namespace, group)) is not None and space.blocks.num_superseded:
                named: set[bytes] = set()
                for start in range(0, len(hashes), CLEAR_STEP):
                    named.update(hashes[start : start + CLEAR_STEP])
                    yield
                yield from self.cache.clear_old(space, named)
        yield from self._forget_notes(namespace)
        return cleared

    def clear_unused(self, namespace: Namespace | None, share: str, seconds: float) -> Clearing:
        """Forget the blocks of a namespace, a share or all that were not used for this long; in slower tiers, all
        blocks of these namespaces."""
        self.expire()
        cleared = 0
        for each in self._chosen(namespace, share):
            self._forget_behind(each)
            for space in self.cache.spaces_of(each):
                for blocks in self.cache.clear_unused(space, seconds):
                    cleared += blocks
                    self._forget_behind(each)
                    yield
            yield from self._forget_notes(each)
        return cleared

    def _forget_behind(self, namespace: Namespace | None) -> None:
        if self.tiering is not None:
            self.tiering.forget(namespace)

    def _forget_notes(self, namespace: Namespace) -> Iterator[None]:
        """Forget the notes on blocks that are gone."""

        def there(group: int, hashes: bytes) -> Bools:
            space = self._space(namespace, group)
            index = space.blocks.index
            found: Bools = index.find(index.keys(hashes)) >= 0
            return found

        yield from self.notes.forget_gone(namespace, there)

    def _chosen(self, namespace: Namespace | None, share: str) -> list[Namespace]:
        """This namespace; or those of a share, or all, that have blocks or ranks.

        Raises:
            InvalidRequest: there is no such share.
        """
        if namespace is not None:
            return [namespace]
        if share and share not in [each.name for each in self.cache.shares]:
            raise InvalidRequest(f"there is no share {share!r}")
        return self.cache.namespaces_of(share) if share else list(self.cache.namespaces)


def _first_of(groups: Sequence[tuple[int, Sequence[bytes]]]) -> list[tuple[int, Sequence[bytes]]]:
    """The blocks that one lookup looks for: the first ones of each group, equally many of all long ones."""
    left, counts = MAX_LOOKUP_BLOCKS, [0] * len(groups)
    for number, at in enumerate(sorted(range(len(groups)), key=lambda at: len(groups[at][1]))):
        counts[at] = min(len(groups[at][1]), left // (len(groups) - number))
        left -= counts[at]
    return [(group, _part(hashes, 0, count)) for (group, hashes), count in zip(groups, counts, strict=True)]


def _tail(run: int, tail: int, count: int) -> range:
    """The places of a group's tail where ``run`` blocks are there in a row: all, if the group has no more."""
    return range(count) if count <= tail else range(min(max(0, run - tail), count), min(run + 1, count))


def _part(hashes: Sequence[bytes], first: int, end: int) -> Sequence[bytes]:
    return hashes.part(first, end) if isinstance(hashes, PackedHashes) else hashes[first:end]


def _padded(answers: Sequence[GroupAnswer], groups: Sequence[tuple[int, Sequence[bytes]]]) -> tuple[GroupAnswer, ...]:
    """The answers to `_first_of`, with misses for the blocks after it."""
    return tuple(
        replace(each, found=[*each.found, *repeat(False, len(hashes) - len(each.found))]) if each.found else each
        for each, (_, hashes) in zip(answers, groups, strict=True)
    )


def _answers(
    groups: Sequence[tuple[int, Sequence[bytes]]], found: Sequence[list[bool]], mode: LookupMode
) -> tuple[GroupAnswer, ...]:
    return tuple(_hits(group, hits, mode) for (group, _), hits in zip(groups, found, strict=True))


def _hits(group: int, found: list[bool], mode: LookupMode) -> GroupAnswer:
    return GroupAnswer(group, found.count(True), found if mode is LookupMode.BITMAP else ())
