/* Part of vector.h: from floats to blocks. */

/* Computes two maxima side by side, so that no step needs to wait for the step before. */
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

/* Converts numbers between -7 and 7 from two's complement, in which the bit MINUS_ZERO is already set if negative. */
INLINE bytes sign_and_magnitude(bytes levels)
{
    return magnitude_of_bytes(levels) | (levels & MINUS_ZERO);
}

/* Returns the codes of 4-bit floats for w = value * inverse; see formats.h. `base` has the bits of 2.0, the least t,
 * whose code is 0. */
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
