// The formats on the wire as one thread sees them: its values, their code, and the way back. kernels/wire.py has the
// layout, kernels/quantize.py and kernels/sign_pack.py the references that these equal bit for bit (--fmad=false).
// Includes launch.cuh. A thread holds VALUES values, whose codes are 16 bytes (sign: 2), in runs of consecutive ones; a
// block of values is a group of neighbouring threads, at most all of a thread block.
#pragma once

#include "launch.cuh"

constexpr float TINY = 0x1p-100f;  // a block whose largest value is below this is zero: see kernels/wire.py
constexpr int TOGETHER = 4;        // rows whose code a thread fetches before it uses any, since memory is far

struct Layout {
    int64_t m;          // values of a row, whole blocks
    int block_log2;     // of the values that share a scale
    int64_t mask_at;    // bytes from a row's begin to its mask
    int64_t codes_at;   // and to its codes
    int64_t row_bytes;  // from a row to the next

    __device__ int block() const { return 1 << block_log2; }
};

// Combine a value of each of `threads` neighbouring threads (a power of two). All of the thread block take part.
template <class Combine>
__device__ __forceinline__ float over_neighbours(float value, int threads, Combine combine) {
    __shared__ float of_warp[WARPS];
    for (int offset = 1; offset < threads && offset < WARP; offset *= 2)
        value = combine(value, __shfl_xor_sync(ALL_LANES, value, offset));
    if (threads > WARP) {
        const int warp = threadIdx.x / WARP, warps = threads / WARP, first = warp & ~(warps - 1);
        __syncthreads();  // an earlier use of the shared values is over
        if (threadIdx.x % WARP == 0) of_warp[warp] = value;
        __syncthreads();
        value = of_warp[first];
        for (int i = 1; i < warps; i++) value = combine(value, of_warp[first + i]);
    }
    return value;
}

struct Max {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
    __device__ float operator()(float a, float b) const { return a + b; }
};

// Where a thread's values lie in its row: run i begins at value `at(i)`.
template <class Format>
struct Place {
    int64_t chunk, first, block;  // which thread of the row this is, its first value, its block of values
    int apart;                    // values from one run to the next
    bool used;                    // else it is beyond the row's end

    __device__ Place(const Layout& layout, int64_t chunk) : chunk(chunk) {
        const int64_t value = chunk * Format::VALUES;
        used = value < layout.m;
        block = value >> layout.block_log2;
        apart = layout.block() / 2;
        const int64_t begin = block << layout.block_log2;
        first = Format::RUNS == 1 ? value : begin + (value - begin) / 2;
    }
    __device__ int64_t at(int run) const { return first + (int64_t)run * apart; }
    __device__ bool leads(const Layout& layout) const { return chunk * Format::VALUES == block << layout.block_log2; }
};

__device__ __forceinline__ uint32_t& word(uint4& vector, int i) { return (&vector.x)[i]; }

// bf16: no blocks, no scale.
struct Bf16 {
    static constexpr int VALUES = 8, RUNS = 1;
    struct Code {
        uint4 raw;
    };
    using At = Place<Bf16>;

    static __device__ Code load(const uint8_t* row, const Layout& layout, const At& place) {
        return {reinterpret_cast<const uint4*>(row + layout.codes_at)[place.chunk]};
    }
    static __device__ void store(uint8_t* row, const Layout& layout, const At& place, const Code& code) {
        if (place.used) reinterpret_cast<uint4*>(row + layout.codes_at)[place.chunk] = code.raw;
    }
    static __device__ void decode(Code code, float (&values)[VALUES]) {
#pragma unroll
        for (int i = 0; i < VALUES; i++) values[i] = bf16_to_float((word(code.raw, i / 2) >> (16 * (i % 2))) & 0xffffu);
    }
    static __device__ Code encode(const float (&values)[VALUES], const Layout&) {
        Code code;
#pragma unroll
        for (int i = 0; i < 4; i++)
            word(code.raw, i) = float_to_bf16(values[2 * i]) | float_to_bf16(values[2 * i + 1]) << 16;
        return code;
    }
};

