/* x86-64 with AVX-512 (F, BW, DQ, VL, as server processors have had since 2017): vectors of 16 floats. */
#if defined(__x86_64__)
#include <immintrin.h>

#include "tile.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx2,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif
#define VECTOR_BYTES 64
#define PRIMITIVES "avx512.h"
#include "vector.h"

const struct tile_kernels diloco_avx512 = {
    "avx512", encode, check, decode, accumulate, outer_step, widen, subtract, add, divide,
};

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
