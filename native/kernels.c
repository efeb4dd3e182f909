/* Plain C11, written so that a compiler vectorizes the loops over a block. No float sum is ever reordered, and no
 * multiplication is fused with an addition (-ffp-contract=off): each operation rounds once, as IEEE 754 says. */
#include "kernels.h"

#include <float.h>
#include <math.h>
#include <string.h>

#if FLT_EVAL_METHOD != 0
#error "float expressions must be evaluated in float"
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "payloads are little-endian"
#endif
#ifdef __FAST_MATH__
#error "fast-math changes results"
#endif

enum { BLOCK = 1024, SCALE_BYTES = sizeof(float), BLOCK_BYTES = SCALE_BYTES + BLOCK };

static const float LARGEST_CODE = 127.0f;
static const uint8_t FORBIDDEN_CODE = 0x80; /* -128: without it the codes are symmetric */

/* Adding 1.5 * 2^23 to a float of magnitude below 2^22 rounds it to the nearest integer, ties to even, and leaves that
 * integer in two's complement in the low bits of the sum. */
static const float ROUNDER = 12582912.0f;

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

static inline int64_t block_length(int64_t count, int64_t block)
{
    int64_t rest = count - block * BLOCK;
    return rest < BLOCK ? rest : BLOCK;
}

static inline int64_t block_count(int64_t count)
{
    return (count + BLOCK - 1) / BLOCK;
}

/* Whether every code times this scale is finite. False for NaN, too. */
static inline int scale_is_sound(float scale)
{
    return !signbit(scale) && LARGEST_CODE * scale <= FLT_MAX;
}

/* As integers, magnitudes sort as the floats do, infinity and NaN above all others: one integer maximum, which may be
 * taken in any order, finds the largest magnitude and everything that isn't finite. */
static float largest_magnitude(const float *values, int64_t length)
{
    int32_t largest = 0;
    for (int64_t i = 0; i < length; i++) {
        int32_t magnitude = (int32_t)(bits_of(values[i]) & 0x7fffffffu);
        largest = magnitude > largest ? magnitude : largest;
    }
    return float_of((uint32_t)largest);
}

/* scale = absmax / 127, code = round(value * (127 / absmax)): at most 127 in magnitude, so nothing is clamped. A block
 * whose scale would be subnormal (absmax below 1.5e-36) is encoded as zeros: its inverse could overflow, and
 * processors set to flush subnormals would decode something else. */
static int encode_block(const float *restrict values, int64_t length, uint8_t *restrict out)
{
    float absmax = largest_magnitude(values, length);
    float scale = absmax / LARGEST_CODE;
    if (!scale_is_sound(scale))
        return 0;
    if (scale < FLT_MIN)
        scale = 0.0f;
    float inverse = scale > 0.0f ? LARGEST_CODE / absmax : 0.0f;
    memcpy(out, &scale, SCALE_BYTES);
    uint8_t *restrict codes = out + SCALE_BYTES;
    for (int64_t i = 0; i < length; i++)
        codes[i] = (uint8_t)bits_of(values[i] * inverse + ROUNDER);
    return 1;
}

int64_t diloco_quantize(uintptr_t values, int64_t count, uintptr_t out)
{
    const float *source = (const float *)values;
    uint8_t *payload = (uint8_t *)out;
    for (int64_t block = 0; block < block_count(count); block++)
        if (!encode_block(source + block * BLOCK, block_length(count, block), payload + block * BLOCK_BYTES))
            return 1 + block;
    return 0;
}

int64_t diloco_quantize_difference(uintptr_t theta, uintptr_t local, int64_t count, uintptr_t out)
{
    uint8_t *payload = (uint8_t *)out;
    float difference[BLOCK]; /* 4 KiB, stays in the first-level cache */
    for (int64_t block = 0; block < block_count(count); block++) {
        const float *from = (const float *)theta + block * BLOCK;
        const float *subtracted = (const float *)local + block * BLOCK;
        int64_t length = block_length(count, block);
        for (int64_t i = 0; i < length; i++)
            difference[i] = from[i] - subtracted[i];
        if (!encode_block(difference, length, payload + block * BLOCK_BYTES))
            return 1 + block;
    }
    return 0;
}