// Conversions by additions: the instructions for them run at a quarter of the rate or less, which memory can outrun.
// An integer from 0 to 255 less `zero`, as a float: the integer is put into the last bits of 2^23.
__device__ __forceinline__ float small_float(uint32_t integer, float zero) {
    return bits_to_float(0x4b000000u | integer) - (8388608.0f + zero);
}
// The integer nearest to x, ties to even, |x| < 2^22, in two's complement in the low bits: those of 1.5 · 2^23 + x.
__device__ __forceinline__ uint32_t nearest(float x) { return __float_as_uint(x + 12582912.0f); }

struct Int8Code {
    static constexpr int VALUES = 16, RUNS = 1;
    static constexpr float LEVEL = 127.0f;

    static __device__ float value(uint4& raw, int i) {
        return small_float(((word(raw, i / 4) ^ 0x80808080u) >> (8 * (i % 4))) & 0xffu, 128.0f);
    }
    static __device__ uint32_t code(float scaled) { return nearest(scaled) & 0xffu; }
    static __device__ void put(uint4& raw, int i, uint32_t code) { word(raw, i / 4) |= code << (8 * (i % 4)); }
};

struct Fp8Code {
    static constexpr int VALUES = 16, RUNS = 1;
    static constexpr float LEVEL = 448.0f;
    static constexpr uint32_t REBIAS = (127 - 7) << 3;

    static __device__ float value(uint4& raw, int i) {
        const uint32_t code = (word(raw, i / 4) >> (8 * (i % 4))) & 0xffu, low = code & 0x7fu;
        const float size = low >= 8 ? bits_to_float((low + REBIAS) << 20) : small_float(low, 0.0f) * (1.0f / 512.0f);
        return code & 0x80u ? -size : size;
    }
    static __device__ uint32_t code(float scaled) {
        const uint32_t bits = __float_as_uint(scaled), size = bits & 0x7fffffffu;
        const uint32_t normal = ((size + 0x7ffffu + ((size >> 20) & 1u)) >> 20) - REBIAS;
        const uint32_t subnormal = nearest(fabsf(scaled) * 512.0f) & 0xffu;
        return (fabsf(scaled) < 0x1p-6f ? subnormal : normal) | ((bits >> 24) & 0x80u);
    }
    static __device__ void put(uint4& raw, int i, uint32_t code) { word(raw, i / 4) |= code << (8 * (i % 4)); }
};

// Values 0 to 15 are low nibbles and of the block's first half, 16 to 31 high ones and of its second.
struct Int4Code {
    static constexpr int VALUES = 32, RUNS = 2;
    static constexpr float LEVEL = 7.0f;

    static __device__ int shift(int i) { return 8 * (i % 4) + 4 * (i / 16); }
    static __device__ float value(uint4& raw, int i) {
        return small_float(((word(raw, (i % 16) / 4) ^ 0x88888888u) >> shift(i)) & 0xfu, 8.0f);
    }
    static __device__ uint32_t code(float scaled) { return nearest(scaled) & 0xfu; }
    static __device__ void put(uint4& raw, int i, uint32_t code) { word(raw, (i % 16) / 4) |= code << shift(i); }
};

// Formats whose blocks have a scale: largest absolute value / LEVEL.
template <class Coding>
struct Scaled {
    static constexpr int VALUES = Coding::VALUES, RUNS = Coding::RUNS;
    struct Code {
        uint4 raw;
        float scale;
    };
    using At = Place<Scaled>;

