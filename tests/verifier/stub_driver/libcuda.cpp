// A libcuda.so.1 without a device, for NVIDIA's real Python packages to talk to: it says yes, and keeps the last launch.
// Functions that are not here answer "not supported".
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NOT_SUPPORTED = 801, INVALID_VALUE = 1, NOT_FOUND = 500 };
struct Attribute { int id; char pad[4]; unsigned x, y, z; char rest[52]; };
struct Config { unsigned grid[3], block[3], shared; void* stream; Attribute* attributes; unsigned num_attributes; };
struct Told { unsigned grid[3], block[3], cluster[3], shared, num_launches; uint64_t stream, function; int shared_limit, loaded; unsigned char block_bytes[64]; };

extern "C" {
Told stub_told;
int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuDeviceGetCount(int* count) { *count = 1; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuCtxGetDevice(int* device) { *device = 0; return 0; }
int cuCtxGetCurrent(void** context) { *context = (void*)0x100; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) { *value = attribute == 16 ? 132 : attribute == 75 ? 9 : 0; return 0; }
int cuLibraryLoadData(void** library, const void* code, void*, void*, unsigned, void*, void*, unsigned) {
  if (memcmp(code, "cubin", 5)) return INVALID_VALUE;
  *library = (void*)0x200;
  return 0;
}
int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  if (library != (void*)0x200 || strcmp(name, "kernel")) return NOT_FOUND;
  *kernel = (void*)0x300;
  return 0;
}
int cuLibraryUnload(void*) { return 0; }
int cuKernelGetFunction(void** function, void* kernel) { stub_told.loaded += kernel == (void*)0x300; *function = (void*)0x400; return 0; }
int cuKernelGetAttribute(int* value, int attribute, void*, int) { *value = 1000 + attribute; return 0; }
int cuKernelSetAttribute(int attribute, int value, void* kernel, int) {
  if (attribute != 8 || kernel != (void*)0x300) return INVALID_VALUE;
  stub_told.shared_limit = value;
  return 0;
}
int cuMemAlloc_v2(uint64_t* address, size_t bytes) { *address = (uint64_t)aligned_alloc(256, (bytes + 255) / 256 * 256); return 0; }
int cuMemFree_v2(uint64_t address) { free((void*)address); return 0; }
int cuMemsetD8_v2(uint64_t address, unsigned char value, size_t bytes) { memset((void*)address, value, bytes); return 0; }
int cuLaunchKernelEx(const Config* c, void* function, void** parameters, void**) {
  Told& t = stub_told;
  if (c->shared > 48 * 1024 && c->shared > (unsigned)t.shared_limit) return INVALID_VALUE;
  memcpy(t.grid, c->grid, sizeof t.grid);
  memcpy(t.block, c->block, sizeof t.block);
  for (unsigned& n : t.cluster) n = 1;
  for (unsigned i = 0; i < c->num_attributes; ++i)
    if (c->attributes[i].id == 4) t.cluster[0] = c->attributes[i].x, t.cluster[1] = c->attributes[i].y, t.cluster[2] = c->attributes[i].z;
  t.shared = c->shared;
  t.stream = (uint64_t)c->stream;
  t.function = (uint64_t)function;
  memcpy(t.block_bytes, parameters[0], sizeof t.block_bytes);
  ++t.num_launches;
  return 0;
}
int cuGetErrorString(int, const char** text) { *text = "the stub refuses"; return 0; }
int cuGetErrorName(int, const char** text) { *text = "STUB_REFUSES"; return 0; }
static int not_supported() { return NOT_SUPPORTED; }
int cuGetProcAddress_v2(const char* name, void** found, int, uint64_t, int* status) {
  static void* self = nullptr;
  Dl_info where;
  if (!self && dladdr((void*)cuInit, &where)) self = dlopen(where.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  char newer[256];
  snprintf(newer, sizeof newer, "%s_v2", name);
  *found = dlsym(self, newer);
  if (!*found) *found = dlsym(self, name);
  if (!*found) *found = (void*)not_supported;
  if (status) *status = 0;
  return 0;
}
}
