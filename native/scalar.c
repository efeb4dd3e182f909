/* The reference: each format as formats.h defines it, one value at a time. The other sets must give the same bits. */
#include "tile.h"

#include <math.h>

#include "elementwise.h"

/* As integers, magnitudes sort as the floats do, infinities and NaNs above all others. */
static float largest_magnitude(const float *values, int64_t length)
{
    uint32_t largest = 0;
    for (int64_t i = 0; i < length; i++) {
        uint32_t magnitude = bits_of(values[i]) & ~SIGN_BIT;
        largest = magnitude > largest ? magnitude : largest;
    }
    return float_of(largest);
}

/* Returns the integer nearest to v, or, with stochastic rounding, one of the two integers around v. */
static int32_t round_linear(float v, const struct rounding *rounding, struct key key, int64_t index)
{
    if (!rounding->is_stochastic)
        return (int32_t)lrintf(v);
    int32_t fixed_point = (int32_t)lrintf(v * 65536.0f);
    return (fixed_point + (int32_t)random_bits(key, index)) >> 16;
}

/* Returns the code of a 4-bit float for w. `shift` is the number of low bits of t (see formats.h) below the code. */
static uint8_t round_exponential(float w, int shift, const struct rounding *rounding, struct key key, int64_t index)
{
    float magnitude = fabsf(w);
    uint32_t t = bits_of(magnitude + fmaxf(magnitude, 2.0f));
    if (rounding->is_stochastic)
        t += random_bits(key, index) << (shift - 16);
    else
        t += (1u << (shift - 1)) - 1 + (t >> shift & 1);
    uint8_t level = t >> shift & 7;
    return level != 0 && signbit(w) ? MINUS_ZERO | level : level;
}

static void put_half_byte(uint8_t *codes, int64_t index, uint8_t code)
{
    if (index % 2 == 0)
        codes[index / 2] = code;
    else
        codes[index / 2] |= (uint8_t)(code << 4);
}

static uint8_t half_byte(const uint8_t *codes, int64_t index)
{
    return index % 2 == 0 ? codes[index / 2] & 15 : codes[index / 2] >> 4;
}

/* Encodes one block; `key` is the key of its random bits. Returns 1, or 0 if the block cannot be encoded. */
typedef int encode_block(const float *values, int64_t length, const struct rounding *rounding, struct key key,
                         uint8_t *block);
/* Returns 1 if an encoder can have made the block, else 0. */
typedef int check_block(const uint8_t *block, int64_t length);
typedef void decode_block(const uint8_t *block, int64_t length, float *values);

static int encode_int8(const float *values, int64_t length, const struct rounding *rounding, struct key key,
                       uint8_t *block)
{
    float absmax = largest_magnitude(values, length);
    if (!(absmax <= LARGEST_ENCODED))
        return 0;
    struct scale scale = scale_of_range(absmax, LARGEST_INT8);
    store_float(block, scale.unit);
    for (int64_t i = 0; i < length; i++)
        block[4 + i] = (uint8_t)round_linear(values[i] * scale.inverse, rounding, key, i);
    return 1;
}

static int check_int8(const uint8_t *block, int64_t length)
{
    uint8_t codes = 0, is_forbidden = 0;
    for (int64_t i = 0; i < length; i++) {
        codes |= block[4 + i];
        is_forbidden |= block[4 + i] == 0x80;
    }
    return !is_forbidden && unit_is_sound(load_float(block), LARGEST_INT8, codes);
}

static void decode_int8(const uint8_t *block, int64_t length, float *values)
{
    float unit = load_float(block);
    for (int64_t i = 0; i < length; i++)
        values[i] = unit * (float)(int8_t)block[4 + i];
}

