"""The backend of the cluster tier: a client of Mooncake Store, which keeps shards in the memory of other nodes."""
