#!/usr/bin/env bash
# The table of arms: speed, memory and quality of every arm at three context lengths, on the demo model.
# Takes about an hour on two cores, most of it quality. Results: benchmarks/results/arms-<prompt tokens>.json
#   benchmarks/arms.sh                 all three lengths, the default arms
#   benchmarks/arms.sh 4096            one length
#   ARMS=transformers,sparse benchmarks/arms.sh 4096
set -euo pipefail
cd "$(dirname "$0")/.."
GSM=${GSM:-.venv/bin/gsm}
ARMS=${ARMS:-transformers,full,tiers,sparse}
mkdir -p benchmarks/results
LENGTHS=${*:-1024 4096 7680}
for n in $LENGTHS; do
  "$GSM" bench demo --prompt-tokens "$n" --new-tokens 128 --runs 3 --arms "$ARMS" \
    --json "benchmarks/results/arms-$n.json"
done
