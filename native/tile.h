/* The functions of an instruction set, each of which works on one tile, whose values stay in the first-level cache.
 *
 * A tile is 1024 values, a whole number of blocks; in a format with longer blocks it is one block. The scalar set works
 * on these long tiles, and on an array's last tile if that is shorter. So the loops of the other sets have constant
 * lengths.
 */
#ifndef DILOCO_TILE_H
#define DILOCO_TILE_H

#include <float.h>
#include <stdint.h>
#include <string.h>

#include "formats.h"
#include "random.h"

#if FLT_EVAL_METHOD != 0
#error "float expressions must be evaluated in float"
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "payloads are little-endian"
#endif
#ifdef __FAST_MATH__
#error "fast-math changes results"
#endif

enum { TILE = 1024, LARGEST_TILE = 4096 };

static inline int64_t values_of_tile(int32_t format)
{
    return diloco_formats[format].values > TILE ? diloco_formats[format].values : TILE;
}

#define INLINE static inline __attribute__((always_inline))

struct rounding {
    int32_t is_stochastic;
    uint64_t seed;
    int64_t first_block; /* the index, for the random bits, of the block that a tile begins with */
};

/* The arrays' next tiles, of up to 4 bytes a value, which are prefetched while the present tiles are in use: by itself,
 * the processor prefetches only within a memory page. */
struct ahead {
    int arrays;
    const uint8_t *tiles[3];
};

static inline void fetch_ahead(const struct ahead *ahead, int64_t first_value, int64_t values)
{
    for (int array = 0; array < ahead->arrays; array++)
        for (int64_t line = 4 * first_value; line < 4 * (first_value + values); line += 64)
            __builtin_prefetch(ahead->tiles[array] + line);
}

/* The functions that return int64_t return 0, or 1 + the index within the tile of the first block they refuse. */
struct tile_kernels {
    const char *name;

    int64_t (*encode)(int format, const float *values, int64_t length, struct rounding rounding,
                      const struct ahead *ahead, uint8_t *payload);
    int64_t (*check)(int format, const uint8_t *payload, int64_t length);
    void (*decode)(int format, const uint8_t *payload, int64_t length, const struct ahead *ahead, float *values);

    void (*accumulate)(int format, const uint8_t *payload, float weight, int64_t length,
                       const struct ahead *ahead, float *sum);
    void (*outer_step)(int format, const uint8_t *payload, float learning_rate, float mu, int64_t length,
                       const struct ahead *ahead, float *theta, float *momentum);

    void (*widen)(const uint16_t *bfloat16, int64_t length, float *values);
    void (*subtract)(const float *minuend, const float *subtrahend, int64_t length, float *difference);
    void (*add)(const float *addend, int64_t length, float *sum);
    void (*divide)(const float *dividend, float divisor, int64_t length, float *quotient);
};

extern const struct tile_kernels diloco_scalar, diloco_avx2, diloco_avx512, diloco_neon;

/* Returns the set that works on a tile of this length: `chosen` or the scalar one. */
static inline const struct tile_kernels *kernels_for(const struct tile_kernels *chosen, int32_t format, int64_t length)
{
    return length == TILE && values_of_tile(format) == TILE ? chosen : &diloco_scalar;
}

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float load_float(const uint8_t *bytes)
{
    float value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

static inline void store_float(uint8_t *bytes, float value)
{
    memcpy(bytes, &value, sizeof value);
}

#define SIGN_BIT 0x80000000u

/* A block's unit, and the factor that scales its values to the levels. */
struct scale {
    float unit, inverse;
};

static inline struct scale scale_of_range(float range, float largest_level)
{
    float unit = range / largest_level;
    if (unit < FLT_MIN)
        return (struct scale){0.0f, 0.0f};
    return (struct scale){unit, largest_level / range};
}

/* Returns 1 if an encoder can have made a block with this unit, else 0. `codes` is the bitwise or of its codes. */
static inline int unit_is_sound(float unit, float largest_level, uint8_t codes)
{
    if (bits_of(unit) == 0)
        return codes == 0;
    return unit >= FLT_MIN && unit * largest_level <= LARGEST_DECODED;
}

static inline int range_is_sound(float unit, float minimum, uint8_t codes)
{
    float maximum = minimum + 15.0f * unit;
    return unit_is_sound(unit, 15.0f, codes) && minimum >= -LARGEST_DECODED && maximum <= LARGEST_DECODED &&
           bits_of(minimum) != SIGN_BIT;
}

#define LARGEST_INT8 127.0f
#define LARGEST_UINT4 15.0f
#define LARGEST_E2M1 12.0f
#define LARGEST_E3M0 64.0f

/* The levels by code; codes from 8 on have the sign bit set. */
static const int8_t E2M1_LEVELS[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
static const int8_t E3M0_LEVELS[16] = {0, 1, 2, 4, 8, 16, 32, 64, 0, -1, -2, -4, -8, -16, -32, -64};
static const int8_t UINT4_LEVELS[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* Half precision: 65520 is the least magnitude that rounds to its infinity. */
#define HALF_OVERFLOW 65520.0f
#define SMALLEST_NORMAL_HALF 0x38800000u   /* the bits of 2^-14 */
#define HALF_EXPONENT_OFFSET (112u << 23) /* the exponents' biases differ by 112 */

/* Returns the bits of the nearest half-precision number, without a branch, so that loops can be vectorized. Adding 0.5
 * rounds small magnitudes to multiples of 2^-24, the smallest half-precision number. */
static inline uint16_t half_of(float value)
{
    uint32_t magnitude = bits_of(value) & ~SIGN_BIT;
    uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    uint32_t normal = (magnitude - HALF_EXPONENT_OFFSET + 0xfff + (magnitude >> 13 & 1)) >> 13;
    uint32_t is_subnormal = -(uint32_t)(magnitude < SMALLEST_NORMAL_HALF);
    return (uint16_t)((bits_of(value) >> 16 & 0x8000) | (subnormal & is_subnormal) | (normal & ~is_subnormal));
}

static inline float value_of_half(uint16_t half)
{
    float magnitude = float_of((uint32_t)(half & 0x7fff) << 13) * 0x1p112f;
    return float_of(bits_of(magnitude) | (uint32_t)(half & 0x8000) << 16);
}

enum { MINUS_ZERO = 8, E2M1_MANTISSA_SHIFT = 22, E3M0_MANTISSA_SHIFT = 23 };

#endif
