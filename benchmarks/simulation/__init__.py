"""Deterministic simulation: the daemon's real decisions over fake devices, a virtual clock and a seeded scheduler."""
