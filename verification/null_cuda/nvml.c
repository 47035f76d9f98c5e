// NVML of the same device, which torch 2.13 asks whether memory can be shared with other nodes: it cannot.
#define NVML_ERROR_NOT_SUPPORTED 3

int nvmlDeviceGetGpuFabricInfoV(void *device, void *fabric) { return NVML_ERROR_NOT_SUPPORTED; }
