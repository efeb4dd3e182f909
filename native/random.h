/* Random bits for stochastic rounding, from a counter: value i of block b under seed s always gets the same 16 bits,
 * on every machine and in any order.
 *
 * A block's 64-bit key is splitmix64's output number b + 1 for the seed (Steele, Lea, Flood 2014). Word w of a block is a
 * bijective 32-bit mix of w and both halves of the key, with the multipliers of hash-prospector's best two-round hash
 * (bias 0.107, C. Wellons and T. Ettinger). Values come in groups of 32, which share 16 words: value 32 g + j takes
 * the low half of word 16 g + j for j < 16, and the high half of word 16 g + j - 16 for the others.
 */
#ifndef DILOCO_RANDOM_H
#define DILOCO_RANDOM_H

#include <stdint.h>

#define MIX_FIRST 0x21f0aaadu
#define MIX_SECOND 0x735a2d97u

struct key {
    uint32_t added, mixed_in;
};

static inline struct key key_of_block(uint64_t seed, int64_t block)
{
    uint64_t state = seed + ((uint64_t)block + 1) * 0x9e3779b97f4a7c15u;
    state = (state ^ state >> 30) * 0xbf58476d1ce4e5b9u;
    state = (state ^ state >> 27) * 0x94d049bb133111ebu;
    state ^= state >> 31;
    return (struct key){(uint32_t)state, (uint32_t)(state >> 32)};
}

/* An expression for both uint32_t and vectors of it. */
#define MIX(word, key)                                                                                                 \
    ({                                                                                                                 \
        __typeof__(word) mixed = (word) + (key).added;                                                                 \
        mixed = (mixed ^ mixed >> 16) * MIX_FIRST ^ (key).mixed_in;                                                    \
        mixed = (mixed ^ mixed >> 15) * MIX_SECOND;                                                                    \
        mixed ^ mixed >> 15;                                                                                           \
    })

static inline uint32_t random_bits(struct key key, int64_t value)
{
    uint32_t word = (uint32_t)(value / 32 * 16 + value % 16);
    uint32_t mixed = MIX(word, key);
    return value % 32 < 16 ? mixed & 0xffffu : mixed >> 16;
}

#endif
