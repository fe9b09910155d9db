/* Inbox: receives an array of one kind, or a list of objects, from whichever of several ranks has sent one, or tells which
   message there is, as a probe.

   It polls the channels of the ranks that have sent such a message before. What else there is to do is Python's: ranks
   that have just begun to send, those that have ended, waits that take longer, messages that have left their channel. */
#include "core.h"

#include <structmember.h>

PyTypeObject *inbox_type;

/* How often Python looks for what the channels do not tell. */
enum { ASK_NS = 1000000 };

static bool is_probe(const Inbox *self) { return self->what == PROBES || self->what == IPROBES; }

static bool has_any(const Inbox *self)
{
    for (int i = 0; i < self->num_channels; i++) {
        if (ring_has_come(self->channels[i].ring))
            return true;
    }
    return false;
}

/* Wait for a message, for a moment. */
static bool await_any(Inbox *self)
{
    if (has_any(self))
        return true;
    for (int spins = 1 + self->spins / (self->num_channels + 1); spins > 0; spins--) {
        if (has_any(self)) {
            spun(&self->spins, false, self->fewest_spins);
            return true;
        }
        pause_briefly();
    }
    spun(&self->spins, true, self->fewest_spins);
    bool has_come = false;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t until = now_ns() + YIELD_NS; !(has_come = has_any(self)) && now_ns() < until;)
        yield_processor();
    Py_END_ALLOW_THREADS
    return has_come;
}

/* Whether it is time for Python to look. */
static bool has_to_ask(Inbox *self)
{
    int64_t now = now_ns();
    if (now - self->asked_ns < ASK_NS)
        return false;
    self->asked_ns = now;
    return true;
}

bool inbox_has_come(const Inbox *self) { return has_any(self); }

int inbox_await(Inbox *self)
{
    if (self->num_channels < self->num_senders && has_to_ask(self))
        return 0;
    for (int i = 0; i < self->num_channels; i++) {
        int precedes = ring_is_preceded(self->channels[i].ring, is_probe(self));
        if (precedes != 0)
            return precedes < 0 ? -1 : 0;
    }
    if (self->what != IPROBES || has_any(self))
        return await_any(self);
    if (has_to_ask(self))
        return 0;
    Py_BEGIN_ALLOW_THREADS
    yield_processor(); /* it is called again and again, and the sender may need the processor */
    Py_END_ALLOW_THREADS
    return 2;
}

/* Whether a channel has a message that a probe finds. */
static int look(const Inbox *self, const struct Channel *channel, Header *header)
{
    int found = ring_look(channel->ring, channel->rank, header);
    return found > 0 ? (self->tag < 0 ? header->tag >= 0 : header->tag == self->tag) : found;
}

int inbox_take(Inbox *self, char *data, Found *found)
{
    int status = 0;
    for (int i = 0; i < self->num_channels && status == 0; i++) {
        int number = (self->turn + i) % self->num_channels;
        struct Channel *channel = &self->channels[number];
        if (!ring_has_come(channel->ring))
            continue;
        status = is_probe(self)                ? look(self, channel, &found->header)
                 : self->what == OBJECT_LISTS ? ring_take_objects(channel->ring, self->tag, &found->number, &found->pickle)
                                               : ring_take(channel->ring, data);
        if (status > 0) {
            found->channel = number;
            self->turn = number + 1;
        }
    }
    if (status > 0 && found->pickle != NULL)
        self->num_bytes = PyBytes_GET_SIZE(found->pickle);
    return status;
}

int inbox_wake(Inbox *self, const Found *found) { return ring_wake(self->channels[found->channel].ring); }

/* The dtype of a message; None for a list of objects. */
static PyObject *dtype_of(const Inbox *self, const Header *header, Py_ssize_t number)
{
    if (number >= 0)
        return Py_NewRef(Py_None);
    PyObject *name = PyBytes_FromStringAndSize(header->dtype, sizeof header->dtype);
    PyObject *dtype = name == NULL ? NULL : PyObject_GetItem(self->dtypes, name);
    Py_XDECREF(name);
    return dtype;
}

PyObject *inbox_info(Inbox *self, const Header *header, PyObject *rank)
{
    Py_ssize_t number = count_objects(header->dtype);
    PyObject *dtype = dtype_of(self, header, number);
    PyObject *info = dtype == NULL ? NULL : ((PyTypeObject *)self->info)->tp_alloc((PyTypeObject *)self->info, 5);
    if (info == NULL) {
        Py_XDECREF(dtype);
        return NULL;
    }
    PyTuple_SET_ITEM(info, 0, Py_NewRef(rank));
    PyTuple_SET_ITEM(info, 1, PyLong_FromLongLong(header->tag));
    PyTuple_SET_ITEM(info, 2, PyLong_FromLongLong(header->num_bytes));
    PyTuple_SET_ITEM(info, 3, dtype);
    PyTuple_SET_ITEM(info, 4, number < 0 ? Py_NewRef(Py_None) : PyLong_FromSsize_t(number));
    if (PyErr_Occurred())
        Py_CLEAR(info);
    return info;
}

