/* Ring: sends or receives messages of one kind. The reference is `shm.fast_path`; see `channel` too.

   In an exchange, both ranks are busy with what they receive. So a long message is only announced: its receiver copies it
   from the sender's array, once instead of twice, and the sender has nothing to do but to wait. */
#include "core.h"

#include <structmember.h>

PyTypeObject *ring_type;

/* How often a receiver polls before it yields; some microseconds. */
enum { SPINS = 300 };
/* Kinds of entries, and the place in a header of what is a message's own: address and number. As in `channel`. */
enum { EAGER = 1, RTS = 2, RTS_CMA = 3, OWN = 40 };
/* A receiver that can read the sender's memory. */
enum { READS = 1 };
/* Up to here the receiver need not begin before all is written. */
enum { SHORT = 8 << 10 };

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

/* Write the header of a message and its bytes. Its receiver may read the first pieces meanwhile. */
static void write_message(Ring *self, const char *data, uint64_t number)
{
    uint64_t head = load(self->pipe.head);
    Py_ssize_t place = head % self->pipe.num_bytes;
    char *entry = self->pipe.ring + place;
    memcpy(entry, PyBytes_AS_STRING(self->start), PyBytes_GET_SIZE(self->start));
    if (number) {
        uint64_t own[] = {(uintptr_t)data, number};
        memcpy(entry + OWN, own, sizeof own);
    }
    if (self->num_bytes <= SHORT && place + self->length <= self->pipe.num_bytes) {
        copy_out(self->pipe.pace, entry + self->unit, data, self->num_bytes);
        store(self->pipe.head, head + self->length);
    } else {
        store(self->pipe.head, head + self->unit);
        stream_fill(&self->pipe, data, self->num_bytes, 0, 0, false);
    }
    if (number)
        store(&self->words[self->written], number);
}

/* The number of the next message that its sender waits for; 0 with an error set. */
static uint64_t next_number(Ring *self)
{
    PyObject *last = PyObject_GetAttrString(self->owner, "numbered");
    uint64_t number = last == NULL ? 0 : PyLong_AsUnsignedLongLong(last) + 1;
    Py_XDECREF(last);
    PyObject *next = PyErr_Occurred() ? NULL : PyLong_FromUnsignedLongLong(number);
    int status = next == NULL ? -1 : PyObject_SetAttrString(self->owner, "numbered", next);
    Py_XDECREF(next);
    return status < 0 ? 0 : number;
}

bool ring_announces(const Ring *self) { return self->follow != Py_None; }

int ring_announce(Ring *self, char *data, uint64_t *number)
{
    int free = is_free(self);
    if (free <= 0)
        return free;
    uint64_t head = load(self->pipe.head);
    if (load(&self->words[self->mode]) != READS || load(&self->words[self->others_state])
        || head + self->unit - load(self->pipe.tail) > (uint64_t)self->pipe.num_bytes)
        return 0;
    if ((*number = next_number(self)) == 0)
        return -1;
    const int64_t kind = RTS_CMA;
    const uint64_t own[] = {(uintptr_t)data, *number};
    char *entry = self->pipe.ring + head % self->pipe.num_bytes;
    memcpy(entry, PyBytes_AS_STRING(self->start), PyBytes_GET_SIZE(self->start));
    memcpy(entry, &kind, sizeof kind);
    memcpy(entry + OWN, own, sizeof own);
    store(self->pipe.head, head + self->unit);
    return ring_wake(self);
}

bool ring_is_taken(const Ring *self, uint64_t number) { return load(&self->words[self->taken]) >= number; }

bool ring_has_come(const Ring *self) { return load(self->pipe.head) != load(self->pipe.tail); }

/* Only a message that has room as a whole goes this way. */
static int send_message(Ring *self, const char *data, uint64_t *number)
{
    int free = is_free(self);
    if (free <= 0)
        return free;
    if (load(&self->words[self->others_state])
        || load(self->pipe.head) + self->length - load(self->pipe.tail) > (uint64_t)self->pipe.num_bytes)
        return 0;
    *number = 0;
    if (self->rest != Py_None && (*number = next_number(self)) == 0)
        return -1;
    write_message(self, data, *number);
    return ring_wake(self);
}

