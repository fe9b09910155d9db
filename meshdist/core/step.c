/* Step: a call of few bytes, carried out in one step: put, signal, wait, take. The reference is `OneStep`. */
#include "core.h"

#include <structmember.h>

PyTypeObject *step_type;

/* Shorter parts of a list are reduced all at once, and then copied. And how much is packed at a time: it stays in the
   innermost cache. */
enum { SHORTEST_PART = 2 << 10, PACKED = 16 << 10 };

static int list_of(const Step *self, int phase) { return returns_early(self->awaited) ? 0 : phase; }
static Py_ssize_t shift_of(const Step *self, int phase)
{
    if (!returns_early(self->awaited))
        return 0;
    return phase % (self->awaited.is_long ? NUM_EARLY_SLOTS : NUM_PHASES) * self->phase_bytes;
}

/* Copy bytes of an array into a slot. */
static void put_rows(Pace *pace, char *place, const Rows *rows, Py_ssize_t offset, Py_ssize_t size)
{
    char packed[PACKED];
    if (rows->num_bytes == 0) {
        copy_out(pace, place, rows->data + offset, size);
        return;
    }
    for (Py_ssize_t done = 0, length; done < size; done += length) {
        length = least(PACKED, size - done);
        copy_rows(rows, offset + done, packed, length, true);
        copy_out(pace, place + done, packed, length);
    }
}

static void keep_rows(const Kept *kept, const Strided *strided)
{
    char packed[PACKED];
    for (Py_ssize_t done = 0, length; done < kept->num_bytes; done += length) {
        length = least(PACKED, kept->num_bytes - done);
        copy_rows(&strided->sent[kept->from], kept->begin + strided->begin + done, packed, length, true);
        copy_rows(&strided->received[kept->to], kept->place + strided->begin + done, packed, length, false);
    }
}

int step_begin(Step *self, char *const *sent, char *const *received, const Strided *strided, uint64_t *word, int *phase)
{
    *phase = returns_early(self->awaited) ? barrier_record(self->barrier, self->text)
                                          : (self->barrier->phase ^= !self->is_second);
    const struct Parts *puts = &self->puts[list_of(self, *phase)];
    Py_ssize_t shift = shift_of(self, *phase);
    PyThreadState *thread = without_gil(self->yields);
    Pace *pace = &self->barrier->pace;
    for (const struct Part *part = puts->parts; part < puts->parts + puts->count; part++) {
        if (part->which < 0)
            copy_out(pace, part->place + shift, self->sizes + part->offset, part->num_bytes);
        else if (strided == NULL)
            copy_out(pace, part->place + shift, sent[part->which] + part->offset, part->num_bytes);
        else
            put_rows(pace, part->place + shift, &strided->sent[part->which], part->offset + strided->begin, part->num_bytes);
    }
    with_gil(thread);
    int status = barrier_signal(self->barrier, self->fingerprint, self->awaited, word);
    for (const Kept *kept = self->kept; kept < self->kept + self->num_kept; kept++) {
        if (strided == NULL)
            copy_in(self->streams, received[kept->to] + kept->place, sent[kept->from] + kept->begin, kept->num_bytes);
        else
            keep_rows(kept, strided);
    }
    return status;
}

/* Reduce the parts of a list straight into its arrays, which are those that were sent. */
static void reduce_parts(Step *self, int phase, char *const *received)
{
    const struct Part *part = self->takes[phase].parts, *end = part + self->takes[phase].count;
    for (; part < end; part++) {
        char *out = received[part->which] + part->offset;
        for (int row = 0; row < self->num_rows; row++)
            self->part_rows[row] = row == self->own.row ? out : self->rows[phase][row] + (part->place - self->totals[0]);
        reduce_rows(&self->reduction, out, self->part_rows, self->num_rows, part->num_bytes);
    }
}

