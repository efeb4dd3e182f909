/* The primitives of vector.h for bytes, on x86-64 with AVX2 or more. */

INLINE bytes magnitude_of_bytes(bytes values)
{
    return (bytes)_mm256_abs_epi8((__m256i)values);
}

INLINE void store_half_bytes(bytes codes, uint8_t *to)
{
    __m256i pairs = _mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi16(0x1001)); /* low + 16 * high */
    __m128i packed = _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    _mm_storeu_si128((__m128i *)to, packed);
}

INLINE bytes load_half_bytes(const uint8_t *from)
{
    __m256i pairs = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)from));
    __m256i apart = _mm256_or_si256(pairs, _mm256_slli_epi16(pairs, 4));
    return (bytes)_mm256_and_si256(apart, _mm256_set1_epi8(15));
}

INLINE bytes look_up(const int8_t table[16], bytes codes)
{
    __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    return (bytes)_mm256_shuffle_epi8(both, (__m256i)codes);
}
