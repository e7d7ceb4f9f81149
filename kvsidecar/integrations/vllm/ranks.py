"""Which shard of each block a rank holds. Pure, except `place_of`, which asks vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvsidecar.client import GroupLayout, KVBuffers
from kvsidecar.integrations.vllm.groups import Group


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory that one rank registers."""

    buffers: KVBuffers
    groups: tuple[GroupLayout, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """One worker among those of its engine (of its data-parallel replica).

    A rank of another pipeline stage holds other layers, and may hold none of a KV cache group.
    """

    tp_rank: int = 0
    tp_size: int = 1
    stage: int = 0
    num_stages: int = 1
    replicated: frozenset[int] = frozenset()
    """Groups whose KV is the same on every tensor-parallel rank: the first stores it, all load it."""
    stages_of: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By group: the stages that hold layers of it; all of them for groups that are not here."""

    @property
    def rank(self) -> int:
        return self.stage * self.tp_size + self.tp_rank

    @property
    def world_size(self) -> int:
        return self.num_stages * self.tp_size

    def stores(self, group: int) -> bool:
        """Whether it is this rank that stores its part of the group's blocks."""
        return group not in self.replicated or self.tp_rank == 0

    def shard(self, group: int) -> tuple[int, int]:
        """This rank's shard of a block of this group, and how many shards it has.

        Raises:
            ValueError: this rank holds no layer of the group.
        """
        stages = self.stages_of.get(group, tuple(range(self.num_stages)))
        index = stages.index(self.stage)
        if group in self.replicated:
            return index, len(stages)
        return index * self.tp_size + self.tp_rank, len(stages) * self.tp_size


def replicated_groups(groups: Sequence[Group], parallel_config: Any) -> frozenset[int]:
    """Groups whose KV every tensor-parallel rank holds whole."""
    # With decode context parallelism each rank holds other tokens of the same latent cache.
    if getattr(parallel_config, "decode_context_parallel_size", 1) > 1:
        return frozenset()
    return frozenset(group.index for group in groups if group.mla)


def place_of(vllm_config: Any, groups: Sequence[Group], facts: Sequence[str] | None) -> tuple[Place, tuple[str, ...]]:
    """This worker's place, and what is true of the layers of all pipeline stages. All ranks must call it at once: the
    stages exchange what they hold.

    Args:
        groups: with this rank's own layers.
        facts: of this rank's layers, for the namespace; None: its memory is not understood.

    Raises:
        ValueError: another stage has no facts, or how this engine is distributed is not supported.
    """
    from vllm.distributed import parallel_state

    parallel = vllm_config.parallel_config
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise ValueError("prefill context parallelism is not supported: start with --prefill-context-parallel-size 1")
    tensor, pipeline = parallel_state.get_tp_group(), parallel_state.get_pp_group()
    mine = (tuple(group.index for group in groups if group.layer_names), facts)
    stages: list[Any] = [mine] * pipeline.world_size
    if pipeline.world_size > 1:
        import torch

        torch.distributed.all_gather_object(stages, mine, group=pipeline.cpu_group)
    if any(found is None for _, found in stages):
        raise ValueError("the KV cache of another pipeline stage cannot be offloaded: see the log of that stage")
    place = Place(
        tp_rank=tensor.rank_in_group,
        tp_size=tensor.world_size,
        stage=pipeline.rank_in_group,
        num_stages=pipeline.world_size,
        replicated=replicated_groups(groups, parallel),
        stages_of={
            group.index: tuple(stage for stage, (held, _) in enumerate(stages) if group.index in held)
            for group in groups
        },
    )
    return place, tuple(sorted({fact for _, found in stages for fact in found}))
