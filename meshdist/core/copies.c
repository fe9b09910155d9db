/* The ways to copy bytes: into shared memory that another rank reads next, into the arrays of calls that the caches cannot
   hold, and between addresses for which the C library is slow (see page_aliasing.c).

   Into shared memory: if the processors of the two share a cache, an ordinary copy is best: the reader finds the bytes in
   that cache. If not, every line has to come back from the reader's cache before it is written, and then has to be fetched
   from the writer's. Stores that go around the caches then took a sixth of the time (AMD EPYC, 64 KiB to 1 MiB), but three
   times as long where there is a common cache. The kernel, or the host of a virtual machine, moves the ranks between
   processors while they run. So every now and then a copy is made one half in each way, and both are timed.

   Into arrays: an ordinary store fetches the line first. Where both arrays of two ranks were more than the common cache,
   stores that go around it took two thirds of the time, and half of it at four times as much; reading the copy afterwards
   included, no longer than ordinary ones. Where the cache held them, twice as long. */
#include "core.h"

#ifdef __SSE2__
#include <emmintrin.h>
#include <x86intrin.h>

/* Shorter copies are not streamed; and not timed. */
enum { SHORTEST = 2 << 10, SHORTEST_TIMED = 8 << 10, LINE = 64 };
/* How often the two are compared, and over how many bytes of a copy each. */
enum { PERIOD = 7, TIMED = 4 << 10 };
/* With a common cache, an ordinary copy of so much took half of the time of one that streams; without one, four times as
   long. So many comparisons in a row decide. */
enum { VOTES = 3 };

/* Copy a number of lines, with a store that the compiler knows. */
#define COPY_LINES(store, to, from, size)                                                                              \
    for (Py_ssize_t line = 0; line < (size); line += LINE) {                                                           \
        const __m128i *source = (const __m128i *)((from) + line);                                                      \
        __m128i *target = (__m128i *)((to) + line);                                                                    \
        __m128i one = _mm_loadu_si128(source), two = _mm_loadu_si128(source + 1);                                      \
        __m128i three = _mm_loadu_si128(source + 2), four = _mm_loadu_si128(source + 3);                               \
        store(target, one), store(target + 1, two), store(target + 2, three), store(target + 3, four);                 \
    }

void copy_aliased(char *to, const char *from, Py_ssize_t size)
{
    Py_ssize_t lines = size & -(Py_ssize_t)LINE;
    COPY_LINES(_mm_storeu_si128, to, from, lines)
    memcpy(to + lines, from + lines, size - lines);
}

/* `to` is the begin of a line, `size` a number of lines. */
static void stream_lines(char *to, const char *from, Py_ssize_t size)
{
    COPY_LINES(_mm_stream_si128, to, from, size)
    _mm_sfence(); /* a release does not wait for these stores */
}

static void stream_bytes(char *to, const char *from, Py_ssize_t size)
{
    Py_ssize_t before = -(uintptr_t)to & (LINE - 1), lines = (size - before) & -(Py_ssize_t)LINE;
    copy_bytes(to, from, before);
    stream_lines(to + before, from + before, lines);
    copy_bytes(to + before + lines, from + before + lines, size - before - lines);
}

/* The time when all stores so far have been carried out. */
static uint64_t time_of_stores(void)
{
    _mm_mfence();
    return __rdtsc();
}

/* Copy the first part in both ways, in turns; return how much that was. */
static Py_ssize_t compare(Pace *pace, char *to, const char *from)
{
    uint64_t begin = time_of_stores();
    stream_bytes(to, from, TIMED);
    uint64_t middle = time_of_stores();
    copy_bytes(to + TIMED, from + TIMED, TIMED);
    uint64_t end = time_of_stores();
    bool is_better = 2 * (end - middle) > 3 * (middle - begin);
    if (is_better && pace->votes < VOTES)
        pace->votes++;
    else if (!is_better && pace->votes > -VOTES)
        pace->votes--;
    if (pace->votes == VOTES || pace->votes == -VOTES)
        pace->streams = pace->votes > 0;
    return 2 * TIMED;
}

void copy_out(Pace *pace, char *to, const char *from, Py_ssize_t size)
{
    if (size < SHORTEST) {
        copy_bytes(to, from, size);
        return;
    }
    bool is_timed = size >= SHORTEST_TIMED && ++pace->copies % PERIOD == 0;
    Py_ssize_t done = is_timed ? compare(pace, to, from) : 0;
    if (pace->streams && size - done >= SHORTEST)
        stream_bytes(to + done, from + done, size - done);
    else
        copy_bytes(to + done, from + done, size - done);
}

void copy_in(bool streams, char *to, const char *from, Py_ssize_t size)
{
    bool overlaps = to < from + size && from < to + size;
    if (overlaps)
        memmove(to, from, size);
    else if (streams && size >= SHORTEST)
        stream_bytes(to, from, size);
    else
        copy_bytes(to, from, size);
}

#else

void copy_aliased(char *to, const char *from, Py_ssize_t size) { memcpy(to, from, size); }
void copy_out(Pace *pace, char *to, const char *from, Py_ssize_t size) { copy_bytes(to, from, size); }
void copy_in(bool streams, char *to, const char *from, Py_ssize_t size) { memmove(to, from, size); }

#endif

/* The bytes of a contiguous array; -1 if it is none. */
static Py_ssize_t bytes_of(PyObject *object, int flags)
{
    if (!is_array(object) || (((Array *)object)->flags & flags) != flags)
        return -1;
    PyObject *num_bytes = PyObject_GetAttrString(object, "nbytes");
    Py_ssize_t size = num_bytes == NULL ? -1 : PyLong_AsSsize_t(num_bytes);
    Py_XDECREF(num_bytes);
    return size;
}

Py_ssize_t read_copy(const char *function, PyObject *const *args, Py_ssize_t num_args, char **to, char **from)
{
    Py_ssize_t room = num_args == 2 ? bytes_of(args[0], C_CONTIGUOUS | WRITEABLE) : -1;
    Py_ssize_t size = room < 0 ? -1 : bytes_of(args[1], C_CONTIGUOUS);
    if (size < 0 || size != room) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_TypeError, "%s: two contiguous arrays of equal size", function);
        return -1;
    }
    *to = ((Array *)args[0])->data, *from = ((Array *)args[1])->data;
    return size;
}

static PyObject *stream_method(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    char *to, *from;
    Py_ssize_t size = read_copy("copy_around_caches(to, from)", args, num_args, &to, &from);
    if (size < 0)
        return NULL;
    PyThreadState *thread = without_gil(size > LONG);
    copy_in(true, to, from, size);
    with_gil(thread);
    Py_RETURN_NONE;
}

PyMethodDef copy_functions[] = {
    {"copy_around_caches", (PyCFunction)(void (*)(void))stream_method, METH_FASTCALL,
     "copy_around_caches(to, from): copy an array into another one, without leaving it in the caches."},
    {NULL, NULL, 0, NULL},
};
