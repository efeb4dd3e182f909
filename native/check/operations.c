/* Tests that the operations do what kernels.h says, however the work is split, and with any float settings of the
 * caller. */
#include "check.h"

#include <math.h>

#include "../float_settings.h"

enum { COUNT = 300 * 1024 + 77 };

static const float WEIGHT = 12345.0f, RATE = 0.7f, MU = 0.9f;

static void check_arithmetic(int32_t format)
{
    const char *name = diloco_format_name(format);
    int64_t size = diloco_payload_size(format, COUNT);
    float *values = random_floats(COUNT, 1e-3f, 1), *local = random_floats(COUNT, 1e-3f, 2);
    float *g = new_floats(COUNT), *sum = copy_of_floats(local, COUNT), *theta = copy_of_floats(values, COUNT);
    float *momentum = copy_of_floats(local, COUNT), *difference = new_floats(COUNT);
    uint8_t *payload = new_bytes(size), *expected = new_bytes(size);
    diloco_quantize(format, 0, 0, 0, ADDRESS(values), COUNT, ADDRESS(payload), 1);
    expect(diloco_dequantize(format, ADDRESS(payload), COUNT, ADDRESS(g), 1) == 0, "%s: dequantize", name);
    expect(diloco_accumulate(format, ADDRESS(payload), WEIGHT, COUNT, ADDRESS(sum), 1) == 0, "%s: accumulate", name);
    expect(diloco_outer_step(format, ADDRESS(payload), ADDRESS(theta), ADDRESS(momentum), COUNT, RATE, MU, 1) == 0,
           "%s: outer step", name);
    int64_t sums = 0, steps = 0;
    for (int64_t i = 0; i < COUNT; i++) {
        float added = local[i] + WEIGHT * g[i];
        float velocity = MU * local[i] + g[i];
        float moved = values[i] - RATE * (g[i] + MU * velocity);
        sums += memcmp(&sum[i], &added, 4) == 0;
        steps += memcmp(&momentum[i], &velocity, 4) == 0 && memcmp(&theta[i], &moved, 4) == 0;
        difference[i] = values[i] - local[i];
    }
    expect(sums == COUNT, "%s: accumulate is not sum + weight * value", name);
    expect(steps == COUNT, "%s: the outer step is not Nesterov's", name);

    diloco_quantize(format, 0, 0, 0, ADDRESS(difference), COUNT, ADDRESS(expected), 1);
    diloco_quantize_difference(format, 0, 0, 0, ADDRESS(values), ADDRESS(local), 0, 0, COUNT, ADDRESS(payload), 1);
    expect(memcmp(payload, expected, (size_t)size) == 0, "%s: the difference is encoded otherwise", name);
    for (int64_t i = 0; i < COUNT; i++)
        difference[i] = values[i] / WEIGHT;
    diloco_quantize(format, 0, 0, 0, ADDRESS(difference), COUNT, ADDRESS(expected), 1);
    diloco_finish_average(format, 0, 0, 0, ADDRESS(values), WEIGHT, COUNT, ADDRESS(payload), 1);
    expect(memcmp(payload, expected, (size_t)size) == 0, "%s: the average is encoded otherwise", name);
    free(values), free(local), free(g), free(sum), free(theta), free(momentum), free(difference);
    free(payload), free(expected);
}

/* The squared norm is the plain sum of squares, except for rounding. */
static void check_squared_norm(int32_t format)
{
    const char *name = diloco_format_name(format);
    int64_t size = diloco_payload_size(format, COUNT);
    float *values = random_floats(COUNT, 1e-3f, 5);
    uint8_t *payload = new_bytes(size);
    double squared, sum = 0;
    diloco_quantize(format, 0, 0, 0, ADDRESS(values), COUNT, ADDRESS(payload), 1);
    diloco_dequantize(format, ADDRESS(payload), COUNT, ADDRESS(values), 1);
    for (int64_t i = 0; i < COUNT; i++)
        sum += (double)values[i] * (double)values[i];
    expect(diloco_squared_norm(format, ADDRESS(payload), COUNT, &squared) == 0, "%s: squared norm", name);
    expect(fabs(squared - sum) <= 1e-6 * sum, "%s: the squared norm is %g, not %g", name, squared, sum);
    expect(diloco_squared_norm(format, ADDRESS(payload), 0, &squared) == 0 && squared == 0, "%s: norm of nothing", name);
    free(values), free(payload);
}

