/* Tests of the operations with no values, and with more than 2^31 values. */
#define _GNU_SOURCE
#include "check.h"

#include <sys/mman.h>
#include <unistd.h>

static void check_nothing(int32_t format)
{
    uintptr_t nowhere = 0;
    expect(diloco_payload_size(format, 0) == 0, "%s: no values take bytes", diloco_format_name(format));
    expect(diloco_quantize(format, 0, 0, 0, nowhere, 0, nowhere, 4) == 0, "%s: nothing", diloco_format_name(format));
    expect(diloco_check_payload(format, nowhere, 0, 4) == 0, "%s: check nothing", diloco_format_name(format));
    expect(diloco_accumulate(format, nowhere, 1.0f, 0, nowhere, 4) == 0, "%s: add nothing", diloco_format_name(format));
    expect(diloco_outer_step(format, nowhere, nowhere, nowhere, 0, 1.0f, 0.9f, 4) == 0, "%s: step by nothing",
           diloco_format_name(format));
}

/* Returns `size` bytes of addresses at which the same `period` bytes of memory repeat, or NULL. */
static uint8_t *repeated(int file, int64_t size, int64_t period)
{
    uint8_t *start = mmap(NULL, (size_t)size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED || ftruncate(file, period) != 0)
        return NULL;
    for (int64_t at = 0; at < size; at += period) {
        int64_t part = size - at < period ? size - at : period;
        if (mmap(start + at, (size_t)part, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED)
            return NULL;
    }
    return start;
}

/* 2^31 + 1030 values, 8.6 GB of addresses but 128 MiB of memory: an index of 32 bits would wrap, and not write the last
 * block, of 6 values. */
static void check_many(void)
{
    const int64_t period = 64 << 20, count = ((int64_t)1 << 31) + 1030, page = 4096;
    int64_t size = diloco_payload_size(3, count);
    int file = memfd_create("values", MFD_CLOEXEC), payload_file = memfd_create("payload", MFD_CLOEXEC);
    uint8_t *values = repeated(file, count * 4 / page * page + page, period);
    uint8_t *payload = repeated(payload_file, size / page * page + page, period);
    expect(values != NULL && payload != NULL, "no addresses for 2^31 values");
    if (values == NULL || payload == NULL)
        return;
    float *last = (float *)(void *)(values + (count - 6) * 4);
    for (int i = 0; i < 6; i++)
        last[i] = (float)(1 << i); /* the memory's other addresses show the same values */
    expect(diloco_quantize(3, 0, 0, 0, ADDRESS(values), count, ADDRESS(payload), 2) == 0, "2^31 values are refused");
    uint8_t expected[4 + 3];
    diloco_quantize(3, 0, 0, 0, ADDRESS(last), 6, ADDRESS(expected), 1);
    expect(memcmp(payload + size - 7, expected, 7) == 0, "the block after 2^31 values is lost");
    munmap(values, (size_t)(count * 4)), munmap(payload, (size_t)size);
    close(file), close(payload_file);
}

void check_sizes(void)
{
    for (int32_t format = 0; format < FORMATS; format++)
        check_nothing(format);
    check_many();
}
