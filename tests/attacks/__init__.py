"""Clients that attack a daemon, each a program: ``python -m tests.attacks.NAME TARGET SECONDS``."""
