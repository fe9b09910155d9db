/* Barrier: the base class of the compiled FlagBarrier. What the words mean is told in `flag_barrier`. */
#include "core.h"

#include <structmember.h>

PyTypeObject *barrier_type;

static const uint64_t STEP = 0xFFFFFFFF;
/* How many words behind its signal a rank writes for which call it is; as in `shared_region`. */
enum { FINGERPRINT = 2 };

static Py_ssize_t *read_indices(PyObject *sequence, int *count)
{
    PyObject *fast = PySequence_Fast(sequence, "indices of words, as a sequence");
    if (fast == NULL)
        return NULL;
    Py_ssize_t size = PySequence_Fast_GET_SIZE(fast);
    Py_ssize_t *indices = PyMem_New(Py_ssize_t, size ? size : 1);
    for (Py_ssize_t i = 0; indices != NULL && i < size; i++) {
        indices[i] = PyLong_AsSsize_t(PySequence_Fast_GET_ITEM(fast, i));
        if (indices[i] == -1 && PyErr_Occurred()) {
            PyMem_Free(indices);
            indices = NULL;
        }
    }
    Py_DECREF(fast);
    *count = (int)size;
    if (indices == NULL && !PyErr_Occurred())
        PyErr_NoMemory();
    return indices;
}

static PyObject *barrier_attach(Barrier *self, PyObject *args)
{
    PyObject *words, *even, *odd, *bells;
    int num_odd;
    Py_ssize_t *odd_posts;
    if (self->words != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "Barrier: attached already");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "OnOOO", &words, &self->mine, &even, &odd, &bells))
        return NULL;
    if ((self->posts = read_indices(even, &self->num_peers)) == NULL || (odd_posts = read_indices(odd, &num_odd)) == NULL)
        return NULL;
    if (num_odd != self->num_peers) {
        PyMem_Free(odd_posts);
        PyErr_SetString(PyExc_ValueError, "Barrier: as many posts in even steps as in odd ones");
        return NULL;
    }
    Py_ssize_t *both = PyMem_Resize(self->posts, Py_ssize_t, 2 * num_odd + 1);
    if (both == NULL) {
        PyMem_Free(odd_posts);
        return PyErr_NoMemory();
    }
    self->posts = both;
    memcpy(both + num_odd, odd_posts, num_odd * sizeof *both);
    PyMem_Free(odd_posts);
    if ((self->bells = read_indices(bells, &self->num_bells)) == NULL)
        return NULL;
    if (PyObject_GetBuffer(words, &self->view, PyBUF_CONTIG) < 0)
        return NULL;
    self->words = self->view.buf;
    self->spins = SPINS, self->fewest_spins = FEWEST_SPINS;
    Py_RETURN_NONE;
}

int barrier_signal(Barrier *self, uint64_t fingerprint, uint64_t *word)
{
    uint64_t step = ++self->step;
    Word *mine = &self->words[self->mine + (step & 1)];
    self->word = *word = (fingerprint & ~STEP) | (step & STEP);
    if (load(mine + FINGERPRINT) != fingerprint) /* a peer may be polling this cache line */
        store(mine + FINGERPRINT, fingerprint);
    store(mine, *word);
    for (int i = 0; i < self->num_bells; i++) {
        if (load(&self->words[self->bells[i]])) {
            PyObject *rang = PyObject_CallMethod((PyObject *)self, "_ring", NULL);
            Py_XDECREF(rang);
            return rang == NULL ? -1 : 0;
        }
    }
    return 0;
}

/* Whether the peers, which have all signalled `word`, did so for this rank's call. */
static bool is_same_call(const Barrier *self, uint64_t word)
{
    const Py_ssize_t *post = self->posts + (word & 1) * self->num_peers, *end = post + self->num_peers;
    uint64_t fingerprint = load(&self->words[self->mine + (word & 1) + FINGERPRINT]);
    for (; post < end; post++) {
        if (load(&self->words[*post + FINGERPRINT]) != fingerprint)
            return false;
    }
    return true;
}

/* Python goes on with a wait: it sleeps in the end, and finds out why a peer does not come. */
static int await_rest(uint64_t word, PyObject *wait)
{
    PyObject *number = PyLong_FromUnsignedLongLong(word);
    PyObject *waited = number == NULL ? NULL : PyObject_CallOneArg(wait, number);
    Py_XDECREF(number);
    Py_XDECREF(waited);
    return waited == NULL ? -1 : 0;
}

bool barrier_poll(Barrier *self, uint64_t word)
{
    const Py_ssize_t *post = self->posts + (word & 1) * self->num_peers, *end = post + self->num_peers;
    int spins = self->spins;
    for (; post < end; post++) {
        while (load(&self->words[*post]) != word) {
            if (--spins < 0)
                goto yield;
            pause_briefly();
        }
    }
    if (spins < self->spins)
        spun(&self->spins, false, self->fewest_spins);
    return is_same_call(self, word);

yield:
    spun(&self->spins, true, self->fewest_spins);
    bool arrived = true;
    Py_BEGIN_ALLOW_THREADS
    int64_t until = now_ns() + YIELD_NS;
    for (; arrived && post < end; post++) {
        while (load(&self->words[*post]) != word && (arrived = now_ns() < until))
            sched_yield();
    }
    Py_END_ALLOW_THREADS
    return arrived && is_same_call(self, word);
}

