/* Ring: sends or receives messages of few bytes of one kind. The reference is `shm.fast_path`; see `channel` too. */
#include "core.h"

#include <structmember.h>

PyTypeObject *ring_type;

/* How often a receiver polls before it yields; some microseconds. */
enum { SPINS = 300 };

/* Whether nobody is in the middle of anything: the lock is free, the containers are empty, the attributes None. The GIL
   is held from here to the end of the message, so that it stays so. */
static int is_free(Ring *self)
{
    PyObject *locked = PyObject_CallNoArgs(self->locked);
    if (locked != Py_False) {
        Py_XDECREF(locked);
        return locked == NULL ? -1 : 0;
    }
    Py_DECREF(locked);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->empties); i++) {
        PyObject *container = PyTuple_GET_ITEM(self->empties, i);
        Py_ssize_t size = PyDict_CheckExact(container) ? PyDict_GET_SIZE(container) : PyObject_Size(container);
        if (size != 0)
            return size < 0 ? -1 : 0;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->nones); i++) {
        PyObject *value = PyObject_GetAttr(self->owner, PyTuple_GET_ITEM(self->nones, i));
        Py_XDECREF(value);
        if (value != Py_None)
            return value == NULL ? -1 : 0;
    }
    return 1;
}

int ring_wake(Ring *self)
{
    if (!load(&self->words[self->others_bells]))
        return 1;
    PyObject *woken = PyObject_CallNoArgs(self->wake);
    Py_XDECREF(woken);
    return woken == NULL ? -1 : 1;
}

static int send_message(Ring *self, const char *data)
{
    int free = is_free(self);
    if (free <= 0)
        return free;
    uint64_t head = load(&self->words[self->head]), place = head % self->ring_bytes;
    if (load(&self->words[self->others_state])
        || head + self->length - load(&self->words[self->tail]) > (uint64_t)self->ring_bytes
        || place + self->length > (uint64_t)self->ring_bytes)
        return 0;
    memcpy(self->ring + place, PyBytes_AS_STRING(self->start), PyBytes_GET_SIZE(self->start));
    memcpy(self->ring + place + self->unit, data, self->num_bytes);
    store(&self->words[self->head], head + self->length);
    return ring_wake(self);
}

bool ring_await(Ring *self)
{
    Word *head = &self->words[self->head];
    uint64_t tail = load(&self->words[self->tail]);
    for (int spins = SPINS; spins > 0; spins--) {
        if (load(head) != tail)
            return true;
        pause_briefly();
    }
    bool has_come = false;
    Py_BEGIN_ALLOW_THREADS
    /* Another thread may read the message meanwhile: then this one needs a request. */
    for (int64_t until = now_ns() + YIELD_NS; !(has_come = load(head) != tail) && now_ns() < until;)
        sched_yield();
    Py_END_ALLOW_THREADS
    return has_come;
}

int ring_take(Ring *self, char *data)
{
    int free = is_free(self);
    if (free <= 0)
        return free;
    uint64_t tail = load(&self->words[self->tail]), place = tail % self->ring_bytes, head = load(&self->words[self->head]);
    if (head - tail < (uint64_t)self->length || place + self->length > (uint64_t)self->ring_bytes
        || memcmp(self->ring + place, PyBytes_AS_STRING(self->start), PyBytes_GET_SIZE(self->start)) != 0)
        return 0;
    memcpy(data, self->ring + place + self->unit, self->num_bytes);
    store(&self->words[self->tail], tail + self->length);
    return 1;
}

static int receive_message(Ring *self, char *data)
{
    if (!ring_await(self))
        return 0;
    int taken = ring_take(self, data);
    return taken <= 0 ? taken : ring_wake(self);
}

int ring_move(Ring *self, char *data) { return self->receives ? receive_message(self, data) : send_message(self, data); }

static PyObject *ring_call(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Ring *self = (Ring *)object;
    Array *array = PyVectorcall_NARGS(nargsf) == 1 && kwnames == NULL ? (Array *)args[0] : NULL;
    if (array == NULL || !is_array((PyObject *)array)) {
        PyErr_SetString(PyExc_TypeError, "a Ring is called with an array");
        return NULL;
    }
    int moved = (array->flags & CARRAY) == CARRAY ? ring_move(self, array->data) : 0;
    return moved < 0 ? NULL : PyBool_FromLong(moved);
}

static PyObject *ring_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *memory, *start, *locked, *empties, *owner, *nones, *wake_up;
    int receives;
    Py_ssize_t ring_begin, ring_bytes, unit, num_bytes, length, others_state, others_bells, head, tail;
    if (!PyArg_ParseTuple(args, "pO(nn)(nnnn)(nnn)O!OO!OO!O", &receives, &memory, &ring_begin, &ring_bytes,
                          &head, &tail, &others_state, &others_bells, &unit, &num_bytes, &length, &PyBytes_Type, &start,
                          &locked, &PyTuple_Type, &empties, &owner, &PyTuple_Type, &nones, &wake_up))
        return NULL;
    Ring *self = (Ring *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->call = ring_call;
    self->receives = receives;
    self->start = Py_NewRef(start), self->locked = Py_NewRef(locked), self->empties = Py_NewRef(empties);
    self->owner = Py_NewRef(owner), self->nones = Py_NewRef(nones), self->wake = Py_NewRef(wake_up);
    self->ring_bytes = ring_bytes, self->unit = unit, self->num_bytes = num_bytes, self->length = length;
    self->head = head, self->tail = tail, self->others_state = others_state, self->others_bells = others_bells;
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_CONTIG) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    self->words = self->memory.buf;
    self->ring = (char *)self->memory.buf + ring_begin;
    return (PyObject *)self;
}

static int ring_traverse(Ring *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->locked);
    Py_VISIT(self->empties);
    Py_VISIT(self->owner);
    Py_VISIT(self->wake);
    return 0;
}

static void ring_dealloc(Ring *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (self->words != NULL)
        PyBuffer_Release(&self->memory);
    Py_XDECREF(self->start);
    Py_XDECREF(self->locked);
    Py_XDECREF(self->empties);
    Py_XDECREF(self->owner);
    Py_XDECREF(self->nones);
    Py_XDECREF(self->wake);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Ring, call), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, ring_new}, {Py_tp_dealloc, ring_dealloc}, {Py_tp_traverse, ring_traverse},
    {Py_tp_call, PyVectorcall_Call}, {Py_tp_members, members},
    {Py_tp_doc, "Ring(receives, memory, (ring_begin, ring_bytes), (head, tail, others_state, others_bells), "
                "(unit, num_bytes, length), start, locked, empties, owner, nones, wake): called with an array, it moves "
                "a message and returns True, or False if it needs a request."},
    {0, NULL},
};

PyType_Spec ring_spec = {
    "meshdist.core._core.Ring", sizeof(Ring), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots,
};
