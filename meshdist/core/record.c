/* Record: what the flight recorder keeps of a call; and where the user's code has made the call. */
#include "core.h"

#include <structmember.h>

PyTypeObject *record_type;

/* `is_ours` of `call_site`: whether a file is one of the package's. */
static PyObject *is_ours;

/* For code that has made calls: whether it is the package's. A place is taken by the last code that falls on it. */
enum { NUM_CODES = 128 };
static struct {
    PyObject *code;
    bool is_ours;
} codes[NUM_CODES];

void tell_ours_by(PyObject *function) { Py_XSETREF(is_ours, Py_NewRef(function)); }

int is_our_code(PyObject *code)
{
    size_t place = ((uintptr_t)code >> 5) % NUM_CODES;
    if (codes[place].code != code) {
        PyObject *file = PyObject_GetAttrString(code, "co_filename");
        PyObject *ours = file == NULL ? NULL : PyObject_CallOneArg(is_ours, file);
        Py_XDECREF(file);
        if (ours == NULL)
            return -1;
        codes[place].is_ours = ours == Py_True;
        Py_DECREF(ours);
        Py_XSETREF(codes[place].code, Py_NewRef(code));
    }
    return codes[place].is_ours;
}

PyObject *place_of_user(int *instruction)
{
    PyFrameObject *frame = (PyFrameObject *)Py_XNewRef((PyObject *)PyEval_GetFrame()), *outer = NULL;
    if (frame == NULL)
        return NULL;
    PyObject *code = (PyObject *)PyFrame_GetCode(frame);
    int ours;
    while ((ours = is_our_code(code)) > 0 && (outer = PyFrame_GetBack(frame)) != NULL) {
        Py_SETREF(frame, outer);
        Py_SETREF(code, (PyObject *)PyFrame_GetCode(frame));
    }
#if PY_VERSION_HEX >= 0x030B0000
    *instruction = PyFrame_GetLasti(frame);
#else
    PyObject *last = PyObject_GetAttrString((PyObject *)frame, "f_lasti");
    *instruction = last == NULL ? 0 : (int)PyLong_AsLong(last);
    Py_XDECREF(last);
#endif
    Py_DECREF(frame);
    if (ours < 0)
        Py_CLEAR(code);
    return code;
}

static Record *new_record(PyObject *facts, unsigned long long sequence, int64_t created_ns, PyObject *code, int instruction)
{
    Record *self = PyObject_New(Record, record_type);
    if (self == NULL)
        return NULL;
    self->facts = Py_NewRef(facts), self->sequence = sequence;
    self->created = created_ns, self->started = self->completed = 0;
    self->code = Py_NewRef(code), self->instruction = instruction;
    self->error = self->peer = NULL;
    return self;
}

Record *record_call(Calls *calls, PyObject *facts, unsigned long long number, int64_t began_ns, Progress progress,
                    PyObject *code, int instruction)
{
    Record *record = new_record(facts, number, began_ns, code, instruction);
    if (record == NULL)
        return NULL;
    record->started = progress >= HAS_STARTED ? began_ns : 0;
    record->completed = progress == IS_DONE ? began_ns : 0;
    PyObject *kept = PyObject_CallOneArg(calls->keep, (PyObject *)record);
    Py_XDECREF(kept);
    if (kept == NULL)
        Py_CLEAR(record);
    return record;
}

int record_message(Calls *calls, PyObject *facts, bool is_done, Record **record)
{
    int instruction;
    PyObject *code = place_of_user(&instruction);
    if (code != NULL)
        *record = record_call(calls, facts, ++calls->num_messages, now_ns(), is_done ? IS_DONE : HAS_STARTED, code,
                              instruction);
    Py_XDECREF(code);
    return *record == NULL ? -1 : 1;
}

static PyObject *record_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *facts, *code;
    unsigned long long sequence;
    long long created_ns, started_ns;
    int instruction;
    if (!PyArg_ParseTuple(args, "OKLLOi", &facts, &sequence, &created_ns, &started_ns, &code, &instruction))
        return NULL;
    Record *self = new_record(facts, sequence, created_ns, code, instruction);
    if (self != NULL)
        self->started = started_ns;
    return (PyObject *)self;
}

static void record_dealloc(Record *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(self->facts);
    Py_XDECREF(self->code);
    Py_XDECREF(self->error);
    Py_XDECREF(self->peer);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMemberDef members[] = {
    {"facts", T_OBJECT, offsetof(Record, facts), 0, NULL},
    {"sequence", T_ULONGLONG, offsetof(Record, sequence), 0, NULL},
    {"created", T_LONGLONG, offsetof(Record, created), 0, NULL},
    {"started", T_LONGLONG, offsetof(Record, started), 0, NULL},
    {"completed", T_LONGLONG, offsetof(Record, completed), 0, NULL},
    {"code", T_OBJECT, offsetof(Record, code), 0, NULL},
    {"instruction", T_INT, offsetof(Record, instruction), 0, NULL},
    {"error", T_OBJECT, offsetof(Record, error), 0, NULL},
    {"peer", T_OBJECT, offsetof(Record, peer), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, record_new}, {Py_tp_dealloc, record_dealloc}, {Py_tp_members, members},
    {Py_tp_doc, "Record(facts, sequence, created, started, code, instruction); see `PlainRecord`."}, {0, NULL},
};

PyType_Spec record_spec = {"meshdist.core._core.Record", sizeof(Record), 0, Py_TPFLAGS_DEFAULT, slots};
