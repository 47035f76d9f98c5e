// The CUDA runtime of a device that has memory, streams and events, and computes nothing.
//
// Memory is address space of the host. Kernels do nothing. A copy to the host of at most 64 KiB reads zeros, so a loss is
// 0 and finite; larger copies move nothing. Streams are always idle. Everything that is asked of them is logged.
#define _GNU_SOURCE
#include "null_cuda.h"
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define API cudaError_t CUDARTAPI
#define MOST_DEVICES 64
#define READ_AS_ZEROS (64u << 10)
#define COPIED (1u << 20)  // tokens and offsets arrive on the device; weights do not
#define OF_THE_CONTEXT (600ull << 20)  // what CUDA, its libraries and NCCL take besides the allocator

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int current_device;
static __thread cudaError_t last_error;

static size_t number(const char *variable, size_t otherwise) {
    const char *text = getenv(variable);
    return text ? strtoull(text, 0, 10) : otherwise;
}

static API failed(cudaError_t error) { return last_error = error; }

// The log -------------------------------------------------------------------------------------------------------------

static struct operation *operations;
static size_t n_operations, room;
static int is_open;
static void (*hook)(int kind, size_t bytes);
static __thread int in_hook;

void null_cuda_open_log(void) { is_open = 1; n_operations = 0; }
size_t null_cuda_operations(struct operation **first) { *first = operations; return n_operations; }
void null_cuda_set_hook(void (*function)(int kind, size_t bytes)) { hook = function; }

void null_cuda_log(enum kind kind, const void *stream, const void *object, const char *name, size_t bytes) {
    if (is_open) {
        pthread_mutex_lock(&lock);
        if (n_operations == room) {
            room = room ? 2 * room : 1 << 16;
            operations = realloc(operations, room * sizeof *operations);
        }
        operations[n_operations++] = (struct operation){kind, stream, object, name, bytes};
        pthread_mutex_unlock(&lock);
    }
    int host_waits = kind == SYNC_STREAM || kind == SYNC_EVENT || kind == SYNC_DEVICE || kind == COPY_PAGEABLE;
    if (host_waits && is_open && hook && !in_hook) {
        in_hook = 1;
        hook(kind, bytes);
        in_hook = 0;
    }
}

// Memory --------------------------------------------------------------------------------------------------------------

static size_t used[MOST_DEVICES];

// Sorted by address; few segments are alive at a time.
static struct segment { uintptr_t first; size_t bytes; int device; enum memory memory; } *segments;
static size_t n_segments, segment_room;

size_t null_cuda_total(void) { return number("NULL_CUDA_MIB", 143771) << 20; }
size_t null_cuda_used(int device) { return used[device] + OF_THE_CONTEXT; }
int null_cuda_current_device(void) { return current_device; }

int null_cuda_take(int device, size_t bytes) {
    pthread_mutex_lock(&lock);
    int fits = null_cuda_used(device) + bytes <= null_cuda_total();
    if (fits) used[device] += bytes;
    pthread_mutex_unlock(&lock);
    return fits;
}

void null_cuda_give(int device, size_t bytes) {
    pthread_mutex_lock(&lock);
    used[device] -= bytes;
    pthread_mutex_unlock(&lock);
}

void *null_cuda_addresses(size_t bytes) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *address = mmap(0, bytes ? bytes : 1, PROT_READ | PROT_WRITE, flags, -1, 0);
    return address == MAP_FAILED ? 0 : address;
}

// The number of segments that begin at or before an address.
static size_t segments_until(uintptr_t address) {
    size_t low = 0, high = n_segments;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (segments[middle].first <= address) low = middle + 1;
        else high = middle;
    }
    return low;
}

void null_cuda_register(void *address, size_t bytes, int device, enum memory memory) {
    pthread_mutex_lock(&lock);
    if (n_segments == segment_room) {
        segment_room = segment_room ? 2 * segment_room : 1024;
        segments = realloc(segments, segment_room * sizeof *segments);
    }
    size_t at = segments_until((uintptr_t)address);
    memmove(segments + at + 1, segments + at, (n_segments++ - at) * sizeof *segments);
    segments[at] = (struct segment){(uintptr_t)address, bytes, device, memory};
    pthread_mutex_unlock(&lock);
}