int barrier_await(Barrier *self, uint64_t word, PyObject *wait)
{
    return barrier_poll(self, word) ? 0 : await_rest(word, wait);
}

static PyObject *barrier_signal_method(Barrier *self, PyObject *fingerprint)
{
    uint64_t word, bits = PyLong_AsUnsignedLongLong(fingerprint);
    if (bits == (uint64_t)-1 && PyErr_Occurred())
        return NULL;
    return barrier_signal(self, bits, &word) < 0 ? NULL : PyLong_FromUnsignedLongLong(word);
}

static PyObject *barrier_await_all(Barrier *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 2) {
        PyErr_SetString(PyExc_TypeError, "await_all(word, plan)");
        return NULL;
    }
    uint64_t word = PyLong_AsUnsignedLongLong(args[0]);
    if (word == (uint64_t)-1 && PyErr_Occurred())
        return NULL;
    PyObject *wait = PyObject_GetAttrString(args[1], "await_rest");
    if (wait == NULL)
        return NULL;
    int status = barrier_await(self, word, wait);
    Py_DECREF(wait);
    if (status < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *barrier_arrived(Barrier *self, PyObject *number)
{
    uint64_t word = PyLong_AsUnsignedLongLong(number);
    if (word == (uint64_t)-1 && PyErr_Occurred())
        return NULL;
    const Py_ssize_t *post = self->posts + (word & 1) * self->num_peers;
    for (int i = 0; i < self->num_peers; i++) {
        if (load(&self->words[post[i]]) != word)
            Py_RETURN_FALSE;
    }
    return PyBool_FromLong(is_same_call(self, word));
}

/* The bytes of a contiguous array; -1 with an error set. */
static Py_ssize_t bytes_of(PyObject *object, int flags)
{
    if (!is_array(object) || (((Array *)object)->flags & flags) != flags) {
        PyErr_SetString(PyExc_TypeError, "put(place, data): both must be contiguous arrays");
        return -1;
    }
    PyObject *num_bytes = PyObject_GetAttrString(object, "nbytes");
    Py_ssize_t size = num_bytes == NULL ? -1 : PyLong_AsSsize_t(num_bytes);
    Py_XDECREF(num_bytes);
    return size;
}

static PyObject *barrier_put(Barrier *self, PyObject *const *args, Py_ssize_t num_args)
{
    Py_ssize_t room = num_args == 2 ? bytes_of(args[0], C_CONTIGUOUS | WRITEABLE) : -1;
    Py_ssize_t size = room < 0 ? -1 : bytes_of(args[1], C_CONTIGUOUS);
    if (size < 0 || size != room) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "put(place, data): two arrays of equal size");
        return NULL;
    }
    char *place = ((Array *)args[0])->data;
    const char *data = ((Array *)args[1])->data;
    PyThreadState *thread = size > LONG ? PyEval_SaveThread() : NULL;
    copy_out(&self->pace, place, data, size);
    if (thread != NULL)
        PyEval_RestoreThread(thread);
    Py_RETURN_NONE;
}

static void barrier_dealloc(Barrier *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyMem_Free(self->posts);
    PyMem_Free(self->bells);
    if (self->words != NULL)
        PyBuffer_Release(&self->view);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"attach", (PyCFunction)barrier_attach, METH_VARARGS,
     "attach(words, mine, even, odd, bells): set the words, and the indices of this rank's, the peers' and the bells"},
    {"signal", (PyCFunction)barrier_signal_method, METH_O, "Enter the next step; return its word."},
    {"await_all", (PyCFunction)(void (*)(void))barrier_await_all, METH_FASTCALL, "Wait until all have signalled."},
    {"put", (PyCFunction)(void (*)(void))barrier_put, METH_FASTCALL, "put(place, data): copy an array into a slot."},
    {"arrived", (PyCFunction)barrier_arrived, METH_O, "Return whether all have signalled a word."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"step", T_ULONGLONG, offsetof(Barrier, step), 0, NULL},
    {"phase", T_INT, offsetof(Barrier, phase), 0, NULL},
    {"fewest_spins", T_INT, offsetof(Barrier, fewest_spins), 0, "How often to poll at least before yielding."},
    {"_word", T_ULONGLONG, offsetof(Barrier, word), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_dealloc, barrier_dealloc}, {Py_tp_methods, methods}, {Py_tp_members, members},
    {Py_tp_doc, "The steps of a group: the compiled part of FlagBarrier."}, {0, NULL},
};

PyType_Spec barrier_spec = {
    "meshdist.core._core.Barrier", sizeof(Barrier), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots,
};
