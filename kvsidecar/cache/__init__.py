"""Which blocks there are, which are in use, and which go first. Pure: no I/O, no clock, no thread, no log.

Imports `types` and `errors`. Begin with `block_cache`: its methods are the steps of a store, a load and a lookup;
`eviction` chooses the blocks that go, `slots` hands out the pool's bytes.
"""
