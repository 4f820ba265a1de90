/* Single values and runs of them: bits, bf16, fp8, fp16, x + residual, squares.
 *
 * Lives here: what the C files of this directory share. Includes the C library's headers only. C11; loops are written
 * so that a compiler vectorises them: no branches, one type of index, integers where a float's bits are meant.
 * Built without contraction of a * b + c: every operation rounds as torch's does, so results are the reference's bits.
 */
#ifndef KERNELS_VALUES_H
#define KERNELS_VALUES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

typedef enum { ABSENT, FP32, BF16, FP16 } Dtype; /* as kernels/native.py numbers them */

#define CHUNK 4096 /* values, as many as the largest block: two such buffers fit into a first-level cache of 32 KiB */
#define WORD 32 /* values that share a word of 32 bits */
#define ABSOLUTE 0x7FFFFFFFu
#define INFINITE 0x7F800000u /* bits of Inf; an absolute above it is a NaN */
#define ROUND 12582912.0f    /* 1.5 * 2^23: added and taken away, it rounds to the nearest integer, ties to even */

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float value_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

static inline uint16_t to_bf16(float value) {
    uint32_t bits = bits_of(value);
    uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & ABSOLUTE) > INFINITE ? 0x7FC0u : rounded);
}

static inline float from_bf16(uint16_t half) { return value_of((uint32_t)half << 16); }

/* In both small formats, subnormal numbers are multiples of one unit. The unit is the last bit of some power of two in
 * fp32: adding that power rounds to the unit, and leaves the multiple in the lowest bits. */

static inline uint16_t to_fp16(float value) {
    uint32_t bits = bits_of(value), absolute = bits & ABSOLUTE;
    uint32_t normal = (absolute + 0xFFFu + ((absolute >> 13) & 1u) - (112u << 23)) >> 13;
    uint32_t subnormal = bits_of(value_of(absolute) + 0.5f) - bits_of(0.5f); /* unit 2^-24 */
    uint32_t code = absolute < 0x38800000u ? subnormal : normal;             /* 2^-14 */
    code = absolute >= 0x47800000u ? 0x7C00u : code;                         /* 65536 and more: Inf */
    code = absolute > INFINITE ? 0x7E00u : code;
    return (uint16_t)(code | ((bits >> 16) & 0x8000u));
}

static inline float from_fp16(uint16_t half) {
    uint32_t low = (half & 0x7FFFu) << 13;
    uint32_t normal = low + (112u << 23);
    uint32_t subnormal = bits_of(value_of(low + (113u << 23)) - value_of(113u << 23));
    uint32_t bits = low < 0x00800000u ? subnormal : normal;
    bits = low >= 0x0F800000u ? normal + (112u << 23) : bits; /* Inf and NaN have the largest exponent in both */
    return value_of(bits | ((uint32_t)(half & 0x8000u) << 16));
}

/* e4m3 of an fp32 up to 448 in size, and in `rounded` its value. */
static inline uint8_t to_fp8(float value, float *rounded) {
    uint32_t bits = bits_of(value), sign = bits & ~ABSOLUTE, absolute = bits & ABSOLUTE;
    uint32_t normal = (absolute + 0x7FFFFu + ((absolute >> 20) & 1u)) & 0xFFF00000u;
    float shifted = value_of(absolute) + 16384.0f; /* unit 2^-9 */
    int small = absolute < 0x3C800000u;            /* 2^-6 */
    *rounded = value_of((small ? bits_of(shifted - 16384.0f) : normal) | sign);
    uint32_t code = small ? bits_of(shifted) - bits_of(16384.0f) : (normal >> 20) - (120u << 3);
    return (uint8_t)(code | sign >> 24);
}

static inline float from_fp8(int8_t code) { /* signed: sign and value are shifted into place together */
    uint32_t bits = (uint32_t)(int32_t)code << 20, low = bits & 0x07F00000u;
    float normal = value_of(low + (120u << 23));
    float subnormal = value_of(low + (121u << 23)) - value_of(121u << 23);
    return value_of(bits_of(low < 0x00800000u ? subnormal : normal) | (bits & ~ABSOLUTE));
}

/* total = x + residual[at..at+n]; returns how many of x aren't finite. */
static inline int64_t load_total(const float *restrict x, const void *residual, Dtype dtype, int64_t at, int64_t n,
                                 float *restrict total) {
    uint32_t largest = 0;
    if (dtype == FP32) {
        const float *restrict r = (const float *)residual + at;
#pragma omp simd reduction(max : largest)
        for (int64_t i = 0; i < n; i++) {
            largest = larger(largest, bits_of(x[i]) & ABSOLUTE);
            total[i] = x[i] + r[i];
        }
    } else if (dtype == BF16) {
        const uint16_t *restrict r = (const uint16_t *)residual + at;
#pragma omp simd reduction(max : largest)
        for (int64_t i = 0; i < n; i++) {
            largest = larger(largest, bits_of(x[i]) & ABSOLUTE);
            total[i] = x[i] + from_bf16(r[i]);
        }
    } else {
#pragma omp simd reduction(max : largest)
        for (int64_t i = 0; i < n; i++) {
            largest = larger(largest, bits_of(x[i]) & ABSOLUTE);
            total[i] = x[i];
        }
    }
    int64_t count = 0;
    if (largest >= INFINITE) /* rare: counted apart */
        for (int64_t i = 0; i < n; i++) count += (bits_of(x[i]) & ABSOLUTE) >= INFINITE;
    return count;
}

/* out[at..at+n] = values in this dtype. */
static inline void store(const float *restrict values, int64_t n, void *out, Dtype dtype, int64_t at) {
    if (dtype == FP32) {
        memcpy((float *)out + at, values, (size_t)n * sizeof(float));
    } else if (dtype == BF16) {
        uint16_t *restrict o = (uint16_t *)out + at;
        for (int64_t i = 0; i < n; i++) o[i] = to_bf16(values[i]);
    } else if (dtype == FP16) {
        uint16_t *restrict o = (uint16_t *)out + at;
        for (int64_t i = 0; i < n; i++) o[i] = to_fp16(values[i]);
    }
}

static inline double squares(const float *restrict values, int64_t n) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += (double)values[i] * (double)values[i];
    return sum;
}

/* Bit i of what these return stands for value i of WORD. A compiler's own code for the plain loops takes twice as long. */

static inline uint32_t negative(const float *restrict values) {
    uint32_t found = 0;
#ifdef __AVX2__
    for (int i = 0; i < WORD; i += 8) {
        __m256 below = _mm256_cmp_ps(_mm256_loadu_ps(values + i), _mm256_setzero_ps(), _CMP_LT_OQ);
        found |= (uint32_t)_mm256_movemask_ps(below) << i;
    }
#else
    for (int i = 0; i < WORD; i++) found |= (uint32_t)(values[i] < 0.0f) << i;
#endif
    return found;
}

/* Where a value's absolute has at least these bits. */
static inline uint32_t at_least(const float *restrict values, uint32_t bits) {
    uint32_t found = 0;
#ifdef __AVX2__
    const __m256i absolute = _mm256_set1_epi32((int)ABSOLUTE), below = _mm256_set1_epi32((int)bits - 1);
    for (int i = 0; i < WORD; i += 8) {
        __m256i value = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(values + i)), absolute);
        found |= (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(value, below))) << i;
    }
#else
    for (int i = 0; i < WORD; i++) found |= (uint32_t)((bits_of(values[i]) & ABSOLUTE) >= bits) << i;
#endif
    return found;
}

#endif
