/* A CUDA runtime without a device, for host code that plans and launches kernels.
 *
 * Loaded before modules that are linked with libcudart, it takes the runtime's place. "Device" memory is the host's.
 * Launches compute nothing and are recorded: the kernel's name, its grid, its block. Asynchronous copies wait until
 * the stream is waited for (cudart_drain), as on a device that is behind: sources that were overwritten before are
 * counted, and the overwritten bytes are what is copied.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Error;
typedef void *Stream;
typedef struct { unsigned x, y, z; } Size;
typedef struct { Size grid, block; size_t shared; Stream stream; void *attributes; unsigned num_attributes; } Launch;

enum { MOST = 1 << 14, OUT_OF_ROOM = 2 };

static struct { const void *function; const char *name; } kernels[MOST];
static int num_kernels;

static struct { const void *function; Size grid, block; } launches[MOST];
static int num_launches;

static struct { void *to; const void *from; size_t size; void *seen; } copies[MOST];
static int num_copies;

/* What the tests call. */

int cudart_num_launches(void) { return num_launches; }

const char *cudart_launch(int i, unsigned *sizes) {
    Size g = launches[i].grid, b = launches[i].block;
    unsigned all[6] = {g.x, g.y, g.z, b.x, b.y, b.z};
    memcpy(sizes, all, sizeof all);
    for (int k = num_kernels - 1; k >= 0; k--)
        if (kernels[k].function == launches[i].function) return kernels[k].name;
    return "?";
}

int cudart_num_copies(void) { return num_copies; }

/* The first `count` copies take place. Returns how many have a source that changed since they were asked for. */
int cudart_drain(int count) {
    int changed = 0;
    for (int i = 0; i < count; i++) {
        changed += memcmp(copies[i].seen, copies[i].from, copies[i].size) != 0;
        memcpy(copies[i].to, copies[i].from, copies[i].size);
        free(copies[i].seen);
    }
    num_copies -= count;
    memmove(copies, copies + count, num_copies * sizeof copies[0]);
    return changed;
}

void cudart_forget_launches(void) { num_launches = 0; }

/* Where sources and targets are gone. */
void cudart_forget_copies(void) {
    while (num_copies) free(copies[--num_copies].seen);
}

/* The runtime. */

Error cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, Stream stream) {
    void *seen = malloc(size ? size : 1);
    if (num_copies == MOST || !seen) return OUT_OF_ROOM;
    memcpy(seen, from, size);
    copies[num_copies].to = to, copies[num_copies].from = from;
    copies[num_copies].size = size, copies[num_copies++].seen = seen;
    return 0;
}

Error cudaMemsetAsync(void *to, int value, size_t size, Stream stream) { memset(to, value, size); return 0; }
Error cudaStreamSynchronize(Stream stream) { cudart_drain(num_copies); return 0; }
Error cudaDeviceSynchronize(void) { cudart_drain(num_copies); return 0; }

Error cudaGetDevice(int *device) { *device = 0; return 0; }
Error cudaSetDevice(int device) { return 0; }

/* An H100, by the numbers of cudaDeviceAttr. */
Error cudaDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
        case 16: *value = 132; break;    /* multiprocessors */
        case 39: *value = 2048; break;   /* threads of a multiprocessor */
        case 75: *value = 9; break;      /* compute capability */
        case 76: *value = 0; break;
        case 81: *value = 233472; break; /* bytes of shared memory of a multiprocessor */
        case 97: *value = 232448; break; /* of a block, on request */
        case 8: *value = 49152; break;   /* of a block */
        default:
            fprintf(stderr, "runtime.c: no value for the device's attribute %d\n", attribute);
            return 1;
    }
    return 0;
}

Error cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *f, int threads, size_t shared) {
    *blocks = 2;
    return 0;
}
Error cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *f, int threads, size_t shared,
                                                             unsigned flags) {
    *blocks = 2;
    return 0;
}
Error cudaFuncSetAttribute(const void *function, int attribute, int value) { return 0; }

static Error launched(const void *function, Size grid, Size block) {
    if (num_launches == MOST) return OUT_OF_ROOM;
    launches[num_launches].function = function, launches[num_launches].grid = grid;
    launches[num_launches++].block = block;
    return 0;
}

Error cudaLaunchKernel(const void *f, Size grid, Size block, void **arguments, size_t shared, Stream stream) {
    return launched(f, grid, block);
}
Error __cudaLaunchKernel(const void *f, Size grid, Size block, void **arguments, size_t shared, Stream stream) {
    return launched(f, grid, block);
}
Error cudaLaunchKernelExC(const Launch *launch, const void *f, void **arguments) {
    return launched(f, launch->grid, launch->block);
}
Error cudaLaunchCooperativeKernel(const void *f, Size grid, Size block, void **arguments, size_t shared, Stream s) {
    return launched(f, grid, block);
}

/* Kernels for Hopper describe tensors to the driver, whose descriptions are not read here. */
static Error described(void) { return 0; }
Error cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
Error cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version, unsigned long long flags,
                                       int *status) {
    if (strcmp(symbol, "cuTensorMapEncodeTiled")) {
        fprintf(stderr, "runtime.c: no stand-in for the driver's %s\n", symbol);
        return 1;
    }
    *function = (void *)described, *status = 0;
    return 0;
}

Error cudaGetLastError(void) { return 0; }
Error cudaPeekAtLastError(void) { return 0; }
const char *cudaGetErrorString(Error error) { return "an error of the runtime without a device"; }
const char *cudaGetErrorName(Error error) { return "cudaErrorWithoutADevice"; }

/* What nvcc's host code calls when a module is loaded, and around a launch. */

static void *fat_binary;
static struct { Size grid, block; size_t shared; Stream stream; } configured;

void **__cudaRegisterFatBinary(void *binary) { return &fat_binary; }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterFunction(void **handle, const char *function, char *device_function, const char *name, int limit,
                            void *tid, void *bid, void *block, void *grid, int *size) {
    if (num_kernels == MOST) abort();
    kernels[num_kernels].function = function, kernels[num_kernels++].name = strdup(name);
}
void __cudaRegisterVar(void **handle, char *variable, char *address, const char *name, int is_external, size_t size,
                       int is_constant, int is_global) {}
Error __cudaGetKernel(void **kernel, const void *function) { *kernel = (void *)function; return 0; }
unsigned __cudaPushCallConfiguration(Size grid, Size block, size_t shared, Stream stream) {
    configured.grid = grid, configured.block = block, configured.shared = shared, configured.stream = stream;
    return 0;
}
Error __cudaPopCallConfiguration(Size *grid, Size *block, size_t *shared, void *stream) {
    *grid = configured.grid, *block = configured.block, *shared = configured.shared;
    *(Stream *)stream = configured.stream;
    return 0;
}
