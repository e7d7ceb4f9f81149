"""Agreement between the ranks of one engine: at the start, and before each load."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank among those that share each request: its tensor-parallel group.

    Args:
        group: SGLang's group for CPU tensors; None for a single rank.
    """

    group: Any
    rank: int
    size: int

    def agree(self, yes: bool) -> bool:
        """Whether every rank says yes. All must ask at the same point: SGLang's schedulers run in lockstep."""
        if self.size == 1:
            return yes
        vote = torch.tensor([int(yes)], dtype=torch.int)
        torch.distributed.all_reduce(vote, op=torch.distributed.ReduceOp.MIN, group=self.group)
        return bool(vote.item())

    def gather(self, mine: Any) -> list[Any]:
        """The values of all ranks, by rank."""
        if self.size == 1:
            return [mine]
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, mine, group=self.group)
        return found

    def token(self) -> str:
        """A random text that is equal on all ranks."""
        return str(self.gather(secrets.token_hex(16))[0])


def ranks_of(params: Any) -> Ranks:
    """The ranks that share each request.

    Args:
        params: SGLang's ``CacheInitParams``.
    """
    group = params.attn_tp_cache_group or params.tp_cache_group
    if group is None or not torch.distributed.is_initialized():
        return Ranks(None, 0, 1)
    return Ranks(group, torch.distributed.get_rank(group=group), torch.distributed.get_world_size(group=group))


def problem_of(params: Any, dcp_size: int) -> str | None:
    """Why this kind of parallelism is not supported; None if it is."""
    if params.pp_size > 1:
        return "pipeline parallelism: SGLang does not let the stages agree on a hit of a linker"
    if params.attn_cp_size > 1 or dcp_size > 1:
        return "context parallelism"
    return None
