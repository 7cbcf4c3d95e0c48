#!/usr/bin/env bash
# Sets llama.cpp, vLLM, OpenVINO GenAI and transformers up in environments of their own (PEERS_DIR, default
# ~/.cache/fwk/peers), runs S1 to S5 on them and on fwk in turn, and writes benchmarks/results/DATE-peers.md.
# --help has the options. Needs fwk[bench], cmake, ninja, g++, and a package index with torch's CPU builds.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$(test -x .venv/bin/python && echo .venv/bin/python || echo python3)}
exec "$python" -m benchmarks.peers "$@"
