/* Reductions in rank order, equal to NumPy's to the last bit. What is not here, NumPy does. */
#include "core.h"

/* Compiled for the vector units of newer processors as well; the loader picks. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) \
    && !defined(__SANITIZE_THREAD__)
#define FOR_VECTORS __attribute__((target_clones("avx2", "default"), optimize("O3")))
#else
#define FOR_VECTORS
#endif

/* No element depends on another one, also if the result takes the place of one of the first two rows. */
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define INDEPENDENT _Pragma("GCC ivdep")
#else
#define INDEPENDENT
#endif

/* All of the first two rows, then row by row: the order of `reduce_in_rank_order`. */
#define KERNEL(name, type, combine)                                                                              \
    FOR_VECTORS static void name(char *result, char *const *rows, int num_rows, Py_ssize_t count)                \
    {                                                                                                            \
        type *out = (type *)(void *)result;                                                                      \
        const type *first = (const type *)(const void *)rows[0], *second = (const type *)(const void *)rows[1];  \
        INDEPENDENT                                                                                              \
        for (Py_ssize_t i = 0; i < count; i++) {                                                                 \
            type a = first[i], b = second[i];                                                                    \
            out[i] = (type)(combine);                                                                            \
        }                                                                                                        \
        for (int row = 2; row < num_rows; row++) {                                                               \
            const type *next = (const type *)(const void *)rows[row];                                            \
            INDEPENDENT                                                                                          \
            for (Py_ssize_t i = 0; i < count; i++) {                                                             \
                type a = out[i], b = next[i];                                                                    \
                out[i] = (type)(combine);                                                                        \
            }                                                                                                    \
        }                                                                                                        \
    }

/* Unsigned arithmetic wraps, as NumPy's does; products of short integers would be computed as signed ones. */
#define SUMS(bits)                                                \
    KERNEL(sum_u##bits, uint##bits##_t, a + b)                    \
    KERNEL(product_u##bits, uint##bits##_t, (uint64_t)a * b)
SUMS(8) SUMS(16) SUMS(32) SUMS(64)
#undef SUMS

#define ORDER(name, type)                \
    KERNEL(min_##name, type, a < b ? a : b) \
    KERNEL(max_##name, type, a > b ? a : b)
ORDER(i8, int8_t) ORDER(i16, int16_t) ORDER(i32, int32_t) ORDER(i64, int64_t)
ORDER(u8, uint8_t) ORDER(u16, uint16_t) ORDER(u32, uint32_t) ORDER(u64, uint64_t)
#undef ORDER

/* A NaN propagates, the first one if there are two. */
#define FLOATS(name, type)                             \
    KERNEL(sum_##name, type, a + b)                    \
    KERNEL(product_##name, type, a * b)                \
    KERNEL(min_##name, type, a <= b || a != a ? a : b) \
    KERNEL(max_##name, type, a >= b || a != a ? a : b)
FLOATS(f32, float) FLOATS(f64, double)
#undef FLOATS

KERNEL(and_bytes, uint8_t, a & b)
KERNEL(or_bytes, uint8_t, a | b)
KERNEL(xor_bytes, uint8_t, a ^ b)

typedef struct {
    const char *op;
    const char *kinds;
    Py_ssize_t itemsize; /* of the kernel's type */
    Kernel *combine;
} Entry;

#define OF_SIZES(op, kinds, name) \
    {op, kinds, 1, name##8}, {op, kinds, 2, name##16}, {op, kinds, 4, name##32}, {op, kinds, 8, name##64}

static const Entry ENTRIES[] = {
    OF_SIZES("sum", "iu", sum_u), OF_SIZES("product", "iu", product_u),
    OF_SIZES("min", "i", min_i), OF_SIZES("max", "i", max_i), OF_SIZES("min", "u", min_u), OF_SIZES("max", "u", max_u),
    {"sum", "f", 4, sum_f32}, {"sum", "f", 8, sum_f64}, {"avg", "f", 4, sum_f32}, {"avg", "f", 8, sum_f64},
    {"product", "f", 4, product_f32}, {"product", "f", 8, product_f64},
    {"min", "f", 4, min_f32}, {"min", "f", 8, min_f64}, {"max", "f", 4, max_f32}, {"max", "f", 8, max_f64},
    {"sum", "b", 1, or_bytes}, {"max", "b", 1, or_bytes}, {"product", "b", 1, and_bytes}, {"min", "b", 1, and_bytes},
};

bool find_reduction(const char *op, char kind, Py_ssize_t itemsize, Reduction *found)
{
    found->elements = 1;
    found->averages = strcmp(op, "avg") == 0;
    if (op[0] == 'b') { /* of bits: any integer is a row of bytes */
        found->combine = strcmp(op, "band") == 0 ? and_bytes : strcmp(op, "bor") == 0 ? or_bytes : xor_bytes;
        found->elements = itemsize;
        return strchr("iub", kind) != NULL;
    }
    if (kind == 'c') { /* sums of complex numbers are those of their parts */
        kind = 'f', itemsize /= 2, found->elements = 2;
        if (strcmp(op, "sum") != 0 && !found->averages)
            return false;
    }
    for (const Entry *entry = ENTRIES; entry < ENTRIES + sizeof ENTRIES / sizeof *ENTRIES; entry++) {
        if (entry->itemsize == itemsize && strchr(entry->kinds, kind) != NULL && strcmp(entry->op, op) == 0) {
            found->combine = entry->combine;
            return true;
        }
    }
    return false;
}

FOR_VECTORS void divide(char *out, Py_ssize_t itemsize, Py_ssize_t count, int divisor)
{
    if (itemsize == 4) {
        float *numbers = (float *)(void *)out;
        for (Py_ssize_t i = 0; i < count; i++)
            numbers[i] /= (float)divisor;
    } else {
        double *numbers = (double *)(void *)out;
        for (Py_ssize_t i = 0; i < count; i++)
            numbers[i] /= (double)divisor;
    }
}
