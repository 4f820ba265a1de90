/* Formats of a few bits a value: encode with the update of error feedback, decode, sum of decoded rows, its encoding.
 *
 * Lives here: the ops of kernels/quantize.py, sign_pack.py and decode_sum.py for a CPU, called by kernels/native.py,
 * which says what they compute; layout as in kernels/wire.py. One pass over memory: a block is read into a buffer that
 * stays in the first-level cache, and all else happens there.
 */
#include "values.h"

enum { FORMAT_BF16, FORMAT_INT8, FORMAT_FP8, FORMAT_INT4, FORMAT_SIGN };

#define TINY value_of(0x0D800000u) /* 2^-100 */

typedef struct {
    int64_t format, rows, m, block;
    int64_t mask_at, codes_at, row_bytes; /* of a row on the wire; scales are at 0 */
    float level_inverse;                  /* 1 / level, rounded to fp32 */
} Layout;

typedef struct {
    float *scale;
    uint8_t *mask, *codes;
} Block;

static inline Block block_at(const Layout *layout, const uint8_t *wire, int64_t row, int64_t at) {
    static const int bits[] = {16, 8, 8, 4, 1};
    uint8_t *start = (uint8_t *)wire + row * layout->row_bytes;
    Block found = {(float *)start + at / layout->block, start + layout->mask_at + at / (8 * WORD),
                   start + layout->codes_at + at * bits[layout->format] / 8};
    return found;
}

static inline uint32_t load_word(const uint8_t *bytes) {
    return bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
}

/* Encoding: total -> block, and error = total - decoded block. */

static void encode_bf16(const float *restrict total, int64_t n, uint16_t *restrict codes, float *restrict error) {
    for (int64_t i = 0; i < n; i++) {
        codes[i] = to_bf16(total[i]);
        error[i] = total[i] - from_bf16(codes[i]);
    }
}

static void encode_int8(const float *restrict total, int64_t n, float scale, float inverse, uint8_t *restrict codes,
                        float *restrict error) {
    for (int64_t i = 0; i < n; i++) {
        float shifted = total[i] * inverse + ROUND; /* its lowest bits are the integer in two's complement */
        codes[i] = (uint8_t)bits_of(shifted);
        error[i] = total[i] - (shifted - ROUND) * scale;
    }
}

static void encode_int4(const float *restrict total, int64_t n, float scale, float inverse, uint8_t *restrict codes,
                        float *restrict error) {
    const int64_t half = n / 2;
    for (int64_t i = 0; i < half; i++) {
        float low = total[i] * inverse + ROUND, high = total[half + i] * inverse + ROUND;
        codes[i] = (uint8_t)((bits_of(low) & 0xFu) | bits_of(high) << 4);
        error[i] = total[i] - (low - ROUND) * scale;
        error[half + i] = total[half + i] - (high - ROUND) * scale;
    }
}

static void encode_fp8(const float *restrict total, int64_t n, float scale, float inverse, uint8_t *restrict codes,
                       float *restrict error) {
    for (int64_t i = 0; i < n; i++) {
        float rounded;
        codes[i] = to_fp8(total[i] * inverse, &rounded);
        error[i] = total[i] - rounded * scale;
    }
}

static void encode_sign(const float *restrict total, int64_t n, Block block, float *restrict error) {
    int64_t words = n / WORD, some = 0;
    float sum = 0;
    memset(block.mask, 0, (size_t)(words / 8));
    for (int64_t word = 0; word < words; word++) {
        const float *restrict t = total + word * WORD;
        uint32_t signs = negative(t);
        int any = at_least(t, 1) != 0;
        for (int i = 0; i < 4; i++) block.codes[word * 4 + i] = (uint8_t)(signs >> (8 * i));
        some += any;
        block.mask[word / 8] |= (uint8_t)(any << word % 8);
    }
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += value_of(bits_of(total[i]) & ABSOLUTE);
    float mean = sum / (float)(some ? some * WORD : 1);
    float scale = mean < TINY ? 0.0f : mean;
    *block.scale = scale;
    for (int64_t word = 0; word < words; word++) {
        const float *restrict t = total + word * WORD;
        float *restrict e = error + word * WORD;
        float size = block.mask[word / 8] >> word % 8 & 1 ? scale : 0.0f;
        for (int i = 0; i < WORD; i++) e[i] = t[i] - (t[i] < 0.0f ? -size : size);
    }
}

static void encode_block(const Layout *layout, const float *restrict total, Block block, float *restrict error) {
    const int64_t n = layout->block;
    if (layout->format == FORMAT_BF16) {
        encode_bf16(total, n, (uint16_t *)block.codes, error);
        return;
    }
    if (layout->format == FORMAT_SIGN) {
        encode_sign(total, n, block, error);
        return;
    }
    uint32_t largest = 0; /* as bits: a NaN is larger than all, and spoils its block as it does in torch */
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < n; i++) largest = larger(largest, bits_of(total[i]) & ABSOLUTE);
    float amax = value_of(largest);
    float scale = amax < TINY ? 0.0f : amax * layout->level_inverse;
    float inverse = amax < TINY ? 0.0f : 1.0f / scale;
    *block.scale = scale;
    if (layout->format == FORMAT_INT8)
        encode_int8(total, n, scale, inverse, block.codes, error);
    else if (layout->format == FORMAT_INT4)
        encode_int4(total, n, scale, inverse, block.codes, error);
    else
        encode_fp8(total, n, scale, inverse, block.codes, error);
}

