/* Writing past the caches (non-temporal stores): a store to memory that isn't cached would first read the line. */
#ifndef DILOCO_STREAM_H
#define DILOCO_STREAM_H

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>

static inline void write_line_past_caches(uint8_t *to, const uint8_t *from)
{
    for (int i = 0; i < 64; i += 16)
        _mm_stream_si128((__m128i *)(void *)(to + i), _mm_loadu_si128((const __m128i *)(const void *)(from + i)));
}

/* Makes other threads see the data written past the caches before all later writes. */
static inline void end_writing_past_caches(void)
{
    _mm_sfence();
}
#else
static inline void write_line_past_caches(uint8_t *to, const uint8_t *from)
{
    memcpy(to, from, 64);
}

static inline void end_writing_past_caches(void)
{
}
#endif

/* Writes the destination's whole cache lines past the caches, and the bytes before and after them as usual. */
static inline void write_past_caches(void *destination, const void *source, int64_t size)
{
    uint8_t *to = destination;
    const uint8_t *from = source;
    int64_t before = (int64_t)(-(uintptr_t)to & 63);
    int64_t head = before < size ? before : size;
    memcpy(to, from, (size_t)head);
    int64_t i = head;
    for (; i + 64 <= size; i += 64)
        write_line_past_caches(to + i, from + i);
    memcpy(to + i, from + i, (size_t)(size - i));
}

enum { LARGEST_TILE_BYTES = 2048, LINE = 64 };

/* A buffer between encoded tiles and the payload's memory. A tile may end within a cache line: the bytes of that line
 * stay in `room` until the next tile is encoded. If not `is_streamed`, tiles are encoded directly into the payload. */
struct stream {
    uint8_t *to;
    int is_streamed;
    int64_t collected;
    uint8_t room[LARGEST_TILE_BYTES + LINE];
};

static inline void start_stream(struct stream *stream, uint8_t *to, int is_streamed)
{
    stream->to = to;
    stream->is_streamed = is_streamed;
    stream->collected = 0;
}

/* Returns the address at which to encode the next tile. */
static inline uint8_t *room_in_stream(struct stream *stream)
{
    return stream->is_streamed ? stream->room + stream->collected : stream->to;
}

static inline void drain_stream(struct stream *stream, int64_t size)
{
    write_past_caches(stream->to, stream->room, size);
    stream->to += size;
    stream->collected -= size;
    memmove(stream->room, stream->room + size, (size_t)stream->collected);
}

static inline void advance_stream(struct stream *stream, int64_t size)
{
    if (!stream->is_streamed) {
        stream->to += size;
        return;
    }
    stream->collected += size;
    int64_t unfinished = (int64_t)((uintptr_t)(stream->to + stream->collected) & (LINE - 1));
    if (unfinished < stream->collected)
        drain_stream(stream, stream->collected - unfinished);
}

static inline void finish_stream(struct stream *stream)
{
    if (stream->is_streamed) {
        drain_stream(stream, stream->collected);
        end_writing_past_caches();
    }
}

#endif
