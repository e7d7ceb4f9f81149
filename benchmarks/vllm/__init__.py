"""The connector in a real vLLM engine: `hits` (time to first token) and `throughput`, beside vLLM's own connectors."""
