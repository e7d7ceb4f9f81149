"""What an engine has announced to routers, and what it must retract.

A block of a medium is announced or it is not: announcing it twice is the same as announcing it once. A count would keep
a block for ever that was cleared and stored again before its first announcement was retracted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import islice

from kvsidecar.integrations.residency.known_blocks import BlockInfo

MAX_ANNOUNCED = 1 << 19
"""Most announced blocks, at 110 bytes each. Beyond it the oldest are retracted early: a router that does not know a
block sends some requests elsewhere, but one that believes in a lost block sends all of them to a miss."""
RETRACTED_PER_STEP = 1024
"""Most blocks of one group that one step retracts when all are lost."""


class Announcements:
    """Announces each block once, and retracts it once.

    Args:
        indexes: the indexes of the groups, which share `MAX_ANNOUNCED`, in the pool and on the disk.
        stored: makes the event that announces a block of the group with this index.
        removed: makes the event that retracts these blocks.
    """

    def __init__(
        self,
        indexes: Collection[int],
        stored: Callable[[int, bytes, BlockInfo], object],
        removed: Callable[[int, list[bytes]], object],
    ) -> None:
        self._stored, self._removed = stored, removed
        self._most = max(1, MAX_ANNOUNCED // (len(indexes) // 2))
        # By group, in the order of their announcement.
        self._announced: dict[int, dict[bytes, None]] = {index: {} for index in indexes}
        self._doubted: dict[int, dict[bytes, None]] = {index: {} for index in self._announced}
        self._to_retract: dict[int, dict[bytes, None]] = {index: {} for index in self._announced}

    def is_announced(self, index: int, block_hash: bytes) -> bool:
        return block_hash in self._announced[index]

    def confirm(self, index: int, block_hash: bytes) -> bool:
        """Stop doubting a block. Returns whether it was doubted."""
        if block_hash not in self._doubted[index]:
            return False
        del self._doubted[index][block_hash]
        self._announced[index][block_hash] = None
        return True

    def doubt(self) -> None:
        """Doubt all announced blocks: they may be gone."""
        for index, announced in self._announced.items():
            self._doubted[index] |= announced
            self._announced[index] = {}

    def doubt_no_more(self) -> None:
        """Retract, over the next steps, the blocks that are still in doubt: they are gone."""
        for index, doubted in self._doubted.items():
            self._to_retract[index] |= doubted
            self._doubted[index] = {}

    def announce(self, index: int, block_hash: bytes, info: BlockInfo) -> None:
        announced, lost = self._announced[index], self._to_retract[index]
        if block_hash in announced or self.confirm(index, block_hash):
            return
        announced[block_hash] = None
        if block_hash in lost:  # not retracted yet: routers still believe in it
            del lost[block_hash]
        else:
            self._stored(index, block_hash, info)
        if len(announced) > self._most:
            # Many at once: each deletion at the front of a dict makes finding its first entry slower.
            for each in list(islice(announced, len(announced) - self._most + self._most // 64)):
                del announced[each]
                lost[each] = None

    def retract(self, index: int, hashes: Iterable[bytes]) -> None:
        """Retract those of the blocks that are announced."""
        announced, doubted = self._announced[index], self._doubted[index]
        gone = [each for each in hashes if each in announced or each in doubted]
        for each in gone:
            announced.pop(each, None)
            doubted.pop(each, None)
        if gone:
            self._removed(index, gone)

    def retract_early(self, index: int, block_hash: bytes) -> None:
        """Retract, over the next steps, a block that is still held but whose tokens are forgotten."""
        if self._announced[index].pop(block_hash, self) is None or self._doubted[index].pop(block_hash, self) is None:
            self._to_retract[index][block_hash] = None

    def retract_all(self, index: int) -> None:
        """Retract all blocks of a group, over the next steps."""
        self._to_retract[index] |= self._announced[index] | self._doubted[index]
        self._announced[index], self._doubted[index] = {}, {}

    def retract_everything(self) -> None:
        """Retract the blocks of all groups, over the next steps."""
        for index in self._announced:
            self.retract_all(index)

    def forget(self) -> None:
        """Forget all blocks: routers have been informed that everything is gone."""
        for each in (self._announced, self._doubted, self._to_retract):
            for index in each:
                each[index] = {}

    @property
    def pending(self) -> bool:
        """Whether there is more to retract."""
        return any(self._to_retract.values())

    def step(self) -> None:
        """Retract some of what is lost."""
        for index, lost in self._to_retract.items():
            if lost:
                self._removed(index, [lost.popitem()[0] for _ in range(min(len(lost), RETRACTED_PER_STEP))])
