"""Announces the daemon's blocks to routers, for every engine's integration. Imports no engine."""
