"""A real vLLM engine on the CPU, with a tiny random model, against a real daemon on the host device.

`make test-vllm` installs what these need and runs them; without vLLM they are not collected.
"""
