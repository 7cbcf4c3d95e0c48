"""Functions in Triton that the kernels of several plugins are made of. Imports nothing of fwk, nor a plugin."""
