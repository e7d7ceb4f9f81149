"""The scheduler's questions to the daemon, until the answers are taken. A question lasts as many steps as it must.

A question is sent when a request arrives, and mostly answered by the request's first step.

A hit needs every block of some groups, but only the last blocks before its end of a sliding window's group. The daemon
works out from the others where that is, so that one message is mostly enough. The rest is asked for in rounds: blocks
of a window at another place, where it is gone or a slower tier has more, and windows whose blocks have another size.

If hits may end inside a block, the last round asks for the stored parts of the block after the hit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress
from operator import or_
from typing import Any

from kvsidecar.client import PendingLookup
from kvsidecar.client.lookup_parts import PART_HASHES
from kvsidecar.client.messages import looked_for
from kvsidecar.client.types import LookupResult
from kvsidecar.errors import ClientError
from kvsidecar.integrations.time_limits import BUDGETED_HASHES
from kvsidecar.integrations.vllm import hits
from kvsidecar.integrations.vllm.groups import Group, GroupKind
from kvsidecar.integrations.vllm.scheduler_client import SchedulerClient
from kvsidecar.types import LookupMode

EARLY_SECONDS = 1.0
"""How long a question is kept that no step asks for. The lease of its answer lasts longer."""
LEASED_PART = 0.8
"""Part of a lease's time after which its answer is no longer used: the rest is left for vLLM to allocate blocks."""
EARLY_REQUESTS = 64
"""Most questions that are sent as requests arrive. The answers to more would be too old by the time of their steps."""
Places = Mapping[int, Sequence[int]]
"""Places in the hashes of each group, in order."""