static char *const *reduced_rows(Step *self, int phase, char *const *sent)
{
    bool is_early = returns_early(self->awaited);
    char **rows = self->rows[is_early ? 1 : phase];
    for (int row = 0; is_early && row < self->num_rows; row++)
        rows[row] = self->rows[0][row] + shift_of(self, phase);
    if (self->own.which >= 0)
        rows[self->own.row] = sent[self->own.which] + self->own.offset;
    return rows;
}

static void reduce_and_take(Step *self, int phase, char *const *sent, char *const *received, const Strided *strided)
{
    if (self->part_rows != NULL) {
        reduce_parts(self, phase, received);
        return;
    }
    if (self->reduction.combine != NULL) {
        char *total = self->totals[0] != NULL ? self->totals[list_of(self, phase)] : received[0];
        reduce_rows(&self->reduction, total, reduced_rows(self, phase, sent), self->num_rows, self->total_bytes);
    }
    const struct Parts *takes = &self->takes[list_of(self, phase)];
    Py_ssize_t shift = shift_of(self, phase);
    for (const struct Part *part = takes->parts; part < takes->parts + takes->count; part++) {
        if (strided == NULL)
            copy_in(self->streams, received[part->which] + part->offset, part->place + shift, part->num_bytes);
        else
            copy_rows(&strided->received[part->which], part->offset + strided->begin, part->place + shift, part->num_bytes,
                      false);
    }
}

void step_finish(Step *self, int phase, char *const *sent, char *const *received, const Strided *strided)
{
    PyThreadState *thread = without_gil(self->yields);
    reduce_and_take(self, phase, sent, received, strided);
    with_gil(thread);
}

/* Wait until all have signalled. Returns as `step_meet` does. */
static int await_all(Step *self, uint64_t word, int phase)
{
    if (barrier_await(self->barrier, word, self->wait) < 0)
        return -1;
    if (self->splits.num_ranks > 0)
        return !step_find_takes(self, phase);
    return self->agreed != NULL
           && memcmp(self->tables[phase], PyBytes_AS_STRING(self->agreed), PyBytes_GET_SIZE(self->agreed)) != 0;
}

int step_meet(Step *self, char *const *sent, char *const *received, const Strided *strided, int *phase)
{
    uint64_t word;
    return step_begin(self, sent, received, strided, &word, phase) < 0 ? -1 : await_all(self, word, *phase);
}

int step_rest(Step *self, uint64_t word, int phase, char *const *sent, char *const *received, const Strided *strided)
{
    int status = await_all(self, word, phase);
    if (status == 0)
        step_finish(self, phase, sent, received, strided);
    return status;
}

int step_run(Step *self, char *const *sent, char *const *received, const Strided *strided)
{
    uint64_t word;
    int phase, status = step_begin(self, sent, received, strided, &word, &phase);
    return status < 0 ? -1 : step_rest(self, word, phase, sent, received, strided);
}

int read_arrays(PyObject *buffers, int flags, char **data)
{
    if (buffers == Py_None)
        return 0;
    if (is_array(buffers)) {
        data[0] = ((Array *)buffers)->data;
        return (((Array *)buffers)->flags & flags) == flags ? 1 : -1;
    }
    if (!PyList_CheckExact(buffers) || PyList_GET_SIZE(buffers) > MOST_ARRAYS)
        return -1;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(buffers); i++) {
        Array *array = (Array *)PyList_GET_ITEM(buffers, i);
        if (!is_array((PyObject *)array) || (array->flags & flags) != flags)
            return -1;
        data[i] = array->data;
    }
    return (int)PyList_GET_SIZE(buffers);
}

static bool read_side(PyObject *buffers, int num_arrays, int flags, Rows *rows)
{
    bool is_list = PyList_CheckExact(buffers);
    if (num_arrays > (is_list ? PyList_GET_SIZE(buffers) : 1))
        return false;
    for (int i = 0; i < num_arrays; i++) {
        PyObject *array = is_list ? PyList_GET_ITEM(buffers, i) : buffers;
        if (!is_array(array) || (((Array *)array)->flags & flags) != flags || !rows_of((Array *)array, &rows[i]))
            return false;
    }
    return true;
}

