// Runs CUDA kernels on a CPU, so that their logic is tested where there is no GPU: what our kernels use, nothing else.
// Put before a .cu file by `g++ -include`. Threads are fibers, in lockstep from one warp operation to the next; a warp
// runs as far as the next barrier before another does, first to last and last to first in turn, so that a missing
// barrier shows. Thread blocks run one after the other. Device memory is shared memory, which peers open by its name.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <ucontext.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static thread_local
#define LAUNCH(kernel, grid, threads, stream, ...) \
    emulation::run(grid, threads, [&] { (void)(stream), kernel(__VA_ARGS__); })

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline thread_local dim3 threadIdx, blockIdx, gridDim;

namespace emulation {

struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(1 << 16);
    unsigned exchanges = 0;  // warp operations so far
    bool done = false, at_barrier = false;
};

struct Block {
    ucontext_t scheduler;
    std::vector<Fiber> fibers;
    std::vector<uint64_t> sent[2];  // by a warp operation's parity: a fast lane's next value doesn't cover this one
    std::function<void()> kernel;
    unsigned thread = 0;
};
inline thread_local Block block;

inline void fail(const char* what) {
    fprintf(stderr, "emulated CUDA: block %u, thread %u: %s\n", blockIdx.x, block.thread, what);
    abort();
}

inline void pause() {
    const unsigned thread = block.thread;
    swapcontext(&block.fibers[thread].context, &block.scheduler);
}

inline void enter() {
    block.kernel();
    block.fibers[block.thread].done = true;
    pause();
}

// Give a value and get those of all lanes of this thread's warp.
template <class T>
const uint64_t* exchange(unsigned mask, T value) {
    static_assert(sizeof(T) <= 8, "a lane's value is at most 8 bytes");
    Fiber& fiber = block.fibers[block.thread];
    std::vector<uint64_t>& sent = block.sent[fiber.exchanges % 2];
    memcpy(&sent[block.thread], &value, sizeof(T));
    fiber.exchanges++;
    pause();
    const unsigned first = block.thread & ~31u;
    for (unsigned lane = first; lane < first + 32; lane++) {
        const Fiber& other = block.fibers[lane];
        if (mask != ~0u || other.done || other.exchanges - fiber.exchanges > 1) fail("lanes of its warp are elsewhere");
    }
    return &sent[first];
}

// A warp as far as it comes; whether all of its threads have ended.
inline bool run_warp(unsigned first, bool forwards) {
    for (bool more = true; more;) {
        more = false;
        for (unsigned turn = 0; turn < 32; turn++) {
            block.thread = first + (forwards ? turn : 31 - turn);
            Fiber& fiber = block.fibers[block.thread];
            if (fiber.done || fiber.at_barrier) continue;
            threadIdx.x = block.thread;
            swapcontext(&block.scheduler, &fiber.context);
            more = true;
        }
    }
    bool ended = true;
    for (unsigned thread = first; thread < first + 32; thread++) ended = ended && block.fibers[thread].done;
    return ended;
}

inline void run_block() {
    const unsigned threads = block.fibers.size();
    for (bool forwards = true, ended = false; !ended; forwards = !forwards) {
        ended = true;
        for (unsigned first = 0; first < threads; first += 32)
            ended = run_warp(forwards ? first : threads - 32 - first, forwards) && ended;
        for (Fiber& fiber : block.fibers) fiber.at_barrier = false;  // all that go on have come to it
    }
}

inline void run(dim3 grid, unsigned threads, std::function<void()> kernel) {
    block.fibers.resize(threads);
    block.kernel = kernel;
    for (auto& values : block.sent) values.assign(threads, 0);
    gridDim = grid;
    for (blockIdx.y = 0; blockIdx.y < grid.y; blockIdx.y++)
        for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++) {
            for (Fiber& fiber : block.fibers) {
                fiber.done = fiber.at_barrier = false, fiber.exchanges = 0;
                getcontext(&fiber.context);
                fiber.context.uc_stack.ss_sp = fiber.stack.data();
                fiber.context.uc_stack.ss_size = fiber.stack.size();
                makecontext(&fiber.context, enter, 0);
            }
            run_block();
        }
}

}  // namespace emulation

inline void __syncthreads() {
    emulation::block.fibers[emulation::block.thread].at_barrier = true;
    emulation::pause();
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance) {
    const uint64_t* lanes = emulation::exchange(mask, value);
    T received;
    memcpy(&received, &lanes[(threadIdx.x % 32) ^ distance], sizeof(T));
    return received;
}

inline unsigned __ballot_sync(unsigned mask, bool vote) {
    const uint64_t* lanes = emulation::exchange(mask, (uint64_t)vote);
    unsigned votes = 0;
    for (int lane = 0; lane < 32; lane++) votes |= (unsigned)(lanes[lane] & 1) << lane;
    return votes;
}

inline float __uint_as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline uint32_t __float_as_uint(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

inline void store_release_system(uint32_t* to, uint32_t value) { __atomic_store_n(to, value, __ATOMIC_RELEASE); }
// The rank that is waited for may need this processor.
inline uint32_t load_acquire_system(const uint32_t* from) {
    usleep(20);
    return __atomic_load_n(from, __ATOMIC_ACQUIRE);
}

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMapBufferObjectFailed = 205 };
typedef void* cudaStream_t;
struct cudaIpcMemHandle_t {
    char reserved[64];
};
constexpr unsigned cudaIpcMemLazyEnablePeerAccess = 1;

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t error) { return error ? "emulated error" : "no error"; }

namespace emulation {
inline std::map<void*, std::pair<std::string, size_t>> memory;

inline cudaError_t map(void** address, const std::string& name, size_t bytes) {  // bytes 0: it is there already
    const int file = shm_open(name.c_str(), bytes ? O_CREAT | O_EXCL | O_RDWR : O_RDWR, 0600);
    struct stat is;
    if (file < 0 || (bytes && ftruncate(file, bytes)) || fstat(file, &is)) return cudaErrorMapBufferObjectFailed;
    *address = mmap(nullptr, is.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (*address == MAP_FAILED) return cudaErrorMapBufferObjectFailed;
    memory[*address] = {name, (size_t)is.st_size};
    return cudaSuccess;
}
}  // namespace emulation

inline cudaError_t cudaMalloc(void** address, size_t bytes) {
    static int number = 0;
    return emulation::map(address, "/cuda_on_cpu_" + std::to_string(getpid()) + "_" + std::to_string(number++), bytes);
}
inline cudaError_t cudaMemset(void* address, int value, size_t bytes) {
    memset(address, value, bytes);
    return cudaSuccess;
}
inline cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* address) {
    snprintf(handle->reserved, sizeof(handle->reserved), "%s", emulation::memory.at(address).first.c_str());
    return cudaSuccess;
}
inline cudaError_t cudaIpcOpenMemHandle(void** address, cudaIpcMemHandle_t handle, unsigned) {
    return emulation::map(address, handle.reserved, 0);
}
inline cudaError_t cudaIpcCloseMemHandle(void* address) {
    const size_t bytes = emulation::memory.at(address).second;
    emulation::memory.erase(address);
    return munmap(address, bytes) ? cudaErrorInvalidValue : cudaSuccess;
}
inline cudaError_t cudaFree(void* address) {
    shm_unlink(emulation::memory.at(address).first.c_str());
    return cudaIpcCloseMemHandle(address);
}
