"""The content of the engine's LoRA adapters. Pure; imports no vLLM.

vLLM's block hashes identify an adapter by its name and path. Both may stand for other weights tomorrow, or on another
node, and the daemon's blocks outlive the engine. So the hashes of requests with an adapter contain instead a digest of
what the ranks have loaded (`adapter_hooks`): the files may have changed since, and other processes may not be able to
read them. Ranks report what they load; until then, a request's hashes are its engine's own, and it is not offloaded.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ATTRIBUTE = "kvsidecar_adapter"
"""Attribute of vLLM's request: the `Adapters.identity` in its hashes. Set with its first hash."""
UNKNOWN = ""
"""Value of the attribute while the content of the adapter is unknown."""
WAIT_STEPS = 3
"""Steps that the report of a loaded adapter may take, besides one for each rank of a pipeline."""

Files = tuple[tuple[str, int, int, int], ...]
"""Names, inodes, sizes and times of an adapter's files."""


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """The load of an adapter on a rank: content that is new under this id, or replaced in place."""

    lora_id: int
    number: int
    """Number of the content under this id, from 1."""
    digest: str


def files_of(path: str) -> Files | None:
    """A record that shows later whether an adapter's files are still the same. None: not a directory."""
    try:
        entries = sorted(Path(path).expanduser().iterdir())
        stats = [(each.name, each.stat()) for each in entries]
    except OSError:
        return None
    return tuple((name, each.st_ino, each.st_size, each.st_mtime_ns) for name, each in stats)


@dataclass(frozen=True, slots=True)
class _Last:
    load: AdapterLoad
    path: str
    files: Files | None
    reread: bool


class AdapterLoads:
    """The adapters that one rank has loaded.

    Args:
        resident: whether an adapter is in the rank's memory, so that the next step does not read its files again.
    """

    def __init__(self, resident: Callable[[int], bool] = lambda lora_id: False) -> None:
        self.resident = resident
        self.changes = 0
        """How many loads changed the content under an id."""
        self._last: dict[int, _Last] = {}
        self._unreported: list[AdapterLoad] = []

    def add(
        self, lora_id: int, digest: str, path: str = "", files: Files | None = None, *, reread: bool = False
    ) -> None:
        """Record the load of an adapter.

        Args:
            files: the files of the directory, before and after the load; None if they differ, or if there is none.
            reread: whether each step reads the files again, as vLLM does for requests that replace an adapter in place.
        """
        before = self._last.get(lora_id)
        if before is not None and before.load.digest == digest:
            load = before.load
        else:
            load = AdapterLoad(lora_id, before.load.number + 1 if before else 1, digest)
            self.changes += load.number > 1
        if reread or before is None or load is not before.load:
            self._unreported.append(load)
        self._last[lora_id] = _Last(load, path, files, reread)

    def keeps(self, lora_id: int) -> bool:
        """Whether the next step uses the content that was loaded last. Otherwise KV of that content must not be loaded:
        the rank has evicted the adapter, and will read files that have changed."""
        last = self._last.get(lora_id)
        if last is None:
            return False
        if self.resident(lora_id) and not last.reread:
            return True
        return last.files is not None and files_of(last.path) == last.files

    def take(self) -> tuple[AdapterLoad, ...]:
        """Remove and return the loads that were not reported yet."""
        loads, self._unreported = tuple(self._unreported), []
        return loads


