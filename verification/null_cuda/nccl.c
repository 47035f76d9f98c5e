// NCCL whose collectives send nothing. Each is logged with what it reads and writes, and so is each communicator.
#include "null_cuda.h"
#include <nccl.h>
#include <stdlib.h>
#include <string.h>

struct communicator { int ranks, rank; };

static ncclResult_t make(ncclComm_t *made, int ranks, int rank, const char *how) {
    struct communicator *communicator = calloc(1, 4096);
    *communicator = (struct communicator){ranks, rank};
    *made = (ncclComm_t)communicator;
    null_cuda_log(COMMUNICATOR, 0, communicator, how, ranks);
    return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t *made, int ranks, ncclUniqueId id, int rank) {
    return make(made, ranks, rank, "ncclCommInitRank");
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t *made, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
    return make(made, ranks, rank, "ncclCommInitRankConfig");
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t *made, int ranks, int rank, int count, ncclUniqueId *ids,
                                      ncclConfig_t *config) {
    return make(made, ranks, rank, "ncclCommInitRankScalable");
}
ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t *made, ncclConfig_t *config) {
    return make(made, ((struct communicator *)parent)->ranks, key, "ncclCommSplit");
}
ncclResult_t ncclCommCount(const ncclComm_t of, int *ranks) { *ranks = ((struct communicator *)of)->ranks; return 0; }
ncclResult_t ncclCommUserRank(const ncclComm_t of, int *rank) { *rank = ((struct communicator *)of)->rank; return 0; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t of, ncclResult_t *error) { *error = ncclSuccess; return ncclSuccess; }
ncclResult_t ncclGetVersion(int *version) { *version = NCCL_VERSION_CODE; return ncclSuccess; }
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) { memset(id, 7, sizeof *id); return ncclSuccess; }
const char *ncclGetErrorString(ncclResult_t error) { return "unsupported by the null CUDA"; }
const char *ncclGetLastError(ncclComm_t of) { return ""; }

static size_t bytes_of(ncclDataType_t dtype) {
    switch (dtype) {
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64: return 8;
    default: return 1;
    }
}
static size_t ranks_of(ncclComm_t of) { return ((struct communicator *)of)->ranks; }
static ncclResult_t log_both(const char *name, const void *from, size_t read, void *to, size_t written, cudaStream_t stream) {
    null_cuda_log(COLLECTIVE, stream, from, name, read);
    null_cuda_log(RECEIVE, stream, to, name, written);
    return ncclSuccess;
}
ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t of,
                           cudaStream_t stream) {
    return log_both("ncclAllReduce", from, count * bytes_of(dtype), to, count * bytes_of(dtype), stream);
}
ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t dtype, ncclRedOp_t op, int root,
                        ncclComm_t of, cudaStream_t stream) {
    return log_both("ncclReduce", from, count * bytes_of(dtype), to, count * bytes_of(dtype), stream);
}
ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t dtype, int root, ncclComm_t of,
                           cudaStream_t stream) {
    return log_both("ncclBroadcast", from, count * bytes_of(dtype), to, count * bytes_of(dtype), stream);
}
ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t dtype, int root, ncclComm_t of, cudaStream_t stream) {
    return log_both("ncclBroadcast", buffer, count * bytes_of(dtype), buffer, count * bytes_of(dtype), stream);
}
ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t dtype, ncclComm_t of,
                           cudaStream_t stream) {
    size_t bytes = count * bytes_of(dtype);
    return log_both("ncclAllGather", from, bytes, to, bytes * ranks_of(of), stream);
}
ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                               ncclComm_t of, cudaStream_t stream) {
    size_t bytes = count * bytes_of(dtype);
    return log_both("ncclReduceScatter", from, bytes * ranks_of(of), to, bytes, stream);
}
ncclResult_t ncclAlltoAll(const void *from, void *to, size_t count, ncclDataType_t dtype, ncclComm_t of,
                          cudaStream_t stream) {
    size_t bytes = count * bytes_of(dtype) * ranks_of(of);
    return log_both("ncclAlltoAll", from, bytes, to, bytes, stream);
}
ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t dtype, int peer, ncclComm_t of, cudaStream_t stream) {
    return log_both("ncclSend", from, count * bytes_of(dtype), (void *)from, 0, stream);
}
ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t dtype, int peer, ncclComm_t of, cudaStream_t stream) {
    return log_both("ncclRecv", to, 0, to, count * bytes_of(dtype), stream);
}
