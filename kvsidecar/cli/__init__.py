"""The command line. `main` has the commands; `doctor` looks at the machine, `operate` asks a running daemon, `demo`
shows that an engine may be killed.

Imports everything but what `bench` keeps to itself. Begin with `main`.
"""