/* Wait until a message is taken, for a moment. */
static bool is_taken(Ring *self, uint64_t number)
{
    const Word *taken = &self->words[self->taken];
    for (int spins = SPINS; spins > 0; spins--) {
        if (load(taken) >= number)
            return true;
        pause_briefly();
    }
    bool is = false;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t until = now_ns() + YIELD_NS; !(is = load(taken) >= number) && now_ns() < until;)
        sched_yield();
    Py_END_ALLOW_THREADS
    return is;
}

/* A message that has no room in the ring can be taken only if it is announced, as in an exchange: else its receive is
   posted at once. */
static bool is_in_vain(const Ring *self)
{
    return self->length > self->pipe.num_bytes && PySet_GET_SIZE(self->announced) == 0 && !ring_has_come(self);
}

bool ring_await(Ring *self)
{
    if (is_in_vain(self))
        return false;
    Word *head = self->pipe.head;
    uint64_t tail = load(self->pipe.tail);
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

/* Whether an entry is a message of this kind; its sender waits for it, or not. */
static bool is_mine(const Ring *self, const char *entry)
{
    const char *start = PyBytes_AS_STRING(self->start);
    int64_t kind;
    memcpy(&kind, entry, sizeof kind);
    return (kind == EAGER || kind == RTS || kind == RTS_CMA)
           && memcmp(entry + sizeof kind, start + sizeof kind, PyBytes_GET_SIZE(self->start) - sizeof kind) == 0;
}

/* Copy an announced message. Other threads run meanwhile: `moving` keeps them from the ring. If the copy fails, it is
   left to a request. */
static int copy_announced(Ring *self, char *data, uint64_t address)
{
    PyObject *moving = PyObject_GetAttrString(self->owner, "moving");
    PyObject *is_mine = moving == NULL ? NULL : PyObject_CallMethod(moving, "acquire", "O", Py_False);
    int status = is_mine == NULL ? -1 : is_mine == Py_True;
    if (status > 0) {
        Py_BEGIN_ALLOW_THREADS
        status = read_memory(self->pid, address, data, self->num_bytes);
        Py_END_ALLOW_THREADS
        PyObject *released = PyObject_CallMethod(moving, "release", NULL);
        Py_XDECREF(released);
        status = released == NULL ? -1 : status;
    }
    Py_XDECREF(is_mine);
    Py_XDECREF(moving);
    return status;
}

/* The message is taken as a whole: if its rest does not come, what has come stays for a request. */
int ring_take(Ring *self, char *data)
{
    int free = is_free(self);
    if (free <= 0)
        return free;
    uint64_t tail = load(self->pipe.tail), own[2];
    const char *entry = self->pipe.ring + tail % self->pipe.num_bytes;
    if (load(self->pipe.head) == tail || !is_mine(self, entry))
        return 0;
    int64_t kind;
    memcpy(&kind, entry, sizeof kind);
    memcpy(own, entry + OWN, sizeof own);
    if (kind == RTS_CMA) {
        int copied = copy_announced(self, data, own[0]);
        if (copied <= 0)
            return copied;
    } else if (self->length > self->pipe.num_bytes
               || stream_look(&self->pipe, tail + self->unit, data, self->num_bytes) < self->num_bytes) {
        return 0;
    }
    store(self->pipe.tail, tail + (kind == RTS_CMA ? self->unit : self->length));
    if (kind != EAGER)
        store(&self->words[self->taken], own[1]);
    return 1;
}

static int receive_message(Ring *self, char *data)
{
    if (!ring_await(self))
        return 0;
    int taken = ring_take(self, data);
    return taken <= 0 ? taken : ring_wake(self);
}

bool ring_waits(const Ring *self) { return !self->receives && self->rest != Py_None; }

int ring_move(Ring *self, char *data, uint64_t *number)
{
    if (self->receives)
        return receive_message(self, data);
    int sent = send_message(self, data, number);
    return sent > 0 && *number && !is_taken(self, *number) ? 2 : sent;
}

int ring_rest(Ring *self, PyObject *array, uint64_t number, PyObject *prefix)
{
    PyObject *done = PyObject_CallFunction(self->rest, "OKO", array, (unsigned long long)number, prefix);
    Py_XDECREF(done);
    return done == NULL ? -1 : 1;
}

static PyObject *ring_call(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Ring *self = (Ring *)object;
    Array *array = PyVectorcall_NARGS(nargsf) == 1 && kwnames == NULL ? (Array *)args[0] : NULL;
    if (array == NULL || !is_array((PyObject *)array)) {
        PyErr_SetString(PyExc_TypeError, "a Ring is called with an array");
        return NULL;
    }
    uint64_t number;
    int moved = (array->flags & CARRAY) == CARRAY && !ring_waits(self) ? ring_move(self, array->data, &number) : 0;
    return moved < 0 ? NULL : PyBool_FromLong(moved);
}

static PyObject *ring_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *memory, *start, *locked, *empties, *owner, *nones, *wake_up, *rest, *announced, *follow;
    int receives;
    Py_ssize_t ring_begin, ring_bytes, unit, num_bytes, length, others_state, others_bells, head, tail;
    Py_ssize_t pace, taken, written, mode;
    long pid;
    if (!PyArg_ParseTuple(args, "pO(nn)(nnnnnnnn)(nnn)O!OO!OO!OOO!Ol", &receives, &memory, &ring_begin, &ring_bytes,
                          &head, &tail, &pace, &others_state, &others_bells, &taken, &written, &mode, &unit, &num_bytes,
                          &length, &PyBytes_Type, &start, &locked, &PyTuple_Type, &empties, &owner, &PyTuple_Type,
                          &nones, &wake_up, &rest, &PySet_Type, &announced, &follow, &pid))
        return NULL;
    Ring *self = (Ring *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->call = ring_call;
    self->receives = receives;
    self->start = Py_NewRef(start), self->locked = Py_NewRef(locked), self->empties = Py_NewRef(empties);
    self->owner = Py_NewRef(owner), self->nones = Py_NewRef(nones), self->wake = Py_NewRef(wake_up);
    self->announced = Py_NewRef(announced), self->follow = Py_NewRef(follow), self->mode = mode, self->pid = pid;
    self->rest = Py_NewRef(rest), self->taken = taken, self->written = written;
    self->unit = unit, self->num_bytes = num_bytes, self->length = length;
    self->others_state = others_state, self->others_bells = others_bells;
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_CONTIG) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    self->words = self->memory.buf;
    self->pipe = (Pipe){&self->words[head], &self->words[tail], (Pace *)&self->words[pace],
                       (char *)self->memory.buf + ring_begin, ring_bytes};
    return (PyObject *)self;
}

