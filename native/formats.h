/* The formats of a payload: how n floats become bytes. They are defined only here.
 *
 * A payload is a row of blocks of `values` consecutive values; the last block may be shorter. A block is a header of
 * `header` bytes, then one code for each `values_a_code` values. All blocks but the last take the same number of bytes,
 * so block i starts at byte i * diloco_block_bytes(format), and every block decodes alone. Floats are fp32,
 * little-endian, at any alignment.
 *
 * 8-bit codes are one byte each. 4-bit codes lie two in a byte: code 2j in the low half, code 2j + 1 in the high half;
 * if their number is odd, the last high half is 0. 16-bit codes are little-endian. 14-bit codes follow each other from
 * the lowest bit of the first byte on; what is left of the last byte is 0.
 *
 *   name          block  header         code         decoded value        source
 *   int8           1024  unit           -127 … 127   unit * code          absmax quantization: arXiv 2208.07339
 *   uint4           256  unit, minimum  0 … 15       minimum + unit*code  min/max (asymmetric) quantization
 *   e2m1-block32     32  unit           sign+3 bits  ± unit * level       the 4-bit float of OCP MX 1.0, fp32 scale
 *   e2m1           1024  unit           sign+3 bits  ± unit * level       the same, one scale for a long block
 *   e3m0           1024  unit           sign+3 bits  ± unit * level       Streaming DiLoCo, arXiv 2501.18512
 *   fp16           1024  none           binary16     the code's value     IEEE 754-2019
 *   sparse         4096  low, high      index+2 bits ± low or ± high      SparseLoCo, arXiv 2508.15706
 *
 * To scale block by block is from arXiv 2110.02861. PRIME's int8 (arXiv 2412.01152) is another format: 256 buckets over
 * six standard deviations to both sides of a tensor's mean, and the mean of each bucket as a codebook beside the codes.
 *
 * Levels by the low three bits of a code: e2m1 0 1 2 3 4 6 8 12, e3m0 0 1 2 4 8 16 32 64; the fourth bit is the sign.
 *
 * sparse has a code for one value in 64, in a short last block rounded up; all others decode to 0. From the lowest bit
 * on, a code is the value's index in its block (12 bits), whether it is high (1 bit), and its sign (1 bit). Indices
 * ascend strictly. Codes that are left over are 0 and come last, where no index can be 0 but that of the first code.
 * low and high are bfloat16, the upper halves of fp32. Both are 0 where there is nothing to keep; they are equal, and no
 * code is high, where one level is enough. The paper keeps as many values and spends as many bits on each. Only the
 * choice of the levels is ours: they are the means of the smaller and of the larger magnitudes, so that no block's
 * error is larger than with one level.
 *
 * Encoding, with every operation rounded to fp32:
 *   int8, e2m1, e3m0   unit = absmax / largest level (127, 12, 64); v = value * (largest level / absmax)
 *   uint4              unit = (maximum - minimum) / 15; v = (value - minimum) * (15 / (maximum - minimum))
 *   fp16               v = value
 * and then v is rounded to a code. A block whose unit would be subnormal gets unit 0 and codes 0.
 *
 * sparse keeps the values of the largest magnitudes, of equal ones those of the lower indices, and none that is 0 or
 * subnormal. A kept value is high if its magnitude is above the mean of those of all kept values. low and high are the
 * means of both sides, rounded to fp32, and then to bfloat16, ties to even. If these are equal, no code is high; where no
 * magnitude is above the mean, high is low. Sums are in double, in the order of indices.
 *
 * To nearest: to the nearest code, a tie to the even one. For e2m1 and e3m0 the tie is seen on t = |w| + max(|w|, 2),
 * with w = v for e2m1 and 2v for e3m0, which has one binade for each step of the exponent; fp32 rounds |w| + 2.
 * Stochastic: the fraction of the way from the code below to the code above (int8, uint4, e3m0 and e2m1 know it to
 * 1/65536) is the probability of going up. fp16 and sparse have no stochastic rounding. random.h has the random bits.
 *
 * Encoders refuse NaN, infinities and magnitudes above 2^63 (fp16: those that round beyond 65504). They never make,
 * and decoders refuse: a unit that is negative, -0 or subnormal; a value beyond 2^64; a nonzero code in a block of unit
 * 0; a nonzero padding half; int8's -128; e2m1's and e3m0's code 8 (minus zero); a minimum of -0; fp16's infinities
 * and NaNs; sparse's indices that do not ascend or are beyond the block, a level beyond 2^63, a high one below the low
 * one or without a code, and padding bits. What passes decodes to finite values, and no sum of them over 2^63 tokens
 * overflows.
 */
#ifndef DILOCO_FORMATS_H
#define DILOCO_FORMATS_H

#include <stdint.h>

enum { INT8, UINT4, E2M1_BLOCK32, E2M1, E3M0, FP16, SPARSE, FORMATS };

struct format {
    const char *name;
    int32_t values; /* in a block */
    int32_t header; /* bytes before the codes */
    int32_t bits;   /* of a code */
    int32_t is_stochastic; /* 1 if it has stochastic rounding, else 0 */
    int32_t values_a_code;
};

static const struct format diloco_formats[FORMATS] = {
    [INT8] = {"int8", 1024, 4, 8, 1, 1},
    [UINT4] = {"uint4", 256, 8, 4, 1, 1},
    [E2M1_BLOCK32] = {"e2m1-block32", 32, 4, 4, 1, 1},
    [E2M1] = {"e2m1", 1024, 4, 4, 1, 1},
    [E3M0] = {"e3m0", 1024, 4, 4, 1, 1},
    [FP16] = {"fp16", 1024, 0, 16, 0, 1},
    [SPARSE] = {"sparse", 4096, 4, 14, 0, 64},
};

#define LARGEST_ENCODED 0x1p63f
#define LARGEST_DECODED 0x1p64f /* scales are rounded, so that a little more than 2^63 may come back */

static inline int64_t codes_of_block(const struct format *format, int64_t length)
{
    return (length + format->values_a_code - 1) / format->values_a_code;
}

static inline int64_t bytes_of_block(const struct format *format, int64_t length)
{
    return format->header + (codes_of_block(format, length) * format->bits + 7) / 8;
}

static inline int64_t bytes_of_values(const struct format *format, int64_t count)
{
    int64_t whole = count / format->values, rest = count % format->values;
    return whole * bytes_of_block(format, format->values) + (rest ? bytes_of_block(format, rest) : 0);
}

#endif
