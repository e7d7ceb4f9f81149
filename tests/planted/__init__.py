"""Bugs that are planted on purpose, one at a time, to see whether the tests find them: `python -m tests.planted`."""
