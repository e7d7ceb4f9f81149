"""A long run: a real daemon, engine processes that are killed at random, and every loaded byte checked."""
