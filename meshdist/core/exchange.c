/* Exchange: sends arrays of known kinds and receives others, as one call, such as sendrecv and a halo exchange.

   All is sent first, which takes room in the rings and no receiver; then all is received; then the long messages that were
   only announced are taken by their receivers, which copy them. What has no room, or takes longer than a moment, is
   Python's, as in calls that were not made before. */
#include "core.h"

#include <structmember.h>

PyTypeObject *exchange_type;

enum { MOST_SENDS = 8 };

typedef struct {
    Ring *ring;
    PyObject *facts;
} Leg;

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    Calls *calls;
    PyObject *prefix;
    PyObject *rest;   /* rest(sent, received, sends, receives): goes on after so many */
    PyObject *follow; /* follow(send, number, array): waits until an announced message is taken */
    int num_sends, num_receives;
    Leg *legs; /* the sends, then the receives */
} Exchange;

/* The array number `i` of a tuple, or the only one; NULL if it is none. */
static Array *array_of(PyObject *arrays, int number, int count)
{
    PyObject *array = arrays;
    if (PyTuple_CheckExact(arrays))
        array = PyTuple_GET_SIZE(arrays) == count ? PyTuple_GET_ITEM(arrays, number) : Py_None;
    else if (count != 1)
        return NULL;
    return is_array(array) ? (Array *)array : NULL;
}

static bool are_arrays(PyObject *arrays, int count)
{
    for (int i = 0; i < count; i++) {
        if (array_of(arrays, i, count) == NULL)
            return false;
    }
    return true;
}

/* Send a message; `number` is that of one that is announced, else 0. Returns 1, 0 if Python has to, or -1. */
static int send(Exchange *self, Ring *ring, Array *array, uint64_t *number)
{
    uint64_t unused;
    int announced = ring_announces(ring) ? ring_announce(ring, array->data, number) : 0;
    if (announced > 0) /* until it is taken, this rank copies what it receives alone, too */
        return PySet_Add(ring->announced, (PyObject *)self) < 0 ? -1 : 1;
    *number = 0;
    return announced < 0 ? -1 : ring_send(ring, array, false, &unused);
}

/* What is sent of one message, and the number of one that is announced, else 0. */
typedef struct {
    Array *array;
    uint64_t number;
} Sent;

/* Send or receive one message. Returns as `send` does. */
static int move_one(Exchange *self, int leg, PyObject *sends, PyObject *receives, Sent *sent)
{
    Ring *ring = self->legs[leg].ring;
    if (leg < self->num_sends) {
        sent[leg].array = packed(array_of(sends, leg, self->num_sends));
        return sent[leg].array == NULL ? -1 : send(self, ring, sent[leg].array, &sent[leg].number);
    }
    Array *array = array_of(receives, leg - self->num_sends, self->num_receives), *room = room_of(array);
    int status = room == NULL ? (PyErr_Occurred() ? -1 : 0) : ring_receive(ring, room->data);
    if (status > 0)
        unpack(array, room);
    Py_XDECREF(room);
    return status;
}

/* Returns the number of legs that are done, or -1 with an error set, which is that of the record. */
static int move_all(Exchange *self, PyObject *sends, PyObject *receives, Sent *sent, Record **record)
{
    int num_legs = self->num_sends + self->num_receives, status = 1, done = 0;
    for (; done < num_legs; done++) {
        if ((status = move_one(self, done, sends, receives, sent)) <= 0)
            break;
        Py_CLEAR(*record);
        if ((status = record_message(self->calls, self->legs[done].facts, true, record)) < 0)
            break;
    }
    return status < 0 ? -1 : done;
}

static void forget_announced(Exchange *self, Ring *ring)
{
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    if (PySet_Discard(ring->announced, (PyObject *)self) < 0)
        PyErr_Clear();
    PyErr_Restore(type, error, trace);
}

/* Wait until an announced message is taken. */
static int await_taken(Exchange *self, int leg, const Sent *sent)
{
    uint64_t number = sent->number;
    const Ring *ring = self->legs[leg].ring;
    bool is = ring_is_taken(ring, number);
    Py_BEGIN_ALLOW_THREADS
    int64_t until = now_ns() + for_bytes(TAKEN_NS, ring->kind.num_bytes);
    for (; !is && now_ns() < until; is = ring_is_taken(ring, number))
        yield_processor();
    Py_END_ALLOW_THREADS
    if (is)
        return 1;
    PyObject *done = PyObject_CallFunction(self->follow, "iKO", leg, (unsigned long long)number, sent->array);
    Py_XDECREF(done);
    return done == NULL ? -1 : 1;
}

