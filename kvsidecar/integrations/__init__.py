"""Connectors of engines. They import the client, and the engine they are for; the daemon knows nothing of them."""
