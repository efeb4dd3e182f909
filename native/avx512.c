/* x86-64 with AVX-512 (F, BW, DQ, VL, as server processors have had since 2017): vectors of 16 floats. */
#if defined(__x86_64__)
#include <immintrin.h>

#include "tile.h"

#pragma GCC target("avx2,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#define VECTOR_BYTES 64
#define PRIMITIVES "avx512.h"
#include "vector.h"

static int is_supported(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

const struct tile_kernels diloco_avx512 = {
    "avx512", is_supported, encode, check, decode, accumulate, outer_step, widen, subtract, add, divide,
};
#endif
