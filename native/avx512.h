/* The primitives of vector.h for AVX-512. */
#include "bytes_x86.h"

INLINE words larger_words(words a, words b)
{
    return (words)_mm512_max_epi32((__m512i)a, (__m512i)b);
}

INLINE floats larger(floats a, floats b)
{
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
}

INLINE floats smaller(floats a, floats b)
{
    return (floats)_mm512_min_ps((__m512)a, (__m512)b);
}

INLINE words with_sign(words magnitudes, floats signs)
{
    words negative = (words)signs >> 31; /* 0 or -1 */
    return (magnitudes ^ negative) - negative;
}

INLINE words to_nearest(floats values)
{
    return (words)_mm512_cvtps_epi32((__m512)values);
}

INLINE bytes narrow(const words group[GROUP])
{
    __m128i first = _mm512_cvtepi32_epi8((__m512i)group[0]), second = _mm512_cvtepi32_epi8((__m512i)group[1]);
    return (bytes)_mm256_set_m128i(second, first);
}
