"""fwk without a server: ``fwk.LLM`` and ``fwk.AsyncLLM``, a model in the process of a Python program.

Core finds them through the entry-point group ``fwk.names`` and imports nothing of them: a server runs without this
package. Here belongs what a program calls and what follows a sequence that it asked for. The engine below is core's,
and what reads HTTP is the server's.
"""

from __future__ import annotations

import os

from fwk_process.threads import spin_briefly

spin_briefly(os.environ)  # heard when this is what imports torch
