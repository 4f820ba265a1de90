// All-reduce (sum) for ranks of one node that read each other's memory: no copy engine, one kernel a message. Includes
// launch.cuh; called by parallel/peer_memory.py. One-shot: everyone reads everything, one meeting. Two-shot: everyone
// sums its part, then reads the others' sums: 2(N-1)/N of the bytes, two meetings. Sums run in rank order, so bits agree.
//
// A rank's shared memory: [signals: uint32 of each thread block and rank][buffer of even calls][buffer of odd calls].
// Signals are numbers that only grow (epochs), so nothing is ever reset. A buffer is written again two calls later: by
// then its owner has met everyone in the call between, which they began after they had finished the call before.

#include "launch.cuh"

constexpr int MAX_RANKS = 8;
constexpr int MAX_BLOCKS = 64;  // few, so that all of them run at once even beside other work, as meetings require
constexpr int64_t SIGNAL_BYTES = MAX_BLOCKS * MAX_RANKS * 4;

struct Peers {
    uint8_t* memory[MAX_RANKS];  // the shared memory of each rank, as this process sees it
    int rank, ranks;
};

// A call's numbers, the same on all ranks but for x.
struct Message {
    void* x;
    int64_t values;
    int64_t buffer;   // bytes from the shared memory's begin to this call's buffer
    uint32_t epoch;   // of the first meeting; the second has the next
};

#ifdef __CUDACC__
__device__ __forceinline__ void store_release_system(uint32_t* to, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t* from) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}
#endif

// Thread block b of every rank waits here for block b of all others: what those wrote before, this one may read after.
__device__ __forceinline__ void meet(const Peers& peers, uint32_t epoch) {
    __syncthreads();
    if (threadIdx.x < peers.ranks) {
        uint32_t* theirs = reinterpret_cast<uint32_t*>(peers.memory[threadIdx.x]) + blockIdx.x * MAX_RANKS;
        const uint32_t* mine = reinterpret_cast<uint32_t*>(peers.memory[peers.rank]) + blockIdx.x * MAX_RANKS;
        store_release_system(theirs + peers.rank, epoch);
        // A faster rank may be at a later meeting already. The difference stays right when the number wraps around.
        while ((int32_t)(load_acquire_system(mine + threadIdx.x) - epoch) < 0) {
        }
    }
    __syncthreads();
}

struct Fp32 {
    static constexpr int VALUES = 4, BYTES = 4;
    static __device__ float value(const uint32_t* words, int i) { return bits_to_float(words[i]); }
    static __device__ void put(uint32_t* words, int i, float x) { words[i] = __float_as_uint(x); }
};

struct Bf16 {
    static constexpr int VALUES = 8, BYTES = 2;
    static __device__ float value(const uint32_t* words, int i) {
        return bf16_to_float(words[i / 2] >> (16 * (i % 2)) & 0xffffu);
    }
    static __device__ void put(uint32_t* words, int i, float x) {
        words[i / 2] = i % 2 ? words[i / 2] | float_to_bf16(x) << 16 : float_to_bf16(x);
    }
};

__device__ __forceinline__ uint4* buffer_of(const Peers& peers, int rank, const Message& message) {
    return reinterpret_cast<uint4*>(peers.memory[rank] + message.buffer);
}

// Vector i of x: 16 bytes, or, where x ends within it or doesn't begin at a multiple of 16, value by value.
template <class Type>
__device__ __forceinline__ bool whole(const Message& message, int64_t i) {
    return (i + 1) * Type::VALUES <= message.values && reinterpret_cast<uintptr_t>(message.x) % 16 == 0;
}

