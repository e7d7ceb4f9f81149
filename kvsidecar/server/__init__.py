"""The servers: the attach socket and the local protocol on it, gRPC on a Unix socket and over TCP, and HTTP for
probes and metrics. They translate messages into calls of `core`, and its results into replies.

Imports `core` and below; the only package of the daemon that imports gRPC or aiohttp. Begin with `handler`, which all
of the ways in share; `attach_socket` is where an engine arrives, `local_protocol` how its messages come, `service`
the same over gRPC.
"""
