"""Names of other servers, for those who come from them: their arguments, and their values of options.

``arguments`` reads ``tables/*.toml``, one for each server, and ``values.toml``. Nothing of ``fwk`` is imported here:
which of the names are options is ``core/fwk/plugins/options.py``.
"""
