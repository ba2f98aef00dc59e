/* What compiled kernels need of a runtime: memory for their arrays, and the processor they run on.

   numba's arrays count their owners in a header in front of the numbers; numba's own runtime makes it from Python. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#if defined(_WIN32)
#define EXPORTED __declspec(dllexport)
#define HIDDEN
#else
#define EXPORTED __attribute__((visibility("default")))
#define HIDDEN __attribute__((visibility("hidden")))
#endif

typedef struct {
    size_t owners;
    void (*destroy)(void *numbers, size_t size, void *info);
    void *info;
    void *numbers;
    size_t size;
    void *allocator;
} Array;

EXPORTED const uint64_t topk_edition = TOPK_EDITION;
EXPORTED const char *const topk_levels = TOPK_LEVELS;

HIDDEN void topk_failed(const char *what)
{
    fprintf(stderr, "topk_registry: %s\n", what);
    abort(); /* no thread of a kernel can raise an exception, and a wrong result must not go on */
}

HIDDEN void *NRT_MemInfo_alloc_aligned(size_t size, uint32_t align)
{
    char *memory = malloc(sizeof(Array) + size + align);
    Array *array = (Array *)memory;
    if (memory == NULL)
        topk_failed("a kernel is out of memory");
    array->owners = 1;
    array->destroy = NULL;
    array->info = NULL;
    array->numbers = (void *)(((uintptr_t)(memory + sizeof(Array)) + align - 1) / align * align);
    array->size = size;
    array->allocator = NULL;
    return array;
}

HIDDEN void *NRT_MemInfo_alloc_safe_aligned(size_t size, uint32_t align)
{
    return NRT_MemInfo_alloc_aligned(size, align);
}

HIDDEN void NRT_MemInfo_call_dtor(Array *array)
{
    if (array->destroy != NULL)
        array->destroy(array->numbers, array->size, array->info);
    free(array);
}

/* Whether the processor has what a level of TOPK_LEVELS needs; the levels are in the order of their names there. */
EXPORTED int topk_suits(int level)
{
#if defined(__x86_64__) || defined(_M_X64)
    int third, fourth;
    __builtin_cpu_init();
    third = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
            __builtin_cpu_supports("bmi2");
    fourth = third && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
    return TOPK_NUMBERS[level] == 4 ? fourth : TOPK_NUMBERS[level] == 3 ? third : 1;
#else
    (void)level;
    return 1;
#endif
}
