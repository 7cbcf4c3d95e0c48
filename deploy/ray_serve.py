"""fwk behind Ray Serve, one server in each replica (pip install 'fwk[ray]' 'ray[serve]').

    serve run deploy.ray_serve:app model=smollm2-135m-instruct max_replicas=4 cpus_per_replica=4

or, without this file, serve run fwk_pools.ray:app with the same words. All of fwk's APIs are at http://127.0.0.1:8000.
Further words are options of fwk serve: api_key=secret, max_running_requests=64.
"""

from __future__ import annotations

from fwk_pools.ray import app as app
