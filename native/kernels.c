/* The operations, tile by tile: encoding takes floats from a `source`, and decoding passes a tile to a `sink`. */
#include "kernels.h"

#include <stddef.h>

#include "dispatch.h"
#include "parallel.h"
#include "stream.h"

/* From this many values on, a result is written past the caches, because it would only push other data out of them. */
enum { STREAMED_VALUES = 1 << 20 };

static inline int64_t tiles_of(int32_t format, int64_t count)
{
    return count / values_of_tile(format) + (count % values_of_tile(format) != 0);
}

static inline int64_t tile_length(int32_t format, int64_t count, int64_t start)
{
    return count - start < values_of_tile(format) ? count - start : values_of_tile(format);
}

static inline int64_t blocks_in_tile(int32_t format)
{
    return values_of_tile(format) / diloco_formats[format].values;
}

static inline int64_t bytes_of_tile(int32_t format)
{
    return bytes_of_values(&diloco_formats[format], values_of_tile(format));
}

/* Adds an array's tile that begins with value `next` to the tiles to prefetch. */
static inline void add_ahead(struct ahead *ahead, const void *array, int64_t next, int64_t bytes_a_value)
{
    ahead->tiles[ahead->arrays++] = (const uint8_t *)((uintptr_t)array + (uintptr_t)(next * bytes_a_value));
}

static int64_t block_of(int32_t format, int64_t tile, int64_t refused_in_tile)
{
    return tile * blocks_in_tile(format) + refused_in_tile;
}

struct encoding {
    const struct tile_kernels *chosen;
    /* Returns the floats of the tile that begins with value `start`, in their array or computed into `room`; NULL if a
     * payload to average is refused. */
    const float *(*source)(const struct encoding *encoding, const struct tile_kernels *kernels, int64_t start,
                           int64_t length, float *room);
    int32_t format;
    struct rounding rounding;
    const float *values; /* or theta, or accumulator */
    const void *local;   /* this and the next two: only for a difference */
    int32_t local_is_bfloat16;
    float *residual;
    const uintptr_t *payloads; /* this and the next two: only for payloads to average */
    const float *weights;
    int32_t payload_count;
    float divisor;
    int64_t count;
    uint8_t *payload;
};

static const float *plain_values(const struct encoding *e, const struct tile_kernels *kernels, int64_t start,
                                 int64_t length, float *room)
{
    (void)kernels, (void)length, (void)room;
    return e->values + start;
}

static const float *difference(const struct encoding *e, const struct tile_kernels *kernels, int64_t start,
                               int64_t length, float *room)
{
    const float *theta = e->values + start;
    if (e->local_is_bfloat16) {
        kernels->widen((const uint16_t *)e->local + start, length, room);
        kernels->subtract(theta, room, length, room);
    } else {
        kernels->subtract(theta, (const float *)e->local + start, length, room);
    }
    if (e->residual != NULL)
        kernels->add(e->residual + start, length, room);
    return room;
}

static const float *average(const struct encoding *e, const struct tile_kernels *kernels, int64_t start, int64_t length,
                            float *room)
{
    kernels->divide(e->values + start, e->divisor, length, room);
    return room;
}

/* Each payload's tile is in the first-level cache when it is added, and so is their sum. */
static const float *average_of_payloads(const struct encoding *e, const struct tile_kernels *kernels, int64_t start,
                                        int64_t length, float *room)
{
    const struct ahead nothing = {0};
    int64_t offset = bytes_of_values(&diloco_formats[e->format], start);
    memset(room, 0, (size_t)length * sizeof *room);
    for (int32_t i = 0; i < e->payload_count; i++) {
        const uint8_t *added = (const uint8_t *)(e->payloads[i] + (uintptr_t)offset);
        if (kernels->check(e->format, added, length))
            return NULL;
        kernels->accumulate(e->format, added, e->weights[i], length, &nothing, room);
    }
    kernels->divide(room, e->divisor, length, room);
    return room;
}

static struct ahead ahead_of_encoding(const struct encoding *e, int64_t next)
{
    struct ahead ahead = {0};
    if (e->values != NULL)
        add_ahead(&ahead, e->values, next, sizeof(float));
    if (e->local != NULL)
        add_ahead(&ahead, e->local, next, e->local_is_bfloat16 ? sizeof(uint16_t) : sizeof(float));
    if (e->residual != NULL)
        add_ahead(&ahead, e->residual, next, sizeof(float));
    return ahead;
}

