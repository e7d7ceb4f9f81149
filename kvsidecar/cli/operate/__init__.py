"""What operators do to a running daemon: ``kvsidecar top | engines | clear | drain``."""
