#!/usr/bin/env bash
# What a user gets: the wheel, made from the sdist, installed into a new environment and used from an empty folder.
set -euo pipefail
cd "$(dirname "$0")/.."
repository=$PWD
work=$(mktemp -d)
trap '[ -z "${watch:-}" ] || kill "$watch"; rm -rf "$work"' EXIT
pip_() { "$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt "${@:2}"; }

"${PYTHON:-python3}" -m venv "$work/build"
pip_ "$work/build" build
"$work/build/bin/python" -m build --outdir "$work/dist" . >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }

"${PYTHON:-python3}" -m venv "$work/venv"
pip_ "$work/venv" torch
pip_ "$work/venv" "$work"/dist/*.whl
"$work/venv/bin/python" -m pip check --disable-pip-version-check

mkdir "$work/empty"
cd "$work/empty"
export PATH="$work/venv/bin:$PATH" HOME="$work/empty" XDG_CACHE_HOME="$work/cache" OMP_NUM_THREADS=1
unset PYTHONPATH
python - "$repository" <<'PY'
import sys
from pathlib import Path

import gguf, matplotlib, pip  # what 'past report' and 'past models pull' need
import past_opsd

own, there = Path(sys.argv[1], "past_opsd"), Path(past_opsd.__file__).parent
assert own not in (there, *there.parents), there
kept = {p.relative_to(own) for p in own.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
missing = [str(p) for p in kept if not (there / p).is_file()]
assert not missing, f"not in the wheel: {missing}"
PY
python -m past_opsd --version
past recipes >recipes
grep -q '^embedded/past ' recipes
past models list
past demo --seeds 17 --set run.cycles=2 --set 'evaluation.at=[0.0, 1.0]' --set task.eval_problems=4 \
    --set task.train_problems=60 --set run.checkpoint_every=1
past report runs/demo --out report.html
test -s report.html

past watch runs/demo >url &
watch=$!
while [ ! -s url ] && kill -0 "$watch"; do sleep 0.3; done
python -c 'import sys, urllib.request as r; print("past watch:", len(r.urlopen(sys.argv[1]).read()), "bytes")' \
    "$(cut -d' ' -f1 url)"
echo "the wheel works"
