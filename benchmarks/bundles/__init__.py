"""Engines for a GPU machine without a network: made here from the package index, unpacked there."""
