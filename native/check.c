/* Tests of the kernels in C, against a reference that is written as the definition reads: no tricks, one value at a
 * time. Every buffer is a heap block of the exact size, so that the address sanitizer sees one byte too many. */
#include "kernels.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 1024, BLOCK_BYTES = 1028 };

static int passed, failed;

static void expect(int condition, const char *what, int64_t count)
{
    if (condition) {
        passed++;
        return;
    }
    failed++;
    fprintf(stderr, "FAILED: %s (%lld values)\n", what, (long long)count);
}

static int64_t payload_size(int64_t count)
{
    return count + 4 * ((count + BLOCK - 1) / BLOCK);
}

static void *new_bytes(int64_t size)
{
    void *bytes = malloc(size > 0 ? (size_t)size : 1);
    if (bytes == NULL)
        exit(2);
    return bytes;
}

static float *new_floats(int64_t count)
{
    return new_bytes(count * (int64_t)sizeof(float));
}

/* Uniform in [-1, 1) and the same in every run (Knuth's multiplier, high bits). */
static float next_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)(*state >> 40) / 8388608.0f - 1.0f;
}

static float *random_floats(int64_t count, float size, uint64_t seed)
{
    float *values = new_floats(count);
    for (int64_t i = 0; i < count; i++)
        values[i] = size * next_random(&seed);
    return values;
}

static void reference_quantize(const float *values, int64_t count, uint8_t *out)
{
    for (int64_t start = 0; start < count; start += BLOCK) {
        int64_t length = count - start < BLOCK ? count - start : BLOCK;
        float absmax = 0.0f;
        for (int64_t i = 0; i < length; i++)
            absmax = fmaxf(absmax, fabsf(values[start + i]));
        float scale = absmax / 127.0f;
        if (scale < FLT_MIN)
            scale = 0.0f;
        memcpy(out, &scale, sizeof scale);
        for (int64_t i = 0; i < length; i++) {
            int8_t code = scale == 0.0f ? 0 : (int8_t)nearbyintf(values[start + i] * (127.0f / absmax));
            memcpy(out + 4 + i, &code, 1);
        }
        out += 4 + length;
    }
}

static float reference_value(const uint8_t *payload, int64_t index, float weight)
{
    const uint8_t *block = payload + index / BLOCK * BLOCK_BYTES;
    float scale;
    int8_t code;
    memcpy(&scale, block, sizeof scale);
    memcpy(&code, block + 4 + index % BLOCK, 1);
    return weight * scale * (float)code;
}

static void test_against_reference(int64_t count, float size)
{
    float *theta = random_floats(count, size, 1), *local = random_floats(count, size, 2);
    float *momentum = random_floats(count, size, 3), *decoded = new_floats(count), *sum = random_floats(count, size, 4);
    float *difference = new_floats(count), *before = new_floats(count), *velocity_before = new_floats(count);
    int64_t bytes = payload_size(count);
    uint8_t *padded = new_bytes(bytes + 1), *payload = padded + 1; /* at an odd address, as inside a message */
    uint8_t *expected = new_bytes(bytes);

    reference_quantize(theta, count, expected);
    expect(diloco_quantize((uintptr_t)theta, count, (uintptr_t)payload) == 0, "quantize succeeds", count);
    expect(memcmp(payload, expected, (size_t)bytes) == 0, "quantize", count);

    for (int64_t i = 0; i < count; i++)
        difference[i] = theta[i] - local[i];
    reference_quantize(difference, count, expected);
    expect(diloco_quantize_difference((uintptr_t)theta, (uintptr_t)local, count, (uintptr_t)payload) == 0,
           "quantize_difference succeeds", count);
    expect(memcmp(payload, expected, (size_t)bytes) == 0, "quantize_difference", count);

    expect(diloco_check_payload((uintptr_t)payload, count) == 0, "a good payload is accepted", count);
    int same = diloco_dequantize((uintptr_t)payload, count, (uintptr_t)decoded) == 0;
    for (int64_t i = 0; i < count; i++)
        same &= decoded[i] == reference_value(payload, i, 1.0f);
    expect(same, "dequantize", count);

    for (int64_t i = 0; i < count; i++)
        before[i] = sum[i];
    same = diloco_accumulate((uintptr_t)payload, 3.7f, count, (uintptr_t)sum) == 0;
    for (int64_t i = 0; i < count; i++)
        same &= sum[i] == before[i] + reference_value(payload, i, 3.7f);
    expect(same, "accumulate", count);

    for (int64_t i = 0; i < count; i++) {
        before[i] = theta[i];
        velocity_before[i] = momentum[i];
    }
    same = diloco_outer_step((uintptr_t)payload, (uintptr_t)theta, (uintptr_t)momentum, count, 0.7f, 0.9f) == 0;
    for (int64_t i = 0; i < count; i++) {
        float decayed = 0.9f * velocity_before[i];
        float velocity = decayed + decoded[i];
        float ahead = 0.9f * velocity;
        float step = 0.7f * (decoded[i] + ahead);
        same &= momentum[i] == velocity && theta[i] == before[i] - step;
    }
    expect(same, "outer_step", count);

    for (int64_t i = 0; i < count; i++)
        difference[i] = sum[i] / 4.4f;
    reference_quantize(difference, count, expected);
    expect(diloco_finish_average((uintptr_t)sum, 4.4f, count, (uintptr_t)payload) == 0, "finish_average succeeds", count);
    expect(memcmp(payload, expected, (size_t)bytes) == 0, "finish_average", count);

    free(theta), free(local), free(momentum), free(decoded), free(sum), free(difference), free(before);
    free(velocity_before), free(padded), free(expected);
}

