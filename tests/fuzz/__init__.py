"""Requests that were right once, and what a seed made of them, on a bare socket to a real serve.

`python -m tests.fuzz --seeds 10000` for as many; `--seed N` for one, told as it was sent.
"""
