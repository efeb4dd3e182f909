#ifndef DILOCO_DISPATCH_H
#define DILOCO_DISPATCH_H

#include "tile.h"

/* The set that calls use: the fastest that this processor has, unless diloco_choose_kernels named another. */
const struct tile_kernels *diloco_chosen_kernels(void);

#endif
