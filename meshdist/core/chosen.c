/* Chosen: a call whose way is chosen, as long as that holds. What carries it out, and for how long, its plan tells after
   each call that goes through Python: see `BarrierPlan.next_calls`. */
#include "core.h"

#include <structmember.h>

PyTypeObject *chosen_type, *countdown_type;

/* How much is left of something, for all that count it. */
typedef struct {
    PyObject_HEAD
    long long left;
} Countdown;

/* What a plan tells, a tuple: what carries out the next calls; a Countdown of calls, of which the last one, and those after
   it, go through Python; one of bytes until the ranks look where they are, and as how many a call counts. None if there is
   no such limit. If arrays may be shared, a tuple: what tells whether this rank has such, the barrier, and for each phase
   those of its words in which the ranks tell that the arrays of the call are; else None. */
enum { RUN, CALLS, LOOKS, COST, SHARED, NUM_TOLD };
enum { HEAP, BARRIER, WORDS };

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *plan, *rest; /* what carries out a call in Python */
    PyObject *told;        /* NULL if that is to carry out the next one */
} Chosen;

static Countdown *countdown(PyObject *told, int which)
{
    PyObject *item = PyTuple_GET_ITEM(told, which);
    return item == Py_None ? NULL : (Countdown *)item;
}

static long long cost(PyObject *told) { return PyLong_AsLongLong(PyTuple_GET_ITEM(told, COST)); }

static bool holds(PyObject *told)
{
    const Countdown *calls = countdown(told, CALLS), *looks = countdown(told, LOOKS);
    return (calls == NULL || calls->left > 1) && (looks == NULL || looks->left > cost(told));
}

static void count(PyObject *told)
{
    Countdown *calls = countdown(told, CALLS), *looks = countdown(told, LOOKS);
    if (calls != NULL)
        calls->left--;
    if (looks != NULL)
        looks->left -= cost(told);
}

static Barrier *barrier_of(PyObject *shared) { return (Barrier *)PyTuple_GET_ITEM(shared, BARRIER); }

static bool any_shared(PyObject *shared, int phase)
{
    PyObject *words = PyTuple_GET_ITEM(PyTuple_GET_ITEM(shared, WORDS), phase);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(words); i++) {
        if (load(&barrier_of(shared)->words[PyLong_AsSsize_t(PyTuple_GET_ITEM(words, i))]))
            return true;
    }
    return false;
}

/* Release the result of a call: -1 for an error, 1 for True, else `otherwise`. */
static int status_of(PyObject *result, int otherwise)
{
    Py_XDECREF(result);
    return result == NULL ? -1 : result == Py_True ? 1 : otherwise;
}

/* Carry out a call in two halves, unless arrays are shared. Returns 1, 0 if nothing was done, 2 if the plan went on after
   the first half, or -1 with an error set. */
static int run_unshared(const Chosen *self, PyObject *told, PyObject *const *args)
{
    PyObject *run = PyTuple_GET_ITEM(told, RUN), *shared = PyTuple_GET_ITEM(told, SHARED);
    PyObject *in_use = PyObject_GetAttrString(PyTuple_GET_ITEM(shared, HEAP), "in_use");
    bool is_plain = in_use == Py_False && !any_shared(shared, barrier_of(shared)->phase ^ 1);
    Py_XDECREF(in_use);
    if (in_use == NULL || !is_plain)
        return in_use == NULL ? -1 : 0;
    PyObject *begun = PyObject_CallMethod(run, "begin", "OO", args[0], args[1]);
    if (begun == NULL || begun == Py_False)
        return status_of(begun, 0);
    bool goes_on = begun == Py_None || any_shared(shared, barrier_of(shared)->phase);
    Py_DECREF(begun);
    return goes_on ? status_of(PyObject_CallMethod(self->plan, "go_on", "OO", args[0], args[1]), 2)
                   : status_of(PyObject_CallMethod(run, "finish", "OO", args[0], args[1]), 1);
}

/* Whether a plan has told what the functions above read. */
static bool is_told(PyObject *told)
{
    if (!PyTuple_Check(told) || PyTuple_GET_SIZE(told) != NUM_TOLD || !PyLong_Check(PyTuple_GET_ITEM(told, COST)))
        return false;
    for (int which = CALLS; which <= LOOKS; which++) {
        PyObject *item = PyTuple_GET_ITEM(told, which);
        if (item != Py_None && Py_TYPE(item) != countdown_type)
            return false;
    }
    PyObject *shared = PyTuple_GET_ITEM(told, SHARED), *heap, *barrier, *even, *odd;
    PyTypeObject *words = &PyTuple_Type;
    return shared == Py_None
           || (PyTuple_Check(shared)
               && PyArg_ParseTuple(shared, "OO!(O!O!)", &heap, barrier_type, &barrier, words, &even, words, &odd));
}

