// cuBLAS: handles. Every product succeeds.
#include "null_cuda.h"
#include <cublas_v2.h>
#include <stdlib.h>

cublasStatus_t CUBLASWINAPI cublasCreate_v2(cublasHandle_t *handle) { *handle = malloc(1); return 0; }
cublasStatus_t CUBLASWINAPI cublasGetMathMode(cublasHandle_t handle, cublasMath_t *mode) { *mode = 0; return 0; }
cublasStatus_t CUBLASWINAPI cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t *mode) {
    *mode = 0;
    return 0;
}
static __thread cudaStream_t stream;
cublasStatus_t CUBLASWINAPI cublasSetStream_v2(cublasHandle_t handle, cudaStream_t of) { stream = of; return 0; }
cublasStatus_t CUBLASWINAPI cublasGemmEx(cublasHandle_t handle, cublasOperation_t transposes_a,
                                         cublasOperation_t transposes_b, int m, int n, int k, const void *alpha,
                                         const void *a, cudaDataType a_type, int a_stride, const void *b,
                                         cudaDataType b_type, int b_stride, const void *beta, void *c,
                                         cudaDataType c_type, int c_stride, cublasComputeType_t type,
                                         cublasGemmAlgo_t algorithm) {
    null_cuda_log(LAUNCH, stream, c, "cublasGemmEx", 0);
    return 0;
}