size_t null_cuda_unregister(void *address, int *device) {
    size_t bytes = 0;
    pthread_mutex_lock(&lock);
    size_t after = segments_until((uintptr_t)address);
    if (after && segments[after - 1].first == (uintptr_t)address) {
        bytes = segments[after - 1].bytes;
        if (device) *device = segments[after - 1].device;
        memmove(segments + after - 1, segments + after, (n_segments-- - after) * sizeof *segments);
    }
    pthread_mutex_unlock(&lock);
    return bytes;
}

enum memory null_cuda_memory(const void *address, int *device) {
    enum memory memory = UNKNOWN;
    pthread_mutex_lock(&lock);
    size_t after = segments_until((uintptr_t)address);
    if (after && (uintptr_t)address - segments[after - 1].first < segments[after - 1].bytes) {
        memory = segments[after - 1].memory;
        if (device) *device = segments[after - 1].device;
    }
    pthread_mutex_unlock(&lock);
    return memory;
}

API cudaMalloc(void **address, size_t bytes) {
    if (!null_cuda_take(current_device, bytes)) return failed(cudaErrorMemoryAllocation);
    *address = null_cuda_addresses(bytes);
    null_cuda_register(*address, bytes, current_device, DEVICE);
    return 0;
}
API cudaFree(void *address) {
    int device = 0;
    size_t bytes = address ? null_cuda_unregister(address, &device) : 0;
    if (bytes) {
        munmap(address, bytes);
        null_cuda_give(device, bytes);
    }
    return 0;
}
API cudaHostAlloc(void **address, size_t bytes, unsigned flags) {
    *address = null_cuda_addresses(bytes);
    null_cuda_register(*address, bytes, 0, PINNED);
    return 0;
}
API cudaFreeHost(void *address) {
    size_t bytes = null_cuda_unregister(address, 0);
    if (bytes) munmap(address, bytes);
    return 0;
}
API cudaHostRegister(void *address, size_t bytes, unsigned flags) {
    null_cuda_register(address, bytes, 0, PINNED);
    return 0;
}
API cudaHostUnregister(void *address) { null_cuda_unregister(address, 0); return 0; }
API cudaMallocAsync(void **address, size_t bytes, cudaStream_t stream) { return cudaMalloc(address, bytes); }
API cudaFreeAsync(void *address, cudaStream_t stream) { return cudaFree(address); }
API cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *total = null_cuda_total();
    *free_bytes = *total - null_cuda_used(current_device);
    return 0;
}

