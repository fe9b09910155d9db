/* Chunks: a call of many bytes through the slots, chunk by chunk: each is a Step, or two, of which the second begins when
   all have reduced their parts. The reference is `InChunks`. */
#include "core.h"

#include <structmember.h>

PyTypeObject *chunks_type;

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    int num_sent, num_received;
    bool reduces;
    Py_ssize_t chunk_bytes;
    Py_ssize_t num_runs;
    struct Run { /* chunks whose steps are the same, at places that are a chunk further in every array */
        Step *first, *second;
        Py_ssize_t count;
    } *runs;
} Chunks;

/* The data of the arrays of a call, at the place of the next chunk. */
typedef struct {
    char *sent[MOST_ARRAYS], *received[MOST_ARRAYS];
    Strided arrays, *strided; /* NULL if all are contiguous */
} Data;

static void advance(const Chunks *self, Data *data)
{
    if (data->strided != NULL) {
        data->strided->begin += self->chunk_bytes;
        return;
    }
    for (int i = 0; i < self->num_sent; i++)
        data->sent[i] += self->chunk_bytes;
    for (int i = 0; i < self->num_received; i++)
        data->received[i] += self->chunk_bytes;
}

/* Carry out the call, of which the first step may have begun. Returns -1 with an error set, and 1 if nothing has been taken
   because the ranks' sizes are not those agreed. */
static int carry_out(const Chunks *self, Data *data, bool has_begun)
{
    for (const struct Run *run = self->runs; run < self->runs + self->num_runs; run++) {
        for (Py_ssize_t done = 0; done < run->count; done++) {
            int phase = run->first->barrier->phase;
            int status = has_begun ? 0 : step_meet(run->first, data->sent, data->received, data->strided, &phase);
            if (status != 0)
                return status;
            has_begun = false;
            step_finish(run->first, phase, data->sent, data->received, data->strided);
            if (run->second != NULL && step_run(run->second, data->sent, data->received, NULL) < 0)
                return -1;
            if (PyErr_CheckSignals() < 0)
                return -1;
            advance(self, data);
        }
    }
    return 0;
}

static int begin(const Chunks *self, Data *data)
{
    int phase;
    return self->num_runs ? step_meet(self->runs->first, data->sent, data->received, data->strided, &phase) : 0;
}

static int run_all(const Chunks *self, Data *data) { return carry_out(self, data, false); }
static int finish(const Chunks *self, Data *data) { return carry_out(self, data, true); }

static PyObject *run(Chunks *self, PyObject *const *args, Py_ssize_t num_args, int (*carry)(const Chunks *, Data *))
{
    Data data;
    if (num_args != 2) {
        PyErr_SetString(PyExc_TypeError, "Chunks take what is sent and what is received");
        return NULL;
    }
    int kind = read_call(args, self->num_sent, self->num_received, !self->reduces, data.sent, data.received, &data.arrays);
    if (kind == 0)
        Py_RETURN_FALSE;
    data.strided = kind == 2 ? &data.arrays : NULL;
    int status = kind < 0 ? -1 : carry(self, &data);
    if (status < 0)
        return NULL;
    if (status > 0)
        Py_RETURN_NONE;
    Py_RETURN_TRUE;
}

static PyObject *chunks_call(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    return run((Chunks *)object, args, kwnames == NULL ? PyVectorcall_NARGS(nargsf) : -1, run_all);
}

static PyObject *chunks_begin(Chunks *self, PyObject *const *args, Py_ssize_t num_args)
{
    return run(self, args, num_args, begin);
}

static PyObject *chunks_finish(Chunks *self, PyObject *const *args, Py_ssize_t num_args)
{
    return run(self, args, num_args, finish);
}

static int read_runs(Chunks *self, PyObject *list)
{
    Py_ssize_t count = PySequence_Size(list);
    if (count < 0)
        return -1;
    if ((self->runs = PyMem_New(struct Run, count + 1)) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count && !PyErr_Occurred(); i++) {
        PyObject *entry = PySequence_GetItem(list, i), *first, *second;
        Py_ssize_t chunks;
        if (entry != NULL && PyArg_ParseTuple(entry, "O!On", step_type, &first, &second, &chunks)) {
            if (second != Py_None && Py_TYPE(second) != step_type)
                PyErr_SetString(PyExc_TypeError, "Chunks: a second step must be a Step, or None");
            else {
                self->reduces |= ((Step *)first)->reduction.combine != NULL;
                self->runs[self->num_runs++] = (struct Run){
                    (Step *)Py_NewRef(first), second == Py_None ? NULL : (Step *)Py_NewRef(second), chunks};
            }
        }
        Py_XDECREF(entry);
    }
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *chunks_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *runs;
    Py_ssize_t chunk_bytes;
    int num_sent, num_received;
    if (!PyArg_ParseTuple(args, "On(ii)", &runs, &chunk_bytes, &num_sent, &num_received))
        return NULL;
    if (num_sent > MOST_ARRAYS || num_received > MOST_ARRAYS)
        Py_RETURN_NONE;
    Chunks *self = (Chunks *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->call = chunks_call;
    self->num_sent = num_sent, self->num_received = num_received, self->chunk_bytes = chunk_bytes;
    if (read_runs(self, runs) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int chunks_traverse(Chunks *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    for (Py_ssize_t i = 0; i < self->num_runs; i++) {
        Py_VISIT(self->runs[i].first);
        Py_VISIT(self->runs[i].second);
    }
    return 0;
}

static int chunks_clear(Chunks *self)
{
    for (Py_ssize_t i = 0; i < self->num_runs; i++) {
        Py_CLEAR(self->runs[i].first);
        Py_CLEAR(self->runs[i].second);
    }
    self->num_runs = 0;
    return 0;
}

static void chunks_dealloc(Chunks *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    chunks_clear(self);
    PyMem_Free(self->runs);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"begin", (PyCFunction)(void (*)(void))chunks_begin, METH_FASTCALL,
     "begin(send, recv): the first step; return False if nothing was done, and None if the ranks' sizes are not those "
     "agreed: then there is no rest."},
    {"finish", (PyCFunction)(void (*)(void))chunks_finish, METH_FASTCALL, "finish(send, recv): the rest."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Chunks, call), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, chunks_new}, {Py_tp_dealloc, chunks_dealloc}, {Py_tp_traverse, chunks_traverse},
    {Py_tp_clear, chunks_clear}, {Py_tp_call, PyVectorcall_Call}, {Py_tp_members, members}, {Py_tp_methods, methods},
    {Py_tp_doc, "Chunks(runs, chunk_bytes, (num_sent, num_received)): a call of many bytes, chunk by chunk; None for too many "
                "arrays. It returns True, False if it did nothing, and None if it took nothing, since the ranks' sizes are others."},
    {0, NULL},
};

PyType_Spec chunks_spec = {
    "meshdist.core._core.Chunks", sizeof(Chunks), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots,
};
