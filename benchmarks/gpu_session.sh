#!/usr/bin/env bash
# One short visit to a GPU machine: correctness first, then a part of the benchmark table.
#   OUT=results bash benchmarks/gpu_session.sh        (PYTHONPATH holds the checkout and the native package)
# Every part has a time limit and leaves its log in $OUT, so a visit that is cut off keeps what was done.
set -u
: "${OUT:?a folder for logs and results}"
cd "$(dirname "$0")/.."
export XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONUNBUFFERED=1
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$OUT/device.txt"

echo "== random calls and the tests that need a GPU, side by side"
for n in 0 1 2 3 4 5; do
  timeout 100 python3 tests/cuda/draws.py --start $((n * 200)) --count 200 --seconds 70 $([ $((n % 2)) = 0 ] && echo "--hopper --largest 700") >"$OUT/draws$n.log" 2>&1 &
done
timeout 110 python3 -m pytest -q --backend cuda -p no:cacheprovider -n 4 -k "not random_calls and not offsets_beyond" \
  tests/test_cuda_gpu.py >"$OUT/gpu_tests.log" 2>&1
wait
tail -n 3 "$OUT"/draws*.log "$OUT/gpu_tests.log"

echo "== timings"
timeout "${JFT_TIMING_SECONDS:-110}" python3 benchmarks/run.py --backend cuda --rounds 5 --output "$OUT" \
  --only "${JFT_ROWS:-D256,D192,S8192 H16 D128,S8192 H32 D64}" 2>"$OUT/timing_progress.log" | tee "$OUT/timing.log"
