/* Tests that values that cannot be encoded, and payloads that no encoder makes, are refused at the right block. */
#include "check.h"

#include <math.h>

enum { COUNT = 3 * 4096 + 100 };

static void check_bad_values(const char *set, int32_t format)
{
    const float bad[] = {NAN, -NAN, INFINITY, -INFINITY, 0x1.000002p63f, -0x1p127f};
    const int64_t places[] = {0, 1, 31, 32, 700, 1023, 1024, 4095, 4096, COUNT - 1};
    int64_t block = diloco_block_values(format);
    uint8_t *payload = new_bytes(diloco_payload_size(format, COUNT));
    for (int k = 0; k < 6; k++)
        for (int p = 0; p < 10; p++) {
            float *values = random_floats(COUNT, 1.0f, 1), *zeros = new_floats(COUNT);
            memset(zeros, 0, sizeof(float) * COUNT);
            values[places[p]] = bad[k];
            int64_t refused = 1 + places[p] / block;
            uintptr_t from = ADDRESS(values), none = ADDRESS(zeros), to = ADDRESS(payload);
            expect(diloco_quantize(format, 0, 0, 0, from, COUNT, to, 2) == refused,
                   "%s %s: %g at %lld is encoded", set, diloco_format_name(format), bad[k], (long long)places[p]);
            expect(diloco_quantize_difference(format, 0, 0, 0, from, none, 0, 0, COUNT, to, 1) == refused,
                   "%s %s: a difference of %g is encoded", set, diloco_format_name(format), bad[k]);
            expect(diloco_finish_average(format, 0, 0, 0, from, 1.0f, COUNT, to, 1) == refused,
                   "%s %s: an average of %g is encoded", set, diloco_format_name(format), bad[k]);
            free(values), free(zeros);
        }
    free(payload);
}

static int64_t check_of(int32_t format, const uint8_t *payload)
{
    return diloco_check_payload(format, ADDRESS(payload), COUNT, 1);
}

/* A copy of a sound payload with some bytes changed is refused at its second block. */
static void expect_refused(const char *set, int32_t format, const uint8_t *sound, int64_t place, const void *bytes,
                           int64_t size, const char *what)
{
    uint8_t *payload = copy_of_bytes(sound, diloco_payload_size(format, COUNT));
    uint8_t *average = new_bytes(diloco_payload_size(format, COUNT));
    float *values = new_floats(COUNT);
    memcpy(payload + diloco_block_bytes(format) + place, bytes, (size_t)size);
    expect(check_of(format, payload) == 2, "%s %s: %s is not refused", set, diloco_format_name(format), what);
    expect(diloco_dequantize(format, ADDRESS(payload), COUNT, ADDRESS(values), 1) == 2, "%s %s: %s is decoded", set,
           diloco_format_name(format), what);
    expect(diloco_accumulate(format, ADDRESS(payload), 1.0f, COUNT, ADDRESS(values), 1) == 2, "%s %s: %s is added", set,
           diloco_format_name(format), what);
    const uintptr_t both[] = {ADDRESS(sound), ADDRESS(payload)};
    const float weights[] = {1.0f, 1.0f};
    expect(diloco_average(format, 0, 0, 0, both, weights, 2, 2.0f, COUNT, ADDRESS(average), 1) != 0,
           "%s %s: %s is averaged", set, diloco_format_name(format), what);
    free(payload), free(values), free(average);
}

