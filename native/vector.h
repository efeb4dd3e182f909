/* The formats with vectors: the same arithmetic as scalar.c, many values at a time, on whole tiles only.
 *
 * A file for an instruction set defines VECTOR_BYTES and these functions before it includes this one. A group is 32
 * values: GROUP vectors of LANES numbers each, or one vector of 32 bytes (`bytes`).
 *   larger_words, larger, smaller     lane by lane
 *   with_sign(words, floats)          words: negated where the float is negative
 *   to_nearest(floats)                words: the nearest integers, ties to even
 *   narrow(words[GROUP])              bytes, from words between -128 and 127
 *   magnitude_of_bytes(bytes)         of signed bytes
 *   store_half_bytes(codes, to)       two codes a byte, 16 bytes
 *   load_half_bytes(from)             bytes: 32 codes
 *   look_up(table, codes)             bytes: table[code]
 */

enum { LANES = VECTOR_BYTES / 4, GROUP_VALUES = 32, GROUP = GROUP_VALUES / LANES };

typedef float floats __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t words __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t unsigned_words __attribute__((vector_size(VECTOR_BYTES)));
typedef uint8_t bytes __attribute__((vector_size(GROUP_VALUES)));

#include PRIMITIVES
#include "elementwise.h"

INLINE floats load(const float *values)
{
    floats loaded;
    memcpy(&loaded, values, sizeof loaded);
    return loaded;
}

INLINE bytes load_bytes(const uint8_t *from)
{
    bytes loaded;
    memcpy(&loaded, from, sizeof loaded);
    return loaded;
}

INLINE void store_bytes(bytes stored, uint8_t *to)
{
    memcpy(to, &stored, sizeof stored);
}

INLINE floats magnitude_of(floats values)
{
    return (floats)((words)values & (words)(~(unsigned_words){} >> 1));
}

INLINE int has_any(bytes set)
{
    uint64_t quarters[4];
    memcpy(quarters, &set, sizeof set);
    return (quarters[0] | quarters[1] | quarters[2] | quarters[3]) != 0;
}

/* Two maxima side by side, so that each step needn't wait for the one before. */
INLINE float largest_magnitude(const float *values, int length)
{
    words even = {}, odd = {};
    for (int i = 0; i < length; i += 2 * LANES) {
        even = larger_words(even, (words)magnitude_of(load(values + i)));
        odd = larger_words(odd, (words)magnitude_of(load(values + i + LANES)));
    }
    even = larger_words(even, odd);
    int32_t largest = 0;
    for (int lane = 0; lane < LANES; lane++)
        largest = even[lane] > largest ? even[lane] : largest;
    return float_of((uint32_t)largest);
}

INLINE void find_range(const float *values, int length, float *minimum, float *maximum)
{
    floats low = load(values), high = low;
    for (int i = LANES; i < length; i += LANES) {
        low = smaller(low, load(values + i));
        high = larger(high, load(values + i));
    }
    *minimum = low[0], *maximum = high[0];
    for (int lane = 1; lane < LANES; lane++) {
        *minimum = low[lane] < *minimum ? low[lane] : *minimum;
        *maximum = high[lane] > *maximum ? high[lane] : *maximum;
    }
}