/* diloco_average makes the same bytes as diloco_accumulate and diloco_finish_average. */
static void check_average(int32_t format, int is_stochastic)
{
    enum { PAYLOADS = 3 };
    const char *name = diloco_format_name(format);
    const float weights[PAYLOADS] = {12345.0f, 0.0f, 3.0f}, total = 12348.0f;
    int64_t size = diloco_payload_size(format, COUNT);
    uintptr_t payloads[PAYLOADS];
    float *sum = new_floats(COUNT);
    uint8_t *expected = new_bytes(size), *averaged = new_bytes(size);
    memset(sum, 0, sizeof(float) * COUNT);
    for (int i = 0; i < PAYLOADS; i++) {
        float *values = random_floats(COUNT, 1e-3f, 20 + (uint64_t)i);
        payloads[i] = ADDRESS(new_bytes(size));
        diloco_quantize(format, 0, 0, 0, ADDRESS(values), COUNT, payloads[i], 1);
        diloco_accumulate(format, payloads[i], weights[i], COUNT, ADDRESS(sum), 1);
        free(values);
    }
    diloco_finish_average(format, is_stochastic, 42, 7, ADDRESS(sum), total, COUNT, ADDRESS(expected), 1);
    for (int32_t threads = 1; threads <= 3; threads += 2) {
        expect(diloco_average(format, is_stochastic, 42, 7, payloads, weights, PAYLOADS, total, COUNT,
                              ADDRESS(averaged), threads) == 0,
               "%s: average", name);
        expect(memcmp(averaged, expected, (size_t)size) == 0, "%s: an average in one go differs", name);
    }
    for (int i = 0; i < PAYLOADS; i++)
        free((void *)payloads[i]);
    free(sum), free(expected), free(averaged);
}

/* residual' = d - decoded and d = (theta - local) + residual, so that d = decoded + residual' but for one rounding. */
static void check_error_feedback(int32_t format)
{
    int64_t size = diloco_payload_size(format, COUNT), right = 0;
    float *theta = random_floats(COUNT, 1e-3f, 3), *residual = random_floats(COUNT, 1e-4f, 5);
    float *before = copy_of_floats(residual, COUNT), *g = new_floats(COUNT), *local = new_floats(COUNT);
    uint16_t *bfloat16 = new_bytes(COUNT * 2);
    uint8_t *payload = new_bytes(size);
    for (int64_t i = 0; i < COUNT; i++) {
        bfloat16[i] = (uint16_t)(0x3a00 + i % 512);
        local[i] = float_from((uint32_t)bfloat16[i] << 16);
    }
    diloco_quantize_difference(format, 0, 0, 0, ADDRESS(theta), ADDRESS(bfloat16), 1, ADDRESS(residual), COUNT,
                               ADDRESS(payload), 2);
    diloco_dequantize(format, ADDRESS(payload), COUNT, ADDRESS(g), 1);
    for (int64_t i = 0; i < COUNT; i++) {
        float left = ((theta[i] - local[i]) + before[i]) - g[i];
        right += memcmp(&left, &residual[i], 4) == 0;
    }
    expect(right == COUNT, "%s: a residual is not what the payload leaves out", diloco_format_name(format));
    free(theta), free(residual), free(before), free(g), free(local), free(bfloat16), free(payload);
}

/* More threads, or ranges of blocks one by one, make the same payload and the same state. */
static void check_cutting(int32_t format, int is_stochastic)
{
    const char *name = diloco_format_name(format);
    int64_t size = diloco_payload_size(format, COUNT), block = diloco_block_values(format);
    float *values = random_floats(COUNT, 1.0f, 8);
    float *theta = copy_of_floats(values, COUNT), *momentum = copy_of_floats(values, COUNT);
    float *theta_cut = copy_of_floats(values, COUNT), *momentum_cut = copy_of_floats(values, COUNT);
    uint8_t *whole = new_bytes(size), *cut = new_bytes(size);
    diloco_quantize(format, is_stochastic, 42, 0, ADDRESS(values), COUNT, ADDRESS(whole), 1);
    diloco_quantize(format, is_stochastic, 42, 0, ADDRESS(values), COUNT, ADDRESS(cut), 3);
    expect(memcmp(whole, cut, (size_t)size) == 0, "%s: threads change the payload", name);
    memset(cut, 0, (size_t)size);
    for (int64_t first = 0, step = 1; first * block < COUNT; first += step, step = step % 97 + 8) {
        int64_t left = COUNT - first * block, length = left < step * block ? left : step * block;
        uintptr_t at = ADDRESS(cut + first * diloco_block_bytes(format));
        diloco_quantize(format, is_stochastic, 42, first, ADDRESS(values + first * block), length, at, 1);
        diloco_outer_step(format, at, ADDRESS(theta_cut + first * block), ADDRESS(momentum_cut + first * block), length,
                          RATE, MU, 2);
    }
    expect(memcmp(whole, cut, (size_t)size) == 0, "%s: ranges change the payload", name);
    diloco_outer_step(format, ADDRESS(whole), ADDRESS(theta), ADDRESS(momentum), COUNT, RATE, MU, 2);
    expect(memcmp(theta, theta_cut, sizeof(float) * COUNT) == 0, "%s: ranges change theta", name);
    expect(memcmp(momentum, momentum_cut, sizeof(float) * COUNT) == 0, "%s: ranges change momentum", name);
    free(values), free(theta), free(momentum), free(theta_cut), free(momentum_cut), free(whole), free(cut);
}

