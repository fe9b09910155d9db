/* Stream: the bytes of a message through the ring of a channel, in pieces. The reference is `Channel.fill` and `drain`. */
#include "core.h"

PyTypeObject *stream_type;

/* How much is copied before the other side may have it. */
enum { PIECE = 32 << 10, UNIT = 64 };

static uint64_t in_units(Py_ssize_t num_bytes) { return (uint64_t)(num_bytes + UNIT - 1) & -(uint64_t)UNIT; }

Py_ssize_t stream_fill(const Pipe *pipe, const char *data, Py_ssize_t size, Py_ssize_t written, uint64_t free_to,
                       bool polls)
{
    uint64_t head = load(pipe->head);
    int spins = polls ? SPINS : 0;
    while (written < size) {
        uint64_t tail = load(pipe->tail);
        Py_ssize_t place = head % pipe->num_bytes;
        Py_ssize_t room = (Py_ssize_t)((tail > free_to ? tail : free_to) + pipe->num_bytes - head);
        Py_ssize_t length = least(least(size - written, PIECE), least(pipe->num_bytes - place, room));
        if (length > 0) {
            copy_out(pipe->pace, pipe->ring + place, data + written, length);
            written += length;
            head += in_units(length); /* all but the last piece are whole units anyway */
            store(pipe->head, head);
            spins = polls ? SPINS : 0;
        } else if (--spins < 0) {
            break;
        } else {
            pause_briefly();
        }
    }
    return written;
}

Py_ssize_t stream_drain(const Pipe *pipe, char *data, Py_ssize_t size, Py_ssize_t there, bool polls)
{
    uint64_t tail = load(pipe->tail);
    int spins = polls ? SPINS : 0;
    while (there < size) {
        Py_ssize_t place = tail % pipe->num_bytes, come = (Py_ssize_t)(load(pipe->head) - tail);
        Py_ssize_t length = least(least(size - there, PIECE), least(pipe->num_bytes - place, come));
        if (length > 0) {
            copy_bytes(data + there, pipe->ring + place, length);
            there += length;
            tail += in_units(length);
            store(pipe->tail, tail);
            spins = polls ? SPINS : 0;
        } else if (--spins < 0) {
            break;
        } else {
            pause_briefly();
        }
    }
    return there;
}

Py_ssize_t stream_look(const Pipe *pipe, uint64_t begin, char *data, Py_ssize_t size)
{
    Py_ssize_t there = 0;
    for (int spins = SPINS; there < size;) {
        Py_ssize_t place = (begin + there) % pipe->num_bytes, come = (Py_ssize_t)(load(pipe->head) - begin) - there;
        Py_ssize_t length = least(least(size - there, come), pipe->num_bytes - place);
        if (length > 0) {
            copy_bytes(data + there, pipe->ring + place, length);
            there += length;
            spins = SPINS;
        } else if (--spins < 0) {
            break;
        } else {
            pause_briefly();
        }
    }
    return there;
}

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    Pipe pipe;
} Stream;

static PyObject *stream_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *memory;
    Py_ssize_t begin, num_bytes, head, tail, pace;
    if (!PyArg_ParseTuple(args, "O(nn)(nnn)", &memory, &begin, &num_bytes, &head, &tail, &pace))
        return NULL;
    Stream *self = (Stream *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_CONTIG) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    Word *words = self->memory.buf;
    self->pipe = (Pipe){&words[head], &words[tail], (Pace *)&words[pace], (char *)self->memory.buf + begin, num_bytes};
    return (PyObject *)self;
}

static PyObject *stream_move(Stream *self, PyObject *args, bool fills)
{
    Py_buffer data;
    Py_ssize_t done;
    unsigned long long free_to = 0;
    int polls;
    if (!PyArg_ParseTuple(args, fills ? "y*nKp" : "w*np", &data, &done, fills ? (void *)&free_to : (void *)&polls, &polls))
        return NULL;
    PyThreadState *thread = without_gil(data.len - done > LONG);
    done = fills ? stream_fill(&self->pipe, data.buf, data.len, done, free_to, polls)
                 : stream_drain(&self->pipe, data.buf, data.len, done, polls);
    with_gil(thread);
    PyBuffer_Release(&data);
    return PyLong_FromSsize_t(done);
}

static PyObject *fill(Stream *self, PyObject *args) { return stream_move(self, args, true); }

static PyObject *drain(Stream *self, PyObject *args) { return stream_move(self, args, false); }

static void stream_dealloc(Stream *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (self->pipe.head != NULL)
        PyBuffer_Release(&self->memory);
    type->tp_free(self);
    Py_DECREF(type);
}

static int stream_traverse(Stream *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static PyMethodDef methods[] = {
    {"fill", (PyCFunction)fill, METH_VARARGS, "fill(data, written, free_to, polls): see Channel.fill."},
    {"drain", (PyCFunction)drain, METH_VARARGS, "drain(target, there, polls): see Channel.drain."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, stream_new}, {Py_tp_dealloc, stream_dealloc}, {Py_tp_traverse, stream_traverse},
    {Py_tp_methods, methods},
    {Py_tp_doc, "Stream(memory, (ring_begin, ring_bytes), (head, tail, pace)): moves messages through a ring in pieces."},
    {0, NULL},
};

PyType_Spec stream_spec = {
    "meshdist.core._core.Stream", sizeof(Stream), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots,
};