static int ring_traverse(Ring *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->locked);
    Py_VISIT(self->empties);
    Py_VISIT(self->owner);
    Py_VISIT(self->wake);
    Py_VISIT(self->rest);
    Py_VISIT(self->announced);
    Py_VISIT(self->follow);
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
    Py_XDECREF(self->rest);
    Py_XDECREF(self->announced);
    Py_XDECREF(self->follow);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Ring, call), READONLY, NULL},
    {"follow", T_OBJECT, offsetof(Ring, follow), READONLY, "Makes the request that waits for an announced send."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, ring_new}, {Py_tp_dealloc, ring_dealloc}, {Py_tp_traverse, ring_traverse},
    {Py_tp_call, PyVectorcall_Call}, {Py_tp_members, members},
    {Py_tp_doc, "Ring(receives, memory, (ring_begin, ring_bytes), (head, tail, pace, others_state, others_bells, "
                "taken, written, mode), (unit, num_bytes, length), start, locked, empties, owner, nones, wake, rest, "
                "announced, follow, pid): called with an array, it moves a message and returns True, or False if it needs "
                "a request. With `rest`, the sender waits until a message is taken, in the end by `rest(array, number, prefix)`."},
    {0, NULL},
};

PyType_Spec ring_spec = {
    "meshdist.core._core.Ring", sizeof(Ring), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots,
};
