/* Reductions in rank order, equal to NumPy's to the last bit. What is not here, NumPy does. */
#include "core.h"

/* Compiled for the vector units of newer processors as well; the loader picks. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) \
    && !defined(__SANITIZE_THREAD__)
#define FOR_VECTORS __attribute__((target_clones("avx2", "default"), optimize("O3")))
#else
#define FOR_VECTORS
#endif

/* No element depends on another one, also if the result takes the place of one of the rows. */
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define INDEPENDENT _Pragma("GCC ivdep")
#else
#define INDEPENDENT
#endif

#define EACH(count, ...)                          \
    INDEPENDENT                                   \
    for (Py_ssize_t i = 0; i < (count); i++) {    \
        __VA_ARGS__                               \
    }

/* Two to four rows at once, in rank order. */
#define KERNEL(name, type, combine)                                                                                   \
    static inline type name##_of(type a, type b) { return (type)(combine); }                                          \
    FOR_VECTORS static void name(char *result, char *const *rows, int num_rows, Py_ssize_t count)                     \
    {                                                                                                                 \
        type *out = (type *)(void *)result;                                                                           \
        const type *r0 = (const type *)(const void *)rows[0], *r1 = (const type *)(const void *)rows[1];              \
        const type *r2 = (const type *)(const void *)rows[num_rows > 2 ? 2 : 1];                                      \
        const type *r3 = (const type *)(const void *)rows[num_rows - 1];                                              \
        if (num_rows == 2)                                                                                            \
            EACH(count, out[i] = name##_of(r0[i], r1[i]);)                                                            \
        else if (num_rows == 3)                                                                                       \
            EACH(count, out[i] = name##_of(name##_of(r0[i], r1[i]), r2[i]);)                                          \
        else                                                                                                          \
            EACH(count, out[i] = name##_of(name##_of(name##_of(r0[i], r1[i]), r2[i]), r3[i]);)                        \
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
    found->element_bytes = itemsize;
    found->averages = strcmp(op, "avg") == 0;
    if (op[0] == 'b') { /* of bits: any integer is a row of bytes */
        found->combine = strcmp(op, "band") == 0 ? and_bytes : strcmp(op, "bor") == 0 ? or_bytes : xor_bytes;
        found->element_bytes = 1;
        return strchr("iub", kind) != NULL;
    }
    if (kind == 'c') { /* sums of complex numbers are those of their parts */
        kind = 'f', found->element_bytes = itemsize /= 2;
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

FOR_VECTORS static void divide(char *out, Py_ssize_t itemsize, Py_ssize_t count, int divisor)
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

void take_mean(const Reduction *reduction, char *total, Py_ssize_t num_bytes, int num_rows)
{
    if (reduction->averages)
        divide(total, reduction->element_bytes, num_bytes / reduction->element_bytes, num_rows);
}

void reduce_rows(const Reduction *reduction, char *out, char *const *rows, int num_rows, Py_ssize_t num_bytes)
{
    /* More rows are added a few at a time, to a block that is in the innermost cache. */
    enum { BLOCK = 8 << 10 };
    char overwritten[BLOCK]; /* what was in the place of the result, of a row that is still to come */
    char *some[ROWS_AT_ONCE];
    Py_ssize_t length, longest = num_rows > ROWS_AT_ONCE || reduction->averages ? BLOCK : num_bytes;
    for (Py_ssize_t begin = 0; begin < num_bytes; begin += length) {
        length = least(longest, num_bytes - begin);
        for (int row = ROWS_AT_ONCE; row < num_rows; row++) {
            if (rows[row] == out)
                memcpy(overwritten, out + begin, length);
        }
        for (int row = 0, count = 0; row < num_rows; row++) {
            some[count++] = row >= ROWS_AT_ONCE && rows[row] == out ? overwritten : rows[row] + begin;
            if (count == ROWS_AT_ONCE || row == num_rows - 1) {
                reduction->combine(out + begin, some, count, length / reduction->element_bytes);
                some[0] = out + begin, count = 1;
            }
        }
        take_mean(reduction, out + begin, length, num_rows);
    }
}