static void check_bad_payloads(const char *set, int32_t format)
{
    float *values = random_floats(COUNT, 1.0f, 1);
    uint8_t *sound = new_bytes(diloco_payload_size(format, COUNT));
    diloco_quantize(format, 0, 0, 0, ADDRESS(values), COUNT, ADDRESS(sound), 1);
    expect(check_of(format, sound) == 0, "%s %s: a sound payload is refused", set, diloco_format_name(format));
#define REFUSE(place, value, what)                                                                                     \
    do {                                                                                                               \
        __typeof__(value) changed = value;                                                                             \
        expect_refused(set, format, sound, place, &changed, sizeof changed, what);                                     \
    } while (0)
    if (strcmp(diloco_format_name(format), "fp16") == 0) {
        REFUSE(10, (uint16_t)0x7c00, "an infinite half");
        REFUSE(20, (uint16_t)0xfe01, "a half that is NaN");
    } else if (strcmp(diloco_format_name(format), "sparse") == 0) {
        REFUSE(0, (uint16_t)0xbf80, "a negative level");
        REFUSE(4, UINT64_MAX, "indices that do not ascend");
    } else {
        REFUSE(0, -1.0f, "a negative unit");
        REFUSE(0, -0.0f, "a unit of minus zero");
        REFUSE(0, 0.0f, "a nonzero code with unit zero");
        REFUSE(0, 0x1p-127f, "a subnormal unit");
        REFUSE(0, NAN, "a unit that is NaN");
        REFUSE(0, INFINITY, "an infinite unit");
        REFUSE(0, 0x1p63f, "a unit beyond all encoders'");
    }
    if (strcmp(diloco_format_name(format), "int8") == 0)
        REFUSE(4 + 1000, (uint8_t)0x80, "the code -128");
    if (strcmp(diloco_format_name(format), "uint4") == 0) {
        REFUSE(4, -0.0f, "a minimum of minus zero");
        REFUSE(4, NAN, "a minimum that is NaN");
        REFUSE(4, -INFINITY, "an infinite minimum");
        REFUSE(4, 0x1p65f, "a minimum beyond all encoders'");
    }
    if (strncmp(diloco_format_name(format), "e", 1) == 0) {
        REFUSE(4 + 3, (uint8_t)0x18, "minus zero in a low half");
        REFUSE(4 + 3, (uint8_t)0x81, "minus zero in a high half");
    }
#undef REFUSE
    free(values), free(sound);
}

/* Checks and decodes a sparse block of 192 values, with three codes of 14 bits each. */
static void check_sparse_block(const char *set, int32_t format, int is_sound, uint16_t low, uint16_t high,
                               uint64_t codes, const char *what)
{
    enum { VALUES = 192, SIZE = 10 };
    uint8_t *block = new_bytes(SIZE), *again = new_bytes(SIZE);
    float *values = new_floats(VALUES);
    memcpy(block, &low, 2);
    memcpy(block + 2, &high, 2);
    memcpy(block + 4, &codes, 6);
    expect(diloco_check_payload(format, ADDRESS(block), VALUES, 1) == !is_sound, "%s sparse: %s is %s", set, what,
           is_sound ? "refused" : "not refused");
    expect(diloco_dequantize(format, ADDRESS(block), VALUES, ADDRESS(values), 1) == !is_sound, "%s sparse: %s", set,
           what);
    if (is_sound) {
        diloco_quantize(format, 0, 0, 0, ADDRESS(values), VALUES, ADDRESS(again), 1);
        expect(memcmp(block, again, SIZE) == 0, "%s sparse: %s has another encoding", set, what);
    }
    free(block), free(again), free(values);
}

static void check_sparse_blocks(const char *set, int32_t format)
{
    enum { ONE = 0x3f80, TWO = 0x4000, LARGEST = 0x5f00, HIGH = 1 << 12, NEGATIVE = 1 << 13 };
#define CODES(first, second, third) ((uint64_t)(first) | (uint64_t)(second) << 14 | (uint64_t)(third) << 28)
#define EXPECT_SOUND(low, high, codes, what) check_sparse_block(set, format, 1, low, high, codes, what)
#define EXPECT_REFUSED(low, high, codes, what) check_sparse_block(set, format, 0, low, high, codes, what)
    EXPECT_SOUND(ONE, ONE, CODES(5, NEGATIVE | 9, 191), "one level");
    EXPECT_SOUND(ONE, TWO, CODES(5, HIGH | NEGATIVE | 9, 191), "two levels");
    EXPECT_SOUND(ONE, ONE, CODES(0, 0, 0), "the first value alone");
    EXPECT_SOUND(ONE, ONE, CODES(NEGATIVE, 7, 0), "two values");
    EXPECT_SOUND(0x0080, LARGEST, CODES(HIGH, 7, 0), "the smallest and the largest level");
    EXPECT_SOUND(0, 0, 0, "nothing");
    EXPECT_REFUSED(0, 0, CODES(5, 0, 0), "a code without a level");
    EXPECT_REFUSED(0, ONE, 0, "a low level of zero");
    EXPECT_REFUSED(0x8000, 0x8000, 0, "a level of minus zero");
    EXPECT_REFUSED(0xbf80, 0xbf80, CODES(5, 0, 0), "a negative level");
    EXPECT_REFUSED(0x0040, 0x0040, CODES(5, 0, 0), "a subnormal level");
    EXPECT_REFUSED(0x7f80, 0x7f80, CODES(5, 0, 0), "an infinite level");
    EXPECT_REFUSED(0x7fc0, 0x7fc0, CODES(5, 0, 0), "a level that is NaN");
    EXPECT_REFUSED(ONE, LARGEST + 1, CODES(5, HIGH | 9, 0), "a level beyond all encoders'");
    EXPECT_REFUSED(TWO, ONE, CODES(5, HIGH | 9, 0), "a high level below the low one");
    EXPECT_REFUSED(ONE, ONE, CODES(5, HIGH | 9, 0), "a high code where there is one level");
    EXPECT_REFUSED(ONE, TWO, CODES(5, 9, 0), "a high level that no code has");
    EXPECT_REFUSED(ONE, TWO, CODES(HIGH | 5, HIGH | 9, 0), "a low level that no code has");
    EXPECT_REFUSED(ONE, ONE, CODES(9, 5, 0), "indices that descend");
    EXPECT_REFUSED(ONE, ONE, CODES(5, 5, 0), "an index twice");
    EXPECT_REFUSED(ONE, ONE, CODES(5, NEGATIVE, 0), "a second code for the first value");
    EXPECT_REFUSED(ONE, ONE, CODES(5, 0, 9), "a code after one that is left over");
    EXPECT_REFUSED(ONE, ONE, CODES(5, 9, 192), "an index beyond the block");
    EXPECT_REFUSED(ONE, ONE, CODES(5, 9, 11) | (uint64_t)1 << 42, "a padding bit");
#undef CODES
#undef EXPECT_SOUND
#undef EXPECT_REFUSED
}

