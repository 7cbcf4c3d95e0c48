"""Files that options, requests and checkpoints name, which need not be trusted: read within bounds, checked, hashed.

``regular`` opens what is a regular file and never waits, ``config_numbers`` checks what a config.json holds,
``model_hash`` hashes a model's files once for each content, ``fingerprint`` samples them. Nothing of ``fwk`` is
imported here: what a checkpoint is made of is a loader's, what its config.json means
``core/fwk/types/model_config.py``.
"""
