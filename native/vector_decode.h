/* Part of vector.h: from blocks to floats. */

INLINE int bytes_are_sound(const uint8_t *codes, int length, uint8_t forbidden, int *has_codes)
{
    bytes any = {}, bad = {};
    for (int i = 0; i < length; i += GROUP_VALUES) {
        bytes loaded = load_bytes(codes + i);
        any |= loaded;
        bad |= (bytes)(loaded == forbidden);
    }
    *has_codes = has_any(any);
    return !has_any(bad);
}

INLINE int half_bytes_are_sound(const uint8_t *codes, int length, int *has_codes)
{
    bytes any = {}, bad = {};
    for (int i = 0; i < length; i += GROUP_VALUES) {
        bytes loaded = load_half_bytes(codes + i / 2);
        any |= loaded;
        bad |= (bytes)(loaded == MINUS_ZERO);
    }
    *has_codes = has_any(any);
    return !has_any(bad);
}

INLINE int check_block(int format, const uint8_t *block)
{
    int length = diloco_formats[format].values, has_codes;
    switch (format) {
    case INT8:
        return bytes_are_sound(block + 4, length, 0x80, &has_codes) &&
               unit_is_sound(load_float(block), LARGEST_INT8, has_codes);
    case UINT4:
        half_bytes_are_sound(block + 8, length, &has_codes);
        return range_is_sound(load_float(block), load_float(block + 4), has_codes);
    case E2M1_BLOCK32:
    case E2M1:
        return half_bytes_are_sound(block + 4, length, &has_codes) &&
               unit_is_sound(load_float(block), LARGEST_E2M1, has_codes);
    case E3M0:
        return half_bytes_are_sound(block + 4, length, &has_codes) &&
               unit_is_sound(load_float(block), LARGEST_E3M0, has_codes);
    default: {
        int is_forbidden = 0;
        for (int i = 0; i < length; i++)
            is_forbidden |= (block[2 * i + 1] & 0x7c) == 0x7c;
        return !is_forbidden;
    }
    }
}

/* The use of decoded values, in loops that the compiler vectorizes: they are stored in `into`, added to `into` with a
 * weight, or used as the gradient of an outer step that changes `into`. */
enum use { STORE, ACCUMULATE, STEP };

struct target {
    enum use use;
    float *into, *momentum;
    float weight, learning_rate, mu;
    const struct ahead *ahead;
    int64_t done; /* values of the tile before this block */
};

/* Values that are decoded between two prefetches. */
enum { DECODED_AT_ONCE = 128 };

INLINE int next_stop(struct target target, int start, int length)
{
    int values = length - start < DECODED_AT_ONCE ? length - start : DECODED_AT_ONCE;
    fetch_ahead(target.ahead, target.done + start, values);
    return start + values;
}

INLINE void use_value(float value, struct target target, int64_t i)
{
    if (target.use == STORE)
        target.into[i] = value;
    else if (target.use == ACCUMULATE)
        accumulate_value(value, target.weight, &target.into[i]);
    else
        step_value(value, target.learning_rate, target.mu, &target.into[i], &target.momentum[i]);
}

INLINE void decode_half_bytes(const uint8_t *codes, const int8_t *table, int length, float unit, struct target target)
{
    int8_t levels[TILE];
    for (int i = 0; i < length; i += GROUP_VALUES)
        store_bytes(look_up(table, load_half_bytes(codes + i / 2)), (uint8_t *)levels + i);
    for (int i = 0; i < length;)
        for (int stop = next_stop(target, i, length); i < stop; i++)
            use_value(unit * (float)levels[i], target, i);
}

INLINE void decode_uint4(const uint8_t *codes, int length, float unit, float minimum, struct target target)
{
    uint8_t levels[TILE];
    for (int i = 0; i < length; i += GROUP_VALUES)
        store_bytes(load_half_bytes(codes + i / 2), levels + i);
    for (int i = 0; i < length;)
        for (int stop = next_stop(target, i, length); i < stop; i++)
            use_value(minimum + unit * (float)levels[i], target, i);
}

INLINE void decode_fp16(const uint8_t *block, int length, struct target target)
{
    uint16_t halves[TILE];
    memcpy(halves, block, (size_t)length * sizeof *halves);
    for (int i = 0; i < length;)
        for (int stop = next_stop(target, i, length); i < stop; i++)
            use_value(value_of_half(halves[i]), target, i);
}

INLINE void decode_int8(const int8_t *codes, int length, float unit, struct target target)
{
    for (int i = 0; i < length;)
        for (int stop = next_stop(target, i, length); i < stop; i++)
            use_value(unit * (float)codes[i], target, i);
}

INLINE void decode_block(int format, const uint8_t *block, struct target target)
{
    int length = diloco_formats[format].values;
    switch (format) {
    case INT8:
        return decode_int8((const int8_t *)block + 4, length, load_float(block), target);
    case UINT4:
        return decode_uint4(block + 8, length, load_float(block), load_float(block + 4), target);
    case E2M1_BLOCK32:
    case E2M1:
        return decode_half_bytes(block + 4, E2M1_LEVELS, length, load_float(block), target);
    case E3M0:
        return decode_half_bytes(block + 4, E3M0_LEVELS, length, load_float(block), target);
    default:
        return decode_fp16(block, length, target);
    }
}
