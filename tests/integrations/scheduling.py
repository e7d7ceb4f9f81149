"""Runs steps of a scheduler."""

from __future__ import annotations

from kvsidecar.integrations.vllm.metadata import RankReport, StoreJob
from kvsidecar.integrations.vllm.scheduler import SchedulerSide
from tests.integrations.engine import EPOCH, Allocated, Block, Request, Step, TinyDaemon, TinyPool, side

ATTACHED = RankReport(attached={0: EPOCH})


def attached(*args: object, world_size: int = 1, **kwargs: object) -> SchedulerSide:
    """`side`, all of whose ranks are attached."""
    made = side(*args, world_size=world_size, **kwargs)  # type: ignore[arg-type]
    made.take_report(RankReport(attached=dict.fromkeys(range(world_size), EPOCH)))
    return made


def run(made: SchedulerSide, pool: TinyPool, request: Request, tokens: int) -> list[Block]:
    """Schedule a new request's first ``tokens`` tokens, and let the step be over."""
    blocks = pool.take(-(-tokens // 4))
    for block, each in zip(blocks, request.block_hashes, strict=False):
        pool.cache(block, each + bytes(4))
    made.update_state_after_alloc(request, Allocated([each.block_id for each in blocks]), 0)
    made.build_plan(Step({request.request_id: tokens}))
    request.num_computed_tokens = tokens
    return blocks


def with_stored(tokens: int) -> tuple[SchedulerSide, TinyDaemon, Request]:
    """A scheduler, its daemon, and a request of so many tokens whose blocks that has."""
    daemon, request = TinyDaemon(), Request("r", list(range(tokens)))
    daemon.put(0, request.block_hashes)
    return attached(daemon=daemon), daemon, request


def stored_hashes(jobs: tuple[StoreJob, ...], group_index: int = 0) -> list[bytes]:
    packed = b"".join(each.hashes for job in jobs for each in job.blocks if each.group == group_index)
    return [packed[i : i + 32] for i in range(0, len(packed), 32)]
