/* x86-64 with AVX2: vectors of 8 floats. */
#if defined(__x86_64__)
#include <immintrin.h>

#include "tile.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC target("avx2")
#endif
#define VECTOR_BYTES 32
#define PRIMITIVES "avx2.h"
#include "vector.h"

const struct tile_kernels diloco_avx2 = {
    "avx2", encode, check, decode, accumulate, outer_step, widen, subtract, add, divide,
};

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
