"""The backend of the disk tier: a directory on a local disk that keeps shards across restarts and reboots.

`backend` decides with a `kvsidecar.cache.block_cache.BlockCache`, `directory` opens or makes the files, `extents` reads
and writes them.
"""