/* The random bits of the group that begins with value `start` of its block. */
INLINE void random_group(struct key key, int start, unsigned_words random[GROUP])
{
    static const uint32_t counted[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    unsigned_words word;
    memcpy(&word, counted, sizeof word);
    word += (uint32_t)start / 2;
    for (int i = 0; i < GROUP / 2; i++, word += LANES) {
        unsigned_words mixed = MIX(word, key);
        random[i] = mixed & 0xffff;
        random[GROUP / 2 + i] = mixed >> 16;
    }
}

/* Codes for v = (value - offset) * inverse, to the nearest integer or a random neighbour. */
INLINE bytes round_linear(const float *values, float offset, float inverse, int is_stochastic, struct key key,
                          int start)
{
    words codes[GROUP];
    if (is_stochastic) {
        unsigned_words random[GROUP];
        random_group(key, start, random);
        for (int i = 0; i < GROUP; i++) {
            floats v = (load(values + start + i * LANES) - offset) * inverse;
            codes[i] = (to_nearest(v * 65536.0f) + (words)random[i]) >> 16;
        }
    } else {
        for (int i = 0; i < GROUP; i++)
            codes[i] = to_nearest((load(values + start + i * LANES) - offset) * inverse);
    }
    return narrow(codes);
}

/* From two's complement between -7 and 7: those below zero have the bit of MINUS_ZERO set already. */
INLINE bytes sign_and_magnitude(bytes levels)
{
    return magnitude_of_bytes(levels) | (levels & MINUS_ZERO);
}

/* Codes of a 4-bit float for w = value * inverse; see formats.h. Base: t is at least 2, whose code is to be 0. */
INLINE bytes round_exponential(const float *values, float inverse, int shift, int is_stochastic, struct key key,
                               int start)
{
    const int32_t base = 0x40000000;
    words levels[GROUP];
    unsigned_words random[GROUP];
    if (is_stochastic)
        random_group(key, start, random);
    for (int i = 0; i < GROUP; i++) {
        floats w = load(values + start + i * LANES) * inverse;
        floats magnitude = magnitude_of(w);
        words t = (words)(magnitude + larger(magnitude, (floats){} + 2.0f));
        if (is_stochastic)
            t = t - base + (words)(random[i] << (shift - 16));
        else
            t = t + ((1 << (shift - 1)) - 1 - base) + (t >> shift & 1);
        levels[i] = with_sign(t >> shift, w);
    }
    return sign_and_magnitude(narrow(levels));
}

INLINE int encode_int8(const float *values, int is_stochastic, struct key key, const struct ahead *ahead,
                       uint8_t *block)
{
    float absmax = largest_magnitude(values, 1024);
    if (!(absmax <= LARGEST_ENCODED))
        return 0;
    struct scale scale = scale_of_range(absmax, LARGEST_INT8);
    store_float(block, scale.unit);
    for (int i = 0; i < 1024; i += GROUP_VALUES) {
        fetch_ahead(ahead, i, GROUP_VALUES);
        store_bytes(round_linear(values, 0.0f, scale.inverse, is_stochastic, key, i), block + 4 + i);
    }
    return 1;
}

INLINE int encode_uint4(const float *values, int is_stochastic, struct key key, uint8_t *block)
{
    if (!(largest_magnitude(values, 256) <= LARGEST_ENCODED))
        return 0;
    float minimum, maximum;
    find_range(values, 256, &minimum, &maximum);
    minimum += 0.0f; /* -0 becomes +0 */
    struct scale scale = scale_of_range(maximum - minimum, LARGEST_UINT4);
    store_float(block, scale.unit);
    store_float(block + 4, minimum);
    for (int i = 0; i < 256; i += GROUP_VALUES)
        store_half_bytes(round_linear(values, minimum, scale.inverse, is_stochastic, key, i), block + 8 + i / 2);
    return 1;
}

INLINE int encode_exponential(const float *values, int length, float largest_level, float w_per_level, int shift,
                              int is_stochastic, struct key key, const struct ahead *ahead, uint8_t *block)
{
    float absmax = largest_magnitude(values, length);
    if (!(absmax <= LARGEST_ENCODED))
        return 0;
    struct scale scale = scale_of_range(absmax, largest_level);
    store_float(block, scale.unit);
    float inverse = w_per_level * scale.inverse;
    for (int i = 0; i < length; i += GROUP_VALUES) {
        if (length == TILE)
            fetch_ahead(ahead, i, GROUP_VALUES);
        store_half_bytes(round_exponential(values, inverse, shift, is_stochastic, key, i), block + 4 + i / 2);
    }
    return 1;
}

INLINE int encode_fp16(const float *values, uint8_t *block)
{
    if (!(largest_magnitude(values, 1024) < HALF_OVERFLOW))
        return 0;
    uint16_t halves[1024];
    for (int i = 0; i < 1024; i++)
        halves[i] = half_of(values[i]);
    memcpy(block, halves, sizeof halves);
    return 1;
}

INLINE int encode_block(int format, const float *values, int is_stochastic, struct key key,
                        const struct ahead *ahead, uint8_t *block)
{
    switch (format) {
    case INT8:
        return encode_int8(values, is_stochastic, key, ahead, block);
    case UINT4:
        return encode_uint4(values, is_stochastic, key, block);
    case E2M1_BLOCK32:
        return encode_exponential(values, 32, LARGEST_E2M1, 1.0f, E2M1_MANTISSA_SHIFT, is_stochastic, key, ahead,
                                  block);
    case E2M1:
        return encode_exponential(values, 1024, LARGEST_E2M1, 1.0f, E2M1_MANTISSA_SHIFT, is_stochastic, key, ahead,
                                  block);
    case E3M0:
        return encode_exponential(values, 1024, LARGEST_E3M0, 2.0f, E3M0_MANTISSA_SHIFT, is_stochastic, key, ahead,
                                  block);
    default:
        return encode_fp16(values, block);
    }
}

INLINE int bytes_are_sound(const uint8_t *codes, int length, uint8_t forbidden, int *has_codes)
{
    bytes any = {}, bad = {};
    for (int i = 0; i < length; i += GROUP_VALUES) {
        bytes loaded = load_bytes(codes + i);
        any |= loaded;
        bad |= (bytes)(loaded == forbidden);
    }
    *has_codes = has_any(any);
    return !has_any(bad);
}

INLINE int half_bytes_are_sound(const uint8_t *codes, int length, int *has_codes)
{
    bytes any = {}, bad = {};
    for (int i = 0; i < length; i += GROUP_VALUES) {
        bytes loaded = load_half_bytes(codes + i / 2);
        any |= loaded;
        bad |= (bytes)(loaded == MINUS_ZERO);
    }
    *has_codes = has_any(any);
    return !has_any(bad);
}

INLINE int check_block(int format, const uint8_t *block)
{
    int length = diloco_formats[format].values, has_codes;
    switch (format) {
    case INT8:
        return bytes_are_sound(block + 4, length, 0x80, &has_codes) &&
               unit_is_sound(load_float(block), LARGEST_INT8, has_codes);
    case UINT4:
        half_bytes_are_sound(block + 8, length, &has_codes);
        return range_is_sound(load_float(block), load_float(block + 4), has_codes);
    case E2M1_BLOCK32:
    case E2M1:
        return half_bytes_are_sound(block + 4, length, &has_codes) &&
               unit_is_sound(load_float(block), LARGEST_E2M1, has_codes);
    case E3M0:
        return half_bytes_are_sound(block + 4, length, &has_codes) &&
               unit_is_sound(load_float(block), LARGEST_E3M0, has_codes);
    default: {
        int is_forbidden = 0;
        for (int i = 0; i < length; i++)
            is_forbidden |= (block[2 * i + 1] & 0x7c) == 0x7c;
        return !is_forbidden;
    }
    }
}

/* What is done with decoded values; the loops are for the compiler to vectorize. `into` is where the values go: alone,
 * or added up, or as the gradient of a step. */
enum use { STORE, ACCUMULATE, STEP };

struct target {
    enum use use;
    float *into, *momentum;
    float weight, learning_rate, mu;
    const struct ahead *ahead;
    int64_t done; /* values of the tile before this block */
};

/* So many values are decoded between two requests to the memory. */
enum { DECODED_AT_ONCE = 128 };

INLINE int next_stop(struct target target, int start, int length)
{
    int values = length - start < DECODED_AT_ONCE ? length - start : DECODED_AT_ONCE;
    fetch_ahead(target.ahead, target.done + start, values);
    return start + values;
}

INLINE void use_value(float value, struct target target, int64_t i)
{
    if (target.use == STORE)
        target.into[i] = value;
    else if (target.use == ACCUMULATE)
        accumulate_value(value, target.weight, &target.into[i]);
    else
        step_value(value, target.learning_rate, target.mu, &target.into[i], &target.momentum[i]);
}

INLINE void decode_half_bytes(const uint8_t *codes, const int8_t *table, int length, float unit, struct target target)
{
    int8_t levels[TILE];
    for (int i = 0; i < length; i += GROUP_VALUES)
        store_bytes(look_up(table, load_half_bytes(codes + i / 2)), (uint8_t *)levels + i);
    for (int i = 0; i < length;)
        for (int stop = next_stop(target, i, length); i < stop; i++)
            use_value(unit * (float)levels[i], target, i);
}

INLINE void decode_uint4(const uint8_t *codes, int length, float unit, float minimum, struct target target)
{
    uint8_t levels[TILE];
    for (int i = 0; i < length; i += GROUP_VALUES)
        store_bytes(load_half_bytes(codes + i / 2), levels + i);
    for (int i = 0; i < length;)
        for (int stop = next_stop(target, i, length); i < stop; i++)
            use_value(minimum + unit * (float)levels[i], target, i);
}

INLINE void decode_fp16(const uint8_t *block, int length, struct target target)
{
    uint16_t halves[TILE];
    memcpy(halves, block, (size_t)length * sizeof *halves);
    for (int i = 0; i < length;)
        for (int stop = next_stop(target, i, length); i < stop; i++)
            use_value(value_of_half(halves[i]), target, i);
}

INLINE void decode_int8(const int8_t *codes, int length, float unit, struct target target)
{
    for (int i = 0; i < length;)
        for (int stop = next_stop(target, i, length); i < stop; i++)
            use_value(unit * (float)codes[i], target, i);
}

INLINE void decode_block(int format, const uint8_t *block, struct target target)
{
    int length = diloco_formats[format].values;
    switch (format) {
    case INT8:
        return decode_int8((const int8_t *)block + 4, length, load_float(block), target);
    case UINT4:
        return decode_uint4(block + 8, length, load_float(block), load_float(block + 4), target);
    case E2M1_BLOCK32:
    case E2M1:
        return decode_half_bytes(block + 4, E2M1_LEVELS, length, load_float(block), target);
    case E3M0:
        return decode_half_bytes(block + 4, E3M0_LEVELS, length, load_float(block), target);
    default:
        return decode_fp16(block, length, target);
    }
}

/* The loops over a tile's blocks. Their callers pass constants, so that each format gets a loop of its own. */
INLINE int64_t encode_blocks(int format, const float *values, int is_stochastic, struct rounding rounding,
                             const struct ahead *ahead, uint8_t *payload)
{
    const struct format *layout = &diloco_formats[format];
    for (int64_t block = 0; block < TILE / layout->values; block++) {
        struct key key = key_of_block(rounding.seed, rounding.first_block + block);
        if (layout->values < TILE)
            fetch_ahead(ahead, block * layout->values, layout->values);
        if (!encode_block(format, values + block * layout->values, is_stochastic, key, ahead,
                          payload + block * bytes_of_block(layout, layout->values)))
            return 1 + block;
    }
    return 0;
}

INLINE int64_t check_blocks(int format, const uint8_t *payload)
{
    const struct format *layout = &diloco_formats[format];
    for (int64_t block = 0; block < TILE / layout->values; block++)
        if (!check_block(format, payload + block * bytes_of_block(layout, layout->values)))
            return 1 + block;
    return 0;
}

INLINE void decode_blocks(int format, const uint8_t *payload, struct target target)
{
    const struct format *layout = &diloco_formats[format];
    for (int64_t block = 0; block < TILE / layout->values; block++) {
        decode_block(format, payload + block * bytes_of_block(layout, layout->values), target);
        target.into += layout->values;
        target.done += layout->values;
        target.momentum += target.use == STEP ? layout->values : 0;
    }
}

#define FOR_FORMAT(format, CALL)                                                                                       \
    switch (format) {                                                                                                  \
    case INT8:                                                                                                         \
        return CALL(INT8);                                                                                             \
    case UINT4:                                                                                                        \
        return CALL(UINT4);                                                                                            \
    case E2M1_BLOCK32:                                                                                                 \
        return CALL(E2M1_BLOCK32);                                                                                     \
    case E2M1:                                                                                                         \
        return CALL(E2M1);                                                                                             \
    case E3M0:                                                                                                         \
        return CALL(E3M0);                                                                                             \
    default:                                                                                                           \
        return CALL(FP16);                                                                                             \
    }

static int64_t encode(int format, const float *values, int64_t length, struct rounding rounding,
                      const struct ahead *ahead, uint8_t *payload)
{
    (void)length;
#define TO_NEAREST(format) encode_blocks(format, values, 0, rounding, ahead, payload)
#define STOCHASTIC(format) encode_blocks(format, values, 1, rounding, ahead, payload)
    if (rounding.is_stochastic)
        FOR_FORMAT(format, STOCHASTIC)
    FOR_FORMAT(format, TO_NEAREST)
}

static int64_t check(int format, const uint8_t *payload, int64_t length)
{
    (void)length;
#define CHECK(format) check_blocks(format, payload)
    FOR_FORMAT(format, CHECK)
}

#define DECODE(format) decode_blocks(format, payload, target)

static void decode(int format, const uint8_t *payload, int64_t length, const struct ahead *ahead, float *values)
{
    (void)length;
    const struct target target = {.use = STORE, .into = values, .ahead = ahead};
    FOR_FORMAT(format, DECODE)
}

static void accumulate(int format, const uint8_t *payload, float weight, int64_t length, const struct ahead *ahead,
                       float *sum)
{
    (void)length;
    const struct target target = {.use = ACCUMULATE, .into = sum, .weight = weight, .ahead = ahead};
    FOR_FORMAT(format, DECODE)
}

static void outer_step(int format, const uint8_t *payload, float learning_rate, float mu, int64_t length,
                       const struct ahead *ahead, float *theta, float *momentum)
{
    (void)length;
    const struct target target = {.use = STEP,
                                  .into = theta,
                                  .momentum = momentum,
                                  .learning_rate = learning_rate,
                                  .mu = mu,
                                  .ahead = ahead};
    FOR_FORMAT(format, DECODE)
}