    static __device__ Code load(const uint8_t* row, const Layout& layout, const At& place) {
        return {reinterpret_cast<const uint4*>(row + layout.codes_at)[place.chunk],
                reinterpret_cast<const float*>(row)[place.block]};
    }
    static __device__ void store(uint8_t* row, const Layout& layout, const At& place, const Code& code) {
        if (!place.used) return;
        reinterpret_cast<uint4*>(row + layout.codes_at)[place.chunk] = code.raw;
        if (place.leads(layout)) reinterpret_cast<float*>(row)[place.block] = code.scale;
    }
    static __device__ void decode(Code code, float (&values)[VALUES]) {
#pragma unroll
        for (int i = 0; i < VALUES; i++) values[i] = Coding::value(code.raw, i) * code.scale;
    }
    static __device__ Code encode(const float (&values)[VALUES], const Layout& layout) {
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < VALUES; i++) largest = fmaxf(largest, fabsf(values[i]));
        largest = over_neighbours(largest, layout.block() / VALUES, Max());
        const bool zero = largest < TINY;
        const float scale = zero ? 0.0f : largest * (float)(1.0 / Coding::LEVEL);
        const float inverse = zero ? 0.0f : 1.0f / scale;
        Code code = {make_uint4(0, 0, 0, 0), scale};
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            const float scaled = fminf(fmaxf(values[i] * inverse, -Coding::LEVEL), Coding::LEVEL);
            Coding::put(code.raw, i, Coding::code(scaled));
        }
        return code;
    }
};

// One bit a value; two threads share a word of 32 values, which one bit of the mask says isn't all zero.
struct Sign {
    static constexpr int VALUES = 16, RUNS = 1, WORD = 32;
    struct Code {
        uint32_t bits;
        bool some;
        float scale;
    };
    using At = Place<Sign>;

    static __device__ Code load(const uint8_t* row, const Layout& layout, const At& place) {
        const uint32_t mask = row[layout.mask_at + place.chunk / 16];
        return {reinterpret_cast<const uint16_t*>(row + layout.codes_at)[place.chunk],
                (mask >> (place.chunk / 2 % 8) & 1u) != 0, reinterpret_cast<const float*>(row)[place.block]};
    }
    // All threads of a warp take part: 16 of them know a byte of the mask.
    static __device__ void store(uint8_t* row, const Layout& layout, const At& place, const Code& code) {
        const int lane = threadIdx.x % WARP;
        const uint32_t halves = __ballot_sync(ALL_LANES, code.some);                            // a bit a thread
        const uint32_t words = __ballot_sync(ALL_LANES, (halves >> (2 * (lane % 16)) & 1u) != 0);  // a bit a word
        if (!place.used) return;
        reinterpret_cast<uint16_t*>(row + layout.codes_at)[place.chunk] = (uint16_t)code.bits;
        if (lane % 16 == 0) row[layout.mask_at + place.chunk / 16] = (uint8_t)(words >> (lane / 2));
        if (place.leads(layout)) reinterpret_cast<float*>(row)[place.block] = code.scale;
    }
    static __device__ void decode(const Code& code, float (&values)[VALUES]) {
#pragma unroll
        for (int i = 0; i < VALUES; i++)
            values[i] = !code.some ? 0.0f : code.bits >> i & 1u ? -code.scale : code.scale;
    }
    static __device__ Code encode(const float (&values)[VALUES], const Layout& layout) {
        Code code = {0, false, 0.0f};
        float size = 0.0f;
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            size += fabsf(values[i]);
            code.some = code.some || values[i] != 0.0f;
            code.bits |= (uint32_t)(values[i] < 0.0f) << i;
        }
        // A word isn't zero if the ballot has a bit of either of its two threads.
        const int lane = threadIdx.x % WARP;
        code.some = (__ballot_sync(ALL_LANES, code.some) >> (lane & ~1) & 3u) != 0;
        const int threads = layout.block() / VALUES;
        size = over_neighbours(size, threads, Sum());
        const float count = over_neighbours(code.some ? (float)VALUES : 0.0f, threads, Sum());
        const float mean = size / fmaxf(count, 1.0f);
        code.scale = mean < TINY ? 0.0f : mean;
        return code;
    }
};

