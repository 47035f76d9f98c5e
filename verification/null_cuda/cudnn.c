// cuDNN: descriptors of its graphs, which are run without doing anything.
#include "null_cuda.h"
#include <cudnn_version.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define IS_A_DESCRIPTOR 15  // CUDNN_TYPE_BACKEND_DESCRIPTOR

size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion(void) { return 13000; }
int cudnnGetProperty(int type, int *value) {
    int parts[] = {CUDNN_MAJOR, CUDNN_MINOR, CUDNN_PATCHLEVEL};
    *value = parts[type];
    return 0;
}
int cudnnCreate(void **handle) { *handle = malloc(1); return 0; }
const char *cudnnGetErrorString(int error) { return "unsupported by the null CUDA"; }
void cudnnGetLastErrorString(char *text, size_t size) { if (size) *text = 0; }
int cudnnBackendCreateDescriptor(int type, void **made) { *made = calloc(1, 4096); return 0; }
int cudnnBackendDestroyDescriptor(void *descriptor) { free(descriptor); return 0; }
int cudnnBackendGetAttribute(void *descriptor, int attribute, int type, int64_t most, int64_t *count, void *values) {
    if (count) *count = 1;
    if (values && most > 0 && type != IS_A_DESCRIPTOR) memset(values, 0, 8);
    return 0;
}
int cudnnBackendExecute(void *handle, void *plan, void *arguments) {
    null_cuda_log(LAUNCH, 0, plan, "cudnnBackendExecute", 0);
    return 0;
}