/* With arbitrary bytes as a payload, no memory outside it is touched (the sanitizer would find that), accepted bytes
 * decode to finite values, and `set` refuses the same block as the scalar set. */
static void check_arbitrary_bytes(const char *set, int32_t format)
{
    uint64_t seed = 17;
    int64_t size = diloco_payload_size(format, COUNT);
    for (int round = 0; round < 200; round++) {
        uint8_t *payload = new_bytes(size);
        float *values = new_floats(COUNT);
        int32_t block_bytes = diloco_block_bytes(format);
        for (int64_t i = 0; i < size; i++)
            payload[i] = (uint8_t)(next_random(&seed) >> (round % 8));
        for (int64_t i = 3; round % 2 && i < size; i += block_bytes)
            payload[i] = 0x3b; /* a valid unit (or sparse's high level), so that the codes are checked */
        int64_t refused = check_of(format, payload);
        diloco_choose_kernels("scalar");
        expect(check_of(format, payload) == refused, "%s %s: another block is refused", set,
               diloco_format_name(format));
        diloco_choose_kernels(set);
        expect(diloco_dequantize(format, ADDRESS(payload), COUNT, ADDRESS(values), 2) == refused,
               "%s %s: decoding refuses something else", set, diloco_format_name(format));
        int64_t finite = refused ? (refused - 1) * diloco_block_values(format) : COUNT, first = 0;
        while (refused == 0 && first < finite && isfinite(values[first]))
            first++;
        expect(refused || first == COUNT, "%s %s: value %lld isn't finite", set, diloco_format_name(format),
               (long long)first);
        free(payload), free(values);
    }
}

static void check_unknown_formats(void)
{
    float value = 1.0f;
    uint8_t payload[8];
    for (int32_t format = -1; format <= FORMATS; format += FORMATS + 1) {
        expect(diloco_format_name(format) == NULL && diloco_block_values(format) == 0, "format %d has a name", format);
        expect(diloco_quantize(format, 0, 0, 0, ADDRESS(&value), 1, ADDRESS(payload), 1) == -1, "format %d", format);
        expect(diloco_check_payload(format, ADDRESS(payload), 1, 1) == -1, "format %d is checked", format);
    }
    for (int32_t format = 5; format <= 6; format++)
        expect(diloco_quantize(format, 1, 0, 0, ADDRESS(&value), 1, ADDRESS(payload), 1) == -1,
               "%s is rounded by chance", diloco_format_name(format));
}

void check_refusals(void)
{
    const char *const sets[] = {"scalar", set_names[0], set_names[1], set_names[2]};
    for (int i = 0; i < 4; i++) {
        if (diloco_choose_kernels(sets[i]) != 0)
            continue;
        for (int32_t format = 0; format < FORMATS; format++) {
            check_bad_values(sets[i], format);
            check_bad_payloads(sets[i], format);
            check_arbitrary_bytes(sets[i], format);
        }
        check_sparse_blocks(sets[i], 6);
    }
    check_unknown_formats();
    expect(diloco_choose_kernels("mmx") == 1, "an unknown set can be chosen");
    diloco_choose_kernels("");
}
