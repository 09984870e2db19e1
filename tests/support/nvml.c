/* A libnvidia-ml.so.1 without a GPU: what it answers stands in the file NVML_STATE names, read anew at each call, so that
   a test changes it while the process runs. It lies as the driver does: a session that was begun before the driver went
   stays broken until it is begun anew (boot), v1 counts what the driver keeps for itself as used, a GPU with the
   machine's memory says NotSupported (or a total of 0), processes are left out, or told without their memory, the list
   grows between two calls, and a call hangs. Written by nvml.py; lines:
     driver ERROR            0, or what every call fails with (9 not loaded, 12 no library, 18 mismatch)
     boot N                  another number: the driver was loaded anew
     hang                    every call waits until this line is gone
     gpu INDEX UUID TOTAL USED RESERVED ERROR MEMORY PROCESSES NAME   bytes; ERROR of all its calls (15 lost);
                             MEMORY 0 (v2 and v1), 1 (v1 only), 3 (NotSupported), 2 (told as 0); PROCESSES 0, or the error
     proc INDEX PID BYTES compute|graphics                            BYTES -1: not told */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned long long u64;
typedef unsigned int u32;
typedef struct { u64 total, free, used; } memory_v1;
typedef struct { u32 version; u64 total, reserved, free, used; } memory_v2;
typedef struct { u32 pid; u64 used; u32 gpu_instance, compute_instance; } process;
typedef struct { int index, error, memory, processes; u64 total, used, reserved; char uuid[96], name[96]; } gpu;
enum { INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, SMALL = 7, NO_FUNCTION = 13, NOT_INITIALIZED = 1 };

static int sessions, begun_under;

static FILE *state(int *driver, int *boot, int *hang) {
    const char *path = getenv("NVML_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[512];
    *driver = file ? 0 : 9;
    *boot = *hang = 0;
    while (file && fgets(line, sizeof line, file)) {
        sscanf(line, "driver %d", driver);
        sscanf(line, "boot %d", boot);
        if (!strncmp(line, "hang", 4)) *hang = 1;
    }
    if (file) rewind(file);
    return file;
}

/* The state for a call, or an error. */
static int ask(FILE **file, int *boot) {
    int driver, hang;
    while ((*file = state(&driver, boot, &hang)) && hang) {
        fclose(*file);
        usleep(2000);
    }
    if (*file && driver) fclose(*file);
    return driver;
}

static int begun(FILE **file) {
    int boot, error;
    if (!sessions) return NOT_INITIALIZED;
    if ((error = ask(file, &boot))) return error;
    if (boot == begun_under) return 0;
    fclose(*file);
    return 999;
}

static int find(FILE *file, int index, const char *uuid, gpu *g) {
    char line[512];
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "gpu %d %95s %llu %llu %llu %d %d %d %95[^\n]", &g->index, g->uuid, &g->total, &g->used,
                   &g->reserved, &g->error, &g->memory, &g->processes, g->name) == 9 &&
            (uuid ? !strcmp(uuid, g->uuid) : index == g->index))
            return 0;
    return uuid ? NOT_FOUND : INVALID;
}

static int of(void *handle, gpu *g) {
    FILE *file;
    int error = begun(&file);
    if (error) return error;
    error = find(file, (int)(long)handle - 1, NULL, g);
    fclose(file);
    return error ? error : g->error;
}

int nvmlInitWithFlags(u32 flags) {
    FILE *file;
    int boot, error = ask(&file, &boot);
    (void)flags;
    if (error) return error;
    fclose(file);
    if (!sessions++) begun_under = boot;
    return 0;
}

int nvmlShutdown(void) { return sessions ? (sessions--, 0) : NOT_INITIALIZED; }

const char *nvmlErrorString(int error) { return error == 999 ? "Unknown Error" : "An error"; }

int nvmlDeviceGetCount_v2(u32 *count) {
    FILE *file;
    gpu g;
    int error = begun(&file);
    *count = 0;
    if (error) return error;
    while (!find(file, (int)*count, NULL, &g)) ++*count, rewind(file);
    fclose(file);
    return 0;
}

static int handle_of(int index, const char *uuid, void **handle) {
    FILE *file;
    gpu g;
    int error = begun(&file);
    if (error) return error;
    error = find(file, index, uuid, &g);
    fclose(file);
    if (!error) *handle = (void *)(long)(g.index + 1);
    return error ? error : g.error;
}

int nvmlDeviceGetHandleByIndex_v2(u32 index, void **handle) { return handle_of((int)index, NULL, handle); }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) { return handle_of(0, uuid, handle); }

int nvmlDeviceGetUUID(void *handle, char *text, u32 size) {
    gpu g;
    int error = of(handle, &g);
    if (!error) snprintf(text, size, "%s", g.uuid);
    return error;
}

int nvmlDeviceGetName(void *handle, char *text, u32 size) {
    gpu g;
    int error = of(handle, &g);
    if (!error) snprintf(text, size, "%s", g.name);
    return error;
}

int nvmlDeviceGetMemoryInfo(void *handle, memory_v1 *m) {
    gpu g;
    int error = of(handle, &g);
    if (error || g.memory == NOT_SUPPORTED) return error ? error : NOT_SUPPORTED;
    *m = g.memory == 2 ? (memory_v1){0} : (memory_v1){g.total, g.total - g.used - g.reserved, g.used + g.reserved};
    return 0;
}

int nvmlDeviceGetMemoryInfo_v2(void *handle, memory_v2 *m) {
    gpu g;
    int error = of(handle, &g);
    if (error || g.memory == NOT_SUPPORTED) return error ? error : NOT_SUPPORTED;
    if (g.memory == 1) return NO_FUNCTION;
    *m = g.memory == 2 ? (memory_v2){m->version}
                       : (memory_v2){m->version, g.total, g.reserved, g.total - g.used - g.reserved, g.used};
    return 0;
}

/* Nothing is written where there is no room for all. */
static int processes(void *handle, u32 *count, process *list, const char *wanted) {
    FILE *file;
    gpu g;
    char line[512], kind[16];
    int index, error = of(handle, &g);
    u32 pid, found = 0, room = *count;
    long long used;
    if (error || g.processes) return error ? error : g.processes;
    if ((error = begun(&file))) return error;
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "proc %d %u %lld %15s", &index, &pid, &used, kind) != 4) continue;
        if (index != g.index || strcmp(kind, wanted)) continue;
        if (found < room && list) list[found] = (process){pid, (u64)used, ~0u, ~0u};
        found++;
    }
    fclose(file);
    *count = found;
    return found > room ? SMALL : 0;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, u32 *count, process *list) {
    return processes(handle, count, list, "compute");
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, u32 *count, process *list) {
    return processes(handle, count, list, "graphics");
}
