"""The backend of the shared tier: a directory of a file system that several nodes mount, with a file for each shard.

`backend` finds, reads and writes files, `sweep` removes those that were not used for longest.
"""
