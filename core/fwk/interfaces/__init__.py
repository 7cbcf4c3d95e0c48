"""The interfaces of plugins: one file per family, with its declaration, its context and its abstract class.

Here belongs what a plugin author implements or is given. No mechanism (importing this package imports neither torch nor
ctypes), no data that only parts of core exchange (``fwk.types``), and no feature of any plugin.
"""
