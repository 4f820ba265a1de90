// Decode the rows that several ranks sent, sum them in fp32 in rank order, and encode the sum again, in one pass.
// Includes wire_formats.cuh. The reference is kernels/decode_sum.py; called by kernels/cuda.py, which has checked all.
// A row's code is read 16 bytes a thread (sign: 2), and the sum never leaves the registers.

#include "wire_formats.cuh"

template <class Format>
__global__ void __launch_bounds__(THREADS)
    decode_sum_kernel(const uint8_t* __restrict__ wire, int rows, Layout layout, float* __restrict__ out) {
    constexpr int RUN = Format::VALUES / Format::RUNS;
    const Place<Format> place(layout, (int64_t)blockIdx.x * THREADS + threadIdx.x);
    if (!place.used) return;
    float sum[Format::VALUES];
    sum_of_rows<Format>(wire, rows, layout, place, sum);
#pragma unroll
    for (int run = 0; run < Format::RUNS; run++) store_values<RUN>(out, FP32, place.at(run), sum + run * RUN);
}

template <class Format>
__global__ void __launch_bounds__(THREADS)
    decode_sum_encode_kernel(const uint8_t* __restrict__ wire, int rows, Layout layout, uint8_t* __restrict__ out,
                             const void* residual, int residual_kind, void* new_residual, int new_residual_kind,
                             double* __restrict__ statistics) {
    const Place<Format> place(layout, (int64_t)blockIdx.x * THREADS + threadIdx.x);
    float sum[Format::VALUES];
    sum_of_rows<Format>(wire, rows, layout, place, sum);
    encode_row<Format>(sum, out, layout, place, residual, residual_kind, new_residual, new_residual_kind,
                       statistics + 3 * (int64_t)blockIdx.x);
}

extern "C" int decode_sum(int format, const uint8_t* wire, int rows, Layout layout, float* out, void* stream) {
    return for_format(format, [&](auto of) {
        using Format = decltype(of);
        LAUNCH(decode_sum_kernel<Format>, thread_blocks<Format>(layout.m), THREADS, stream, wire, rows, layout, out);
    });
}

// statistics: double [thread blocks, 3], of which the caller takes the sum.
extern "C" int decode_sum_encode(int format, const uint8_t* wire, int rows, Layout layout, uint8_t* out,
                                 const void* residual, int residual_kind, void* new_residual, int new_residual_kind,
                                 double* statistics, void* stream) {
    return for_format(format, [&](auto of) {
        using Format = decltype(of);
        LAUNCH(decode_sum_encode_kernel<Format>, thread_blocks<Format>(layout.m), THREADS, stream, wire, rows, layout,
               out, residual, residual_kind, new_residual, new_residual_kind, statistics);
    });
}