static PyObject *exchange_call(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Exchange *self = (Exchange *)object;
    if (PyVectorcall_NARGS(nargsf) != 2 || kwnames != NULL) {
        PyErr_SetString(PyExc_TypeError, "an Exchange is called with what is sent and what is received");
        return NULL;
    }
    Sent sent[MOST_SENDS] = {0};
    PyObject *result = NULL;
    Record *record = NULL;
    /* Other messages that this rank waits for come before. */
    bool goes = self->calls->is_open && PyObject_Size(self->calls->deferred) == 0
                && are_arrays(args[0], self->num_sends) && are_arrays(args[1], self->num_receives);
    int done = goes ? move_all(self, args[0], args[1], sent, &record) : 0;
    if (done < 0) {
        call_failed(self->calls, self->prefix, record);
    } else if (done < self->num_sends + self->num_receives) {
        int num_sent = done < self->num_sends ? done : self->num_sends;
        result = PyObject_CallFunction(self->rest, "iiOO", num_sent, done - num_sent, args[0], args[1]);
    } else {
        result = Py_NewRef(Py_None);
    }
    for (int i = 0; i < self->num_sends; i++) {
        if (sent[i].number && result != NULL && await_taken(self, i, &sent[i]) < 0)
            Py_CLEAR(result);
        if (sent[i].number)
            forget_announced(self, self->legs[i].ring);
        ring_ended(self->legs[i].ring);
        Py_XDECREF(sent[i].array);
    }
    Py_XDECREF(record);
    return result;
}

static int read_legs(Leg *legs, PyObject *tuple)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        PyObject *ring, *facts;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(tuple, i), "O!O!", ring_type, &ring, &PyTuple_Type, &facts))
            return -1;
        legs[i] = (Leg){(Ring *)Py_NewRef(ring), Py_NewRef(facts)};
    }
    return 0;
}

static PyObject *exchange_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *calls, *prefix, *sends, *receives, *rest, *follow;
    if (!PyArg_ParseTuple(args, "O!OO!O!OO", calls_type, &calls, &prefix, &PyTuple_Type, &sends, &PyTuple_Type, &receives,
                          &rest, &follow))
        return NULL;
    if (PyTuple_GET_SIZE(sends) > MOST_SENDS) {
        PyErr_SetString(PyExc_ValueError, "Exchange: too many messages");
        return NULL;
    }
    Exchange *self = (Exchange *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->call = exchange_call;
    self->calls = (Calls *)Py_NewRef(calls), self->prefix = Py_NewRef(prefix), self->rest = Py_NewRef(rest);
    self->follow = Py_NewRef(follow);
    int num_sends = (int)PyTuple_GET_SIZE(sends), num_receives = (int)PyTuple_GET_SIZE(receives);
    self->legs = PyMem_Calloc(num_sends + num_receives + 1, sizeof *self->legs);
    self->num_sends = num_sends, self->num_receives = self->legs == NULL ? 0 : num_receives;
    if (self->legs == NULL)
        self->num_sends = 0, PyErr_NoMemory();
    if (PyErr_Occurred() || read_legs(self->legs, sends) < 0 || read_legs(self->legs + num_sends, receives) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int exchange_traverse(Exchange *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->calls);
    Py_VISIT(self->rest);
    Py_VISIT(self->follow);
    for (int i = 0; i < self->num_sends + self->num_receives; i++) {
        Py_VISIT(self->legs[i].ring);
        Py_VISIT(self->legs[i].facts);
    }
    return 0;
}

static void exchange_dealloc(Exchange *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    for (int i = 0; i < self->num_sends + self->num_receives; i++) {
        Py_XDECREF(self->legs[i].ring);
        Py_XDECREF(self->legs[i].facts);
    }
    PyMem_Free(self->legs);
    Py_XDECREF(self->calls);
    Py_XDECREF(self->prefix);
    Py_XDECREF(self->rest);
    Py_XDECREF(self->follow);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Exchange, call), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, exchange_new}, {Py_tp_dealloc, exchange_dealloc}, {Py_tp_traverse, exchange_traverse},
    {Py_tp_call, PyVectorcall_Call}, {Py_tp_members, members},
    {Py_tp_doc, "Exchange(calls, prefix, sends, receives, rest, follow): of each message its Ring and its facts. Called with the "
                "arrays to send and to receive into, a tuple or the only one, it moves all messages; where it cannot, "
                "`rest(sent, received, sends, receives)` goes on after so many, and `follow(send, number, array)` waits until an "
                "announced message is taken."},
    {0, NULL},
};

PyType_Spec exchange_spec = {
    "meshdist.core._core.Exchange", sizeof(Exchange), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots,
};
