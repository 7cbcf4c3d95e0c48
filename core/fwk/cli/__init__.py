"""The command line: ``fwk serve``, flags from options models, and the commands of other packages.

Here belongs what ``fwk serve`` needs and what every command shares. Tools alongside the server (``chat``, ``bench``,
``plugins``) belong to ``fwk_kit``, and come in through the entry-point group ``fwk.commands``.
"""
