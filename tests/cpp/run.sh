#!/bin/bash
# All C++ tests: natively on every instruction set, under the sanitizers (address and undefined behaviour in one build; threads), and for arm64 under qemu.
#   tests/cpp/run.sh [native] [sanitize] [tsan] [neon]      (default: all of them)
# Builds in build/cpp-tests/ of the checkout. JFT_TEST_CALLS sets the number of random calls.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(cd "$here/../.." && pwd)/build/cpp-tests
generator=$(command -v ninja > /dev/null && echo Ninja || echo "Unix Makefiles")
calls=${JFT_TEST_CALLS:-200}

build() {  # name, cmake arguments...
  local name=$1
  shift
  cmake -S "$here" -B "$out/$name" -G "$generator" "$@" > "$out/$name.log" 2>&1 &&
    cmake --build "$out/$name" -j 2 >> "$out/$name.log" 2>&1 || { tail -40 "$out/$name.log"; exit 1; }
}

run() {  # name, number of random calls, command prefix...
  local name=$1 n=$2
  shift 2
  echo "== $name"
  for test in semantics_test convert_test numerics_test; do "$@" "$out/$name/$test"; done
  "$@" "$out/$name/kernels_test" "$n"
}

mkdir -p "$out"
for what in "${@:-native sanitize tsan neon}"; do
  for name in $what; do
    case $name in
      native) build native && run native "$calls" env ;;
      sanitize) build sanitize -DCMAKE_BUILD_TYPE=RelWithDebInfo \
        -DCMAKE_CXX_FLAGS="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer" &&
        run sanitize "$calls" env ASAN_OPTIONS=detect_leaks=1 ;;
      tsan) build tsan -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS="-fsanitize=thread" &&
        run tsan $((calls / 4)) env TSAN_OPTIONS=halt_on_error=1 ;;
      neon) build neon -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
        -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_EXE_LINKER_FLAGS=-static &&
        run neon $((calls / 2)) qemu-aarch64 ;;
      *) echo "unknown: $name (native sanitize tsan neon)"; exit 2 ;;
    esac
  done
done
echo "all C++ tests passed"
