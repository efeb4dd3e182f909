/* The arithmetic of pseudo-gradients, the same bit for bit on every machine and with every instruction set.
 *
 * formats.h defines the payloads. Addresses are uintptr_t, which a Python caller hands over without building a pointer
 * object; floats must be aligned to 4 bytes, bfloat16 to 2, payloads to nothing. Arguments must not overlap. Nothing
 * here allocates or keeps state, but for the choice of instruction set. `count` values may be none, or more than 2^31.
 *
 * A function that takes a range of blocks gets the addresses of its first value and its first block. Work is split
 * over up to `threads` threads, which end with the call; the caller's own is one of them.
 *
 * `is_stochastic` rounds by chance instead of to nearest; the bits depend on `seed` and on a block's index, which is
 * `first_block` for the first block of the range. `format` is an index into the table in formats.h.
 *
 * Functions return 0, or 1 + the index in the range of the first block that they refuse (formats.h says which), or -1
 * for a format or a rounding that doesn't exist. After a refusal, what was to be written is undefined.
 */
#ifndef DILOCO_KERNELS_H
#define DILOCO_KERNELS_H

#include <stdint.h>

/* The facts of formats.h; NULL or 0 for an index beyond the last format. */
const char *diloco_format_name(int32_t format);
int32_t diloco_block_values(int32_t format);
int32_t diloco_block_bytes(int32_t format);
int32_t diloco_format_is_stochastic(int32_t format);
int64_t diloco_payload_size(int32_t format, int64_t count);

/* "scalar", "avx2", "avx512" or "neon" for all calls from now on, "" for the fastest one. Returns 0, or 1 and changes
 * nothing if this build or processor doesn't have it. */
int32_t diloco_choose_kernels(const char *name);
int32_t diloco_kernels_are_supported(const char *name);
const char *diloco_kernels_name(void);

/* Encode `count` floats. */
int64_t diloco_quantize(int32_t format, int32_t is_stochastic, uint64_t seed, int64_t first_block, uintptr_t values,
                        int64_t count, uintptr_t payload, int32_t threads);

/* Encode d = theta - local, with local as floats or bfloat16. If `residual` is not 0, it is the address of floats of
 * earlier calls' rounding errors (error feedback): d = (theta - local) + residual, and residual = d - decoded. */
int64_t diloco_quantize_difference(int32_t format, int32_t is_stochastic, uint64_t seed, int64_t first_block,
                                   uintptr_t theta, uintptr_t local, int32_t local_is_bfloat16, uintptr_t residual,
                                   int64_t count, uintptr_t payload, int32_t threads);

/* Encode accumulator / total_weight. */
int64_t diloco_finish_average(int32_t format, int32_t is_stochastic, uint64_t seed, int64_t first_block,
                              uintptr_t accumulator, float total_weight, int64_t count, uintptr_t payload,
                              int32_t threads);

/* Encode (sum of weight * decoded payload) / total_weight, added up in the order of `payloads`, their addresses. The
 * bytes are those of diloco_accumulate into zeros and diloco_finish_average. If no encoder makes a payload's block, the
 * first block of its tile is refused. */
int64_t diloco_average(int32_t format, int32_t is_stochastic, uint64_t seed, int64_t first_block,
                       const uintptr_t *payloads, const float *weights, int32_t payload_count, float total_weight,
                       int64_t count, uintptr_t payload, int32_t threads);

/* Refuse a payload that no encoder makes. The other functions that decode also refuse it, when they reach the block. */
int64_t diloco_check_payload(int32_t format, uintptr_t payload, int64_t count, int32_t threads);

/* Set `squared` to the sum of the squares of the decoded values, in double, with the same bits on every machine. Give
 * the whole payload: sums of parts would be rounded in another way. */
int64_t diloco_squared_norm(int32_t format, uintptr_t payload, int64_t count, double *squared);

/* values = decoded payload. */
int64_t diloco_dequantize(int32_t format, uintptr_t payload, int64_t count, uintptr_t values, int32_t threads);

/* accumulator += weight * decoded payload. */
int64_t diloco_accumulate(int32_t format, uintptr_t payload, float weight, int64_t count, uintptr_t accumulator,
                          int32_t threads);

/* g = decoded payload; momentum = mu * momentum + g; theta -= learning_rate * (g + mu * momentum). */
int64_t diloco_outer_step(int32_t format, uintptr_t payload, uintptr_t theta, uintptr_t momentum, int64_t count,
                          float learning_rate, float mu, int32_t threads);

#endif
