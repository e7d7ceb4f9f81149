"""How requests come in: the attach socket, the local protocol beside it, gRPC on a Unix socket and over TCP, and HTTP
for probes and metrics. Turns messages into calls of `core`, and answers.

Imports `core` and below; the only package of the daemon that imports gRPC or aiohttp. Begin with `handler`, which all
of the ways in share; `attach_socket` is where an engine arrives, `local_protocol` how its messages come, `service`
the same over gRPC.
"""
