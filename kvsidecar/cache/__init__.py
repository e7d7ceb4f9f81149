"""Which blocks there are, who needs them, and which go first. Pure: no I/O, no clock, no thread, no log.

Imports `types` and `errors`. Begin with `block_cache`: its methods are what a store, a load and a lookup ask of the
cache; `eviction` chooses what goes, `slots` hands out the pool's bytes.
"""