static void test_values_that_cannot_be_encoded(void)
{
    const float bad[] = {NAN, -NAN, INFINITY, -INFINITY, FLT_MAX}; /* FLT_MAX / 127 rounds up: 127 of it are infinite */
    const int64_t count = 2 * BLOCK + 5, places[] = {0, BLOCK - 1, BLOCK, 2 * BLOCK + 4};
    float *values = random_floats(count, 1.0f, 5), *zeros = random_floats(count, 0.0f, 6);
    uint8_t *out = new_bytes(payload_size(count));
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        for (size_t j = 0; j < sizeof places / sizeof *places; j++) {
            float good = values[places[j]];
            int64_t refused = 1 + places[j] / BLOCK;
            values[places[j]] = bad[i];
            expect(diloco_quantize((uintptr_t)values, count, (uintptr_t)out) == refused, "quantize refuses", count);
            expect(diloco_quantize_difference((uintptr_t)values, (uintptr_t)zeros, count, (uintptr_t)out) == refused,
                   "quantize_difference refuses", count);
            expect(diloco_finish_average((uintptr_t)values, 1.0f, count, (uintptr_t)out) == refused,
                   "finish_average refuses", count);
            values[places[j]] = good;
        }
    values[7] = 3e38f, zeros[7] = -3e38f;
    expect(diloco_quantize_difference((uintptr_t)values, (uintptr_t)zeros, count, (uintptr_t)out) == 1,
           "a difference that overflows is refused", count);
    free(values), free(zeros), free(out);
}

/* Whether all that read this payload refuse the given block and leave their arrays alone. */
static int refuses_unchanged(const uint8_t *payload, int64_t count, int64_t refused)
{
    float *first = random_floats(count, 1.0f, 7), *second = random_floats(count, 1.0f, 8);
    float *first_before = random_floats(count, 1.0f, 7), *second_before = random_floats(count, 1.0f, 8);
    int right = diloco_check_payload((uintptr_t)payload, count) == refused;
    right &= diloco_dequantize((uintptr_t)payload, count, (uintptr_t)first) == refused;
    right &= diloco_accumulate((uintptr_t)payload, 1.0f, count, (uintptr_t)first) == refused;
    right &= diloco_outer_step((uintptr_t)payload, (uintptr_t)first, (uintptr_t)second, count, 0.7f, 0.9f) == refused;
    right &= memcmp(first, first_before, (size_t)count * sizeof(float)) == 0;
    right &= memcmp(second, second_before, (size_t)count * sizeof(float)) == 0;
    free(first), free(second), free(first_before), free(second_before);
    return right;
}

static void test_corrupt_payloads(void)
{
    const float bad_scales[] = {NAN, INFINITY, -INFINITY, -1.0f, -0.0f, FLT_MAX, FLT_MAX / 126.0f};
    const int64_t count = 3 * BLOCK - 9;
    float *values = random_floats(count, 1.0f, 9);
    uint8_t *payload = new_bytes(payload_size(count));
    diloco_quantize((uintptr_t)values, count, (uintptr_t)payload);
    for (int64_t block = 0; block < 3; block++) {
        uint8_t *bytes = payload + block * BLOCK_BYTES, good[4], good_code = bytes[4 + 700];
        memcpy(good, bytes, sizeof good);
        for (size_t i = 0; i < sizeof bad_scales / sizeof *bad_scales; i++) {
            memcpy(bytes, &bad_scales[i], sizeof good);
            expect(refuses_unchanged(payload, count, 1 + block), "a bad scale is refused", count);
        }
        memcpy(bytes, good, sizeof good);
        bytes[4 + 700] = 0x80;
        expect(refuses_unchanged(payload, count, 1 + block), "the code -128 is refused", count);
        bytes[4 + 700] = good_code;
    }
    float large = 1e36f;
    memcpy(payload + BLOCK_BYTES, &large, sizeof large);
    expect(diloco_check_payload((uintptr_t)payload, count) == 0, "a large scale is accepted", count);
    expect(diloco_accumulate((uintptr_t)payload, 1000.0f, count, (uintptr_t)values) == 2,
           "a large scale is refused when its weight makes it overflow", count);
    free(values), free(payload);
}

int main(void)
{
    const int64_t counts[] = {0, 1, 3, 4, 5, 15, 16, 17, 1023, 1024, 1025, 2047, 2048, 2049, 10000};
    const float sizes[] = {1.0f, 1e-3f, 0.0f, 1e-30f, 2e-36f, 1e-37f, 1e-40f, 1e30f};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        for (size_t j = 0; j < sizeof sizes / sizeof *sizes; j++)
            test_against_reference(counts[i], sizes[j]);
    test_values_that_cannot_be_encoded();
    test_corrupt_payloads();
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
