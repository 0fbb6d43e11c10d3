#!/bin/sh
# Every run behind docs/results.md, then the evidence of it, then the page; what is done already is not done again.
# usage: scripts/make_results.sh [FOLDER OF THE RUNS, default runs/results]; PAST and PYTHON name the programs,
# SETTINGS more options of 'past compare', for a quick look.
set -eu
cd "$(dirname "$0")/.."
runs=${1:-runs/results}
past=${PAST:-past}
python=${PYTHON:-python}
results=${RESULTS:-results/embedded}
page=${PAGE:-docs/results.md}

for suite in main factorial branches objectives sampling; do
  # shellcheck disable=SC2086
  $past compare --suite "$suite" --out "$runs/default" ${SETTINGS:-}
done
for world in weaker-teacher little-copying; do
  if [ ! -f "$runs/models/$world/config.json" ]; then
    rm -rf "$runs/models/$world.part"
    mkdir -p "$runs/models"
    $python scripts/make_embedded_model.py --seed 17 --world "$world" --out "$runs/models/$world.part"
    mv "$runs/models/$world.part" "$runs/models/$world"
  fi
  # shellcheck disable=SC2086
  $past compare --suite robustness --set model.path="$(cd "$runs/models/$world" && pwd)" --out "$runs/$world" ${SETTINGS:-}
done
for world in default weaker-teacher little-copying; do
  $past results collect "$runs/$world/runs" --world "$world" --folder "$results"
done
$past results rebuild --folder "$results" --page "$page"