int read_call(PyObject *const *args, int num_sent, int num_received, bool moves, char **sent, char **received,
              Strided *strided)
{
    if (read_arrays(args[0], C_CONTIGUOUS, sent) >= num_sent && read_arrays(args[1], CARRAY, received) >= num_received)
        return 1;
    strided->begin = 0;
    if (moves && read_side(args[0], num_sent, 0, strided->sent)
        && read_side(args[1], num_received, WRITEABLE, strided->received))
        return 2;
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *step_call(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Step *self = (Step *)object;
    char *sent[MOST_ARRAYS], *received[MOST_ARRAYS];
    Strided strided;
    if (PyVectorcall_NARGS(nargsf) != 2 || kwnames != NULL) {
        PyErr_SetString(PyExc_TypeError, "a Step is called with what is sent and what is received");
        return NULL;
    }
    bool moves = self->reduction.combine == NULL;
    int kind = read_call(args, self->num_sent, self->num_received, moves, sent, received, &strided);
    if (kind == 0)
        Py_RETURN_FALSE;
    int status = kind < 0 ? -1 : step_run(self, sent, received, kind == 2 ? &strided : NULL);
    if (status < 0)
        return NULL;
    if (status > 0)
        Py_RETURN_NONE;
    Py_RETURN_TRUE;
}

static PyObject *step_begin_method(Step *self, PyObject *const *args, Py_ssize_t num_args)
{
    char *sent[MOST_ARRAYS], *received[MOST_ARRAYS];
    int phase;
    if (num_args != 2) {
        PyErr_SetString(PyExc_TypeError, "begin(send, recv)");
        return NULL;
    }
    if (read_arrays(args[0], C_CONTIGUOUS, sent) < self->num_sent
        || read_arrays(args[1], CARRAY, received) < self->num_received)
        Py_RETURN_FALSE;
    int status = step_meet(self, sent, received, NULL, &phase);
    if (status < 0)
        return NULL;
    if (status > 0)
        Py_RETURN_NONE;
    Py_RETURN_TRUE;
}

static PyObject *step_finish_method(Step *self, PyObject *const *args, Py_ssize_t num_args)
{
    char *sent[MOST_ARRAYS], *received[MOST_ARRAYS];
    long phase = num_args == 3 ? PyLong_AsLong(args[2]) : num_args == 2 ? self->barrier->phase : -1;
    if (phase < 0 || phase >= (returns_early(self->awaited) ? NUM_PHASES : 2)
        || read_arrays(args[0], C_CONTIGUOUS, sent) < self->num_sent
        || read_arrays(args[1], CARRAY, received) < self->num_received) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "finish(send, recv, phase): arrays that are not those of the call");
        return NULL;
    }
    step_finish(self, (int)phase, sent, received, NULL);
    Py_RETURN_NONE;
}

