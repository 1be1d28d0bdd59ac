#!/usr/bin/env bash
# Run the native kernels under sanitizers: address and undefined behaviour with g++, data races with clang and its
# OpenMP (libgomp is not instrumented for the race detector, which would report its barriers). Takes three to four
# minutes, mostly for g++ to compile the row kernels.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

build() { # build COMPILER FLAGS...: compile the driver and the kernels
  local compiler=$1
  shift
  "$compiler" -std=c++17 -g -O1 -fopenmp -ffp-contract=off -fno-math-errno -w "$@" -DLEVEL=baseline \
    -c csrc/row_kernels.cpp -o "$out/rows.o"
  for kernels in pair product activation attention; do
    "$compiler" -std=c++17 -g -O1 -fopenmp -w "$@" -DLEVEL=baseline -c "csrc/${kernels}_kernels.cpp" -o "$out/$kernels.o"
  done
  "$compiler" -std=c++17 -g -O1 -fopenmp -ffp-contract=off -fno-math-errno -w "$@" -DLEVEL=baseline \
    -c csrc/adam_kernels.cpp -o "$out/adam.o"
  "$compiler" -std=c++17 -g -O1 -fopenmp -w "$@" \
    csrc/{levels,lookup,sort,update,ids,jagged,pairs,attention,adam,squares}.cpp \
    tests/native/driver.cpp "$out"/{rows,adam,pair,product,activation,attention}.o -o "$out/driver"
  "$compiler" -std=c++17 -g -O1 -fopenmp -pthread -w "$@" csrc/{cache_index,cached_ids,id_map,row_log,memory}.cpp \
    tests/native/cache_driver.cpp -o "$out/cache_driver"
}

vector_flags=()
if grep -q avx2 /proc/cpuinfo; then vector_flags=(-mavx2 -mf16c); fi
build g++ -fno-var-tracking -fsanitize=address,undefined -fno-sanitize-recover=all "${vector_flags[@]}"
echo "addresses and undefined behaviour:"
"$out/driver"
"$out/cache_driver"

# Archer reports OpenMP's barriers to the race detector; the runtime itself is not instrumented. Compiled without AVX2,
# because the race detector does not see accesses of more than 16 bytes.
archer=$(dirname "$(readlink -f "$(command -v clang++ || echo none)")")/../lib/libarcher.so
if [ -e "$archer" ]; then
  build clang++ -fsanitize=thread
  export OMP_TOOL_LIBRARIES=$archer TSAN_OPTIONS="ignore_noninstrumented_modules=1 halt_on_error=1"
  echo "data races:"
  "$out/driver"
  "$out/cache_driver" --threads
else
  echo "data races: not run; install clang++ with its OpenMP (apt-get install clang libomp-dev)"
fi
