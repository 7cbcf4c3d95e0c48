"""Names that come from elsewhere: other servers' arguments and values of options, and flags of packages not installed.

``arguments`` reads ``tables/*.toml``, one for each server, and ``values.toml``; ``catalogue`` a file of packages and of
the flags that they bring. ``generation_config`` knows the fields by which a model's makers recommend sampling. Nothing
of ``fwk`` is imported here: which of the names are options is ``core/fwk/plugins/options.py``.
"""
