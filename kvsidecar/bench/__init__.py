"""`kvsidecar bench`: measures the daemon on this machine as an engine uses it, through the public client.

Imports the client, and starts daemons as processes. Begin with `run`; experiments live in ``benchmarks/`` beside the
package.
"""
