"""Finds the blocks of the GPU's prefix cache that hold what their hashes claim. Pure.

vLLM enters a block into its prefix cache when it schedules the tokens that fill it, before any forward pass has written
them. The pass may never come, because vLLM preempts the request in the same step or the step is lost, and it may
compute on KV that another connector failed to load. So a block counts as written only when the output of its step has
been processed without an invalid block in it. `kvsidecar.integrations.vllm.selection.choose` leaves out all others, and
every store passes through it.

A state that ends inside a block is overwritten by the next step of its request, before which vLLM moves the hash to a
copy. Until then it cannot be stored, because the copier reads later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from kvsidecar.integrations.vllm.metadata import StepPlan
from kvsidecar.integrations.wrapping import End, wrap

MAX_STEPS = 64
"""Steps that may be in flight; vLLM has one for each stage of a pipeline, and one more. A step that is pushed out
counts as lost."""

BlockIds = Callable[[str], Sequence[Sequence[int]]]
"""Returns the ids of a request's current blocks, by group, from its id; empty if it has none."""


@dataclass(eq=False, slots=True)
class _Entry:
    """Blocks that vLLM has entered into its prefix cache at one time."""

    request_id: str
    block_ids: list[int]


@dataclass(eq=False, slots=True)
class _Step:
    """One step, from its schedule until its output is processed."""

    output: Any = None
    """vLLM's ``SchedulerOutput``; None while the step is being scheduled."""
    entries: list[_Entry] = field(default_factory=list)
    plan: StepPlan | None = None
    """The ranks' plan for this step, if that must not be lost."""

    @property
    def tokens(self) -> dict[str, int]:
        """Number of tokens that the step computes, by request id."""
        tokens: dict[str, int] = self.output.num_scheduled_tokens
        return tokens

    def entries_of(self, request_id: str) -> Iterator[_Entry]:
        return (each for each in self.entries if each.request_id == request_id)


