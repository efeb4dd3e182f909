/* Loops that move the same bytes as an operation of the kernels and compute almost nothing, to measure the speed that
 * the memory allows. They are built with -march=native when a benchmark starts. Each is split over threads that end
 * with the call, like the kernels' work. */
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

enum { MOST_THREADS = 64, LINE_VALUES = 32 };

struct slice {
    void (*loop)(struct slice *slice);
    const float *first, *second;
    float *updated, *also_updated;
    const uint8_t *read;
    uint8_t *written;
    int64_t count; /* a multiple of 32 */
};

static void *run(void *slice)
{
    ((struct slice *)slice)->loop(slice);
    return 0;
}

static void split(struct slice whole, int32_t threads)
{
    struct slice slices[MOST_THREADS];
    pthread_t others[MOST_THREADS];
    int64_t share = whole.count / threads / LINE_VALUES * LINE_VALUES;
    for (int32_t i = 0; i < threads; i++) {
        slices[i] = whole;
        slices[i].count = i + 1 < threads ? share : whole.count - share * i;
        slices[i].first += i * share;
        slices[i].second += whole.second ? i * share : 0;
        slices[i].updated += whole.updated ? i * share : 0;
        slices[i].also_updated += whole.also_updated ? i * share : 0;
        slices[i].read += whole.read ? i * share : 0;
        slices[i].written += whole.written ? i * share : 0;
        if (i + 1 < threads)
            pthread_create(&others[i], 0, run, &slices[i]);
        else
            run(&slices[i]);
    }
    for (int32_t i = 0; i + 1 < threads; i++)
        pthread_join(others[i], 0);
}

#if defined(__AVX2__)
static __m256i line(const float *values)
{
    const __m256i *v = (const __m256i *)values;
    return _mm256_or_si256(_mm256_or_si256(_mm256_load_si256(v), _mm256_load_si256(v + 1)),
                           _mm256_or_si256(_mm256_load_si256(v + 2), _mm256_load_si256(v + 3)));
}

static void read_4_write_1(struct slice *s)
{
    for (int64_t i = 0; i < s->count; i += LINE_VALUES)
        _mm256_stream_si256((__m256i *)(s->written + i), line(s->first + i));
    _mm_sfence();
}

static void read_8_write_1(struct slice *s)
{
    for (int64_t i = 0; i < s->count; i += LINE_VALUES)
        _mm256_stream_si256((__m256i *)(s->written + i), _mm256_or_si256(line(s->first + i), line(s->second + i)));
    _mm_sfence();
}
#else
static void read_4_write_1(struct slice *s)
{
    for (int64_t i = 0; i < s->count; i++)
        s->written[i] = (uint8_t)s->first[i];
}

static void read_8_write_1(struct slice *s)
{
    for (int64_t i = 0; i < s->count; i++)
        s->written[i] = (uint8_t)(s->first[i] + s->second[i]);
}
#endif

/* One byte in, two floats changed in place: the traffic of an outer step from an int8 payload. */
static void read_1_update_8(struct slice *s)
{
    for (int64_t i = 0; i < s->count; i++) {
        float byte = (float)s->read[i];
        s->updated[i] += byte;
        s->also_updated[i] += byte;
    }
}

static void add(struct slice *s)
{
    for (int64_t i = 0; i < s->count; i++)
        s->updated[i] += s->first[i];
}

void limit_read_4_write_1(uintptr_t values, uintptr_t out, int64_t count, int32_t threads)
{
    split((struct slice){.loop = read_4_write_1, .first = (float *)values, .written = (uint8_t *)out, .count = count},
          threads);
}

void limit_read_8_write_1(uintptr_t first, uintptr_t second, uintptr_t out, int64_t count, int32_t threads)
{
    split((struct slice){.loop = read_8_write_1,
                         .first = (float *)first,
                         .second = (float *)second,
                         .written = (uint8_t *)out,
                         .count = count},
          threads);
}

void limit_read_1_update_8(uintptr_t bytes, uintptr_t theta, uintptr_t momentum, int64_t count, int32_t threads)
{
    split((struct slice){.loop = read_1_update_8,
                         .read = (uint8_t *)bytes,
                         .updated = (float *)theta,
                         .also_updated = (float *)momentum,
                         .count = count},
          threads);
}

void limit_add(uintptr_t values, uintptr_t sum, int64_t count, int32_t threads)
{
    split((struct slice){.loop = add, .first = (float *)values, .updated = (float *)sum, .count = count}, threads);
}
