"""fwk alongside other engines: the same weights, prompts and machine, one engine at a time, run after run in turn.

``benchmarks/peers.sh`` is the command; docs/benchmarking.md says how to read what it writes.
"""
