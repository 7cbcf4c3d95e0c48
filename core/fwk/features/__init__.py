"""The lists of features' parts that server, engine and worker go through: each builds its own, and tells them things.

Here belongs what calls the parts of ``fwk.interfaces.feature``. No feature: those are plugins, and no list knows which
it holds.
"""
