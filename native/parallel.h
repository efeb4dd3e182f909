/* Work on an array's tiles by several threads, which live for one call: no pool, so nothing to break after a fork or
 * at exit, and nothing that competes with another library's threads between calls. */
#ifndef DILOCO_PARALLEL_H
#define DILOCO_PARALLEL_H

#include <stdint.h>

/* Does tiles [first, last); returns 0, or 1 + the index of the first block it refuses. */
typedef int64_t work_on_tiles(const void *operation, int64_t first, int64_t last);

/* Works on all `tiles` with up to `threads` threads, including the caller's (alone if no thread can be started).
 * Returns the least refusal, or 0. The result does not depend on which thread works on which tile, nor on the caller's
 * floating-point settings: IEEE 754 holds, subnormals included. */
int64_t diloco_run_tiles(work_on_tiles *work, const void *operation, int64_t tiles, int32_t threads);

#endif
