/* The primitives of vector.h for NEON. */

INLINE words larger_words(words a, words b)
{
    return (words)vmaxq_s32((int32x4_t)a, (int32x4_t)b);
}

INLINE floats larger(floats a, floats b)
{
    return (floats)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
}

INLINE floats smaller(floats a, floats b)
{
    return (floats)vminq_f32((float32x4_t)a, (float32x4_t)b);
}

INLINE words with_sign(words magnitudes, floats signs)
{
    words negative = (words)signs >> 31; /* 0 or -1 */
    return (magnitudes ^ negative) - negative;
}

INLINE words to_nearest(floats values)
{
    return (words)vcvtnq_s32_f32((float32x4_t)values);
}

INLINE bytes join(uint8x16_t first, uint8x16_t second)
{
    bytes joined;
    memcpy(&joined, &first, sizeof first);
    memcpy((uint8_t *)&joined + sizeof first, &second, sizeof second);
    return joined;
}

INLINE uint8x16_t half_of_bytes(bytes joined, int half)
{
    uint8x16_t taken;
    memcpy(&taken, (const uint8_t *)&joined + half * sizeof taken, sizeof taken);
    return taken;
}

INLINE uint8x16_t narrow_half(const words group[4])
{
    int16x8_t first = vcombine_s16(vmovn_s32((int32x4_t)group[0]), vmovn_s32((int32x4_t)group[1]));
    int16x8_t second = vcombine_s16(vmovn_s32((int32x4_t)group[2]), vmovn_s32((int32x4_t)group[3]));
    return vreinterpretq_u8_s8(vcombine_s8(vmovn_s16(first), vmovn_s16(second)));
}

INLINE bytes narrow(const words group[GROUP])
{
    return join(narrow_half(group), narrow_half(group + 4));
}

INLINE bytes magnitude_of_bytes(bytes values)
{
    uint8x16_t first = vreinterpretq_u8_s8(vabsq_s8(vreinterpretq_s8_u8(half_of_bytes(values, 0))));
    uint8x16_t second = vreinterpretq_u8_s8(vabsq_s8(vreinterpretq_s8_u8(half_of_bytes(values, 1))));
    return join(first, second);
}

INLINE void store_half_bytes(bytes codes, uint8_t *to)
{
    uint8x16_t first = half_of_bytes(codes, 0), second = half_of_bytes(codes, 1);
    uint8x16_t low = vuzp1q_u8(first, second), high = vuzp2q_u8(first, second);
    vst1q_u8(to, vorrq_u8(low, vshlq_n_u8(high, 4)));
}

INLINE bytes load_half_bytes(const uint8_t *from)
{
    uint8x16_t pairs = vld1q_u8(from);
    uint8x16_t low = vandq_u8(pairs, vdupq_n_u8(15)), high = vshrq_n_u8(pairs, 4);
    return join(vzip1q_u8(low, high), vzip2q_u8(low, high));
}

INLINE bytes look_up(const int8_t table[16], bytes codes)
{
    uint8x16_t levels = vld1q_u8((const uint8_t *)table);
    return join(vqtbl1q_u8(levels, half_of_bytes(codes, 0)), vqtbl1q_u8(levels, half_of_bytes(codes, 1)));
}
