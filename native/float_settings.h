/* The processor's floating-point settings: rounding to nearest, subnormals kept, nothing trapped. A caller's thread may
 * have other settings (torch.set_flush_denormal(True) changes them), with which the results would have other bits. */
#ifndef DILOCO_FLOAT_SETTINGS_H
#define DILOCO_FLOAT_SETTINGS_H

#if defined(__x86_64__)
#include <xmmintrin.h>

typedef unsigned int float_settings;

static inline void restore_float_settings(float_settings settings)
{
    _mm_setcsr(settings);
}

/* Returns the settings before this call. */
static inline float_settings use_default_float_settings(void)
{
    float_settings before = _mm_getcsr();
    _mm_setcsr(0x1f80);
    return before;
}
#elif defined(__aarch64__)
#include <stdint.h>

typedef uint64_t float_settings;

static inline void restore_float_settings(float_settings settings)
{
    __asm__ volatile("msr fpcr, %0" : : "r"(settings));
}

static inline float_settings use_default_float_settings(void)
{
    float_settings before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    restore_float_settings(0);
    return before;
}
#else
#include <fenv.h>

typedef fenv_t float_settings;

static inline void restore_float_settings(float_settings settings)
{
    fesetenv(&settings);
}

static inline float_settings use_default_float_settings(void)
{
    float_settings before;
    fegetenv(&before);
    fesetenv(FE_DFL_ENV);
    return before;
}
#endif

#endif
