/* What the tests share. Buffers are heap blocks of the exact size: the address sanitizer sees one byte too many. */
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

/* Counts; says what failed, with printf's format and arguments. */
void expect(int condition, const char *what, ...) __attribute__((format(printf, 2, 3)));

void *new_bytes(int64_t size); /* at least one byte */
float *new_floats(int64_t count);
float *copy_of_floats(const float *values, int64_t count);
uint8_t *copy_of_bytes(const uint8_t *bytes, int64_t size);

uint64_t next_random(uint64_t *state);
float next_float(uint64_t *state); /* in [-1, 1) */
float float_from(uint32_t bits);

/* Values of all magnitudes that can be encoded, zeros and subnormals among them; the same for the same seed. */
float *mixed_floats(int64_t count, uint64_t seed);
float *random_floats(int64_t count, float size, uint64_t seed);

/* The sets that this machine can run besides the scalar one. */
extern const char *const set_names[3];

void check_golden(const char *path);
void check_sets(void);
void check_operations(void);
void check_refusals(void);
void check_sizes(void);

#endif