static PyObject *inbox_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"num_senders", "info", "dtypes", "tag", "waits", "of_objects", "is_single", NULL};
    Py_ssize_t num_senders;
    PyObject *info = NULL, *dtypes = NULL;
    long long tag = -1;
    int waits = 1, of_objects = 0, is_single = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "n|$O!OLppp", names, &num_senders, &PyType_Type, &info, &dtypes, &tag,
                                     &waits, &of_objects, &is_single))
        return NULL;
    if (info != NULL && (dtypes == NULL || !PyType_IsSubtype((PyTypeObject *)info, &PyTuple_Type))) {
        PyErr_SetString(PyExc_TypeError, "Inbox: info must be a type of tuples, and needs dtypes");
        return NULL;
    }
    Inbox *self = (Inbox *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->num_senders = num_senders, self->tag = tag;
    self->what = info != NULL ? (waits ? PROBES : IPROBES) : of_objects ? OBJECT_LISTS : ARRAYS;
    self->is_single = (char)is_single;
    self->info = Py_XNewRef(info), self->dtypes = Py_XNewRef(dtypes);
    self->asked_ns = now_ns(), self->spins = SPINS, self->fewest_spins = FEWEST_FOR_MESSAGES;
    if ((self->channels = PyMem_Calloc(num_senders + 1, sizeof *self->channels)) == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static PyObject *inbox_add(Inbox *self, PyObject *args)
{
    PyObject *ring, *rank, *global_rank;
    if (!PyArg_ParseTuple(args, "O!O!O!", ring_type, &ring, &PyLong_Type, &rank, &PyLong_Type, &global_rank))
        return NULL;
    if (self->num_channels == self->num_senders) {
        PyErr_SetString(PyExc_ValueError, "an Inbox has one channel for each sender");
        return NULL;
    }
    self->channels[self->num_channels] =
        (struct Channel){(Ring *)Py_NewRef(ring), Py_NewRef(rank), Py_NewRef(global_rank)};
    self->fewest_spins = ((Ring *)ring)->fewest_spins; /* the same of all ranks of a host */
    self->num_channels++; /* last: another thread may be polling */
    Py_RETURN_NONE;
}

static PyObject *inbox_senders(Inbox *self, void *unused)
{
    PyObject *ranks = PyList_New(self->num_channels);
    for (int i = 0; ranks != NULL && i < self->num_channels; i++)
        PyList_SET_ITEM(ranks, i, Py_NewRef(self->channels[i].rank));
    return ranks;
}

static int inbox_traverse(Inbox *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    for (int i = 0; i < self->num_channels; i++)
        Py_VISIT(self->channels[i].ring);
    Py_VISIT(self->info);
    Py_VISIT(self->dtypes);
    return 0;
}

static void inbox_dealloc(Inbox *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    for (int i = 0; i < self->num_channels; i++) {
        Py_DECREF(self->channels[i].ring);
        Py_DECREF(self->channels[i].rank);
        Py_DECREF(self->channels[i].global_rank);
    }
    PyMem_Free(self->channels);
    Py_XDECREF(self->info);
    Py_XDECREF(self->dtypes);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"add", (PyCFunction)inbox_add, METH_VARARGS,
     "add(ring, rank, global_rank): add the messages of one more rank, by the Ring that receives them."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"senders", (getter)inbox_senders, NULL, "The ranks that have been added.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, inbox_new}, {Py_tp_dealloc, inbox_dealloc}, {Py_tp_traverse, inbox_traverse},
    {Py_tp_methods, methods}, {Py_tp_getset, properties},
    {Py_tp_doc, "Inbox(num_senders, *, info, dtypes, tag=-1, waits=True, of_objects=False, is_single=False): messages from any "
                "rank. With "
                "`info`, a probe for those of a tag, any if it is negative, which waits or not; its result is an `info` of "
                "source, tag, bytes, what `dtypes` has for the name of the dtype, and number of objects. With "
                "`of_objects`, lists of objects, or with `is_single` one object; else arrays of one kind."},
    {0, NULL},
};

PyType_Spec inbox_spec = {
    "meshdist.core._core.Inbox", sizeof(Inbox), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots,
};