// The host waits for a copy from or to host memory that is not pinned.
static void copy(void *to, const void *from, size_t bytes, cudaStream_t stream) {
    enum memory target = null_cuda_memory(to, 0), source = null_cuda_memory(from, 0);
    if (target == DEVICE && source == DEVICE) {
        null_cuda_log(COPY_ON_DEVICE, stream, to, 0, bytes);
        if (bytes <= COPIED) memmove(to, from, bytes);
    } else if (target == DEVICE) {
        null_cuda_log(COPY_TO_DEVICE, stream, to, 0, bytes);
        if (source != PINNED) null_cuda_log(COPY_PAGEABLE, stream, to, 0, bytes);
        if (bytes <= COPIED) memmove(to, from, bytes);
    } else {
        null_cuda_log(COPY_TO_HOST, stream, from, 0, bytes);
        if (target != PINNED) null_cuda_log(COPY_PAGEABLE, stream, from, 0, bytes);
        if (bytes <= READ_AS_ZEROS) memset(to, 0, bytes);
    }
}
API cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    copy(to, from, bytes, 0);
    null_cuda_log(SYNC_STREAM, 0, 0, 0, 0);
    return 0;
}
API cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    copy(to, from, bytes, stream);
    return 0;
}
API cudaMemcpyPeerAsync(void *to, int device, const void *from, int source, size_t bytes, cudaStream_t stream) {
    copy(to, from, bytes, stream);
    return 0;
}
API cudaMemcpy2DAsync(void *to, size_t pitch, const void *from, size_t source_pitch, size_t width, size_t height,
                      enum cudaMemcpyKind kind, cudaStream_t stream) {
    null_cuda_log(COPY_ON_DEVICE, stream, to, 0, width * height);
    return 0;
}
API cudaMemsetAsync(void *address, int value, size_t bytes, cudaStream_t stream) {
    null_cuda_log(FILL, stream, address, 0, bytes);
    if (bytes <= COPIED) memset(address, value, bytes);
    return 0;
}
API cudaMemset(void *address, int value, size_t bytes) { return cudaMemsetAsync(address, value, bytes, 0); }
API cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
    int device = 0;
    enum memory memory = null_cuda_memory(address, &device);
    memset(attributes, 0, sizeof *attributes);
    attributes->device = device;
    if (memory == UNKNOWN) return 0;  // cudaMemoryTypeUnregistered is 0
    attributes->type = memory == DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    attributes->devicePointer = (void *)address;
    if (memory == PINNED) attributes->hostPointer = (void *)address;
    return 0;
}
API cudaGetSymbolAddress(void **address, const void *symbol) {
    static char constants[1 << 16];
    *address = constants;
    return 0;
}

// Devices: of the generation of H100, of as much memory as NULL_CUDA_MIB says -----------------------------------------

static int devices(void) { return (int)number("NULL_CUDA_DEVICES", 1); }

API cudaGetDeviceCount(int *count) { *count = devices(); return 0; }
API cudaGetDevice(int *device) { *device = current_device; return 0; }
API cudaSetDevice(int device) {
    if (device < 0 || device >= devices()) return failed(cudaErrorInvalidDevice);
    current_device = device;
    return 0;
}

