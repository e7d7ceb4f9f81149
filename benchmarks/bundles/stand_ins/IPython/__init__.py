# ruff: noqa: N999
"""Stands for IPython, from which SGLang imports what shows text in a notebook."""
