// NVRTC, with which torch compiles a few of its own kernels at their first use. They are launched by the driver's library.
#include <stddef.h>

typedef struct program *Program;

int nvrtcCreateProgram(Program *made, const char *source, const char *name, int count, const char *const *headers,
                       const char *const *names) {
    *made = (Program)"";
    return 0;
}
int nvrtcVersion(int *major, int *minor) { *major = 13; *minor = 0; return 0; }
int nvrtcGetCUBINSize(Program program, size_t *bytes) { *bytes = 1; return 0; }
int nvrtcGetPTXSize(Program program, size_t *bytes) { *bytes = 1; return 0; }
int nvrtcGetProgramLogSize(Program program, size_t *bytes) { *bytes = 1; return 0; }
int nvrtcGetLoweredName(Program program, const char *name, const char **lowered) { *lowered = name; return 0; }
