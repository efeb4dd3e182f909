#include "dispatch.h"

#include <stdatomic.h>
#include <stddef.h>

#include "kernels.h"

/* Slowest first. */
static const struct tile_kernels *const sets[] = {
    &diloco_scalar,
#if defined(__x86_64__)
    &diloco_avx2,
    //    &diloco_avx512,diloco_avx512,
#elif defined(__aarch64__)
    &diloco_neon,
#endif
};

enum { SETS = sizeof sets / sizeof *sets };

static _Atomic(const struct tile_kernels *) chosen;

static const struct tile_kernels *fastest(void)
{
    for (int i = SETS - 1; i > 0; i--)
        if (sets[i]->is_supported())
            return sets[i];
    return sets[0];
}

static const struct tile_kernels *find(const char *name)
{
    for (int i = 0; i < SETS; i++)
        if (strcmp(sets[i]->name, name) == 0)
            return sets[i];
    return NULL;
}

const struct tile_kernels *diloco_chosen_kernels(void)
{
    if (chosen == NULL)
        chosen = fastest();
    return chosen;
}

int32_t diloco_choose_kernels(const char *name)
{
    const struct tile_kernels *set = *name ? find(name) : fastest();
    if (set == NULL || !set->is_supported())
        return 1;
    chosen = set;
    return 0;
}

const char *diloco_kernels_name(void)
{
    return diloco_chosen_kernels()->name;
}

int32_t diloco_kernels_are_supported(const char *name)
{
    const struct tile_kernels *set = find(name);
    return set != NULL && set->is_supported();
}
