// Signs of values as one bit each, with a scale a block and a mask of zero words, error feedback in the same pass; and
// back. Includes wire_formats.cuh, whose Sign does the work: words and mask come from warp ballots. The reference is
// kernels/sign_pack.py; called by kernels/cuda.py, which has checked all.

#include "wire_formats.cuh"

// x, residuals: [rows, m]; a row of thread blocks for each.
__global__ void __launch_bounds__(THREADS)
    sign_pack_kernel(const float* __restrict__ x, Layout layout, uint8_t* __restrict__ wire, const void* residual,
                     int residual_kind, void* new_residual, int new_residual_kind, double* __restrict__ statistics) {
    const Place<Sign> place(layout, (int64_t)blockIdx.x * THREADS + threadIdx.x);
    const int64_t row = blockIdx.y, begin = row * layout.m;
    float values[Sign::VALUES];
#pragma unroll
    for (int i = 0; i < Sign::VALUES; i++) values[i] = 0.0f;
    if (place.used) load_values<Sign::VALUES>(x + begin, FP32, place.first, values);
    const int64_t before = begin * (residual_kind == FP32 ? 4 : 2), after = begin * (new_residual_kind == FP32 ? 4 : 2);
    encode_row<Sign>(values, wire + row * layout.row_bytes, layout, place, (const char*)residual + before,
                     residual_kind, (char*)new_residual + after, new_residual_kind,
                     statistics + 3 * (row * gridDim.x + blockIdx.x));
}

__global__ void __launch_bounds__(THREADS)
    sign_unpack_kernel(const uint8_t* __restrict__ wire, Layout layout, float* __restrict__ out) {
    const Place<Sign> place(layout, (int64_t)blockIdx.x * THREADS + threadIdx.x);
    if (!place.used) return;
    const int64_t row = blockIdx.y;
    float values[Sign::VALUES];
    Sign::decode(Sign::load(wire + row * layout.row_bytes, layout, place), values);
    store_values<Sign::VALUES>(out + row * layout.m, FP32, place.first, values);
}

// statistics: double [rows · thread blocks, 3], of which the caller takes the sum.
extern "C" int sign_pack(const float* x, int rows, Layout layout, uint8_t* wire, const void* residual,
                         int residual_kind, void* new_residual, int new_residual_kind, double* statistics,
                         void* stream) {
    const dim3 grid((unsigned)thread_blocks<Sign>(layout.m), (unsigned)rows);
    LAUNCH(sign_pack_kernel, grid, THREADS, stream, x, layout, wire, residual, residual_kind, new_residual,
           new_residual_kind, statistics);
    return (int)cudaGetLastError();
}

extern "C" int sign_unpack(const uint8_t* wire, int rows, Layout layout, float* out, void* stream) {
    const dim3 grid((unsigned)thread_blocks<Sign>(layout.m), (unsigned)rows);
    LAUNCH(sign_unpack_kernel, grid, THREADS, stream, wire, layout, out);
    return (int)cudaGetLastError();
}
