/* Tests of the kernels in C, without Python. Usage: kernels-check golden.txt */
#include "check.h"

#include <math.h>
#include <stdarg.h>

int passed, failed;
const char *const set_names[3] = {"avx2", "avx512", "neon"};

void expect(int condition, const char *what, ...)
{
    if (condition) {
        passed++;
        return;
    }
    failed++;
    va_list arguments;
    va_start(arguments, what);
    fputs("FAILED: ", stderr);
    vfprintf(stderr, what, arguments);
    fputc('\n', stderr);
    va_end(arguments);
}

void *new_bytes(int64_t size)
{
    void *bytes = malloc(size > 0 ? (size_t)size : 1);
    if (bytes == NULL) {
        fprintf(stderr, "no memory for %lld bytes\n", (long long)size);
        exit(2);
    }
    memset(bytes, 0xa5, size > 0 ? (size_t)size : 1);
    return bytes;
}

float *new_floats(int64_t count)
{
    return new_bytes(count * (int64_t)sizeof(float));
}

float *copy_of_floats(const float *values, int64_t count)
{
    return memcpy(new_floats(count), values, (size_t)count * sizeof(float));
}

uint8_t *copy_of_bytes(const uint8_t *bytes, int64_t size)
{
    return memcpy(new_bytes(size), bytes, (size_t)size);
}

/* A linear congruential generator with Knuth's multiplier. The low bits are dropped, because they are hardly random. */
uint64_t next_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 16;
}

float next_float(uint64_t *state)
{
    return (float)(next_random(state) >> 24) / 8388608.0f - 1.0f;
}

float float_from(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

float *random_floats(int64_t count, float size, uint64_t seed)
{
    float *values = new_floats(count);
    for (int64_t i = 0; i < count; i++)
        values[i] = size * next_float(&seed);
    return values;
}

float *mixed_floats(int64_t count, uint64_t seed)
{
    static const float specials[] = {0.0f, -0.0f, 0x1p-149f, -0x1p-126f, 1.0f, -1.0f, 0.5f, 1.5f, 2.5f, 127.0f, -3.0f};
    float *values = new_floats(count);
    int exponent = 0;
    for (int64_t i = 0; i < count; i++) {
        if (i % 256 == 0) /* blocks differ in magnitude, and so do the values in a block */
            exponent = (int)(next_random(&seed) % 180) - 140;
        uint64_t kind = next_random(&seed) % 16;
        if (kind < 11)
            values[i] = ldexpf(next_float(&seed), exponent - (int)(next_random(&seed) % 12));
        else
            values[i] = ldexpf(specials[next_random(&seed) % 11], exponent);
    }
    return values;
}

int main(int count, char **arguments)
{
    if (count != 2) {
        fputs("usage: kernels-check golden.txt\n", stderr);
        return 2;
    }
    check_golden(arguments[1]);
    check_sets();
    check_operations();
    check_refusals();
    check_sizes();
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