class WrittenBlocks:
    """Follows each block from its entry into vLLM's prefix cache to the output of the step that writes it.

    Args:
        block_ids: returns the blocks of a request, to find the requests that have computed on invalid ones.
        states: indices of the groups whose blocks hold a state: a request continues in the block in which a hit may
            end.
    """

    def __init__(self, block_ids: BlockIds = lambda _: (), states: Collection[int] = ()) -> None:
        self._block_ids, self._states = block_ids, states
        self._pool: Any = None
        self._wraps: list[End] = []
        self._steps: deque[_Step] = deque()
        """Steps in flight, the oldest first."""
        self._scheduled = _Step()
        """The step that is being scheduled, or is next."""
        self._entry_of: dict[int, _Entry] = {}
        """Last entry of each block that is not known to be written, by its id."""
        self._mutable: dict[int, str] = {}
        """The request that will overwrite a state which ends inside a block, by the id of the block."""
        self._in_output = False
        """Whether vLLM is processing an output: what it enters now was written by that step or an earlier one."""
        self._wrong: set[str] = set()
        """Requests that may continue from wrong KV, until they are preempted. None of their blocks enters the prefix
        cache."""
        self._has_lost = False
        self._lost_plans: list[StepPlan] = []

    # -- vLLM's pool -----------------------------------------------------------------------------------------------

    def bind(self, pool: Any) -> None:
        """Watch what vLLM's ``BlockPool`` enters into the prefix cache, from now on."""
        self._pool = pool
        watched: dict[str, Callable[..., Any]] = {
            "cache_full_blocks": self._cache_full_blocks,
            "cache_partial_block": self._cache_partial_block,
            "move_block_hashes": self._move_block_hashes,
        }
        self._wraps = [wrap(pool, name, call) for name, call in watched.items() if hasattr(pool, name)]

    def close(self) -> None:
        """No longer watch the pool."""
        for end in self._wraps:
            end()
        self._wraps.clear()

    def _cache_full_blocks(
        self,
        original: Callable[..., Any],
        request: Any,
        blocks: Sequence[Any],
        num_cached_blocks: int,
        num_full_blocks: int,
        *others: Any,
        **named: Any,
    ) -> None:
        if request.request_id not in self._wrong:
            original(request, blocks, num_cached_blocks, num_full_blocks, *others, **named)
            self._entered(request.request_id, blocks[num_cached_blocks:num_full_blocks])

    def _cache_partial_block(
        self, original: Callable[..., Any], request: Any, block: Any, *others: Any, **named: Any
    ) -> Any:
        if request.request_id in self._wrong:
            return None
        key = original(request, block, *others, **named)
        self._entered(request.request_id, [block])
        if named.get("kv_cache_group_id") in self._states and not named.get("replace_existing_hashes"):
            self._mutable[block.block_id] = request.request_id
        return key

    def _move_block_hashes(self, original: Callable[..., Any], src_block: Any, dst_block: Any) -> None:
        # The step that is being scheduled copies the one block into the other.
        original(src_block, dst_block)
        entry = self._entry_of.get(src_block.block_id)
        self._mutable.pop(src_block.block_id, None)
        self._entered(entry.request_id if entry is not None else "", [dst_block])

    def _entered(self, request_id: str, blocks: Sequence[Any]) -> None:
        if self._mutable:  # nearly never, and a step may enter hundreds of blocks
            for block in blocks:
                self._mutable.pop(block.block_id, None)
        if self._in_output:
            return
        entry = _Entry(request_id, [block.block_id for block in blocks if not block.is_null])
        self._scheduled.entries.append(entry)
        self._entry_of.update(dict.fromkeys(entry.block_ids, entry))

    # -- what is known ---------------------------------------------------------------------------------------------

    @property
    def unwritten(self) -> Collection[int]:
        """Ids of the blocks that are not known to hold what their hashes claim, or may not when they are read."""
        return self._entry_of.keys() | self._mutable.keys() if self._mutable else self._entry_of.keys()

    def first_unwritten(self, table: Sequence[Any], blocks: range) -> int:
        """Index of the first of these blocks of a request's block table that is not known to be written; the end of the
        range if all are. A request's last tokens are written last, whichever request computes them."""
        first = blocks.stop
        if self._entry_of:
            for i in reversed(range(blocks.start, min(blocks.stop, len(table)))):
                if table[i].block_id in self._entry_of:
                    first = i
                elif not table[i].is_null:
                    break
        return first

    def tokens_in_flight(self) -> Sequence[Mapping[str, int]]:
        """Tokens by request id of each step before the last one whose output has not been processed."""
        return [step.tokens for step in islice(self._steps, len(self._steps) - 1)]

    # -- steps -----------------------------------------------------------------------------------------------------

    def schedule(self, output: Any) -> None:
        """Note that vLLM has scheduled a step, which writes the blocks that were entered since the last call.

        No step writes the blocks of a request that vLLM has preempted again, and vLLM would hit them: they leave the
        prefix cache. Blocks of a request that is not in the step were loaded before.

        Args:
            output: vLLM's ``SchedulerOutput``.
        """
        step, self._scheduled = self._scheduled, _Step()
        step.output = output
        tokens, preempted = output.num_scheduled_tokens, output.preempted_req_ids or ()
        for entry in step.entries:
            if entry.request_id in tokens or not entry.request_id:
                continue
            if entry.request_id in preempted:
                self._evict(set(self._last_entered([entry])))
            self._settle([entry])
        self._wrong.difference_update(preempted)
        for request_id in preempted:
            self._leave(request_id)
        self._steps.append(step)
        while len(self._steps) > MAX_STEPS:
            self._lose(self._steps.popleft())

    def send(self, plan: StepPlan) -> None:
        """Note that the ranks get this plan with the step that was scheduled last."""
        self._steps[-1].plan = plan

    def take_lost_plans(self) -> tuple[bool, Sequence[StepPlan]]:
        """Whether steps were lost since the last call, and their plans: some rank may not have got them."""
        taken = self._has_lost, self._lost_plans
        self._has_lost, self._lost_plans = False, []
        return taken

    def begin_output(self, output: Any, invalid: Collection[int]) -> None:
        """Note that vLLM begins to process the output of a step.

        Args:
            output: the step's ``SchedulerOutput``. If it is unknown, only the failures of loads matter.
            invalid: ids of blocks that were not loaded, although the step has computed on them.
        """
        self._in_output = True
        step = next((each for each in self._steps if each.output is output), None)
        wrong = set(invalid)
        if step is not None:
            while (oldest := self._steps.popleft()) is not step:
                wrong |= self._lose(oldest)
        if wrong:
            self._spread(wrong, [*([step] if step is not None else ()), *self._steps])
        if step is not None:
            self._settle(step.entries)

    def end_output(self) -> None:
        """Note that vLLM has processed an output, or failed to."""
        self._in_output = False

    def end_request(self, request_id: str) -> None:
        """Note that a request has ended, and enters nothing any more."""
        self._wrong.discard(request_id)
        self._leave(request_id)

    def preempt_all(self) -> None:
        """Note that vLLM has preempted all requests, which may be in the next step again."""
        self._wrong.clear()
        self._mutable.clear()

    def _leave(self, request_id: str) -> None:
        """Note that a request writes to none of its blocks any more."""
        for block_id in [block_id for block_id, owner in self._mutable.items() if owner == request_id]:
            del self._mutable[block_id]

    def abort_all(self) -> None:
        """Forget all steps: vLLM aborts all requests, on demand or because a step has failed. The outputs of the steps
        in flight may never come, so that nothing may hit what they were to write."""
        for step in (*self._steps, self._scheduled):
            self._forget(step)

    def _lose(self, step: _Step) -> set[int]:
        """Forget a step whose output will never come: it is unknown what it has written. Returns its blocks."""
        self._has_lost = True
        if step.plan is not None:
            self._lost_plans += [*step.plan.lost, replace(step.plan, lost=())]
        return self._forget(step)

    def _forget(self, step: _Step) -> set[int]:
        """Remove the blocks that a step has entered from the prefix cache."""
        entered = set(self._last_entered(step.entries))
        self._evict(entered)
        self._settle(step.entries)
        return entered

    def _spread(self, wrong: set[int], steps: Sequence[_Step]) -> None:
        """Remove these blocks from the prefix cache, and those that were computed on them in these steps.

        vLLM computes the requests again, but not all correctly: it continues with what it has scheduled already, and
        lets a request that shares an invalid block continue before another one has computed that again.
        """
        affected: set[str] = set()
        grows = True
        while grows:
            grows = False
            for request_id in {name for step in steps for name in step.tokens} - affected:
                entered = {i for step in steps for i in self._last_entered(step.entries_of(request_id))}
                has = {i for ids in self._block_ids(request_id) for i in ids}
                # If a request has lost blocks since, it is unknown what it has computed on.
                if not (entered <= has and wrong.isdisjoint(has)):
                    affected.add(request_id)
                    wrong |= entered
                    grows = True
        self._wrong |= affected
        self._evict(wrong)

    def _last_entered(self, entries: Iterable[_Entry]) -> Iterator[int]:
        """The blocks of these entries that vLLM has not given to others since."""
        get = self._entry_of.get
        return (block_id for entry in entries for block_id in entry.block_ids if get(block_id) is entry)

    def _settle(self, entries: Iterable[_Entry]) -> None:
        """Forget these entries: what is still in the prefix cache is written."""
        for block_id in list(self._last_entered(entries)):
            del self._entry_of[block_id]

    def _evict(self, block_ids: set[int]) -> None:
        if self._pool is not None and block_ids:
            self._pool.evict_blocks(block_ids)
