#!/bin/bash
# What a GPU host has to show: `farm doctor`, the GPU tests, and a tiny sweep whose kernels are judged and timed here.
#   benchmarks/gpu_session.sh [seconds for the tests, 330 by default] [seconds for the sweep, 200 by default]
# Full logs and the rows go to "$OUT" (default: a temporary folder); the short results come last.
set -uo pipefail
cd "$(dirname "$0")/.."
export OUT=${OUT:-$(mktemp -d)} PYTHONUNBUFFERED=1 PYTHONPATH=${PYTHONPATH:-$PWD} FARM_CACHE=${FARM_CACHE:-$(mktemp -d)}
limit=${1:-330} started=$SECONDS
work=$(mktemp -d)
cat >"$work/plan.yaml" <<'PLAN'
name: gpu-session
targets: [sm_80, sm_90a]
specs:
  - {name: causal-d128, num_heads: 16, num_kv_heads: 16, head_dim: 128, batch: 1, seqlen_q: 4096, seqlen_k: 4096, dtype: bf16, masks: [causal]}
  - {name: window-d64, num_heads: 16, num_kv_heads: 4, head_dim: 64, batch: 1, seqlen_q: 2048, seqlen_k: 2048, dtype: fp16, masks: [{window: {left: 255, right: 0}}]}
tuning: {candidates: 1, measure_s: 1.0}
PLAN

python3 -m farm doctor >"$OUT/doctor.txt" 2>&1
echo "[$((SECONDS - started)) s] doctor: exit $?"
timeout -k 10 "$limit" python3 -m pytest -m gpu tests/gpu/test_gpu_{timing,loader,judge}.py -q -rA --durations=15 -p no:cacheprovider >"$OUT/tests.txt" 2>&1
tests=$?
echo "[$((SECONDS - started)) s] tests: exit $tests"
timeout -k 10 "${2:-200}" python3 -m farm sweep "$work/plan.yaml" --catalog "$work/catalog" --executor local --json --quiet >"$OUT/sweep.json" 2>"$OUT/sweep.err"
sweep=$?
python3 -m farm catalog list --catalog "$work/catalog" --json >"$OUT/rows.json" 2>>"$OUT/sweep.err"
echo "[$((SECONDS - started)) s] sweep: exit $sweep"

echo "=== doctor"
grep -E "GPU|CUDA|PyCUDA|can " "$OUT/doctor.txt"
echo "=== tests"
grep -E "^(FAILED|ERROR)|^[a-z]+: AttentionSpec|^(long|short|window): " "$OUT/tests.txt" | cut -c1-900
grep -E "^E  " "$OUT/tests.txt" | cut -c1-700 | head -40
tail -1 "$OUT/tests.txt"
echo "=== sweep"
tail -5 "$OUT/sweep.err"
python3 - "$OUT/sweep.json" <<'TABLE'
import json, sys
try:
    told = json.load(open(sys.argv[1]))
except ValueError as error:
    sys.exit(f"no summary: {error}")
print(told["by_reason"], f"{told['wall_s']:.0f} s", told["stop_reason"])
for row in told["best"]:
    print(*(row[name] for name in ("model", "target", "shape", "dtype", "ours_ms", "rival", "rival_ms", "ratio", "verdict")))
TABLE
[ $tests = 0 ] && [ $sweep = 0 ]