static int64_t encode_tile(const struct encoding *e, int64_t tile, struct stream *stream)
{
    float room[LARGEST_TILE], decoded[LARGEST_TILE];
    int64_t start = tile * values_of_tile(e->format), length = tile_length(e->format, e->count, start);
    const struct tile_kernels *kernels = kernels_for(e->chosen, e->format, length);
    const struct ahead ahead = ahead_of_encoding(e, start + values_of_tile(e->format)), nothing = {0};
    struct rounding rounding = e->rounding;
    rounding.first_block += tile * blocks_in_tile(e->format);
    const float *values = e->source(e, kernels, start, length, room);
    if (values == NULL)
        return block_of(e->format, tile, 1);
    uint8_t *encoded = room_in_stream(stream);
    int64_t refused = kernels->encode(e->format, values, length, rounding, &ahead, encoded);
    if (refused)
        return block_of(e->format, tile, refused);
    if (e->residual != NULL) {
        kernels->decode(e->format, encoded, length, &nothing, decoded);
        kernels->subtract(values, decoded, length, e->residual + start);
    }
    advance_stream(stream, bytes_of_values(&diloco_formats[e->format], length));
    return 0;
}

static int64_t encode_tiles(const void *operation, int64_t first, int64_t last)
{
    const struct encoding *e = operation;
    struct stream stream;
    start_stream(&stream, e->payload + first * bytes_of_tile(e->format), e->count >= STREAMED_VALUES);
    for (int64_t tile = first; tile < last; tile++) {
        int64_t refused = encode_tile(e, tile, &stream);
        if (refused)
            return refused;
    }
    finish_stream(&stream);
    return 0;
}

static int64_t run_encoding(struct encoding *encoding, int32_t threads)
{
    int32_t format = encoding->format;
    if (format < 0 || format >= FORMATS)
        return -1;
    if (encoding->rounding.is_stochastic && !diloco_formats[format].is_stochastic)
        return -1;
    encoding->chosen = diloco_chosen_kernels();
    return diloco_run_tiles(encode_tiles, encoding, tiles_of(format, encoding->count), threads);
}

int64_t diloco_quantize(int32_t format, int32_t is_stochastic, uint64_t seed, int64_t first_block, uintptr_t values,
                        int64_t count, uintptr_t payload, int32_t threads)
{
    struct encoding encoding = {
        .source = plain_values,
        .format = format,
        .rounding = {is_stochastic, seed, first_block},
        .values = (const float *)values,
        .count = count,
        .payload = (uint8_t *)payload,
    };
    return run_encoding(&encoding, threads);
}

int64_t diloco_quantize_difference(int32_t format, int32_t is_stochastic, uint64_t seed, int64_t first_block,
                                   uintptr_t theta, uintptr_t local, int32_t local_is_bfloat16, uintptr_t residual,
                                   int64_t count, uintptr_t payload, int32_t threads)
{
    struct encoding encoding = {
        .source = difference,
        .format = format,
        .rounding = {is_stochastic, seed, first_block},
        .values = (const float *)theta,
        .local = (const void *)local,
        .local_is_bfloat16 = local_is_bfloat16,
        .residual = (float *)residual,
        .count = count,
        .payload = (uint8_t *)payload,
    };
    return run_encoding(&encoding, threads);
}

int64_t diloco_finish_average(int32_t format, int32_t is_stochastic, uint64_t seed, int64_t first_block,
                              uintptr_t accumulator, float total_weight, int64_t count, uintptr_t payload,
                              int32_t threads)
{
    struct encoding encoding = {
        .source = average,
        .format = format,
        .rounding = {is_stochastic, seed, first_block},
        .values = (const float *)accumulator,
        .divisor = total_weight,
        .count = count,
        .payload = (uint8_t *)payload,
    };
    return run_encoding(&encoding, threads);
}

int64_t diloco_average(int32_t format, int32_t is_stochastic, uint64_t seed, int64_t first_block,
                       const uintptr_t *payloads, const float *weights, int32_t payload_count, float total_weight,
                       int64_t count, uintptr_t payload, int32_t threads)
{
    struct encoding encoding = {
        .source = average_of_payloads,
        .format = format,
        .rounding = {is_stochastic, seed, first_block},
        .payloads = payloads,
        .weights = weights,
        .payload_count = payload_count,
        .divisor = total_weight,
        .count = count,
        .payload = (uint8_t *)payload,
    };
    return run_encoding(&encoding, threads);
}

