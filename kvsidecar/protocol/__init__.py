"""What goes over the sockets between an engine and the daemon, for both ends: where the sockets are (`paths`), and
how
messages are framed (`framing`) and names written (`wire`).

Imports `support`, `types`, `errors` and the generated messages in `kvsidecar.v1`. Does no I/O. Begin with `wire`.
"""
