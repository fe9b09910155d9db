/* Ranks that share processors are spread over them evenly.

   The kernel may leave three of four ranks on one of two processors for seconds, while the fourth keeps the other one busy
   with waiting for them: calls then take up to twice as long. So ranks that wait tell each other where they run, and one
   that finds its processor crowded moves to another one. For that, it is bound to that one for a moment; from then on the
   kernel may move it as before. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* sched_getcpu, sched_setaffinity */
#endif
#include "core.h"
#include <pthread.h>

#ifdef __linux__
/* How often a rank looks for a better place at most, and how often any of them moves. */
enum { LOOK_NS = 200000, MOVE_NS = 10000000 };

static struct {
    Py_buffer view; /* it keeps the words mapped */
    Word *places;   /* of each rank of this host: its processor, plus 1; 0 for none, as while it sleeps */
    Word *moved;    /* when one of them has moved */
    Py_ssize_t apart;
    int num_ranks, rank, here;
    int64_t looked_ns;
} host;
static _Thread_local bool is_rank; /* whether this thread is the one that the places are about */

static void set_place(int here) { store(&host.places[host.rank * host.apart], host.here = here); }

/* Return the processor to which this rank should move; -1 if it is as good where it is. */
static int better_place(const cpu_set_t *allowed)
{
    uint16_t counts[CPU_SETSIZE] = {0};
    int best = -1;
    for (int rank = 0; rank < host.num_ranks; rank++) {
        uint64_t place = load(&host.places[rank * host.apart]);
        if (place > 0 && place <= CPU_SETSIZE)
            counts[place - 1]++;
    }
    for (int processor = 0; processor < CPU_SETSIZE; processor++) {
        if (CPU_ISSET(processor, allowed) && (best < 0 || counts[processor] < counts[best]))
            best = processor;
    }
    return best >= 0 && counts[best] + 1 < counts[host.here - 1] ? best : -1;
}

static void spread(void)
{
    int here = sched_getcpu() + 1;
    if (here < 1 || here > CPU_SETSIZE)
        return;
    if (here != host.here)
        set_place(here);
    int64_t now = now_ns();
    if (now - host.looked_ns < LOOK_NS)
        return;
    host.looked_ns = now;
    uint64_t moved = load(host.moved);
    cpu_set_t allowed, one;
    if ((uint64_t)now < moved + MOVE_NS || sched_getaffinity(0, sizeof allowed, &allowed) < 0)
        return;
    int place = better_place(&allowed);
    if (place < 0 || !atomic_compare_exchange_strong(host.moved, &moved, (uint64_t)now))
        return;
    CPU_ZERO(&one);
    CPU_SET(place, &one);
    if (sched_setaffinity(0, sizeof one, &one) < 0)
        return;
    set_place(place + 1);
    if (sched_setaffinity(0, sizeof allowed, &allowed) < 0) { /* none of them is left to this container */
        memset(&one, 0xff, sizeof one);
        sched_setaffinity(0, sizeof one, &one);
    }
}

void yield_processor(void)
{
    if (is_rank && host.places != NULL)
        spread();
    sched_yield();
}

static void forget_host(void) /* in a forked child, which is none of the ranks */
{
    host.places = NULL;
}

static void leave_host(void)
{
    if (host.places != NULL) {
        set_place(0);
        host.places = NULL;
        PyBuffer_Release(&host.view);
    }
}

static PyObject *spread_ranks(PyObject *module, PyObject *args)
{
    static bool is_known = false;
    PyObject *words;
    Py_ssize_t first, apart, moved;
    int num_ranks, rank;
    if (!PyArg_ParseTuple(args, "Onnnii", &words, &first, &apart, &moved, &num_ranks, &rank))
        return NULL;
    if (!is_known && pthread_atfork(NULL, NULL, forget_host) != 0)
        return PyErr_NoMemory();
    is_known = true;
    Py_buffer view;
    if (PyObject_GetBuffer(words, &view, PyBUF_WRITABLE) < 0)
        return NULL;
    leave_host();
    host.view = view;
    host.moved = (Word *)view.buf + moved;
    host.apart = apart, host.num_ranks = num_ranks, host.rank = rank;
    host.places = (Word *)view.buf + first;
    set_place(0);
    is_rank = true;
    Py_RETURN_NONE;
}

static PyObject *leave_places(PyObject *module, PyObject *words)
{
    if (host.places == NULL)
        Py_RETURN_NONE;
    Py_buffer view;
    if (PyObject_GetBuffer(words, &view, PyBUF_WRITABLE) < 0)
        return NULL;
    bool is_this = view.buf == host.view.buf;
    PyBuffer_Release(&view);
    if (is_this)
        leave_host();
    Py_RETURN_NONE;
}

static PyObject *is_spread(PyObject *module, PyObject *unused) { return PyBool_FromLong(host.places != NULL); }

static PyObject *begin_sleep(PyObject *module, PyObject *unused)
{
    if (is_rank && host.places != NULL && host.here != 0)
        set_place(0);
    Py_RETURN_NONE;
}
#else
void yield_processor(void) { sched_yield(); }

static PyObject *spread_ranks(PyObject *module, PyObject *args) { Py_RETURN_NONE; }
static PyObject *leave_places(PyObject *module, PyObject *words) { Py_RETURN_NONE; }
static PyObject *is_spread(PyObject *module, PyObject *unused) { Py_RETURN_FALSE; }
static PyObject *begin_sleep(PyObject *module, PyObject *unused) { Py_RETURN_NONE; }
#endif

static PyObject *yield_method(PyObject *module, PyObject *unused)
{
    Py_BEGIN_ALLOW_THREADS
    yield_processor();
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyMethodDef spreading_functions[] = {
    {"spread_ranks", spread_ranks, METH_VARARGS,
     "spread_ranks(words, first, apart, moved, num_ranks, rank): from here on, while this thread waits, spread the ranks of "
     "this host over its processors. The place of a rank is `words[first + rank * apart]`, and the time of the last move "
     "`words[moved]`. Other words are used no more."},
    {"leave_places", leave_places, METH_O,
     "leave_places(words): leave it to the kernel again where this rank runs, if these words are still used."},
    {"is_spread", is_spread, METH_NOARGS, "is_spread(): return whether the ranks of this host are spread."},
    {"begin_sleep", begin_sleep, METH_NOARGS, "begin_sleep(): this rank takes no processor until it waits the next time."},
    {"yield_processor", yield_method, METH_NOARGS, "yield_processor(): let another thread run on this processor."},
    {NULL, NULL, 0, NULL},
};
