// What every kernel file of ours begins with: sizes of a launch, 16-byte accesses, and errors as text.
// Includes the standard library only. nvcc brings CUDA's own names; tests bring an emulation of them (cuda_on_cpu.h).
#pragma once

#include <cstdint>

#ifndef LAUNCH
#define LAUNCH(kernel, grid, threads, stream, ...) kernel<<<grid, threads, 0, (cudaStream_t)(stream)>>>(__VA_ARGS__)
#endif

constexpr int THREADS = 256;
constexpr int WARP = 32;
constexpr int WARPS = THREADS / WARP;
constexpr unsigned ALL_LANES = 0xffffffffu;

enum Kind { NONE = 0, FP32 = 1, BF16 = 2 };  // dtypes of a tensor that may be missing; kernels/cuda.py sends these

__device__ __forceinline__ float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }

__device__ __forceinline__ float bf16_to_float(uint32_t code) { return bits_to_float(code << 16); }

// To nearest, ties to even. By integers, so that every implementation gives the same bits.
__device__ __forceinline__ uint32_t float_to_bf16(float x) {
    const uint32_t bits = __float_as_uint(x);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// N consecutive values from (to) memory of fp32 or bf16, aligned to 16 bytes; N is a multiple of 8.
template <int N>
__device__ __forceinline__ void load_values(const void* from, int kind, int64_t at, float* values) {
    if (kind == FP32) {
        const float4* vectors = reinterpret_cast<const float4*>(static_cast<const float*>(from) + at);
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            const float4 vector = vectors[i];
            values[4 * i] = vector.x, values[4 * i + 1] = vector.y;
            values[4 * i + 2] = vector.z, values[4 * i + 3] = vector.w;
        }
    } else {
        const uint4* vectors = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(from) + at);
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
            const uint4 vector = vectors[i];
            const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
            for (int k = 0; k < 8; k++) values[8 * i + k] = bf16_to_float((words[k / 2] >> (16 * (k % 2))) & 0xffffu);
        }
    }
}

template <int N>
__device__ __forceinline__ void store_values(void* to, int kind, int64_t at, const float* values) {
    if (kind == FP32) {
        float4* vectors = reinterpret_cast<float4*>(static_cast<float*>(to) + at);
#pragma unroll
        for (int i = 0; i < N / 4; i++)
            vectors[i] = make_float4(values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]);
    } else {
        uint4* vectors = reinterpret_cast<uint4*>(static_cast<uint16_t*>(to) + at);
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
            uint32_t words[4];
#pragma unroll
            for (int k = 0; k < 4; k++)
                words[k] = float_to_bf16(values[8 * i + 2 * k]) | float_to_bf16(values[8 * i + 2 * k + 1]) << 16;
            vectors[i] = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

extern "C" const char* error_text(int code) { return cudaGetErrorString((cudaError_t)code); }
