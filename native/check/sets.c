/* Every set gives the bytes and the floats of the scalar one, for every operation. */
#include "check.h"

static const int64_t lengths[] = {1, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 2048, 5000, 70001};

enum { LENGTHS = sizeof lengths / sizeof *lengths };

struct results {
    int64_t refused[7];
    uint8_t *payload, *difference, *from_bfloat16, *average, *mean;
    float *decoded, *sum, *theta, *momentum, *residual;
};

/* Runs all operations on the same arguments. The payload begins at an odd address, floats at one unfit for vectors. */
static struct results results_of(int32_t format, int is_stochastic, const float *values, const float *other,
                                 int64_t count)
{
    const float divisor = 3.0f, weight = 0.3f, rate = 0.7f, mu = 0.9f;
    int64_t size = diloco_payload_size(format, count);
    struct results r = {
        .payload = new_bytes(size + 1),
        .difference = new_bytes(size),
        .from_bfloat16 = new_bytes(size),
        .average = new_bytes(size),
        .mean = new_bytes(size),
        .decoded = new_floats(count + 1),
        .sum = copy_of_floats(other, count),
        .theta = copy_of_floats(other, count),
        .momentum = copy_of_floats(values, count),
        .residual = copy_of_floats(values, count),
    };
    uintptr_t payload = ADDRESS(r.payload + 1), theta = ADDRESS(values), local = ADDRESS(other);
    r.payload[0] = 0;
    r.decoded[0] = 0;
    r.refused[0] = diloco_quantize(format, is_stochastic, 11, 5, theta, count, payload, 1);
    r.refused[1] = diloco_quantize_difference(format, is_stochastic, 11, 5, theta, local, 0, ADDRESS(r.residual), count,
                                              ADDRESS(r.difference), 1);
    r.refused[2] = diloco_quantize_difference(format, is_stochastic, 11, 5, theta, local, 1, 0, count,
                                              ADDRESS(r.from_bfloat16), 1);
    r.refused[3] = diloco_finish_average(format, is_stochastic, 11, 5, theta, divisor, count, ADDRESS(r.average), 1);
    r.refused[4] = diloco_dequantize(format, payload, count, ADDRESS(r.decoded + 1), 1);
    r.refused[5] = diloco_accumulate(format, payload, weight, count, ADDRESS(r.sum), 1) |
                   diloco_outer_step(format, payload, ADDRESS(r.theta), ADDRESS(r.momentum), count, rate, mu, 1);
    const uintptr_t twice[] = {payload, payload};
    const float weights[] = {weight, divisor};
    r.refused[6] = diloco_average(format, is_stochastic, 11, 5, twice, weights, 2, weight + divisor, count,
                                  ADDRESS(r.mean), 1);
    return r;
}

static void free_results(struct results r)
{
    free(r.payload), free(r.difference), free(r.from_bfloat16), free(r.average), free(r.mean), free(r.decoded);
    free(r.sum), free(r.theta), free(r.momentum), free(r.residual);
}

static int same_bytes(const void *left, const void *right, int64_t size)
{
    return memcmp(left, right, (size_t)size) == 0;
}

static void compare(const char *set, int32_t format, int is_stochastic, const float *values, const float *other,
                    int64_t count)
{
    const char *name = diloco_format_name(format), *how = is_stochastic ? "stochastic" : "nearest";
    int64_t size = diloco_payload_size(format, count), floats = count * (int64_t)sizeof(float);
    diloco_choose_kernels("scalar");
    struct results a = results_of(format, is_stochastic, values, other, count);
    diloco_choose_kernels(set);
    struct results b = results_of(format, is_stochastic, values, other, count);
#define EXPECT_SAME(what, field, bytes)                                                                                \
    expect(same_bytes(a.field, b.field, bytes), "%s %s %s, %lld values: %s differs", set, name, how, (long long)count, \
           what)
    EXPECT_SAME("what is refused", refused, (int64_t)sizeof a.refused);
    if (a.refused[0] == 0) {
        EXPECT_SAME("quantize", payload, size + 1);
        EXPECT_SAME("dequantize", decoded, floats + 4);
        EXPECT_SAME("accumulate", sum, floats);
        EXPECT_SAME("the average of payloads", mean, size);
        EXPECT_SAME("the outer step's theta", theta, floats);
        EXPECT_SAME("the outer step's momentum", momentum, floats);
    }
    if (a.refused[1] == 0) {
        EXPECT_SAME("the difference", difference, size);
        EXPECT_SAME("the residual", residual, floats);
    }
    if (a.refused[2] == 0)
        EXPECT_SAME("the difference from bfloat16", from_bfloat16, size);
    if (a.refused[3] == 0)
        EXPECT_SAME("the average", average, size);
    free_results(a);
    free_results(b);
}

