#include "dispatch.h"

#include <stdatomic.h>
#include <stddef.h>

#include "kernels.h"

static int always(void)
{
    return 1;
}

#if defined(__x86_64__)
static int has_avx2(void)
{
    return __builtin_cpu_supports("avx2");
}

static int has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

/* Slowest first. What asks for instructions is here, in a file that doesn't use them. */
static const struct {
    const struct tile_kernels *kernels;
    int (*is_supported)(void);
} sets[] = {
    {&diloco_scalar, always},
#if defined(__x86_64__)
    {&diloco_avx2, has_avx2},
    {&diloco_avx512, has_avx512},
#elif defined(__aarch64__)
    {&diloco_neon, always},
#endif
};

enum { SETS = sizeof sets / sizeof *sets };

static _Atomic(const struct tile_kernels *) chosen;

static const struct tile_kernels *fastest(void)
{
    for (int i = SETS - 1; i > 0; i--)
        if (sets[i].is_supported())
            return sets[i].kernels;
    return &diloco_scalar;
}

/* NULL if this processor or this build doesn't have it. */
static const struct tile_kernels *find(const char *name)
{
    for (int i = 0; i < SETS; i++)
        if (strcmp(sets[i].kernels->name, name) == 0 && sets[i].is_supported())
            return sets[i].kernels;
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
    if (set == NULL)
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
    return find(name) != NULL;
}
