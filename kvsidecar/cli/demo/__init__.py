"""`kvsidecar demo`: the whole story on one machine, with real processes."""
