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

#include "vector_decode.h"
#include "vector_encode.h"

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