static int encode_uint4(const float *values, int64_t length, const struct rounding *rounding, struct key key,
                        uint8_t *block)
{
    if (!(largest_magnitude(values, length) <= LARGEST_ENCODED))
        return 0;
    float minimum = values[0], maximum = values[0];
    for (int64_t i = 1; i < length; i++) {
        minimum = fminf(minimum, values[i]);
        maximum = fmaxf(maximum, values[i]);
    }
    minimum += 0.0f; /* -0 becomes +0 */
    struct scale scale = scale_of_range(maximum - minimum, LARGEST_UINT4);
    store_float(block, scale.unit);
    store_float(block + 4, minimum);
    for (int64_t i = 0; i < length; i++)
        put_half_byte(block + 8, i, (uint8_t)round_linear((values[i] - minimum) * scale.inverse, rounding, key, i));
    return 1;
}

static int check_uint4(const uint8_t *block, int64_t length)
{
    uint8_t codes = 0;
    for (int64_t i = 0; i < (length + 1) / 2; i++)
        codes |= block[8 + i];
    int is_padded = length % 2 == 0 || half_byte(block + 8, length) == 0;
    return is_padded && range_is_sound(load_float(block), load_float(block + 4), codes);
}

static void decode_uint4(const uint8_t *block, int64_t length, float *values)
{
    float unit = load_float(block), minimum = load_float(block + 4);
    for (int64_t i = 0; i < length; i++)
        values[i] = minimum + unit * (float)half_byte(block + 8, i);
}

static int encode_exponential(const float *values, int64_t length, float largest_level, float w_per_level, int shift,
                              const struct rounding *rounding, struct key key, uint8_t *block)
{
    float absmax = largest_magnitude(values, length);
    if (!(absmax <= LARGEST_ENCODED))
        return 0;
    struct scale scale = scale_of_range(absmax, largest_level);
    store_float(block, scale.unit);
    for (int64_t i = 0; i < length; i++) {
        float w = values[i] * (w_per_level * scale.inverse);
        put_half_byte(block + 4, i, round_exponential(w, shift, rounding, key, i));
    }
    return 1;
}

static int check_exponential(const uint8_t *block, int64_t length, float largest_level)
{
    uint8_t codes = 0, is_forbidden = 0;
    for (int64_t i = 0; i < length; i++) {
        codes |= half_byte(block + 4, i);
        is_forbidden |= half_byte(block + 4, i) == MINUS_ZERO;
    }
    int is_padded = length % 2 == 0 || half_byte(block + 4, length) == 0;
    return is_padded && !is_forbidden && unit_is_sound(load_float(block), largest_level, codes);
}

static void decode_exponential(const uint8_t *block, int64_t length, const int8_t *levels, float *values)
{
    float unit = load_float(block);
    for (int64_t i = 0; i < length; i++)
        values[i] = unit * (float)levels[half_byte(block + 4, i)];
}

static int encode_e2m1(const float *values, int64_t length, const struct rounding *rounding, struct key key,
                       uint8_t *block)
{
    return encode_exponential(values, length, LARGEST_E2M1, 1.0f, E2M1_MANTISSA_SHIFT, rounding, key, block);
}

static int check_e2m1(const uint8_t *block, int64_t length)
{
    return check_exponential(block, length, LARGEST_E2M1);
}

static void decode_e2m1(const uint8_t *block, int64_t length, float *values)
{
    decode_exponential(block, length, E2M1_LEVELS, values);
}

static int encode_e3m0(const float *values, int64_t length, const struct rounding *rounding, struct key key,
                       uint8_t *block)
{
    return encode_exponential(values, length, LARGEST_E3M0, 2.0f, E3M0_MANTISSA_SHIFT, rounding, key, block);
}

static int check_e3m0(const uint8_t *block, int64_t length)
{
    return check_exponential(block, length, LARGEST_E3M0);
}

static void decode_e3m0(const uint8_t *block, int64_t length, float *values)
{
    decode_exponential(block, length, E3M0_LEVELS, values);
}