/* Have the plan tell what carries out the next calls. */
static int ask(Chosen *self)
{
    PyObject *told = PyObject_CallMethod(self->plan, "next_calls", NULL);
    if (told != NULL && told != Py_None && !is_told(told)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "next_calls must return NextCalls, or None");
        Py_CLEAR(told);
    }
    int status = told == NULL ? -1 : 0;
    if (told == Py_None)
        Py_CLEAR(told);
    Py_XSETREF(self->told, told);
    return status;
}

static PyObject *chosen_call(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Chosen *self = (Chosen *)object;
    if (PyVectorcall_NARGS(nargsf) != 2 || kwnames != NULL) {
        PyErr_SetString(PyExc_TypeError, "a Chosen is called with what is sent and what is received");
        return NULL;
    }
    int status = 0;
    PyObject *told = Py_XNewRef(self->told);
    if (told != NULL && holds(told)) {
        status = PyTuple_GET_ITEM(told, SHARED) != Py_None
                     ? run_unshared(self, told, args)
                     : status_of(PyObject_Vectorcall(PyTuple_GET_ITEM(told, RUN), args, 2, NULL), 0);
        if (status == 1)
            count(told);
    }
    Py_XDECREF(told);
    if (status < 0)
        return NULL;
    if (status == 1)
        Py_RETURN_NONE;
    PyObject *result = status == 2 ? Py_NewRef(Py_None) : PyObject_Vectorcall(self->rest, args, 2, NULL);
    if (result != NULL && result != Py_True && ask(self) < 0) /* True: there is something faster from now on */
        Py_CLEAR(result);
    return result;
}

static PyObject *chosen_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *plan, *rest;
    if (!PyArg_ParseTuple(args, "OO", &plan, &rest))
        return NULL;
    Chosen *self = (Chosen *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->call = chosen_call;
    self->plan = Py_NewRef(plan), self->rest = Py_NewRef(rest);
    return (PyObject *)self;
}

static int chosen_traverse(Chosen *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->plan);
    Py_VISIT(self->rest);
    Py_VISIT(self->told);
    return 0;
}

static int chosen_clear(Chosen *self)
{
    Py_CLEAR(self->told);
    return 0;
}

static void chosen_dealloc(Chosen *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->told);
    Py_XDECREF(self->plan);
    Py_XDECREF(self->rest);
    type->tp_free(self);
    Py_DECREF(type);
}

static int countdown_init(Countdown *self, PyObject *args, PyObject *keywords)
{
    return PyArg_ParseTuple(args, "L", &self->left) ? 0 : -1;
}

static void countdown_dealloc(Countdown *self)
{
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Chosen, call), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMemberDef countdown_members[] = {
    {"left", T_LONGLONG, offsetof(Countdown, left), 0, "How much is left; at most 0 if nothing is."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, chosen_new}, {Py_tp_dealloc, chosen_dealloc}, {Py_tp_traverse, chosen_traverse},
    {Py_tp_clear, chosen_clear}, {Py_tp_call, PyVectorcall_Call}, {Py_tp_members, members},
    {Py_tp_doc, "Chosen(plan, rest): carries out calls as `plan.next_calls()` has told after the last call of `rest`, while that "
                "holds, and else by `rest(send, recv)`, whose result it returns. `plan.go_on(send, recv)` goes on after the "
                "first step of a call if the arrays of a rank are shared, or the ranks' sizes are not those agreed."},
    {0, NULL},
};

PyType_Spec chosen_spec = {
    "meshdist.core._core.Chosen", sizeof(Chosen), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots,
};

static PyType_Slot countdown_slots[] = {
    {Py_tp_init, countdown_init}, {Py_tp_dealloc, countdown_dealloc}, {Py_tp_members, countdown_members},
    {Py_tp_doc, "Countdown(left): a number that several calls count down."}, {0, NULL},
};

PyType_Spec countdown_spec = {
    "meshdist.core._core.Countdown", sizeof(Countdown), 0, Py_TPFLAGS_DEFAULT, countdown_slots,
};
