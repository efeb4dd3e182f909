/* The primitives of vector.h for AVX2. */
#include "bytes_x86.h"

INLINE words larger_words(words a, words b)
{
    return (words)_mm256_max_epi32((__m256i)a, (__m256i)b);
}

INLINE floats larger(floats a, floats b)
{
    return (floats)_mm256_max_ps((__m256)a, (__m256)b);
}

INLINE floats smaller(floats a, floats b)
{
    return (floats)_mm256_min_ps((__m256)a, (__m256)b);
}

INLINE words with_sign(words magnitudes, floats signs)
{
    return (words)_mm256_sign_epi32((__m256i)magnitudes, (__m256i)signs);
}

INLINE words to_nearest(floats values)
{
    return (words)_mm256_cvtps_epi32((__m256)values);
}

INLINE bytes narrow(const words group[GROUP])
{
    const __m256i *w = (const __m256i *)group;
    __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(w[0], w[1]), _mm256_packs_epi32(w[2], w[3]));
    return (bytes)_mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
