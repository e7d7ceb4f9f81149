"""Moves the bytes of one GPU: two threads, one for each direction, that keep the link busy.

Imports `device` and `support`. Begin with `worker`; `hub` has the workers of all GPUs.
"""