/* Results have the same bytes if they are written past the caches, as many values are, or not. */
static void check_streaming(int32_t format)
{
    enum { MANY = (1 << 20) + 1000 };
    int64_t size = diloco_payload_size(format, MANY), half = MANY / 2048 * 1024;
    int64_t half_size = diloco_payload_size(format, half);
    float *values = random_floats(MANY, 1.0f, 9), *decoded = new_floats(MANY), *expected = new_floats(MANY);
    for (int offset = 0; offset < 3; offset++) {
        uint8_t *streamed = new_bytes(size + offset), *plain = new_bytes(size + offset);
        diloco_quantize(format, 0, 0, 0, ADDRESS(values), MANY, ADDRESS(streamed + offset), 2);
        diloco_quantize(format, 0, 0, 0, ADDRESS(values), half, ADDRESS(plain + offset), 1);
        diloco_quantize(format, 0, 0, half / diloco_block_values(format), ADDRESS(values + half), MANY - half,
                        ADDRESS(plain + offset + half_size), 1);
        expect(memcmp(streamed + offset, plain + offset, (size_t)size) == 0, "%s: streaming changes the payload",
               diloco_format_name(format));
        diloco_dequantize(format, ADDRESS(streamed + offset), MANY, ADDRESS(decoded), 2);
        diloco_dequantize(format, ADDRESS(streamed + offset), half, ADDRESS(expected), 1);
        expect(memcmp(decoded, expected, (size_t)half * 4) == 0, "%s: streaming changes the values",
               diloco_format_name(format));
        free(streamed), free(plain);
    }
    free(values), free(decoded), free(expected);
}

/* A caller who flushes subnormals to zero gets the same bits, and keeps the settings. */
static void check_float_settings(int32_t format)
{
#if defined(__x86_64__)
    const float_settings flushing = 0x1f80 | 0x8040;
#else
    const float_settings flushing = 1u << 24;
#endif
    enum { SMALL = 2048 };
    int64_t size = diloco_payload_size(format, SMALL);
    float *values = random_floats(SMALL, 0x1p-119f, 4), *g = new_floats(SMALL), *flushed_g = new_floats(SMALL);
    uint8_t *payload = new_bytes(size), *flushed = new_bytes(size);
    diloco_quantize(format, 0, 0, 0, ADDRESS(values), SMALL, ADDRESS(payload), 1);
    diloco_dequantize(format, ADDRESS(payload), SMALL, ADDRESS(g), 1);
    float_settings before = use_default_float_settings();
    restore_float_settings(flushing);
    diloco_quantize(format, 0, 0, 0, ADDRESS(values), SMALL, ADDRESS(flushed), 1);
    diloco_dequantize(format, ADDRESS(payload), SMALL, ADDRESS(flushed_g), 1);
    float_settings after = use_default_float_settings();
    restore_float_settings(before);
    expect(after == flushing, "%s: the caller's float settings are lost", diloco_format_name(format));
    expect(memcmp(payload, flushed, (size_t)size) == 0 && memcmp(g, flushed_g, SMALL * 4) == 0,
           "%s: flushing subnormals changes the result", diloco_format_name(format));
    free(values), free(g), free(flushed_g), free(payload), free(flushed);
}

void check_operations(void)
{
    for (int32_t format = 0; format < FORMATS; format++) {
        check_squared_norm(format);
        check_arithmetic(format);
        check_error_feedback(format);
        for (int is_stochastic = 0; is_stochastic <= diloco_format_is_stochastic(format); is_stochastic++) {
            check_average(format, is_stochastic);
            check_cutting(format, is_stochastic);
        }
        check_streaming(format);
        check_float_settings(format);
    }
}