/* x + residual[at..] into a block of a row, the error into new_residual[at..]. */
static void encode_one(const Layout *layout, const float *restrict x, Block block, const void *residual, Dtype dtype,
                       void *new_residual, Dtype new_dtype, int64_t at, double *statistics) {
    float total[CHUNK], local[CHUNK];
    statistics[2] += (double)load_total(x, residual, dtype, at, layout->block, total);
    float *error = new_dtype == FP32 ? (float *)new_residual + at : local;
    encode_block(layout, total, block, error);
    statistics[0] += squares(total, layout->block);
    statistics[1] += squares(error, layout->block);
    if (new_dtype == BF16) store(error, layout->block, new_residual, new_dtype, at);
}

void encode(const Layout *layout, const float *x, uint8_t *wire, const void *residual, int32_t dtype,
            void *new_residual, int32_t new_dtype, double *statistics) {
    for (int64_t row = 0; row < layout->rows; row++)
        for (int64_t at = 0; at < layout->m; at += layout->block) {
            int64_t from = row * layout->m + at;
            encode_one(layout, x + from, block_at(layout, wire, row, at), residual, (Dtype)dtype, new_residual,
                       (Dtype)new_dtype, from, statistics);
        }
}

/* Decoding: out = value, or out + value where `add` is set; inlined with a constant, so each is a loop of its own. */

#define PUT(i, value) out[i] = add ? out[i] + (value) : (value)

static inline void decode_block_into(const Layout *layout, Block block, float *restrict out, int add) {
    const int64_t n = layout->block, half = n / 2;
    const uint8_t *restrict codes = block.codes;
    const float scale = layout->format == FORMAT_BF16 ? 1.0f : *block.scale;
    if (layout->format == FORMAT_BF16) {
        const uint16_t *restrict halves = (const uint16_t *)codes;
        for (int64_t i = 0; i < n; i++) PUT(i, from_bf16(halves[i]));
    } else if (layout->format == FORMAT_INT8) {
        for (int64_t i = 0; i < n; i++) PUT(i, (float)(int8_t)codes[i] * scale);
    } else if (layout->format == FORMAT_FP8) {
        for (int64_t i = 0; i < n; i++) PUT(i, from_fp8((int8_t)codes[i]) * scale);
    } else if (layout->format == FORMAT_INT4) {
        for (int64_t i = 0; i < half; i++) {
            PUT(i, (float)(((codes[i] & 0xF) ^ 8) - 8) * scale);
            PUT(half + i, (float)(((codes[i] >> 4) ^ 8) - 8) * scale);
        }
    } else {
        for (int64_t word = 0; word < n / WORD; word++) {
            uint32_t signs = load_word(codes + word * 4);
            int some = block.mask[word / 8] >> word % 8 & 1;
            uint32_t size = some ? bits_of(scale) : 0, keep = some ? ~ABSOLUTE : 0;
            float *restrict o = out + word * WORD;
            for (int i = 0; i < WORD; i++) {
                float value = value_of(size ^ ((signs << (31 - i)) & keep));
                o[i] = add ? o[i] + value : value;
            }
        }
    }
}

static void decode_block(const Layout *layout, Block block, float *restrict out) {
    decode_block_into(layout, block, out, 0);
}

static void sum_blocks(const Layout *layout, const uint8_t *wire, int64_t at, float *restrict out) {
    memset(out, 0, (size_t)layout->block * sizeof(float));
    for (int64_t row = 0; row < layout->rows; row++) decode_block_into(layout, block_at(layout, wire, row, at), out, 1);
}

void decode(const Layout *layout, const uint8_t *wire, float *out) {
    for (int64_t row = 0; row < layout->rows; row++)
        for (int64_t at = 0; at < layout->m; at += layout->block)
            decode_block(layout, block_at(layout, wire, row, at), out + row * layout->m + at);
}

void decode_sum(const Layout *layout, const uint8_t *wire, float *out) {
    for (int64_t at = 0; at < layout->m; at += layout->block) sum_blocks(layout, wire, at, out + at);
}

void decode_sum_encode(const Layout *layout, const uint8_t *wire, uint8_t *out, const void *residual, int32_t dtype,
                       void *new_residual, int32_t new_dtype, double *statistics) {
    float sum[CHUNK];
    for (int64_t at = 0; at < layout->m; at += layout->block) {
        sum_blocks(layout, wire, at, sum);
        encode_one(layout, sum, block_at(layout, out, 0, at), residual, (Dtype)dtype, new_residual, (Dtype)new_dtype,
                   at, statistics);
    }
}
