"""Clients that attack a daemon, each a program: ``python -m benchmarks.attacks.NAME TARGET SECONDS``."""
