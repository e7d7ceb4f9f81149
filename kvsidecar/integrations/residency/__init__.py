"""Which of the daemon's blocks an engine announces to routers, for every engine's integration. Imports no engine."""
