/* The squared norm of what a payload decodes to. It is compared between machines, so it has the same bits on all. */
#include "kernels.h"

#include "dispatch.h"
#include "float_settings.h"

enum { LANES = 8 };

/* For int8: the sum of a block's squared codes fits an int32, a unit's square is exact in double, and only their
 * product is rounded. */
static double squared_int8(const uint8_t *block, int64_t length)
{
    const int8_t *codes = (const int8_t *)block + 4;
    float unit;
    int32_t sum = 0;
    memcpy(&unit, block, sizeof unit);
    for (int64_t i = 0; i < length; i++)
        sum += (int32_t)codes[i] * codes[i];
    return (double)unit * (double)unit * (double)sum;
}

/* For the other formats: floats' squares are exact in double, and are added up in eight lanes on every machine. */
static double squared_floats(const float *values, int64_t length)
{
    double lanes[LANES] = {0}, sum = 0;
    int64_t whole = length - length % LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        for (int lane = 0; lane < LANES; lane++)
            lanes[lane] += (double)values[i + lane] * (double)values[i + lane];
    for (int64_t i = whole; i < length; i++)
        lanes[i - whole] += (double)values[i] * (double)values[i];
    for (int lane = 0; lane < LANES; lane++)
        sum += lanes[lane];
    return sum;
}

static int64_t add_squares(int32_t format, const uint8_t *tile, int64_t count, double *squared)
{
    const struct tile_kernels *chosen = diloco_chosen_kernels();
    const struct ahead nothing = {0};
    float values[LARGEST_TILE];
    int64_t most = values_of_tile(format);
    for (int64_t start = 0; start < count; start += most) {
        int64_t length = count - start < most ? count - start : most;
        const struct tile_kernels *kernels = kernels_for(chosen, format, length);
        int64_t refused = kernels->check(format, tile, length);
        if (refused)
            return start / diloco_formats[format].values + refused;
        if (format == INT8) {
            *squared += squared_int8(tile, length);
        } else {
            kernels->decode(format, tile, length, &nothing, values);
            *squared += squared_floats(values, length);
        }
        tile += bytes_of_values(&diloco_formats[format], most);
    }
    return 0;
}

int64_t diloco_squared_norm(int32_t format, uintptr_t payload, int64_t count, double *squared)
{
    *squared = 0;
    if (format < 0 || format >= FORMATS)
        return -1;
    float_settings before = use_default_float_settings();
    int64_t refused = add_squares(format, (const uint8_t *)payload, count, squared);
    restore_float_settings(before);
    return refused;
}
