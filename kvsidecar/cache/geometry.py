"""The shards of a space: all of its ranks must say the same of them."""

from __future__ import annotations

from kvsidecar.cache.space_blocks import Space
from kvsidecar.errors import NamespaceMismatch

MISMATCH_HINT = (
    "Instances whose KV differs in layout or type must differ in kv_layout or dtype of the namespace; if the blocks of "
    "the other kind are not wanted any more, clear the namespace"
)


def set_geometry(space: Space, num_shards: int, shard: int, shard_bytes: int) -> bool:
    """Set the size of a shard. Returns whether it was not known before.

    Raises:
        NamespaceMismatch: another rank has said something else.
    """
    if space.num_shards != num_shards:
        raise NamespaceMismatch(
            f"group {space.group}: this rank says a block has {num_shards} shards, but in this namespace "
            f"{space.num_shards} are registered. {MISMATCH_HINT}"
        )
    if space.shard_bytes[shard] not in (None, shard_bytes):
        raise NamespaceMismatch(
            f"group {space.group}: this rank says shard {shard} has {shard_bytes} bytes per block, but in this "
            f"namespace {space.shard_bytes[shard]} are registered. {MISMATCH_HINT}"
        )
    new_shard = space.shard_bytes[shard] is None
    space.set_shard(shard, shard_bytes)
    return new_shard
