/* Part of scalar.c: the sparse format, of which every set uses this one implementation. */

enum {
    SPARSE_VALUES = 4096,
    SPARSE_CODES = 64,
    SPARSE_BITS = 14,
    INDEX_MASK = 0xfff,
    HIGH = 1 << 12,
    NEGATIVE = 1 << 13,
    COLUMNS = 2 * SPARSE_CODES,
    LOOKED_AT = 16, /* values that are skipped together if all are too small */
    SMALLEST_KEPT = 0x00800000, /* the bits of FLT_MIN, the smallest normal number */
    SMALLEST_LEVEL = 0x0080,    /* the same as bfloat16 */
    LARGEST_LEVEL = 0x5f00,     /* 2^63 */
};

/* The bits of a float's magnitude. As integers they sort as the floats do, infinities and NaNs above all others. */
static int32_t magnitude_bits(float value)
{
    return (int32_t)(bits_of(value) & ~SIGN_BIT);
}

static int64_t count_at_least(const int32_t *magnitudes, int64_t count, int32_t least)
{
    int32_t found = 0;
    for (int64_t i = 0; i < count; i++)
        found += magnitudes[i] >= least;
    return found;
}

/* Returns the `wanted`-th largest magnitude, found bit by bit: the largest number that `wanted` magnitudes reach. */
static int32_t find_threshold(const int32_t *magnitudes, int64_t count, int64_t wanted)
{
    int32_t threshold = 0;
    for (int32_t bit = 1 << 30; bit > 0; bit >>= 1)
        if (count_at_least(magnitudes, count, threshold | bit) >= wanted)
            threshold |= bit;
    return threshold;
}

/* The largest magnitude of each column, where values lie in rows of COLUMNS. */
static void find_column_maxima(const float *values, int64_t length, int32_t maxima[COLUMNS])
{
    memset(maxima, 0, COLUMNS * sizeof *maxima);
    for (int64_t start = 0; start < length; start += COLUMNS) {
        int64_t columns = length - start < COLUMNS ? length - start : COLUMNS;
        for (int64_t i = 0; i < columns; i++) {
            int32_t magnitude = magnitude_bits(values[start + i]);
            maxima[i] = magnitude > maxima[i] ? magnitude : maxima[i];
        }
    }
}

static int has_any_at_least(const float values[LOOKED_AT], int32_t least)
{
    int32_t found = 0;
    for (int64_t i = 0; i < LOOKED_AT; i++)
        found |= magnitude_bits(values[i]) >= least;
    return found;
}

/* Collects the magnitudes that are at least `least`, and their indices. Returns their number. */
static int64_t collect(const float *values, int64_t length, int32_t least, int32_t *magnitudes, uint16_t *indices)
{
    int64_t found = 0;
    for (int64_t start = 0; start < length; start += LOOKED_AT) {
        int64_t end = length - start < LOOKED_AT ? length : start + LOOKED_AT;
        if (end == start + LOOKED_AT && !has_any_at_least(values + start, least))
            continue;
        for (int64_t i = start; i < end; i++) {
            magnitudes[found] = magnitude_bits(values[i]);
            indices[found] = (uint16_t)i;
            found += magnitudes[found] >= least;
        }
    }
    return found;
}

/* Keeps only the `wanted` largest of the `found` magnitudes, in the same order. Returns the number kept. */
static int64_t keep_largest(int64_t wanted, int64_t found, int32_t *magnitudes, uint16_t *indices)
{
    if (found <= wanted)
        return found;
    int32_t threshold = find_threshold(magnitudes, found, wanted);
    int64_t equal_ones = wanted - count_at_least(magnitudes, found, threshold + 1), kept = 0;
    for (int64_t i = 0; i < found; i++) {
        if (magnitudes[i] < threshold || (magnitudes[i] == threshold && equal_ones-- <= 0))
            continue;
        magnitudes[kept] = magnitudes[i];
        indices[kept++] = indices[i];
    }
    return kept;
}