int64_t diloco_finish_average(uintptr_t accumulator, float total_weight, int64_t count, uintptr_t out)
{
    uint8_t *payload = (uint8_t *)out;
    float average[BLOCK];
    for (int64_t block = 0; block < block_count(count); block++) {
        const float *sum = (const float *)accumulator + block * BLOCK;
        int64_t length = block_length(count, block);
        for (int64_t i = 0; i < length; i++)
            average[i] = sum[i] / total_weight;
        if (!encode_block(average, length, payload + block * BLOCK_BYTES))
            return 1 + block;
    }
    return 0;
}

static inline float scale_of(const uint8_t *block)
{
    float scale;
    memcpy(&scale, block, SCALE_BYTES);
    return scale;
}

static inline const int8_t *codes_of(const uint8_t *block)
{
    return (const int8_t *)(block + SCALE_BYTES);
}

static int block_is_sound(const uint8_t *block, int64_t length, float weight)
{
    float scale = scale_of(block);
    if (!scale_is_sound(scale) || !scale_is_sound(weight * scale))
        return 0;
    uint8_t forbidden = 0;
    for (int64_t i = 0; i < length; i++)
        forbidden |= block[SCALE_BYTES + i] == FORBIDDEN_CODE;
    return !forbidden;
}

static int64_t check_weighted(const uint8_t *payload, int64_t count, float weight)
{
    for (int64_t block = 0; block < block_count(count); block++)
        if (!block_is_sound(payload + block * BLOCK_BYTES, block_length(count, block), weight))
            return 1 + block;
    return 0;
}

int64_t diloco_check_payload(uintptr_t payload, int64_t count)
{
    return check_weighted((const uint8_t *)payload, count, 1.0f);
}

int64_t diloco_dequantize(uintptr_t payload, int64_t count, uintptr_t out)
{
    int64_t refused = diloco_check_payload(payload, count);
    if (refused)
        return refused;
    for (int64_t block = 0; block < block_count(count); block++) {
        const uint8_t *bytes = (const uint8_t *)payload + block * BLOCK_BYTES;
        const int8_t *codes = codes_of(bytes);
        float scale = scale_of(bytes);
        float *restrict values = (float *)out + block * BLOCK;
        int64_t length = block_length(count, block);
        for (int64_t i = 0; i < length; i++)
            values[i] = scale * (float)codes[i];
    }
    return 0;
}

int64_t diloco_accumulate(uintptr_t payload, float weight, int64_t count, uintptr_t accumulator)
{
    int64_t refused = check_weighted((const uint8_t *)payload, count, weight);
    if (refused)
        return refused;
    for (int64_t block = 0; block < block_count(count); block++) {
        const uint8_t *bytes = (const uint8_t *)payload + block * BLOCK_BYTES;
        const int8_t *codes = codes_of(bytes);
        float weighted_scale = weight * scale_of(bytes);
        float *restrict sum = (float *)accumulator + block * BLOCK;
        int64_t length = block_length(count, block);
        for (int64_t i = 0; i < length; i++)
            sum[i] += weighted_scale * (float)codes[i];
    }
    return 0;
}

int64_t diloco_outer_step(uintptr_t payload, uintptr_t theta, uintptr_t momentum, int64_t count, float learning_rate,
                          float mu)
{
    int64_t refused = diloco_check_payload(payload, count);
    if (refused)
        return refused;
    for (int64_t block = 0; block < block_count(count); block++) {
        const uint8_t *bytes = (const uint8_t *)payload + block * BLOCK_BYTES;
        const int8_t *codes = codes_of(bytes);
        float scale = scale_of(bytes);
        float *restrict parameters = (float *)theta + block * BLOCK;
        float *restrict velocity = (float *)momentum + block * BLOCK;
        int64_t length = block_length(count, block);
        for (int64_t i = 0; i < length; i++) {
            float gradient = scale * (float)codes[i];
            float updated = mu * velocity[i] + gradient;
            velocity[i] = updated;
            parameters[i] -= learning_rate * (gradient + mu * updated);
        }
    }
    return 0;
}
