#!/usr/bin/env bash
# The embedding kernels under the sanitizers: addresses and undefined behaviour with g++, data races with clang and its
# own OpenMP (libgomp is not built for the race detector, which would report its barriers).
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

build() { # build COMPILER FLAGS...: the driver with the row kernels at the best level that this machine has
  local compiler=$1
  shift
  local level=baseline flags=()
  if grep -q avx2 /proc/cpuinfo; then flags=(-mavx2 -mf16c); fi
  "$compiler" -std=c++17 -g -O1 -fopenmp -ffp-contract=off -fno-math-errno -w "$@" "${flags[@]}" -DLEVEL=$level \
    -c csrc/row_kernels.cpp -o "$out/rows.o"
  "$compiler" -std=c++17 -g -O1 -fopenmp -w "$@" csrc/{levels,lookup,sort,update,ids}.cpp tests/native/driver.cpp \
    "$out/rows.o" -o "$out/driver"
}

build g++ -fsanitize=address,undefined -fno-sanitize-recover=all
"$out/driver"
if command -v clang++ >/dev/null && build clang++ -fsanitize=thread 2>"$out/why"; then
  archer=$(find / -name 'libarcher.so*' -not -path '/proc/*' 2>/dev/null | head -1)
  OMP_TOOL_LIBRARIES=$archer TSAN_OPTIONS="ignore_noninstrumented_modules=1 halt_on_error=1" "$out/driver"
else
  echo "data races: not run, this needs clang++ with its OpenMP (apt-get install clang libomp-dev)"
fi