static uint16_t bfloat16_of(float value)
{
    uint32_t bits = bits_of(value);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float value_of_bfloat16(uint16_t upper_half)
{
    return float_of((uint32_t)upper_half << 16);
}

struct levels {
    uint16_t low, high;
    double middle; /* magnitudes above it are high */
};

static struct levels find_levels(const int32_t *magnitudes, int64_t kept)
{
    double sum = 0, low = 0, high = 0;
    int64_t highs = 0;
    for (int64_t i = 0; i < kept; i++)
        sum += (double)float_of((uint32_t)magnitudes[i]);
    double middle = sum / (double)kept;
    for (int64_t i = 0; i < kept; i++) {
        double magnitude = (double)float_of((uint32_t)magnitudes[i]);
        int is_high = magnitude > middle;
        *(is_high ? &high : &low) += magnitude;
        highs += is_high;
    }
    uint16_t low_level = bfloat16_of((float)(low / (double)(kept - highs)));
    uint16_t high_level = highs ? bfloat16_of((float)(high / (double)highs)) : low_level;
    return (struct levels){low_level, high_level, middle};
}

static void put_codes(const uint16_t *codes, int64_t count, uint8_t *to)
{
    uint32_t waiting = 0;
    int bits = 0;
    for (int64_t i = 0; i < count; i++) {
        waiting |= (uint32_t)codes[i] << bits;
        for (bits += SPARSE_BITS; bits >= 8; bits -= 8, waiting >>= 8)
            *to++ = (uint8_t)waiting;
    }
    if (bits > 0)
        *to = (uint8_t)waiting;
}

/* Reads `count` codes, and returns the unused bits of the last byte. */
static uint32_t get_codes(const uint8_t *from, int64_t count, uint16_t *codes)
{
    uint32_t waiting = 0;
    int bits = 0;
    for (int64_t i = 0; i < count; i++) {
        for (; bits < SPARSE_BITS; bits += 8)
            waiting |= (uint32_t)*from++ << bits;
        codes[i] = waiting & ((1 << SPARSE_BITS) - 1);
        waiting >>= SPARSE_BITS;
        bits -= SPARSE_BITS;
    }
    return waiting;
}

static void put_levels(uint16_t low, uint16_t high, uint8_t *block)
{
    memcpy(block, &low, 2);
    memcpy(block + 2, &high, 2);
}

static void get_levels(const uint8_t *block, uint16_t *low, uint16_t *high)
{
    memcpy(low, block, 2);
    memcpy(high, block + 2, 2);
}

static int64_t codes_of_sparse(int64_t length)
{
    return codes_of_block(&diloco_formats[SPARSE], length);
}

/* Returns the number of codes that stand for a value, in a block with a nonzero value. The other codes are padding. */
static int64_t count_used(const uint16_t *codes, int64_t count)
{
    int64_t used = 1;
    while (used < count && codes[used] != 0)
        used++;
    return used;
}

/* The `wanted`-th largest of the columns' maxima is a lower bound that at least `wanted` magnitudes reach. Usually few
 * others reach it, so that the search for the `wanted` largest is short. */
static int encode_sparse(const float *values, int64_t length, const struct rounding *rounding, struct key key,
                         uint8_t *block)
{
    (void)rounding, (void)key;
    int32_t maxima[COLUMNS], magnitudes[SPARSE_VALUES];
    uint16_t indices[SPARSE_VALUES], codes[SPARSE_CODES] = {0};
    int64_t wanted = codes_of_sparse(length);
    find_column_maxima(values, length, maxima);
    if (count_at_least(maxima, COLUMNS, (LARGEST_LEVEL << 16) + 1) > 0)
        return 0;
    int32_t least = find_threshold(maxima, COLUMNS, wanted);
    least = least < SMALLEST_KEPT ? SMALLEST_KEPT : least;
    int64_t found = collect(values, length, least, magnitudes, indices);
    int64_t kept = keep_largest(wanted, found, magnitudes, indices);
    struct levels levels = kept ? find_levels(magnitudes, kept) : (struct levels){0};
    for (int64_t i = 0; i < kept; i++) {
        int is_high = levels.low < levels.high && (double)float_of((uint32_t)magnitudes[i]) > levels.middle;
        codes[i] = (uint16_t)(indices[i] | (is_high ? HIGH : 0) | (signbit(values[indices[i]]) ? NEGATIVE : 0));
    }
    put_levels(levels.low, levels.high, block);
    put_codes(codes, wanted, block + 4);
    return 1;
}

static int codes_are_sound(const uint16_t *codes, int64_t count, int64_t length, int has_two_levels)
{
    int64_t used = count_used(codes, count), highs = 0;
    for (int64_t i = 0; i < used; i++) {
        int64_t index = codes[i] & INDEX_MASK;
        if (index >= length || (i > 0 && index <= (codes[i - 1] & INDEX_MASK)))
            return 0;
        highs += (codes[i] & HIGH) != 0;
    }
    for (int64_t i = used; i < count; i++)
        if (codes[i] != 0)
            return 0;
    return has_two_levels ? highs > 0 && highs < used : highs == 0;
}

static int check_sparse(const uint8_t *block, int64_t length)
{
    uint16_t codes[SPARSE_CODES], low, high, any = 0;
    int64_t count = codes_of_sparse(length);
    if (get_codes(block + 4, count, codes) != 0)
        return 0;
    get_levels(block, &low, &high);
    if (low == 0) {
        for (int64_t i = 0; i < count; i++)
            any |= codes[i];
        return high == 0 && any == 0;
    }
    return low >= SMALLEST_LEVEL && low <= high && high <= LARGEST_LEVEL &&
           codes_are_sound(codes, count, length, low < high);
}

static void decode_sparse(const uint8_t *block, int64_t length, float *values)
{
    uint16_t codes[SPARSE_CODES], low, high;
    int64_t count = codes_of_sparse(length);
    memset(values, 0, (size_t)length * sizeof *values);
    get_levels(block, &low, &high);
    if (low == 0)
        return;
    get_codes(block + 4, count, codes);
    int64_t used = count_used(codes, count);
    for (int64_t i = 0; i < used; i++) {
        float level = value_of_bfloat16(codes[i] & HIGH ? high : low);
        values[codes[i] & INDEX_MASK] = codes[i] & NEGATIVE ? -level : level;
    }
}
