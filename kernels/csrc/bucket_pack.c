/* Many tensors into one flat buffer: scale, cast, count of values that aren't finite, sum of squares.
 *
 * Lives here: the op of kernels/bucket_pack.py for a CPU, called by kernels/native.py, which says what it computes.
 * One call for all tensors, through a table of their addresses.
 */
#include "values.h"

static int64_t load_scaled(const void *restrict x, Dtype dtype, int64_t at, int64_t n, float factor,
                           float *restrict scaled) {
    if (dtype == FP32) {
        const float *restrict v = (const float *)x + at;
        for (int64_t i = 0; i < n; i++) scaled[i] = v[i] * factor;
    } else if (dtype == BF16) {
        const uint16_t *restrict v = (const uint16_t *)x + at;
        for (int64_t i = 0; i < n; i++) scaled[i] = from_bf16(v[i]) * factor;
    } else {
        const uint16_t *restrict v = (const uint16_t *)x + at;
        for (int64_t i = 0; i < n; i++) scaled[i] = from_fp16(v[i]) * factor;
    }
    int32_t not_finite = 0;
#pragma omp simd reduction(+ : not_finite)
    for (int64_t i = 0; i < n; i++) not_finite += (bits_of(scaled[i]) & ABSOLUTE) >= INFINITE;
    return not_finite;
}

void bucket_pack(int64_t tensors, const void *const *addresses, const int64_t *sizes, int32_t dtype, void *out,
                 int32_t out_dtype, float factor, double *statistics) {
    float scaled[CHUNK];
    int64_t to = 0;
    for (int64_t tensor = 0; tensor < tensors; tensor++)
        for (int64_t at = 0; at < sizes[tensor]; at += CHUNK) {
            int64_t n = sizes[tensor] - at < CHUNK ? sizes[tensor] - at : CHUNK;
            statistics[1] += (double)load_scaled(addresses[tensor], (Dtype)dtype, at, n, factor, scaled);
            statistics[0] += squares(scaled, n);
            store(scaled, n, out, (Dtype)out_dtype, to);
            to += n;
        }
}
