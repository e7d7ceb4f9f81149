"""`kvsidecar demo`: store, kill, load and compare on one machine, with real processes."""
