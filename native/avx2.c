/* x86-64 with AVX2: vectors of 8 floats. */
#if defined(__x86_64__)
#include <immintrin.h>

#include "tile.h"

#pragma GCC target("avx2")
#define VECTOR_BYTES 32
#define PRIMITIVES "avx2.h"
#include "vector.h"

static int is_supported(void)
{
    return __builtin_cpu_supports("avx2");
}

const struct tile_kernels diloco_avx2 = {
    "avx2", is_supported, encode, check, decode, accumulate, outer_step, widen, subtract, add, divide,
};
#endif
