/* Tests that every set encodes to and decodes the payloads of golden.txt, which make_golden.py made without a set. */
#include "check.h"

static uint8_t *bytes_of_hex(const char *hex, int64_t *size)
{
    *size = (int64_t)strlen(hex) / 2;
    uint8_t *bytes = new_bytes(*size);
    for (int64_t i = 0; i < *size; i++) {
        unsigned int byte;
        sscanf(hex + 2 * i, "%2x", &byte);
        bytes[i] = (uint8_t)byte;
    }
    return bytes;
}

static int32_t format_of_name(const char *name)
{
    for (int32_t format = 0; format < FORMATS; format++)
        if (strcmp(diloco_format_name(format), name) == 0)
            return format;
    return -1;
}

static void check_line(const char *set, const char *name, int is_stochastic, uint64_t seed, int64_t first_block,
                       const char *values_in_hex, const char *payload_in_hex, const char *decoded_in_hex)
{
    int64_t values_size, payload_size, decoded_size;
    uint8_t *values = bytes_of_hex(values_in_hex, &values_size);
    uint8_t *payload = bytes_of_hex(payload_in_hex, &payload_size);
    uint8_t *decoded = bytes_of_hex(decoded_in_hex, &decoded_size);
    int64_t count = values_size / (int64_t)sizeof(float);
    int32_t format = format_of_name(name);

    expect(diloco_payload_size(format, count) == payload_size, "%s %s: the golden payload's size", set, name);
    uint8_t *encoded = new_bytes(payload_size);
    float *back = new_floats(count);
    expect(diloco_quantize(format, is_stochastic, seed, first_block, ADDRESS(values), count, ADDRESS(encoded), 1) == 0,
           "%s %s: golden values are refused", set, name);
    expect(memcmp(encoded, payload, (size_t)payload_size) == 0, "%s %s%s: not the golden payload", set, name,
           is_stochastic ? " stochastic" : "");
    expect(diloco_dequantize(format, ADDRESS(payload), count, ADDRESS(back), 1) == 0,
           "%s %s: a golden payload is refused", set, name);
    expect(memcmp(back, decoded, (size_t)decoded_size) == 0, "%s %s: not the golden values", set, name);
    free(values), free(payload), free(decoded), free(encoded), free(back);
}

static void check_file(const char *set, FILE *file)
{
    static char name[32], rounding[32], values[1 << 16], payload[1 << 16], decoded[1 << 16];
    unsigned long long seed;
    long long first_block;
    int lines = 0;
    rewind(file);
    while (fscanf(file, "%31s %31s %llu %lld %65535s %65535s %65535s", name, rounding, &seed, &first_block, values,
                  payload, decoded) == 7) {
        check_line(set, name, strcmp(rounding, "stochastic") == 0, seed, first_block, values, payload, decoded);
        lines++;
    }
    expect(feof(file) && lines > 0, "%s: the golden file ends after %d lines", set, lines);
}

void check_golden(const char *path)
{
    FILE *file = fopen(path, "r");
    expect(file != NULL, "%s can't be opened", path);
    if (file == NULL)
        return;
    diloco_choose_kernels("scalar");
    check_file("scalar", file);
    for (int i = 0; i < 3; i++)
        if (diloco_choose_kernels(set_names[i]) == 0)
            check_file(set_names[i], file);
    fclose(file);
}