int null_cuda_attribute(int attribute) {
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 48 << 10;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 227 << 10;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 228 << 10;
    case cudaDevAttrTotalConstantMemory:
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrWarpSize:
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrClockRate: return 1980000;         // kHz
    case cudaDevAttrMemoryClockRate: return 2619000;   // kHz
    case cudaDevAttrGlobalMemoryBusWidth: return 5120; // bits
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrL2CacheSize: return 50 << 20;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrAsyncEngineCount: return 3;
    case cudaDevAttrComputeCapabilityMajor: return number("NULL_CUDA_CAPABILITY", 90) / 10;
    case cudaDevAttrComputeCapabilityMinor: return number("NULL_CUDA_CAPABILITY", 90) % 10;
    case cudaDevAttrIntegrated:
    case cudaDevAttrComputeMode: return 0;
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrCooperativeLaunch:
    case 102:  // CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    case 103:  // CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
    case cudaDevAttrMemoryPoolsSupported: return 1;
    default: return 0;
    }
}
API cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    *value = null_cuda_attribute(attribute);
    return 0;
}
API cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    if (device < 0 || device >= devices()) return failed(cudaErrorInvalidDevice);
    const char *name = getenv("NULL_CUDA_NAME");
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "%s", name ? name : "NVIDIA H200");
    properties->major = null_cuda_attribute(cudaDevAttrComputeCapabilityMajor);
    properties->minor = null_cuda_attribute(cudaDevAttrComputeCapabilityMinor);
    properties->totalGlobalMem = null_cuda_total();
    properties->multiProcessorCount = null_cuda_attribute(cudaDevAttrMultiProcessorCount);
    properties->sharedMemPerBlock = null_cuda_attribute(cudaDevAttrMaxSharedMemoryPerBlock);
    properties->sharedMemPerBlockOptin = null_cuda_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    properties->sharedMemPerMultiprocessor = null_cuda_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    properties->regsPerBlock = null_cuda_attribute(cudaDevAttrMaxRegistersPerBlock);
    properties->regsPerMultiprocessor = null_cuda_attribute(cudaDevAttrMaxRegistersPerMultiprocessor);
    properties->warpSize = null_cuda_attribute(cudaDevAttrWarpSize);
    properties->maxThreadsPerBlock = null_cuda_attribute(cudaDevAttrMaxThreadsPerBlock);
    properties->maxThreadsPerMultiProcessor = null_cuda_attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
    properties->maxBlocksPerMultiProcessor = null_cuda_attribute(cudaDevAttrMaxBlocksPerMultiprocessor);
    for (int i = 0; i < 3; i++) {
        properties->maxThreadsDim[i] = null_cuda_attribute(cudaDevAttrMaxBlockDimX + i);
        properties->maxGridSize[i] = null_cuda_attribute(cudaDevAttrMaxGridDimX + i);
    }
    properties->l2CacheSize = null_cuda_attribute(cudaDevAttrL2CacheSize);
    properties->totalConstMem = null_cuda_attribute(cudaDevAttrTotalConstantMemory);
    properties->memoryBusWidth = null_cuda_attribute(cudaDevAttrGlobalMemoryBusWidth);
    properties->memPitch = 2147483647;
    properties->textureAlignment = 512;
    properties->concurrentKernels = properties->unifiedAddressing = properties->managedMemory = 1;
    properties->canMapHostMemory = properties->cooperativeLaunch = 1;
    properties->asyncEngineCount = null_cuda_attribute(cudaDevAttrAsyncEngineCount);
    properties->pciBusID = properties->uuid.bytes[0] = device + 1;
    return 0;
}
API cudaDeviceGetPCIBusId(char *text, int size, int device) {
    snprintf(text, size, "0000:%02x:00.0", device + 1);
    return 0;
}
API cudaDeviceCanAccessPeer(int *can, int device, int other) { *can = 1; return 0; }
API cudaDeviceEnablePeerAccess(int device, unsigned flags) { return 0; }
API cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return 0; }
API cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return 0; }
API cudaDeviceSynchronize(void) { null_cuda_log(SYNC_DEVICE, 0, 0, 0, 0); return 0; }
API cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return 0;
}
static const char *error_text(cudaError_t error) {
    return error == 0 ? "no error" : error == cudaErrorMemoryAllocation ? "out of memory" : "unsupported by the null CUDA";
}
const char *CUDARTAPI cudaGetErrorName(cudaError_t error) { return error_text(error); }
const char *CUDARTAPI cudaGetErrorString(cudaError_t error) { return error_text(error); }
API cudaPeekAtLastError(void) { return last_error; }
API cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = 0;
    return error;
}

// Streams and events --------------------------------------------------------------------------------------------------

struct stream { int priority; };

API cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    struct stream *made = malloc(sizeof *made);
    made->priority = priority;
    *stream = (cudaStream_t)made;
    return 0;
}
API cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
API cudaStreamDestroy(cudaStream_t stream) { return 0; }  // its address is never used again, so the log is unambiguous
API cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    int is_default = (uintptr_t)stream <= 2;
    *priority = is_default ? 0 : ((struct stream *)stream)->priority;
    return 0;
}
API cudaStreamSynchronize(cudaStream_t stream) { null_cuda_log(SYNC_STREAM, stream, 0, 0, 0); return 0; }
API cudaStreamQuery(cudaStream_t stream) { return 0; }
API cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    null_cuda_log(WAIT, stream, event, 0, 0);
    return 0;
}
API cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned flags) {
    function(stream, 0, data);
    return 0;
}
API cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) { function(data); return 0; }
API cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return 0;
}
API cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                             cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                             size_t *count) {
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    if (count) *count = 0;
    return 0;
}
API cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return 0; }
API cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    unsigned *made = malloc(sizeof *made);
    *made = flags;
    *event = (cudaEvent_t)made;
    return 0;
}
API cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
API cudaEventDestroy(cudaEvent_t event) { free(event); return 0; }
API cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { null_cuda_log(RECORD, stream, event, 0, 0); return 0; }
API cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}
API cudaEventSynchronize(cudaEvent_t event) { null_cuda_log(SYNC_EVENT, 0, event, 0, 0); return 0; }
// A busy device is never done, so that memory that record_stream keeps is not given out again. Times can be taken.
API cudaEventQuery(cudaEvent_t event) {
    int takes_times = !(*(unsigned *)event & cudaEventDisableTiming);
    return getenv("NULL_CUDA_IS_BUSY") && !takes_times ? cudaErrorNotReady : 0;
}
API cudaEventElapsedTime(float *ms, cudaEvent_t first, cudaEvent_t last) { *ms = 0.05f; return 0; }

