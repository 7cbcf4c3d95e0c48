"""Work that may turn out endless or huge, done in a process that can be killed.

``client.JobProcess`` starts a process that imports and builds once, ``fork_server.ForkServer`` in it forks for each
job, and the system ends what exceeds its CPU time or its memory. What the jobs are is the caller's: nothing of ``fwk``
is imported here, and ``core/fwk/server/helper.py`` translates errors. ``tokenizers`` converts a vocabulary file in one.
"""