static int encode_fp16(const float *values, int64_t length, const struct rounding *rounding, struct key key,
                       uint8_t *block)
{
    (void)rounding, (void)key;
    if (!(largest_magnitude(values, length) < HALF_OVERFLOW))
        return 0;
    for (int64_t i = 0; i < length; i++) {
        uint16_t half = half_of(values[i]);
        memcpy(block + 2 * i, &half, 2);
    }
    return 1;
}

static int check_fp16(const uint8_t *block, int64_t length)
{
    uint8_t is_forbidden = 0;
    for (int64_t i = 0; i < length; i++)
        is_forbidden |= (block[2 * i + 1] & 0x7c) == 0x7c;
    return !is_forbidden;
}

static void decode_fp16(const uint8_t *block, int64_t length, float *values)
{
    for (int64_t i = 0; i < length; i++) {
        uint16_t half;
        memcpy(&half, block + 2 * i, 2);
        values[i] = value_of_half(half);
    }
}

#include "sparse.h"

static const struct {
    encode_block *encode;
    check_block *check;
    decode_block *decode;
} blocks[FORMATS] = {
    [INT8] = {encode_int8, check_int8, decode_int8},
    [UINT4] = {encode_uint4, check_uint4, decode_uint4},
    [E2M1_BLOCK32] = {encode_e2m1, check_e2m1, decode_e2m1},
    [E2M1] = {encode_e2m1, check_e2m1, decode_e2m1},
    [E3M0] = {encode_e3m0, check_e3m0, decode_e3m0},
    [FP16] = {encode_fp16, check_fp16, decode_fp16},
    [SPARSE] = {encode_sparse, check_sparse, decode_sparse},
};

static inline int64_t block_length(const struct format *format, int64_t start, int64_t length)
{
    return length - start < format->values ? length - start : format->values;
}

static int64_t encode(int format, const float *values, int64_t length, struct rounding rounding,
                      const struct ahead *ahead, uint8_t *payload)
{
    (void)ahead;
    const struct format *layout = &diloco_formats[format];
    int64_t index = 0;
    for (int64_t start = 0; start < length; start += layout->values, index++) {
        struct key key = key_of_block(rounding.seed, rounding.first_block + index);
        if (!blocks[format].encode(values + start, block_length(layout, start, length), &rounding, key, payload))
            return 1 + index;
        payload += bytes_of_block(layout, layout->values);
    }
    return 0;
}

static int64_t check(int format, const uint8_t *payload, int64_t length)
{
    const struct format *layout = &diloco_formats[format];
    int64_t index = 0;
    for (int64_t start = 0; start < length; start += layout->values, index++) {
        if (!blocks[format].check(payload, block_length(layout, start, length)))
            return 1 + index;
        payload += bytes_of_block(layout, layout->values);
    }
    return 0;
}

static void decode(int format, const uint8_t *payload, int64_t length, const struct ahead *ahead, float *values)
{
    (void)ahead;
    const struct format *layout = &diloco_formats[format];
    for (int64_t start = 0; start < length; start += layout->values) {
        blocks[format].decode(payload, block_length(layout, start, length), values + start);
        payload += bytes_of_block(layout, layout->values);
    }
}

static void accumulate(int format, const uint8_t *payload, float weight, int64_t length, const struct ahead *ahead,
                       float *sum)
{
    float values[LARGEST_TILE];
    decode(format, payload, length, ahead, values);
    for (int64_t i = 0; i < length; i++)
        accumulate_value(values[i], weight, &sum[i]);
}

static void outer_step(int format, const uint8_t *payload, float learning_rate, float mu, int64_t length,
                       const struct ahead *ahead, float *theta, float *momentum)
{
    float gradient[LARGEST_TILE];
    decode(format, payload, length, ahead, gradient);
    for (int64_t i = 0; i < length; i++)
        step_value(gradient[i], learning_rate, mu, &theta[i], &momentum[i]);
}

const struct tile_kernels diloco_scalar = {
    "scalar", encode, check, decode, accumulate, outer_step, widen, subtract, add, divide,
};
