// cuBLASLt: descriptors. Its heuristic finds one algorithm for everything, and every product succeeds.
#include "null_cuda.h"
#include <cublasLt.h>
#include <stdlib.h>
#include <string.h>

static cublasStatus_t make(void **made) { *made = calloc(1, 1024); return 0; }
size_t CUBLASWINAPI cublasLtGetVersion(void) { return CUBLAS_VERSION; }
cublasStatus_t CUBLASWINAPI cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *made, cublasComputeType_t type,
                                                     cudaDataType_t scale) {
    return make((void **)made);
}
cublasStatus_t CUBLASWINAPI cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *made) { return make((void **)made); }
cublasStatus_t CUBLASWINAPI cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *made, cudaDataType dtype, uint64_t rows,
                                                       uint64_t columns, int64_t stride) {
    return make((void **)made);
}
cublasStatus_t CUBLASWINAPI cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t how, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
    cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference, int most,
    cublasLtMatmulHeuristicResult_t results[], int *found) {
    memset(results, 0, sizeof *results);
    *found = 1;
    return 0;
}
cublasStatus_t CUBLASWINAPI cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t how, const void *alpha,
                                           const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                                           cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                                           cublasLtMatrixLayout_t c_layout, void *d, cublasLtMatrixLayout_t d_layout,
                                           const cublasLtMatmulAlgo_t *algorithm, void *workspace, size_t bytes,
                                           cudaStream_t stream) {
    null_cuda_log(LAUNCH, stream, d, "cublasLtMatmul", 0);
    return 0;
}
