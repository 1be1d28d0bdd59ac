#pragma once

// Always inlined: kernels whose vectors a call would move through memory, and functions that only prefetch, which GCC
// takes as functions without effect, so that it drops calls that it does not inline.
#define ALWAYS inline __attribute__((always_inline))