/* What is kept: a list of (array sent, begin, array received, place, bytes). */
static int read_kept(PyObject *list, Step *self)
{
    Py_ssize_t count = PySequence_Size(list);
    if (count < 0)
        return -1;
    if ((self->kept = PyMem_New(Kept, count + 1)) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count && !PyErr_Occurred(); i++) {
        Kept *kept = &self->kept[i];
        PyObject *entry = PySequence_GetItem(list, i);
        if (entry != NULL)
            PyArg_ParseTuple(entry, "ininn", &kept->from, &kept->begin, &kept->to, &kept->place, &kept->num_bytes);
        Py_XDECREF(entry);
        self->num_kept = (int)i + 1;
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* Parts for the phases: lists of (array, offset, bytes, address). */
static int read_parts(const Step *self, PyObject *phases, struct Parts *parts)
{
    for (int phase = 0; phase < num_lists(self); phase++) {
        PyObject *list = PySequence_GetItem(phases, phase);
        Py_ssize_t count = list == NULL ? -1 : PySequence_Size(list);
        if (count >= 0 && (parts[phase].parts = PyMem_New(struct Part, count ? count : 1)) == NULL)
            PyErr_NoMemory(), count = -1;
        parts[phase].count = (int)count;
        for (Py_ssize_t i = 0; i < count; i++) {
            struct Part *part = &parts[phase].parts[i];
            PyObject *entry = PySequence_GetItem(list, i);
            unsigned long long address;
            if (entry == NULL
                || !PyArg_ParseTuple(entry, "innK", &part->which, &part->offset, &part->num_bytes, &address))
                count = -1;
            else
                part->place = (char *)(uintptr_t)address;
            Py_XDECREF(entry);
        }
        Py_XDECREF(list);
        if (count < 0)
            return -1;
    }
    return 0;
}

static int read_rows(Step *self, PyObject *rows)
{
    for (int phase = 0; phase < 2; phase++) {
        if ((self->rows[phase] = PyMem_New(char *, self->num_rows)) == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        if (phase >= num_lists(self))
            break;
        PyObject *addresses = PySequence_GetItem(rows, phase);
        for (int row = 0; addresses != NULL && row < self->num_rows; row++) {
            PyObject *address = PySequence_GetItem(addresses, row);
            self->rows[phase][row] = address == NULL ? NULL : PyLong_AsVoidPtr(address);
            Py_XDECREF(address);
        }
        Py_XDECREF(addresses);
        if (PyErr_Occurred())
            return -1;
    }
    return 0;
}

static PyObject *step_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *barrier, *wait, *text, *keeps, *puts, *takes, *kept, *rows = Py_None, *agreed = NULL;
    unsigned long long even_total = 0, odd_total = 0, sizes = 0, even_table = 0, odd_table = 0;
    unsigned long long fingerprint;
    int num_sent, num_received, kind = 0, num_rows = 0;
    const char *op = "";
    Awaited awaited;
    Py_ssize_t phase_bytes, itemsize = 0, count = 0;
    struct Own own = {-1, -1, 0};
    int is_second = 0, yields = 0, streams = 0;
    if (!PyArg_ParseTuple(args, "O!KO((iipp)nS)OiiOOO|sCniOn(KK)SK(KK)(iin)ppp", barrier_type, &barrier, &fingerprint,
                          &wait, &awaited.first, &awaited.end, &awaited.in_order, &awaited.is_long, &phase_bytes, &text,
                          &keeps, &num_sent, &num_received, &puts, &takes, &kept, &op, &kind, &itemsize, &num_rows, &rows, &count,
                          &even_total, &odd_total, &agreed, &sizes, &even_table, &odd_table, &own.row, &own.which,
                          &own.offset, &is_second, &yields, &streams))
        return NULL;
    Reduction reduction = {NULL, 1, false};
    if (PyBytes_GET_SIZE(text) > CALL_TEXT_BYTES || awaited.first > awaited.end
        || awaited.end > ((Barrier *)barrier)->num_peers) {
        PyErr_SetString(PyExc_ValueError, "Step: the text is too long, or there are no such peers to wait for");
        return NULL;
    }
    if (num_sent > MOST_ARRAYS || num_received > MOST_ARRAYS
        || (op[0] && !find_reduction(op, (char)kind, itemsize, &reduction)))
        Py_RETURN_NONE; /* it is NumPy's */
    Step *self = (Step *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->call = step_call;
    self->barrier = (Barrier *)Py_NewRef(barrier);
    self->fingerprint = fingerprint;
    self->wait = Py_NewRef(wait);
    self->awaited = awaited, self->phase_bytes = phase_bytes;
    self->text = Py_NewRef(text);
    self->keeps = Py_NewRef(keeps);
    self->num_sent = num_sent, self->num_received = num_received;
    self->reduction = reduction;
    self->num_rows = num_rows;
    self->own = own;
    self->totals[0] = (char *)(uintptr_t)even_total, self->totals[1] = (char *)(uintptr_t)odd_total;
    self->is_second = is_second, self->yields = yields, self->streams = streams;
    self->total_bytes = count * itemsize;
    if (agreed != NULL && PyBytes_GET_SIZE(agreed)) {
        self->agreed = Py_NewRef(agreed);
        self->sizes = (char *)(uintptr_t)sizes;
        self->tables[0] = (char *)(uintptr_t)even_table, self->tables[1] = (char *)(uintptr_t)odd_table;
    }
    if (read_parts(self, puts, self->puts) < 0 || read_parts(self, takes, self->takes) < 0 || read_kept(kept, self) < 0
        || (op[0] && read_rows(self, rows) < 0)) {
        Py_DECREF(self);
        return NULL;
    }
    if (even_total != 0 && self->takes[0].count > 0 && count * itemsize >= SHORTEST_PART * (Py_ssize_t)self->takes[0].count
        && (self->part_rows = PyMem_New(char *, num_rows)) == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static int step_traverse(Step *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->barrier);
    Py_VISIT(self->wait);
    Py_VISIT(self->keeps);
    return 0;
}

static int step_clear(Step *self)
{
    Py_CLEAR(self->barrier);
    Py_CLEAR(self->wait);
    Py_CLEAR(self->text);
    Py_CLEAR(self->keeps);
    Py_CLEAR(self->agreed);
    Py_CLEAR(self->alike.words);
    Py_CLEAR(self->alike.hasher);
    Py_CLEAR(self->splits.sizes);
    return 0;
}

static void step_dealloc(Step *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    step_clear(self);
    for (int phase = 0; phase < 2; phase++) {
        PyMem_Free(self->puts[phase].parts);
        PyMem_Free(self->takes[phase].parts);
        PyMem_Free(self->rows[phase]);
    }
    PyMem_Free(self->kept);
    PyMem_Free(self->part_rows);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"begin", (PyCFunction)(void (*)(void))step_begin_method, METH_FASTCALL,
     "begin(send, recv): the step of a call for which all ranks wait; return False if nothing was done, and None if the "
     "ranks' sizes are not those agreed."},
    {"finish", (PyCFunction)(void (*)(void))step_finish_method, METH_FASTCALL,
     "finish(send, recv, phase): take what is received, of a call that the core has begun; the phase is that of now by default."},
    {"set_alike", (PyCFunction)step_set_alike, METH_VARARGS,
     "set_alike(num_bytes, (least_bytes, most_bytes), (slots_begin, slots_end, slot_bytes), form, hasher): a rank puts so "
     "many bytes; a call that puts others, between these two, is carried out in the same way. Its signature has this "
     "form, of which `hasher` makes the fingerprint."},
    {"set_splits", (PyCFunction)step_set_splits, METH_VARARGS,
     "set_splits(rank, num_ranks, row_bytes, limit_bytes, most_bytes, (even_slots, odd_slots, slot_bytes)): find what to take "
     "in the table, also if that is not the agreed one, and make steps for other numbers of rows. No rank puts more than "
     "the limit into its slot, and this one not more than the most."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Step, call), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, step_new}, {Py_tp_dealloc, step_dealloc}, {Py_tp_traverse, step_traverse}, {Py_tp_clear, step_clear},
    {Py_tp_call, PyVectorcall_Call}, {Py_tp_methods, methods}, {Py_tp_members, members},
    {Py_tp_doc, "Step(barrier, fingerprint, wait, (awaited, phase_bytes, text), keeps, num_sent, num_received, puts, takes, kept, op, kind, "
                "itemsize, num_rows, rows, count, totals, agreed, sizes, tables, own, is_second, yields, streams): a call of few bytes; None if its reduction is left to NumPy. "
                "It returns True, False if it did nothing, and None if it took nothing, since the ranks' sizes are others."},
    {0, NULL},
};

PyType_Spec step_spec = {
    "meshdist.core._core.Step", sizeof(Step), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots,
};