static void compare_all(const char *set, const float *values, const float *other, int64_t count)
{
    for (int32_t format = 0; format < FORMATS; format++)
        for (int is_stochastic = 0; is_stochastic <= diloco_format_is_stochastic(format); is_stochastic++)
            compare(set, format, is_stochastic, values, other, count);
}

/* Floats up to 2^63 whose lower 16 bits are 0, and the floats beside them: ties, powers of two and their neighbours, at
 * every exponent that can be encoded. */
static void compare_exhaustively(const char *set)
{
    enum { COUNT = 1 << 14 };
    float *values = new_floats(COUNT), *other = random_floats(COUNT, 1.0f, 3);
    for (uint32_t pass = 0; pass < 8; pass++) {
        for (uint32_t i = 0; i < COUNT; i++) {
            uint32_t bits = ((pass * COUNT + i) % 0x5f00) << 16; /* up to 2^63 */
            values[i] = float_from((bits + pass % 3 - (bits > 0 ? 1 : 0)) | (i % 2 ? 0x80000000u : 0));
        }
        compare_all(set, values, other, COUNT);
    }
    free(values), free(other);
}

/* Multiples of a quarter of the unit, in blocks of many magnitudes: each is a tie between two levels, or near one. */
static void compare_ties(const char *set)
{
    enum { COUNT = 1024 };
    float *values = new_floats(COUNT), *other = new_floats(COUNT);
    for (int exponent = -126; exponent <= 56; exponent += 7) {
        float unit = float_from((uint32_t)(exponent + 127) << 23);
        for (int i = 0; i < COUNT; i++) {
            values[i] = unit * 0.25f * (float)(i % 509 - 254); /* up to 63.5 */
            other[i] = 0.0f;
        }
        values[1] = 64.0f * unit;
        compare_all(set, values, other, COUNT);
        values[1] = 127.0f * unit;
        values[2] = float_from(0x3f000000u + (uint32_t)exponent); /* the absmax, if `unit` is small */
        compare_all(set, values, other, COUNT);
    }
    free(values), free(other);
}

/* Every finite half-precision number, the next float, and the floats around the middle to the next such number. */
static void compare_halves(const char *set)
{
    enum { HALVES = 0x7c00, COUNT = 2 * 5 * HALVES };
    float *values = new_floats(COUNT), *other = random_floats(COUNT, 1.0f, 5);
    for (uint32_t half = 0; half < HALVES; half++) {
        uint32_t bits = half < 0x400 ? 0 : (half << 13) + (112u << 23);
        if (half < 0x400) { /* a subnormal half is a multiple of 2^-24 */
            float value = (float)half * 0x1p-24f;
            memcpy(&bits, &value, sizeof bits);
        }
        const int32_t beside[5] = {0, 1, 0xfff, 0x1000, 0x1001};
        for (int i = 0; i < 5; i++) {
            uint32_t moved = half == HALVES - 1 && i > 2 ? bits : bits + (uint32_t)beside[i];
            values[10 * half + 2 * i] = float_from(moved);
            values[10 * half + 2 * i + 1] = float_from(moved | 0x80000000u);
        }
    }
    compare(set, 5, 0, values, other, COUNT);
    free(values), free(other);
}

void check_sets(void)
{
    for (int i = 0; i < 3; i++) {
        if (!diloco_kernels_are_supported(set_names[i])) {
            printf("%s: not on this machine, not checked\n", set_names[i]);
            continue;
        }
        for (int k = 0; k < LENGTHS; k++) {
            float *values = mixed_floats(lengths[k], (uint64_t)k), *other = mixed_floats(lengths[k], (uint64_t)k + 99);
            compare_all(set_names[i], values, other, lengths[k]);
            free(values), free(other);
        }
        compare_exhaustively(set_names[i]);
        compare_ties(set_names[i]);
        compare_halves(set_names[i]);
    }
    diloco_choose_kernels("");
}
