/* The functions that all tests use. Buffers are heap blocks of the exact size, so that the address sanitizer finds an
 * access to the byte after the end. */
#ifndef DILOCO_CHECK_H
#define DILOCO_CHECK_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../kernels.h"

#define ADDRESS(pointer) ((uintptr_t)(pointer))

enum { FORMATS = 7, LARGEST_ERROR_TEXT = 200 };

extern int passed, failed;

/* Counts a passed or a failed check. Unless `condition` holds, prints `what`, a format of printf with its arguments. */
void expect(int condition, const char *what, ...) __attribute__((format(printf, 2, 3)));

void *new_bytes(int64_t size); /* one byte if `size` is 0 */
float *new_floats(int64_t count);
float *copy_of_floats(const float *values, int64_t count);
uint8_t *copy_of_bytes(const uint8_t *bytes, int64_t size);

uint64_t next_random(uint64_t *state);
float next_float(uint64_t *state); /* in [-1, 1) */
float float_from(uint32_t bits);

/* Values of all magnitudes that can be encoded, zeros and subnormals among them; the same for the same seed. */
float *mixed_floats(int64_t count, uint64_t seed);
float *random_floats(int64_t count, float size, uint64_t seed);

/* The names of all sets but the scalar one; a machine supports only some of them. */
extern const char *const set_names[3];

void check_golden(const char *path);
void check_sets(void);
void check_operations(void);
void check_refusals(void);
void check_sizes(void);

#endif
