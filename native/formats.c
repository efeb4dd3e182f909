#include "formats.h"

#include <stddef.h>

#include "kernels.h"

static const struct format *find(int32_t format)
{
    return format >= 0 && format < FORMATS ? &diloco_formats[format] : NULL;
}

const char *diloco_format_name(int32_t format)
{
    return find(format) ? find(format)->name : NULL;
}

int32_t diloco_block_values(int32_t format)
{
    return find(format) ? find(format)->values : 0;
}

int32_t diloco_block_bytes(int32_t format)
{
    return find(format) ? (int32_t)bytes_of_block(find(format), find(format)->values) : 0;
}

int32_t diloco_format_is_stochastic(int32_t format)
{
    return find(format) ? find(format)->is_stochastic : 0;
}

int64_t diloco_payload_size(int32_t format, int64_t count)
{
    return find(format) ? bytes_of_values(find(format), count) : 0;
}