class Adapters:
    """The adapters that all ranks have loaded, on the scheduler's side.

    Args:
        in_hashes: whether vLLM's hashes contain the identities. Otherwise no request with an adapter is offloaded.
        token: makes a unique name.
    """

    def __init__(
        self, world_size: int, *, in_hashes: bool = True, token: Callable[[], str] = lambda: secrets.token_hex(16)
    ) -> None:
        self._world_size, self.in_hashes = world_size, in_hashes
        self.own = token()
        """Name that makes an identity this engine's own, so that no other shares it."""
        self._loads: dict[int, dict[int, AdapterLoad]] = {}
        """Last loads by id and rank."""
        self._digests: dict[int, str] = {}
        """Digests of the content that all ranks have loaded, by id."""
        self._replaced: dict[int, str] = {}
        """Earlier digests of adapters that are replaced in place and not reported yet, by id."""
        self._unsound: set[str] = set()
        """Digests under which the GPU's cache may have KV of other content."""
        self._changes: dict[int, int] = {}
        self._step = 0
        self._asked: dict[int, int] = {}
        """The step in which a request first waited for an adapter's report, by id."""
        self._ended: dict[str, int] = {}
        """The step in which the last request with a digest ended, by digest."""

    def new_step(self) -> None:
        self._step += 1

    @property
    def changes(self) -> int:
        """How many `AdapterLoads.changes` of each rank are known."""
        return min(self._changes.values(), default=0) if len(self._changes) == self._world_size else 0

    def identity(self, lora_id: int) -> str | None:
        """The text that represents the content of an adapter in hashes; None: unknown. May be called in any thread."""
        digest = self._digests.get(lora_id)
        return f"{digest} {self.own}" if digest in self._unsound else digest

    def may_share(self, request: Any) -> bool:
        """Whether the request's hashes contain the present content of its adapter."""
        if request.lora_request is None:
            return True
        digest = self._digests.get(request.lora_request.lora_int_id)
        return (
            self.in_hashes
            and digest is not None
            and digest not in self._unsound
            and getattr(request, ATTRIBUTE, None) == digest
        )

    def settle(self, request: Any) -> bool:
        """Give a request without blocks the hashes of its adapter's content, if that is known. Returns whether its
        hashes have changed."""
        identity = self.identity(request.lora_request.lora_int_id)
        if not self.in_hashes or identity is None or getattr(request, ATTRIBUTE, None) == identity:
            return False
        if not hasattr(request, "update_block_hashes"):  # this vLLM cannot hash it again
            return False
        setattr(request, ATTRIBUTE, identity)
        request.block_hashes.clear()
        request.update_block_hashes()
        return True

    def waits(self, request: Any) -> bool:
        """Whether a report with the content of the request's adapter may be under way: it was loaded before the request
        arrived, and an idle engine reports nothing."""
        lora_id = request.lora_request.lora_int_id
        if not self.in_hashes or self.identity(lora_id) is not None:
            return False
        return self._step - self._asked.setdefault(lora_id, self._step) < WAIT_STEPS + self._world_size

    def ended(self, request: Any) -> None:
        if request.lora_request is not None and (identity := getattr(request, ATTRIBUTE, None)):
            self._ended.pop(identity, None)
            self._ended[identity] = self._step
            while self._step - next(iter(self._ended.values())) > WAIT_STEPS + self._world_size:
                del self._ended[next(iter(self._ended))]

    def loading(self, lora_id: int, *, inplace: bool) -> None:
        """Note that an adapter is about to be loaded. If in place, its content is unknown until every rank has reported
        it."""
        self._asked.pop(lora_id, None)
        if inplace and (digest := self._digests.pop(lora_id, None)) is not None:
            self._replaced[lora_id] = digest

    def not_loaded(self, lora_id: int) -> None:
        """Note that the load has failed."""
        if (digest := self._replaced.pop(lora_id, None)) is not None:
            self._digests[lora_id] = digest

    def take_report(self, loads: Mapping[int, tuple[AdapterLoad, ...]], used: Callable[[str], bool]) -> bool:
        """Handle the loads of the ranks.

        Args:
            used: whether a request has hashes with this identity and blocks on the GPU.

        Returns:
            Whether requests continued with other content than that in their hashes.
        """
        mixed = False
        for rank, each in loads.items():
            self._changes.setdefault(rank, 0)
            for load in each:
                before = self._loads.get(load.lora_id, {}).get(rank)
                self._changes[rank] += before is not None and before.number != load.number
                mixed |= self._take(rank, load, used)
        return mixed

    def _take(self, rank: int, load: AdapterLoad, used: Callable[[str], bool]) -> bool:
        of_ranks = self._loads.setdefault(load.lora_id, {})
        of_ranks[rank] = load
        known, replaced = self._digests.pop(load.lora_id, None), self._replaced.pop(load.lora_id, None)
        old = known or replaced
        if len(of_ranks) == self._world_size and len({each.number for each in of_ranks.values()}) == 1:
            self._digests[load.lora_id] = _joined([of_ranks[rank].digest for rank in sorted(of_ranks)])
        if old is None or self._digests.get(load.lora_id) == old:
            return False
        # A request that has ended since may have been computed with the new content in its last steps.
        if not (used(old) or self._step - self._ended.get(old, -100) <= WAIT_STEPS + self._world_size):
            return False
        self._unsound.add(old)
        return True

    def reset(self) -> None:
        """Note that the GPU's cache is empty."""
        self._unsound.clear()


def _joined(digests: list[str]) -> str:
    """One digest for all ranks. Those with parts of an adapter, such as experts, have different ones."""
    return digests[0] if len(set(digests)) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()
