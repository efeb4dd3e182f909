/* The arithmetic of pseudo-gradients, the same bit for bit on every machine.
 *
 * A payload is n values in blocks of 1024 consecutive ones (the last block may be shorter). A block's bytes are its
 * scale (fp32, little-endian, at any alignment) and then one int8 code a value: block i starts at byte 1028 * i, and
 * a payload takes n + 4 * ceil(n / 1024) bytes. A value is decoded as scale * code.
 *
 * Addresses are passed as uintptr_t, which a Python caller can hand over without building a pointer object. Floats
 * must be aligned to 4 bytes; arguments must not overlap. Nothing here allocates, keeps state or takes locks.
 *
 * Every function returns 0, or 1 + the index of the first block that it refuses.
 */
#ifndef DILOCO_KERNELS_H
#define DILOCO_KERNELS_H

#include <stdint.h>

/* Encode `count` floats. Refuses a block with a NaN, an infinity or a value too large to be decoded as a finite one;
 * the blocks of `out` from that one on are left as they were. */
int64_t diloco_quantize(uintptr_t values, int64_t count, uintptr_t out);

/* The same for theta - local, without storing the difference. */
int64_t diloco_quantize_difference(uintptr_t theta, uintptr_t local, int64_t count, uintptr_t out);

/* The same for accumulator / total_weight. */
int64_t diloco_finish_average(uintptr_t accumulator, float total_weight, int64_t count, uintptr_t out);

/* Refuse a block whose scale is negative (-0 too), not finite or too large, or that holds the code -128. */
int64_t diloco_check_payload(uintptr_t payload, int64_t count);

/* The three below check the whole payload first and change nothing if a block is refused. */

/* out = decoded values. */
int64_t diloco_dequantize(uintptr_t payload, int64_t count, uintptr_t out);

/* accumulator += (weight * scale) * code. Also refuses a block for which weight * scale is too large. */
int64_t diloco_accumulate(uintptr_t payload, float weight, int64_t count, uintptr_t accumulator);

/* g = decoded values; momentum = mu * momentum + g; theta -= learning_rate * (g + mu * momentum). */
int64_t diloco_outer_step(uintptr_t payload, uintptr_t theta, uintptr_t momentum, int64_t count, float learning_rate,
                          float mu);

#endif
