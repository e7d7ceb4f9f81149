"""`kvsidecar bench`: what the daemon gives an engine on this machine, through the public client.

Imports the client, and starts daemons as processes. Begin with `run`; experiments live in ``benchmarks/`` beside the
package.
"""