// Kernels -------------------------------------------------------------------------------------------------------------

// The names of torch's kernels by the addresses of their host functions, in a hash table.
#define SLOTS (1u << 17)
static struct { const void *function; const char *name; } kernels[SLOTS];

static unsigned slot(const void *function) {
    unsigned at = (unsigned)((uintptr_t)function >> 4) * 2654435761u % SLOTS;
    while (kernels[at].function && kernels[at].function != function) at = (at + 1) % SLOTS;
    return at;
}
static API launched(const void *function, cudaStream_t stream) {
    const char *name = kernels[slot(function)].name;
    null_cuda_log(LAUNCH, stream, function, name ? name : "?", 0);
    return 0;
}
void CUDARTAPI __cudaRegisterFunction(void **binary, const char *function, char *device_function, const char *name,
                                      int limit, void *a, void *b, void *c, void *d, int *e) {
    unsigned at = slot(function);
    kernels[at].function = function;
    kernels[at].name = name;
}
void **CUDARTAPI __cudaRegisterFatBinary(void *binary) { return malloc(sizeof(void *)); }
void CUDARTAPI __cudaRegisterFatBinaryEnd(void **binary) {}
void CUDARTAPI __cudaUnregisterFatBinary(void **binary) {}
char CUDARTAPI __cudaInitModule(void **binary) { return 1; }
void CUDARTAPI __cudaRegisterVar(void **binary, char *variable, char *address, const char *name, int e, size_t bytes,
                                 int c, int g) {}

// <<<grid, block, shared, stream>>> pushes what it is called with, and the host function pops it.
static __thread struct { dim3 grid, block; size_t shared; cudaStream_t stream; } calls[16];
static __thread int n_calls;
unsigned CUDARTAPI __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    calls[n_calls].grid = grid;
    calls[n_calls].block = block;
    calls[n_calls].shared = shared;
    calls[n_calls++].stream = stream;
    return 0;
}
API __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    n_calls--;
    *grid = calls[n_calls].grid;
    *block = calls[n_calls].block;
    *shared = calls[n_calls].shared;
    *(cudaStream_t *)stream = calls[n_calls].stream;
    return 0;
}
API __cudaGetKernel(cudaKernel_t *kernel, const void *function) { *kernel = (cudaKernel_t)function; return 0; }
API __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    return launched(kernel, stream);
}
API cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    return launched(kernel, stream);
}
API cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                cudaStream_t stream) {
    return launched(kernel, stream);
}
API cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *kernel, void **arguments) {
    return launched(kernel, how->stream);
}
API cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->binaryVersion = attributes->ptxVersion = 90;
    attributes->maxDynamicSharedSizeBytes = 227 << 10;
    return 0;
}
API cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value) { return 0; }
API cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int threads, size_t shared,
                                                           unsigned flags) {
    *blocks = 2;
    return 0;
}
API cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, kernel, threads, shared, 0);
}

API cudaProfilerStart(void) { return 0; }
API cudaProfilerStop(void) { return 0; }

// The driver's functions are called through the runtime, by name.
API cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                     enum cudaDriverEntryPointQueryResult *result) {
    static void *driver;
    char second[256];
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    snprintf(second, sizeof second, "%s_v2", name);
    *function = dlsym(driver, second);
    if (!*function) *function = dlsym(driver, name);
    if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return *function ? 0 : failed(cudaErrorSymbolNotFound);
}
