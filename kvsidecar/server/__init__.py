"""The servers: the attach socket with the local protocol, gRPC on a Unix socket and over TCP, and HTTP for probes,
metrics and a page. They translate messages into calls of `core`, and results into replies.

Imports `core` and below; the only package of the daemon that imports gRPC or aiohttp. Begin with `handler`, which all
transports share. Engines connect to `attach_socket`; their messages arrive through `local_protocol`, or through
`service` over gRPC, and both drive `attach_protocol`.
"""