struct decoding {
    const struct tile_kernels *chosen;
    /* Decodes and uses a tile's blocks after they are checked; NULL only checks them. */
    void (*sink)(const struct decoding *decoding, const struct tile_kernels *kernels, const uint8_t *payload,
                 int64_t start, int64_t length, const struct ahead *ahead);
    int32_t format;
    const uint8_t *payload;
    int64_t count;
    float *values; /* or accumulator, or theta */
    float *momentum;
    float weight, learning_rate, mu;
};

static void store(const struct decoding *d, const struct tile_kernels *kernels, const uint8_t *payload, int64_t start,
                  int64_t length, const struct ahead *ahead)
{
    float room[LARGEST_TILE], *to = d->values + start;
    if (d->count < STREAMED_VALUES) {
        kernels->decode(d->format, payload, length, ahead, to);
    } else {
        kernels->decode(d->format, payload, length, ahead, room);
        write_past_caches(to, room, length * (int64_t)sizeof *room);
    }
}

static void add_weighted(const struct decoding *d, const struct tile_kernels *kernels, const uint8_t *payload,
                         int64_t start, int64_t length, const struct ahead *ahead)
{
    kernels->accumulate(d->format, payload, d->weight, length, ahead, d->values + start);
}

static void step(const struct decoding *d, const struct tile_kernels *kernels, const uint8_t *payload, int64_t start,
                 int64_t length, const struct ahead *ahead)
{
    kernels->outer_step(d->format, payload, d->learning_rate, d->mu, length, ahead, d->values + start,
                        d->momentum + start);
}

static struct ahead ahead_of_decoding(const struct decoding *d, int64_t next)
{
    struct ahead ahead = {0};
    if (d->values != NULL && d->sink != store)
        add_ahead(&ahead, d->values, next, sizeof(float));
    if (d->momentum != NULL)
        add_ahead(&ahead, d->momentum, next, sizeof(float));
    return ahead;
}

static int64_t decode_tiles(const void *operation, int64_t first, int64_t last)
{
    const struct decoding *d = operation;
    int64_t bytes = bytes_of_tile(d->format);
    for (int64_t tile = first; tile < last; tile++) {
        const uint8_t *payload = d->payload + tile * bytes;
        int64_t start = tile * values_of_tile(d->format), length = tile_length(d->format, d->count, start);
        const struct tile_kernels *kernels = kernels_for(d->chosen, d->format, length);
        const struct ahead ahead = ahead_of_decoding(d, start + values_of_tile(d->format));
        int64_t refused = kernels->check(d->format, payload, length);
        if (refused)
            return block_of(d->format, tile, refused);
        if (d->sink != NULL)
            d->sink(d, kernels, payload, start, length, &ahead);
    }
    end_writing_past_caches();
    return 0;
}

static int64_t run_decoding(struct decoding *decoding, int32_t threads)
{
    if (decoding->format < 0 || decoding->format >= FORMATS)
        return -1;
    decoding->chosen = diloco_chosen_kernels();
    return diloco_run_tiles(decode_tiles, decoding, tiles_of(decoding->format, decoding->count), threads);
}

int64_t diloco_check_payload(int32_t format, uintptr_t payload, int64_t count, int32_t threads)
{
    struct decoding decoding = {.format = format, .payload = (const uint8_t *)payload, .count = count};
    return run_decoding(&decoding, threads);
}

int64_t diloco_dequantize(int32_t format, uintptr_t payload, int64_t count, uintptr_t values, int32_t threads)
{
    struct decoding decoding = {
        .sink = store,
        .format = format,
        .payload = (const uint8_t *)payload,
        .count = count,
        .values = (float *)values,
    };
    return run_decoding(&decoding, threads);
}

int64_t diloco_accumulate(int32_t format, uintptr_t payload, float weight, int64_t count, uintptr_t accumulator,
                          int32_t threads)
{
    struct decoding decoding = {
        .sink = add_weighted,
        .format = format,
        .payload = (const uint8_t *)payload,
        .count = count,
        .values = (float *)accumulator,
        .weight = weight,
    };
    return run_decoding(&decoding, threads);
}

int64_t diloco_outer_step(int32_t format, uintptr_t payload, uintptr_t theta, uintptr_t momentum, int64_t count,
                          float learning_rate, float mu, int32_t threads)
{
    struct decoding decoding = {
        .sink = step,
        .format = format,
        .payload = (const uint8_t *)payload,
        .count = count,
        .values = (float *)theta,
        .momentum = (float *)momentum,
        .learning_rate = learning_rate,
        .mu = mu,
    };
    return run_decoding(&decoding, threads);
}
