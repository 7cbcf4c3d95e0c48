"""Settings of the operating-system process: garbage collection, malloc, thread waiting, file limits, its parent, forks.

Here belongs what a process sets for itself once, before or while it starts, how one is forked from another
(``forks``), and what has nothing to do with requests or models: nothing of ``fwk`` is imported. C++ kernels and the
memory they use belong to ``fwk_native``.
"""