template <class Type>
__device__ __forceinline__ uint4 read(const Message& message, int64_t i) {
    if (whole<Type>(message, i)) return static_cast<const uint4*>(message.x)[i];
    uint32_t words[4] = {0, 0, 0, 0};
    for (int k = 0; k < 16 / Type::BYTES; k++) {
        const int64_t at = i * Type::VALUES + k;
        if (at >= message.values) break;
        if (Type::BYTES == 4) words[k % 4] = static_cast<const uint32_t*>(message.x)[at];
        if (Type::BYTES == 2) words[k / 2] |= (uint32_t) static_cast<const uint16_t*>(message.x)[at] << (16 * (k % 2));
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

template <class Type>
__device__ __forceinline__ void write(const Message& message, int64_t i, uint4 vector) {
    if (whole<Type>(message, i)) {
        static_cast<uint4*>(message.x)[i] = vector;
        return;
    }
    const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int k = 0; k < 16 / Type::BYTES; k++) {
        const int64_t at = i * Type::VALUES + k;
        if (at >= message.values) break;
        if (Type::BYTES == 4) static_cast<uint32_t*>(message.x)[at] = words[k % 4];
        if (Type::BYTES == 2) static_cast<uint16_t*>(message.x)[at] = (uint16_t)(words[k / 2] >> (16 * (k % 2)));
    }
}

// Vector i of all ranks' buffers, summed from rank 0 on. All are fetched before the first is used.
template <class Type>
__device__ __forceinline__ uint4 sum_of_ranks(const Peers& peers, const Message& message, int64_t i) {
    uint4 vectors[MAX_RANKS];
#pragma unroll
    for (int rank = 0; rank < MAX_RANKS; rank++)
        if (rank < peers.ranks) vectors[rank] = buffer_of(peers, rank, message)[i];
    float sum[Type::VALUES];
#pragma unroll
    for (int k = 0; k < Type::VALUES; k++) sum[k] = 0.0f;
#pragma unroll
    for (int rank = 0; rank < MAX_RANKS; rank++)
        if (rank < peers.ranks) {
            const uint32_t words[4] = {vectors[rank].x, vectors[rank].y, vectors[rank].z, vectors[rank].w};
#pragma unroll
            for (int k = 0; k < Type::VALUES; k++) sum[k] += Type::value(words, k);
        }
    uint32_t words[4];
#pragma unroll
    for (int k = 0; k < Type::VALUES; k++) Type::put(words, k, sum[k]);
    return make_uint4(words[0], words[1], words[2], words[3]);
}

template <class Type>
__global__ void __launch_bounds__(THREADS) one_shot_kernel(const __grid_constant__ Peers peers,
                                                                const __grid_constant__ Message message) {
    const int64_t vectors = (message.values + Type::VALUES - 1) / Type::VALUES;
    const int64_t begin = (int64_t)blockIdx.x * THREADS + threadIdx.x, step = (int64_t)gridDim.x * THREADS;
    uint4* mine = buffer_of(peers, peers.rank, message);
    for (int64_t i = begin; i < vectors; i += step) mine[i] = read<Type>(message, i);
    meet(peers, message.epoch);
    for (int64_t i = begin; i < vectors; i += step) write<Type>(message, i, sum_of_ranks<Type>(peers, message, i));
}

template <class Type>
__global__ void __launch_bounds__(THREADS) two_shot_kernel(const __grid_constant__ Peers peers,
                                                                const __grid_constant__ Message message) {
    const int64_t vectors = (message.values + Type::VALUES - 1) / Type::VALUES;
    const int64_t part = (vectors + peers.ranks - 1) / peers.ranks;  // vectors that each rank sums
    const int64_t begin = (int64_t)blockIdx.x * THREADS + threadIdx.x, step = (int64_t)gridDim.x * THREADS;
    uint4* mine = buffer_of(peers, peers.rank, message);
    // Thread block b has the same vectors of each part in all three loops: it need meet the other ranks' b only.
    for (int64_t i = begin; i < part; i += step)
        for (int64_t at = i; at < vectors; at += part) mine[at] = read<Type>(message, at);
    meet(peers, message.epoch);
    for (int64_t i = begin; i < part; i += step) {
        const int64_t at = peers.rank * part + i;
        // Over this rank's own values, which nobody else reads before the second meeting.
        if (at < vectors) mine[at] = sum_of_ranks<Type>(peers, message, at);
    }
    meet(peers, message.epoch + 1);
    for (int64_t i = begin; i < part; i += step)
        for (int rank = 0; rank < peers.ranks; rank++) {
            const int64_t at = rank * part + i;
            if (at < vectors) write<Type>(message, at, buffer_of(peers, rank, message)[at]);
        }
}

template <class Type>
static int launch(const Peers& peers, const Message& message, bool two_shot, void* stream) {
    const int64_t vectors = (message.values + Type::VALUES - 1) / Type::VALUES;
    const int64_t each = two_shot ? (vectors + peers.ranks - 1) / peers.ranks : vectors;
    const int64_t needed = (each + THREADS - 1) / THREADS, blocks = needed < MAX_BLOCKS ? needed : MAX_BLOCKS;
    if (two_shot)
        LAUNCH(two_shot_kernel<Type>, (unsigned)blocks, THREADS, stream, peers, message);
    else
        LAUNCH(one_shot_kernel<Type>, (unsigned)blocks, THREADS, stream, peers, message);
    return (int)cudaGetLastError();
}

// Sum x over the ranks, in place. All ranks call it with the same numbers.
extern "C" int peer_all_reduce(Peers peers, int kind, void* x, int64_t values, int64_t buffer, uint32_t epoch,
                               int two_shot, void* stream) {
    const Message message = {x, values, SIGNAL_BYTES + buffer, epoch};
    if (kind == FP32) return launch<Fp32>(peers, message, two_shot, stream);
    if (kind == BF16) return launch<Bf16>(peers, message, two_shot, stream);
    return (int)cudaErrorInvalidValue;
}

// Memory of this rank for signals, all 0, and two buffers of `bytes`, and the handle that opens it in other processes.
extern "C" int peer_allocate(int64_t bytes, void** memory, cudaIpcMemHandle_t* handle) {
    cudaError_t error = cudaMalloc(memory, (size_t)(SIGNAL_BYTES + 2 * bytes));
    if (error == cudaSuccess) error = cudaMemset(*memory, 0, (size_t)SIGNAL_BYTES);
    if (error == cudaSuccess) error = cudaDeviceSynchronize();  // before anybody can open it
    if (error == cudaSuccess) error = cudaIpcGetMemHandle(handle, *memory);
    return (int)error;
}

extern "C" int peer_open(const cudaIpcMemHandle_t* handle, void** memory) {
    return (int)cudaIpcOpenMemHandle(memory, *handle, cudaIpcMemLazyEnablePeerAccess);
}

// Until all that was launched has ended.
extern "C" int peer_wait() { return (int)cudaDeviceSynchronize(); }

extern "C" int peer_close(void* memory) { return (int)cudaIpcCloseMemHandle(memory); }

extern "C" int peer_free(void* memory) { return (int)cudaFree(memory); }
