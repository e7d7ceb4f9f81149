"""What operators do to a running daemon, such as ``kvsidecar top | clear | drain``. Begin with `commands`."""
