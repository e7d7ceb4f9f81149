"""Finds the shard of each block that a rank holds. Pure, except `place_of`, which queries vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvsidecar.integrations.vllm.groups import Group


@dataclass(frozen=True, slots=True)
class Place:
    """A worker's position in its engine (its data-parallel replica).

    Each pipeline stage holds other layers, and may hold none of a KV cache group.
    """

    tp_rank: int = 0
    tp_size: int = 1
    stage: int = 0
    num_stages: int = 1
    replicas: Mapping[int, int] = field(default_factory=dict)
    """`Group.replicas` by group: the first of these ranks stores the KV, all load it. 1 for groups that are missing
    here."""
    stages_of: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """The stages that hold layers of each group; all stages for groups that are missing here."""

    @property
    def rank(self) -> int:
        return self.stage * self.tp_size + self.tp_rank

    @property
    def world_size(self) -> int:
        return self.num_stages * self.tp_size

    def stores(self, group: int) -> bool:
        """Whether this rank stores its part of the group's blocks."""
        return self.tp_rank % self.replicas.get(group, 1) == 0

    def shard(self, group: int) -> tuple[int, int]:
        """The index of this rank's shard of a block of the group, and the number of shards.

        Raises:
            ValueError: this rank holds no layer of the group.
        """
        stages = self.stages_of.get(group, tuple(range(self.num_stages)))
        replicas = self.replicas.get(group, 1)
        parts = self.tp_size // replicas
        return stages.index(self.stage) * parts + self.tp_rank // replicas, len(stages) * parts


def place_of(vllm_config: Any, groups: Sequence[Group], facts: Sequence[str] | None) -> tuple[Place, tuple[str, ...]]:
    """This worker's position, and the facts of all pipeline stages. All ranks must call it at the same time: the stages
    exchange data.

    Args:
        groups: with this rank's own layers.
        facts: facts about this rank's layers, for the namespace; None if its memory cannot be shared.

    Raises:
        ValueError: the memory of another stage cannot be shared, or the kind of parallelism is not supported.
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
        replicas={group.index: group.replicas for group in groups},
        stages_of={
            group.index: tuple(stage for stage, (held, _) in enumerate(stages) if group.index in held)
            for group in groups
        },
    )
    return place, tuple(sorted({fact for _, found in stages for fact in found}))
