"""Tracks which blocks exist and which are in use, and chooses which to evict. Pure: no I/O, clock, thread or log.

Imports `types` and `errors`. Begin with `block_cache`: its methods are the steps of a store, a load and a lookup.
`victims` chooses what to evict by a policy, `eviction_lru` or `eviction_rhythm`; `slots` allocates the pool's bytes.
"""
