/* aarch64, where NEON is always there: vectors of 4 floats. */
#if defined(__aarch64__)
#include <arm_neon.h>

#include "tile.h"

#define VECTOR_BYTES 16
#define PRIMITIVES "neon.h"
#include "vector.h"

const struct tile_kernels diloco_neon = {
    "neon", encode, check, decode, accumulate, outer_step, widen, subtract, add, divide,
};
#endif
