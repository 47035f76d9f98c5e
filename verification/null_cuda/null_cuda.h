// What the stubs of the runtime, the driver and NCCL share. The runtime's library has the state and the functions.
#pragma once
#include <stddef.h>

enum kind {
    LAUNCH,           // object: the kernel; name: its name
    COLLECTIVE,       // name: the function of NCCL; object, bytes: what it reads
    RECEIVE,          // name, object, bytes: what it writes
    RECORD,           // object: the event
    WAIT,             // a stream waits for an event (object)
    SYNC_STREAM,      // the host waits for a stream
    SYNC_EVENT,       // the host waits for an event (object)
    SYNC_DEVICE,      // the host waits for the device
    COPY_TO_HOST,     // from here on bytes is the size
    COPY_TO_DEVICE,
    COPY_ON_DEVICE,
    COPY_PAGEABLE,    // from or to host memory that is not pinned: the host waits
    FILL,
    COMMUNICATOR,     // name: how it was made; bytes: its ranks
};

struct operation {
    int kind;
    const void *stream, *object;
    const char *name;
    size_t bytes;
};

enum memory { UNKNOWN, DEVICE, PINNED };

// Add to the log, if it is open, and call the hook for what makes the host wait.
void null_cuda_log(enum kind kind, const void *stream, const void *object, const char *name, size_t bytes);

// Take memory of a device. Return 0 where there is not enough.
int null_cuda_take(int device, size_t bytes);
void null_cuda_give(int device, size_t bytes);
size_t null_cuda_total(void);
size_t null_cuda_used(int device);

// Addresses without memory behind them until someone writes to them.
void *null_cuda_addresses(size_t bytes);
void null_cuda_register(void *address, size_t bytes, int device, enum memory memory);
size_t null_cuda_unregister(void *address, int *device);
enum memory null_cuda_memory(const void *address, int *device);

int null_cuda_current_device(void);
int null_cuda_attribute(int attribute);
