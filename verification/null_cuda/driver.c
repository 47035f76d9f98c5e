// The CUDA driver of the same device: what torch, inductor and Triton call of it. Compiled kernels are launched by name.
#define _GNU_SOURCE
#include "null_cuda.h"
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define API CUresult CUDAAPI
extern int cudaGetDeviceCount(int *);

static char contexts[64];

API cuInit(unsigned flags) { return 0; }
API cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return 0; }
API cuDeviceGetCount(int *count) { return cudaGetDeviceCount(count); }
API cuDeviceGet(CUdevice *device, int index) { *device = index; return 0; }
API cuDeviceGetName(char *name, int size, CUdevice device) { snprintf(name, size, "NVIDIA H200"); return 0; }
API cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) { *bytes = null_cuda_total(); return 0; }
API cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    *value = null_cuda_attribute(attribute);
    return 0;
}
API cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) { memset(uuid, device + 1, sizeof *uuid); return 0; }
API cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = (CUcontext)&contexts[device];
    return 0;
}
API cuDevicePrimaryCtxRelease_v2(CUdevice device) { return 0; }
API cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    if (flags) *flags = 0;
    *active = device == null_cuda_current_device();
    return 0;
}
API cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)&contexts[null_cuda_current_device()]; return 0; }
API cuCtxSetCurrent(CUcontext context) { return 0; }
API cuCtxPushCurrent_v2(CUcontext context) { return 0; }
API cuCtxPopCurrent_v2(CUcontext *context) { return context ? cuCtxGetCurrent(context) : 0; }
API cuCtxGetDevice(CUdevice *device) { *device = null_cuda_current_device(); return 0; }
API cuCtxSynchronize(void) { null_cuda_log(SYNC_DEVICE, 0, 0, 0, 0); return 0; }
API cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
API cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 1 << 20; return 0; }
API cuCtxSetLimit(CUlimit limit, size_t value) { return 0; }
API cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "unsupported by the null CUDA";
    return 0;
}
API cuGetErrorName(CUresult error, const char **text) { return cuGetErrorString(error, text); }

// Virtual memory: the allocator's expandable segments -----------------------------------------------------------------

struct chunk { size_t bytes; int device; };

API cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr wish, unsigned long long flags) {
    *address = (CUdeviceptr)null_cuda_addresses(bytes);
    null_cuda_register((void *)*address, bytes, null_cuda_current_device(), DEVICE);
    return 0;
}
API cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    null_cuda_unregister((void *)address, 0);
    munmap((void *)address, bytes);
    return 0;
}
API cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *how,
                unsigned long long flags) {
    if (!null_cuda_take(how->location.id, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    struct chunk *chunk = malloc(sizeof *chunk);
    *chunk = (struct chunk){bytes, how->location.id};
    *handle = (CUmemGenericAllocationHandle)chunk;
    return 0;
}
API cuMemRelease(CUmemGenericAllocationHandle handle) {
    struct chunk *chunk = (struct chunk *)handle;
    null_cuda_give(chunk->device, chunk->bytes);
    free(chunk);
    return 0;
}
API cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
             unsigned long long flags) {
    return 0;
}
API cuMemUnmap(CUdeviceptr address, size_t bytes) { madvise((void *)address, bytes, MADV_DONTNEED); return 0; }
API cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count) { return 0; }
API cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address) { *flags = 3; return 0; }
API cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *how,
                                  CUmemAllocationGranularity_flags option) {
    *bytes = 2 << 20;
    return 0;
}
API cuMemsetD32Async(CUdeviceptr address, unsigned value, size_t count, CUstream stream) {
    null_cuda_log(FILL, stream, (void *)address, 0, 4 * count);
    return 0;
}
API cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    int device = 0;
    enum memory memory = null_cuda_memory((void *)address, &device);
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr *)value = address;
    else if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        *(int *)value = memory == DEVICE ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    else *(int *)value = attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL ? device : 0;
    return memory == UNKNOWN ? CUDA_ERROR_INVALID_VALUE : 0;
}
API cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) { return 0; }
API cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) { return 0; }

// Kernels that inductor and Triton compile ----------------------------------------------------------------------------

struct kernel { char name[256]; };

static API module(CUmodule *made) { *made = (CUmodule)malloc(1); return 0; }
API cuModuleLoad(CUmodule *made, const char *file) { return module(made); }
API cuModuleLoadData(CUmodule *made, const void *image) { return module(made); }
API cuModuleLoadDataEx(CUmodule *made, const void *image, unsigned count, CUjit_option *options, void **values) {
    return module(made);
}
API cuModuleUnload(CUmodule made) { free(made); return 0; }
API cuModuleGetFunction(CUfunction *function, CUmodule made, const char *name) {
    struct kernel *kernel = malloc(sizeof *kernel);  // as long as the process, for the log
    snprintf(kernel->name, sizeof kernel->name, "%s", name);
    *function = (CUfunction)kernel;
    return 0;
}
API cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64
             : attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return 0;
}
API cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return 0; }
API cuFuncSetCacheConfig(CUfunction function, CUfunc_cache cache) { return 0; }

static API launched(CUfunction function, CUstream stream) {
    null_cuda_log(LAUNCH, stream, function, ((struct kernel *)function)->name, 0);
    return 0;
}
API cuLaunchKernel(CUfunction function, unsigned a, unsigned b, unsigned c, unsigned x, unsigned y, unsigned z,
                   unsigned shared, CUstream stream, void **arguments, void **extra) {
    return launched(function, stream);
}
API cuLaunchKernelEx(const CUlaunchConfig *how, CUfunction function, void **arguments, void **extra) {
    return launched(function, how->hStream);
}
API cuLaunchCooperativeKernel(CUfunction function, unsigned a, unsigned b, unsigned c, unsigned x, unsigned y,
                              unsigned z, unsigned shared, CUstream stream, void **arguments) {
    return launched(function, stream);
}
API cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t shared) {
    *blocks = 2;
    return 0;
}
API cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *how) {
    *clusters = 66;
    return 0;
}
API cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType dtype, cuuint32_t rank, void *address,
                           const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                           const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                           CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    return 0;
}
