"""`kvsidecar bench`: what the daemon gives an engine on this machine, measured through the public client."""
