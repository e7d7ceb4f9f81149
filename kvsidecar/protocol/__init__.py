"""The protocol between an engine and the daemon, shared by both ends: socket paths (`paths`), message framing
(`framing`), conversion between messages and types (`wire`), and messages as JSON for people (`as_json`).

Imports `support`, `types`, `errors` and the generated messages in `kvsidecar.v1`. Does no I/O. Begin with `wire`.
"""
