"""PegaFlow, LMCache, vLLM's own copy path and the bare driver, on the same shapes in one run. Start with README.md."""
