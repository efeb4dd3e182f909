#include "dispatch.h"

#include <stdatomic.h>
#include <stddef.h>

#include "kernels.h"

static int always(void)
{
    return 1;
}

#if defined(__x86_64__)
#include <cpuid.h>

/* The processor's extensions, and the registers that the system saves when it switches threads. The compilers' builtin
   for these tests always returns false with zig's runtime library (0.17), with which the wheels are built. */
static unsigned processor_extensions(void)
{
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) ? ebx : 0;
}

static unsigned kept_registers(void)
{
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & bit_OSXSAVE))
        return 0;
    __asm__("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
    return eax;
}

static int has(unsigned extensions, unsigned registers)
{
    return (processor_extensions() & extensions) == extensions && (kept_registers() & registers) == registers;
}

enum { XMM_AND_YMM = 0x06, MASKS_AND_ZMM = 0xe0 };

static int has_avx2(void)
{
    return has(bit_AVX2, XMM_AND_YMM);
}

static int has_avx512(void)
{
    return has(bit_AVX2 | bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL, XMM_AND_YMM | MASKS_AND_ZMM);
}
#endif

/* The sets, slowest first. This file, which finds out the supported ones, is itself compiled without their
 * instructions. */
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

/* Returns the set of this name, or NULL if this processor or this build does not support it. */
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
