"""The kit for plugin authors: contract suites, templates of plugins, benchmarks, and the commands that run them.

Here belongs what helps to write, prove and measure plugins. It uses core; core does not use it: its commands come in
through the entry-point group ``fwk.commands``. Plugin authors import the suites from ``fwk.testing``.
"""
