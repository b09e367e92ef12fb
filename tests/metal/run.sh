#!/usr/bin/env bash
# Builds the Metal backend for the emulator (Linux, clang 17 or newer) and runs its tests, then the
# shared suite on it. The environment needs the test extra, nanobind, cmake and ninja.
#   PYTHON=python3  CLANG=clang++-19  BUILD=build/metal-emulated  bash tests/metal/run.sh [pytest options]
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=$(${PYTHON:-python3} -c 'import sys; print(sys.executable)')
clang=${CLANG:-clang++-19}
build=${BUILD:-$root/build/metal-emulated}
mkdir -p "$build"

cmake -S "$root" -B "$build" -G Ninja -DPython_EXECUTABLE="$python" -DCMAKE_CXX_COMPILER="$clang" \
  -DJFT_METAL=ON -DJFT_CPU=ON -DJFT_CUDA=OFF ${CMAKE_ARGS:-} > "$build.log" 2>&1 || { tail -20 "$build.log"; exit 1; }
cmake --build "$build" >> "$build.log" 2>&1 || { tail -40 "$build.log"; exit 1; }
cmake --install "$build" --prefix "$build/stage" >> "$build.log"

cd "$root"
export PYTHONPATH="$root:$build/stage" JAX_PLATFORMS=cpu JFT_EMULATOR_CACHE="$build/libraries"
"$python" -m pytest -q tests/test_metal_emulator.py tests/test_metal_kernels.py tests/test_metal_mutations.py "$@"
"$python" -m pytest -q --backend metal-emulated tests/test_acceptance.py tests/test_numerics.py "$@"
