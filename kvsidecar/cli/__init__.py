"""The command line. `main` defines the commands; `doctor` examines the machine, `operate` queries and controls a
running daemon, `demo` shows that the cache outlives an engine.

Imports all other packages, and of `bench` only its entry. Begin with `main`.
"""
