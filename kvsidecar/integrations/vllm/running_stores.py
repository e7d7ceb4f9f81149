"""The store jobs that ranks have been sent, and how long the daemon has been silent about them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvsidecar.integrations.vllm.metadata import GroupBlocks, RankReport, all_of
from kvsidecar.integrations.vllm.selection import Selection

SOON_SECONDS = 0.1
"""If no store has ended for longer than this, none ends soon."""
HUNG_SECONDS = 1.0
"""If no store has ended for longer than this, the daemon hangs: none is planned, as it would hold those blocks as well.
If one runs for longer while others end, the daemon is slow: the engine gets the room that a hung one would leave it."""
GIVE_UP_SECONDS = 2.0
"""If no store has ended for longer than this, and the stores hold more than a hung daemon may, the engine gives it
up."""
REPORT_STEPS = 4
"""Steps until the scheduler side knows the end of even the shortest store: the ranks see it one step later, and their
report may arrive after two more steps were planned."""


@dataclass(slots=True)
class RunningStore:
    selection: Selection
    blocks: tuple[GroupBlocks, ...]
    unreported: int
    """Ranks that have not reported yet, as in `RankReport.stored`."""
    begun: tuple[float, int]
    """Monotonic seconds and step number when it was sent to the ranks."""
    failed: bool = False
    retry: bool = True
    """Whether to store its blocks later if it fails."""
    tells: bool = True
    """Whether the store's end matters. False: its blocks were stored under keys that a reset has made useless."""
    admitted: bool = True
    """False: the daemon keeps other blocks instead."""


class RunningStores:
    """Stores that some rank has not reported, the oldest first. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._stores: dict[int, RunningStore] = {}
        """Stores by number of their job."""
        self._step = 0
        self._ended = (0.0, 0)
        """Time and step number when a store last ended, or the daemon was given up."""

    def __len__(self) -> int:
        return len(self._stores)

    def __iter__(self) -> Iterator[RunningStore]:
        return iter(self._stores.values())

    def new_step(self) -> None:
        self._step += 1

    def add(self, number: int, selection: Selection, blocks: tuple[GroupBlocks, ...], ranks: int, now: float) -> None:
        """Add a store that is sent to this many ranks in this step."""
        self._stores[number] = RunningStore(selection, blocks, all_of(ranks), (now, self._step))

    def ended(self, report: RankReport, now: float) -> Iterator[RunningStore]:
        """Take a report. Yields the stores that every rank has reported by then."""
        for number, ranks in report.stored.items():
            store = self._stores.get(number)
            if store is None:
                continue
            store.failed |= number in report.not_stored
            store.admitted &= number not in report.not_admitted
            store.unreported &= ~ranks
            if not store.unreported:
                self.wait_anew(now)
                del self._stores[number]
                yield store

    def wait_anew(self, now: float) -> None:
        """Count the daemon's silence from now on."""
        self._ended = now, self._step

    def silent_for(self, seconds: float, now: float) -> bool:
        """Whether a store runs, and none has ended for at least ``seconds``."""
        return bool(self._stores) and self._is_longer(max(self._ended, self._oldest_begun), seconds, now)

    def has_run_for(self, seconds: float, now: float) -> bool:
        """Whether a store has run for at least ``seconds``."""
        return bool(self._stores) and self._is_longer(self._oldest_begun, seconds, now)

    @property
    def _oldest_begun(self) -> tuple[float, int]:
        return next(iter(self._stores.values())).begun

    def _is_longer(self, since: tuple[float, int], seconds: float, now: float) -> bool:
        """Whether both ``seconds`` and the steps that the report of a store's end may take have passed since then."""
        return now - since[0] >= seconds and self._step - since[1] >= REPORT_STEPS
