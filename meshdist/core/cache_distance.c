/* How long a cache line takes from the processor of one rank to that of another: some tens of nanoseconds if they share a
   cache, else more than a hundred. The kernel, or the host of a virtual machine, moves the ranks while they run, and what
   is the fastest way to carry out a call with the one distance may take three times as long with the other. */
#include "core.h"

/* Chains of cache lines, each of which tells where the next one is, so that they are not read at the same time. They are
   in different pages, so that they are not read ahead. The shorter time counts: a rank may lose its core meanwhile. */
enum { NUM_CHAINS = 2, LINES = 4, APART = (4096 + 128) / sizeof(Word), NEIGHBOUR = 128 / sizeof(Word) };

static Word *words_at(PyObject *address)
{
    return (Word *)(uintptr_t)PyLong_AsUnsignedLongLong(address);
}

static PyObject *write_lines(PyObject *module, PyObject *address)
{
    Word *words = words_at(address);
    if (PyErr_Occurred())
        return NULL;
    for (int line = 0; line < NUM_CHAINS * LINES; line++)
        store(&words[line * APART], (uint64_t)(line + 3) % LINES);
    Py_RETURN_NONE;
}

static PyObject *time_lines(PyObject *module, PyObject *address)
{
    const Word *words = words_at(address);
    if (PyErr_Occurred())
        return NULL;
    /* A line of each page that nobody writes, so that the addresses of pages are known: where these are nested, as in a
       virtual machine, to look them up may take longer than the line. */
    for (int line = 0; line < NUM_CHAINS * LINES; line++)
        load(&words[line * APART + NEIGHBOUR]);
    int64_t shortest = INT64_MAX;
    for (int chain = 0; chain < NUM_CHAINS; chain++, words += LINES * APART) {
        uint64_t line = 0;
        int64_t begin = now_ns();
        for (int left = LINES; left > 0; left--)
            line = load(&words[line % LINES * APART]);
        int64_t took = now_ns() - begin; /* the clock waits for the loads before it */
        shortest = took < shortest ? took : shortest;
    }
    return PyLong_FromLongLong(shortest / LINES);
}

PyMethodDef distance_functions[] = {
    {"write_lines", write_lines, METH_O,
     "write_lines(address): write the lines that other ranks time, which take LINES_BYTES."},
    {"time_lines", time_lines, METH_O,
     "time_lines(address): return how many nanoseconds a line took that another rank has written."},
    {NULL, NULL, 0, NULL},
};

const int lines_bytes = NUM_CHAINS * LINES * APART * sizeof(Word);