// Add this thread's values of each row, from row 0 on, to a sum that begins at 0.
template <class Format>
__device__ __forceinline__ void sum_of_rows(const uint8_t* wire, int rows, const Layout& layout,
                                            const Place<Format>& place, float (&sum)[Format::VALUES]) {
#pragma unroll
    for (int i = 0; i < Format::VALUES; i++) sum[i] = 0.0f;
    if (!place.used) return;
    for (int row = 0; row < rows; row += TOGETHER) {
        typename Format::Code codes[TOGETHER];
#pragma unroll
        for (int k = 0; k < TOGETHER; k++)
            if (row + k < rows) codes[k] = Format::load(wire + (row + k) * layout.row_bytes, layout, place);
#pragma unroll
        for (int k = 0; k < TOGETHER; k++) {
            if (row + k >= rows) break;
            float values[Format::VALUES];
            Format::decode(codes[k], values);
#pragma unroll
            for (int i = 0; i < Format::VALUES; i++) sum[i] += values[i];
        }
    }
}

// Encode raw [+ residual] into a row, what the code doesn't carry of it into the new residual, and this thread block's
// part of the three statistics (kernels/wire.py) into `statistics`. All of its threads take part.
template <class Format>
__device__ __forceinline__ void encode_row(float (&raw)[Format::VALUES], uint8_t* row, const Layout& layout,
                                           const Place<Format>& place, const void* residual, int residual_kind,
                                           void* new_residual, int new_residual_kind, double* statistics) {
    constexpr int VALUES = Format::VALUES, RUN = VALUES / Format::RUNS;
    double part[3] = {0.0, 0.0, 0.0};  // Σ total², Σ error², values that aren't finite
#pragma unroll
    for (int i = 0; i < VALUES; i++) part[2] += (__float_as_uint(raw[i]) & 0x7f800000u) == 0x7f800000u;
    if (residual_kind != NONE && place.used) {
        float before[VALUES];
#pragma unroll
        for (int run = 0; run < Format::RUNS; run++)
            load_values<RUN>(residual, residual_kind, place.at(run), before + run * RUN);
#pragma unroll
        for (int i = 0; i < VALUES; i++) raw[i] += before[i];
    }
    const typename Format::Code code = Format::encode(raw, layout);
    Format::store(row, layout, place, code);
    float error[VALUES];
    Format::decode(code, error);
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        error[i] = raw[i] - error[i];
        part[0] += (double)raw[i] * raw[i];
        part[1] += (double)error[i] * error[i];
    }
    if (new_residual_kind != NONE && place.used)
#pragma unroll
        for (int run = 0; run < Format::RUNS; run++)
            store_values<RUN>(new_residual, new_residual_kind, place.at(run), error + run * RUN);

    __shared__ double of_warp[WARPS][3];
#pragma unroll
    for (int k = 0; k < 3; k++) {
        for (int offset = 1; offset < WARP; offset *= 2) part[k] += __shfl_xor_sync(ALL_LANES, part[k], offset);
        if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP][k] = part[k];
    }
    __syncthreads();
    if (threadIdx.x < 3) {
        double sum = 0.0;
        for (int warp = 0; warp < WARPS; warp++) sum += of_warp[warp][threadIdx.x];
        statistics[threadIdx.x] = sum;
    }
}

template <class Format>
constexpr int64_t thread_blocks(int64_t m) {
    return (m + (int64_t)THREADS * Format::VALUES - 1) / ((int64_t)THREADS * Format::VALUES);
}

// Call `function` with a format, by the number that kernels/cuda.py gives it; an error code.
template <class Function>
int for_format(int number, Function function) {
    switch (number) {
        case 0: function(Bf16()); break;
        case 1: function(Scaled<Int8Code>()); break;
        case 2: function(Scaled<Fp8Code>()); break;
        case 3: function(Scaled<Int4Code>()); break;
        case 4: function(Sign()); break;
        default: return (int)cudaErrorInvalidValue;
    }
    return (int)cudaGetLastError();
}