class Question:
    """A question about the blocks of one request that the daemon has.

    Args:
        local: tokens that the GPU has, or at most turns out to have; a multiple of the alignment.
        most: most tokens that a hit after ``local`` may have.
        prefix: whether ``local`` is certain, so that nothing after a group's first miss matters.
        aim: tokens of the request after which a hit ends whose blocks are fetched from a slower tier; 0: there is none.
    """

    def __init__(
        self, groups: Sequence[Group], request: Any, local: int, most: int, *, prefix: bool, aim: int = 0
    ) -> None:
        self._groups, self._aim = groups, aim
        self.local, self.end = local, local + most
        self.touched = 0.0
        self._hashes = hits.hashes(groups, request.block_hashes, local, most) if groups else {}
        self._block_tokens = {group.index: group.block_tokens for group in groups}
        self._first = {index: local // tokens for index, tokens in self._block_tokens.items()}
        self.mode = LookupMode.PREFIX if prefix and not hits.chooses(groups) else LookupMode.BITMAP
        self._found: dict[int, Sequence[bool]] = {index: [False] * len(each) for index, each in self._hashes.items()}
        self._held: dict[int, Sequence[bool]] = {}
        self._hoped: dict[int, list[bool]] = {}
        """For each block of a window whether it is found, or not asked for yet, by group."""
        self._request_hashes: Sequence[bytes] = request.block_hashes if groups else ()
        self._most_inside = hits.limit_inside(groups, request.num_tokens) if groups and groups[0].grain else 0
        self._ends_inside: Sequence[int] = ()
        """Tokens of the request after which a hit may end inside a block, once they are asked for."""
        self._found_inside: dict[int, Sequence[bool]] = {}
        self._held_inside: dict[int, Sequence[bool]] = {}
        self._now_local = local
        self._rounds = self._plan()
        self._round: dict[int, Sequence[int]] = {}
        self._packed: dict[int, bytes] = {}
        """The joined hashes of groups for which all were asked at once."""
        self.pending: PendingLookup | None = None
        """The lookup of the round that is under way."""
        self.sent = 0.0
        """When that lookup was sent."""
        self.lease_last: dict[int, int] = {}
        """How many hits of each group the round leases, the last ones; all of a group that is missing. Earlier hits may
        be left from an earlier turn."""
        self.tails: dict[int, int] = {}
        """How many hashes the round asks for in groups of which it needs only the end of what others have, not counting
        the one after that."""
        self.hashes_asked = 0
        self.missing: dict[int, list[bytes]] = {}
        """Hashes that were asked for and not found, by group."""
        self.lease: int | None = None
        self.ready, self.coming, self.reason = False, False, ""

    def __bool__(self) -> bool:
        """Whether there is anything to ask."""
        return (self.end > self.local and any(self._hashes.values())) or self._most_inside > self.local

    # -- what to ask -----------------------------------------------------------------------------------------------

    def next_round(self, local: int) -> dict[int, bytes]:
        """The hashes to ask for next, by group; nothing if the question is answered.

        Args:
            local: tokens that the GPU has, not less than the question's.
        """
        if self.reason or (self._round and not self.ready):
            return {}
        self._now_local = local
        self.lease_last, self.tails = {}, {}
        for asked in self._rounds:  # a round may turn out to need nothing
            self._round = {index: places for index, places in asked.items() if places}
            if self._round:
                break
        else:
            self._round = {}
        packed: dict[int, bytes] = {}
        for index, places in self._round.items():
            self.hashes_asked += looked_for(len(places), self.tails.get(index))
            first = next(iter(packed), index)
            if index in self.tails and len(self._hashes[first]) == len(places):
                packed[index] = self._packed[index] = packed[first]  # the same hashes, which are sent once
            else:
                packed[index] = self._join(index, places)
        return packed

    def wanted(self, aim: int) -> dict[int, list[bool]]:
        """The blocks of the round to fetch for a hit that ends after ``aim`` tokens of the request."""
        if aim <= self.local:
            return {}
        if self._ends_inside:
            return {index: [self._ends_inside[each] == aim for each in places] for index, places in self._round.items()}
        flags = hits.needed(self._groups, aim - self.local, self.local, self.end - self.local)
        return {index: [flags[index][each] for each in places] for index, places in self._round.items()}

    def _plan(self) -> Iterator[Places]:
        yield from self._plan_blocks()
        if self._most_inside <= self._now_local:
            return
        grain, block = self._groups[0].grain, self._groups[0].block_tokens
        # There may be no state at the end of a block before the one inside a block.
        hit, (chained, later) = self._now_local + self._ends()[0], self._chained_ends()
        ends = [each for each in range(hit, min(later + block, self._most_inside + 1), grain) if each % block]
        self._ends_inside = ends[-BUDGETED_HASHES // len(self._groups) :]
        places = range(len(self._ends_inside))
        if places:
            self.lease_last = {}
            behind = [place for place in places if self._ends_inside[place] > chained]
            yield {group.index: behind if group.chained else places for group in self._groups}

    def _plan_blocks(self) -> Iterator[Places]:
        everything = {index: range(len(each)) for index, each in self._hashes.items()}
        windowed = [
            group for group in self._groups if group.kind in (GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL)
        ]
        others = [group for group in self._groups if group not in windowed]
        if not any(group.chained for group in others):
            others, windowed = list(self._groups), []
        self._hoped = {group.index: [True] * len(everything[group.index]) for group in windowed}

        def windows(*ends: int) -> Places:
            """The places in the windows that hits of these many tokens need and that were not asked for yet."""
            needed: dict[int, list[int]] = {}
            for group in windowed:
                first, unknown = self._first[group.index], set(self._unknown(group.index))
                blocks = [each for end in ends if end > 0 for each in hits.needed_blocks(group, end, self._now_local)]
                needed[group.index] = sorted(unknown.intersection([each - first for each in blocks]))
            return needed

        self.tails = {} if self._aim else self._tails()
        self.lease_last = {group.index: group.most_needed for group in others if not group.chained}
        leased = dict(self.lease_last)
        yield {
            **{group.index: everything[group.index] for group in sorted(others, key=lambda group: not group.chained)},
            **(windows(self._aim - self._now_local) if self._aim else {}),
            **{group.index: everything[group.index] for group in windowed if group.index in self.tails},
        }
        self.tails, self.lease_last = {}, {}
        hoped = self._ends(self._hoped)
        if self._ends() != hoped:  # blocks that were not asked for can make the hit longer
            yield windows(*hoped)
            if self._ends() != self._ends(self._hoped):  # a window is gone: the hit may end anywhere before
                yield {index: self._unknown(index) for index in self._hoped}
        if end := self._ends()[0]:
            yield self._not_leased(end, leased)

    def _unknown(self, index: int) -> list[int]:
        """The places in a window that were not asked for yet."""
        known = zip(self._hoped[index], self._found[index], strict=True)
        return [place for place, (hoped, found) in enumerate(known) if hoped and not found]

    def _tails(self) -> dict[int, int]:
        """How many blocks before the end of an unbroken run of blocks show whether that is a hit, by group; groups that
        need every block are missing. Empty if the daemon cannot work it out in one message."""
        chained = [group for group in self._groups if group.chained]
        ending = [group for group in self._groups if group.block_tokens == chained[0].block_tokens] if chained else []
        if len({group.block_tokens for group in chained}) != 1 or len(ending) == len(chained):
            return {}
        # The hit ends at a multiple of the alignment, and before the last block of a group with `eagle`.
        behind = self._groups[0].alignment // chained[0].block_tokens - 1 + any(group.eagle for group in chained)
        tails = {
            group.index: len(self._hashes[group.index]) if group.kind is GroupKind.STATE else group.most_needed + behind
            for group in ending
            if not group.chained
        }
        asked = sum([looked_for(len(each), tails.get(index)) for index, each in self._hashes.items()])
        return tails if asked <= PART_HASHES else {}

    def _not_leased(self, end: int, leased: Mapping[int, int]) -> Places:
        """The blocks that a hit of ``end`` tokens needs in groups in which other blocks were leased.

        Args:
            leased: how many of the found blocks of each group were leased, the last ones.
        """
        more: dict[int, Sequence[int]] = {}
        for group in self._groups:
            blocks, first = hits.needed_blocks(group, end, self._now_local), self._first[group.index]
            most = leased.get(group.index, 0)
            if blocks and most and sum(self._found[group.index][blocks.start - first :]) > most:
                more[group.index] = [each - first for each in blocks]
        return more

    def _ends(self, assumed: Mapping[int, Sequence[bool]] | None = None) -> tuple[int, int]:
        """Tokens of the longest hit now, and after a fetch from a slower tier.

        Args:
            assumed: whether each block is taken to be found, by group, in place of what was answered; each that was
                found is.
        """
        local, most = self._now_local, self.end - self._now_local
        taken = {index: flags[self._after(index, local) :] for index, flags in (assumed or {}).items()}
        now = hits.longest_hit(self._groups, {**self.found(local), **taken}, local, most)
        if not self._held:
            return now, now
        there = self.there(local)
        later = {index: list(map(or_, flags, there[index])) for index, flags in taken.items()}
        return now, hits.longest_hit(self._groups, {**there, **later}, local, most)

    def _chained_ends(self) -> tuple[int, int]:
        """Tokens of the request up to which the groups that need every block have all, now and after a fetch."""
        others = [group.index for group in self._groups if not group.chained]
        now, later = self._ends({index: [True] * len(self._found[index]) for index in others})
        return self._now_local + now, self._now_local + later

    def _join(self, index: int, places: Sequence[int]) -> bytes:
        hashes = self._round_hashes(index)
        if len(places) < len(hashes) or self._ends_inside:
            return b"".join([hashes[each] for each in places])
        self._packed[index] = b"".join(hashes)
        return self._packed[index]

    def _round_hashes(self, index: int) -> Sequence[bytes]:
        """The hashes of a group that the round's places index."""
        if self._ends_inside:
            return [self._hash_inside(end) for end in self._ends_inside]
        return self._hashes[index]

    def _hash_inside(self, end: int) -> bytes:
        """The hash under which the block is stored whose content ends after ``end`` tokens of the request."""
        return self._request_hashes[end // self._groups[0].hash_tokens - 1]

    # -- what was answered -----------------------------------------------------------------------------------------

    def take(self, result: LookupResult) -> None:
        """Take over the result of a round."""
        self.pending = None
        self.lease = result.lease or self.lease
        self.ready, self.reason = result.ready, result.reason
        self.coming |= result.coming
        if result.reason or not result.ready:
            self.lease = result.lease
            return
        inside = bool(self._ends_inside)
        all_found, all_held = (self._found_inside, self._held_inside) if inside else (self._found, self._held)
        for index, places in self._round.items():
            answer, hashes = result.groups[index], self._round_hashes(index)
            if index in self.tails:
                places = self._round[index] = range(answer.first, answer.first + len(answer.found))
            found: Sequence[bool] = answer.found
            if self.mode is LookupMode.PREFIX:
                found = (True,) * answer.hits + (False,) * (len(places) - answer.hits)
            if answer.hits < len(places):
                missed = [hashes[place] for place, flag in zip(places, found, strict=True) if not flag]
                self.missing.setdefault(index, []).extend(missed)
            if not inside and (hoped := self._hoped.get(index)) is not None:
                for place, flag in zip(places, found, strict=True):
                    hoped[place] = flag
            nothing = (False,) * len(hashes)
            all_found[index] = _placed(all_found.get(index) or nothing, places, found)
            if answer.held:
                all_held[index] = _placed(all_held.get(index) or nothing, places, answer.held)

    def refused(self, reason: str) -> None:
        self.pending, self.lease, self.reason = None, None, reason

    def found(self, local: int) -> dict[int, Sequence[bool]]:
        """Flags by group for the blocks from ``local`` on: whether each can be loaded."""
        return {index: flags[self._after(index, local) :] for index, flags in self._found.items()}

    def there(self, local: int) -> dict[int, Sequence[bool]]:
        """Flags by group for the blocks from ``local`` on: whether each can be loaded, now or after a fetch from a
        slower tier."""
        flags = self.found(local)
        for index, held in self._held.items():
            later = held[self._after(index, local) :]
            flags[index] = [one or other for one, other in zip(flags[index], later, strict=True)]
        return flags

    def end_inside(self, *, later: bool = False) -> tuple[int, Mapping[int, bytes]]:
        """Tokens of the request at which its hit ends inside a block, and the hash of that block by group; 0: nowhere.

        Args:
            later: whether to count blocks that a fetch from a slower tier would bring.
        """
        chained = self._chained_ends()[later] if self._ends_inside else 0
        for place, end in reversed(list(enumerate(self._ends_inside))):
            if end // self._groups[0].block_tokens > chained // self._groups[0].block_tokens:
                continue
            blocks = {group.index: self._block_inside(group, end, place, later) for group in self._groups}
            if all(blocks.values()):
                return end, {index: block for index, block in blocks.items() if block is not None}
        return 0, {}

    def _block_inside(self, group: Group, end: int, place: int, later: bool) -> bytes | None:
        """The hash of a found block of this group with which a request can continue after ``end`` tokens; None: there
        is none.

        In a group that needs every block, the rest of the block does not matter, so the full block serves as well.
        """
        for flags in (self._found_inside, self._held_inside)[: 1 + later]:
            if (found := flags.get(group.index)) and found[place]:
                return self._hash_inside(end)
        at = end // group.block_tokens - self._first[group.index]
        found = self._found[group.index]
        return self._hashes[group.index][at] if group.chained and at < len(found) and found[at] else None

    def packed(self, local: int, hash_bytes: int) -> dict[int, bytes]:
        """The joined hashes from the first block after ``local`` on, for groups for which all were asked."""
        return {index: each[self._after(index, local) * hash_bytes :] for index, each in self._packed.items()}

    def _after(self, index: int, local: int) -> int:
        return local // self._block_tokens[index] - self._first[index]


def _placed(flags: Sequence[bool], places: Sequence[int], new: Sequence[bool]) -> Sequence[bool]:
    """``flags`` with the new ones at these places."""
    if len(places) == len(flags):
        return new
    placed = list(flags)
    for place in compress(places, new):
        placed[place] = True
    return placed


class Questions:
    """The questions that are under way, by request.

    Args:
        lease_seconds: how long the answers are leased.
    """

    def __init__(
        self, groups: Sequence[Group], client: SchedulerClient, lease_seconds: float, clock: Callable[[], float]
    ) -> None:
        self._groups, self._client = groups, client
        self._lease_seconds, self._clock = lease_seconds, clock
        self._chooses = hits.chooses(groups)
        self._questions: dict[str, Question] = {}
        """Questions by request, in the order in which steps have last asked for them."""

    def __len__(self) -> int:
        return len(self._questions)

    def begin_early(self, request: Any) -> None:
        """Ask about all blocks of a request that has arrived, because it is unknown yet how many of them the GPU has.
        Never waits, never raises."""
        if len(self._questions) >= EARLY_REQUESTS or request.request_id in self._questions:
            return
        most = hits.limit(self._groups, request.num_tokens, 0)
        question = Question(self._groups, request, 0, most, prefix=False)
        if not question:
            return
        try:
            if self.send(question, question.next_round(0), self.arguments(question)):
                self.keep(request.request_id, question)
        except ClientError:
            return  # the request's step asks again, and logs the error

    def advance(self, deadline: float) -> None:
        """Take answers that have arrived, and send the next rounds, so that a step finds all answers. Never waits,
        never raises.

        Args:
            deadline: time on the clock at which the rest is left to the next step.
        """
        if not self._chooses:
            return  # all is asked at once
        for request_id, question in list(self._questions.items()):
            if question.pending is None or not question.pending.wait(0.0):
                continue
            if self._clock() >= deadline:
                return
            try:
                question.take(question.pending.result(0.0))
                packed = question.next_round(question.local)
                goes_on = not packed or self.send(question, packed, self.arguments(question))
            except ClientError:
                goes_on = False
            if not goes_on:
                self.cancel(request_id)  # the step that asks begins again, and logs the error

    def send(self, question: Question, packed: Mapping[int, bytes], arguments: Mapping[str, Any]) -> bool:
        """Send a round without waiting. False: it cannot be sent. Raises ClientError: the daemon would refuse it."""
        question.pending = self._client.begin_lookup(packed, **arguments)
        question.sent = self._clock()
        return question.pending is not None

    def new(self, request: Any, local: int, most: int, aim: int) -> Question:
        """A question about a request of which the GPU has ``local`` tokens. For ``aim`` see `Question`."""
        return Question(self._groups, request, local, most, prefix=True, aim=aim)

    def find(self, request: Any, local: int, most: int) -> Question | None:
        """The question about this request, if there is one that covers these tokens and is not outdated."""
        question = self._questions.get(request.request_id)
        if question is None:
            return None
        outdated = self._clock() - question.sent >= LEASED_PART * self._lease_seconds
        if outdated or local < question.local or question.end != local + most:
            self.cancel(request.request_id)
            return None
        self.keep(request.request_id, self._questions.pop(request.request_id))
        return question

    def keep(self, request_id: str, question: Question) -> None:
        """Keep a question until `remove` or `cancel`."""
        question.touched = self._clock()
        question.sent = question.sent or question.touched
        self._questions[request_id] = question

    def arguments(self, question: Question, aim: int = 0, fetch_tokens: int = 0) -> dict[str, Any]:
        """The arguments of a round's lookup besides the hashes.

        Args:
            aim: end of the hit, in tokens of the request, whose blocks are fetched from a slower tier.
            fetch_tokens: how many more tokens it has than a hit without a fetch.
        """
        arguments: dict[str, Any] = {"mode": question.mode, "lease_seconds": self._lease_seconds}
        if question.lease_last:
            arguments["lease_last"] = question.lease_last
        if question.tails:
            arguments["tails"] = question.tails
        if question.lease is not None:
            arguments["lease"] = question.lease
        if self._chooses:
            # Nothing at first: what the tier holds decides it.
            arguments["wanted"] = question.wanted(aim)
            arguments["fetch_tokens"] = fetch_tokens
        return arguments

    def remove(self, request_id: str) -> None:
        """Remove a question that is answered."""
        del self._questions[request_id]

    def cancel(self, request_id: str) -> None:
        """Give up a question and the lease of its answer, even if that has not arrived yet."""
        question = self._questions.pop(request_id, None)
        if question is None:
            return
        if question.pending is not None:
            question.pending.cancel()
        elif question.lease is not None:
            self._client.release_nowait(question.lease)

    def cancel_old(self, age: float = EARLY_SECONDS) -> None:
        """Cancel the questions that no step has asked for in the last ``age`` seconds."""
        while self._questions:
            request_id, oldest = next(iter(self._questions.items()))
            if self._clock() - oldest.touched < age:
                return
            self.cancel(request_id)
