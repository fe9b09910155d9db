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

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *plan, *rest; /* what carries out a call in Python */
    PyObject *run;         /* what carries out the next calls; NULL for `rest` */
    Countdown *calls;      /* the last one, and those after it, go through Python; NULL for none */
    Countdown *looks;      /* bytes until the ranks look where they are; NULL if they do not */
    long long cost;        /* bytes that a call counts as */
    /* If arrays may be shared: what tells whether this rank has such, and the words in which the ranks tell that those of
       the call are, for each phase. */
    PyObject *heap;
    Barrier *barrier;
    Py_ssize_t *words[2], num_words;
} Chosen;

static void forget(Chosen *self)
{
    Py_CLEAR(self->run);
    Py_CLEAR(self->calls);
    Py_CLEAR(self->looks);
    Py_CLEAR(self->heap);
    Py_CLEAR(self->barrier);
    for (int phase = 0; phase < 2; phase++) {
        PyMem_Free(self->words[phase]);
        self->words[phase] = NULL;
    }
}

static bool holds(const Chosen *self)
{
    return self->run != NULL && (self->calls == NULL || self->calls->left > 1)
           && (self->looks == NULL || self->looks->left > self->cost);
}

static void count(const Chosen *self)
{
    if (self->calls != NULL)
        self->calls->left--;
    if (self->looks != NULL)
        self->looks->left -= self->cost;
}

static bool any_shared(const Chosen *self, int phase)
{
    for (Py_ssize_t i = 0; i < self->num_words; i++) {
        if (load(&self->barrier->words[self->words[phase][i]]))
            return true;
    }
    return false;
}

/* Take the reference to what a call in one of two parts has returned, or to what the plan has. */
static int status_of(PyObject *result, int otherwise)
{
    Py_XDECREF(result);
    return result == NULL ? -1 : result == Py_True ? 1 : otherwise;
}

/* Returns 1, 0 if nothing was done, 2 if the plan went on after the first step, or -1 with an error set. */
static int run_unshared(const Chosen *self, PyObject *const *args)
{
    PyObject *in_use = PyObject_GetAttrString(self->heap, "in_use");
    bool is_plain = in_use == Py_False && !any_shared(self, self->barrier->phase ^ 1);
    Py_XDECREF(in_use);
    if (in_use == NULL || !is_plain)
        return in_use == NULL ? -1 : 0;
    PyObject *begun = PyObject_CallMethod(self->run, "begin", "OO", args[0], args[1]);
    if (begun == NULL || begun == Py_False)
        return status_of(begun, 0);
    if (begun == Py_None || any_shared(self, self->barrier->phase)) {
        Py_DECREF(begun);
        return status_of(PyObject_CallMethod(self->plan, "go_on", "OO", args[0], args[1]), 2);
    }
    Py_DECREF(begun);
    return status_of(PyObject_CallMethod(self->run, "finish", "OO", args[0], args[1]), 1);
}

static Py_ssize_t *read_words(PyObject *list, Py_ssize_t *count)
{
    Py_ssize_t size = PySequence_Size(list), *words = size < 0 ? NULL : PyMem_New(Py_ssize_t, size + 1);
    if (words == NULL && size >= 0)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; words != NULL && i < size; i++) {
        PyObject *word = PySequence_GetItem(list, i);
        words[i] = word == NULL ? -1 : PyLong_AsSsize_t(word);
        Py_XDECREF(word);
        if (PyErr_Occurred()) {
            PyMem_Free(words);
            return NULL;
        }
    }
    *count = size;
    return words;
}

/* Have the plan tell what carries out the next calls. */
static int ask(Chosen *self)
{
    PyObject *told = PyObject_CallMethod(self->plan, "next_calls", NULL), *run, *calls, *looks, *shared;
    long long cost;
    forget(self);
    if (told == NULL || told == Py_None) {
        Py_XDECREF(told);
        return told == NULL ? -1 : 0;
    }
    int status = -1;
    if (!PyArg_ParseTuple(told, "OOOLO", &run, &calls, &looks, &cost, &shared))
        goto done;
    if ((calls != Py_None && Py_TYPE(calls) != countdown_type) || (looks != Py_None && Py_TYPE(looks) != countdown_type)) {
        PyErr_SetString(PyExc_TypeError, "next_calls: calls and looks are Countdowns, or None");
        goto done;
    }
    if (shared != Py_None) {
        PyObject *heap, *barrier, *even, *odd;
        if (!PyArg_ParseTuple(shared, "OO(OO)", &heap, &barrier, &even, &odd)
            || (self->words[0] = read_words(even, &self->num_words)) == NULL
            || (self->words[1] = read_words(odd, &self->num_words)) == NULL)
            goto done;
        if (!PyObject_TypeCheck(barrier, barrier_type)) {
            PyErr_SetString(PyExc_TypeError, "next_calls: a Barrier has the words");
            goto done;
        }
        self->heap = Py_NewRef(heap), self->barrier = (Barrier *)Py_NewRef(barrier);
    }
    self->calls = calls == Py_None ? NULL : (Countdown *)Py_NewRef(calls);
    self->looks = looks == Py_None ? NULL : (Countdown *)Py_NewRef(looks);
    self->run = Py_NewRef(run), self->cost = cost;
    status = 0;
done:
    Py_DECREF(told);
    return status;
}

static PyObject *chosen_call(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Chosen *self = (Chosen *)object;
    if (PyVectorcall_NARGS(nargsf) != 2 || kwnames != NULL) {
        PyErr_SetString(PyExc_TypeError, "a Chosen is called with what is sent and what is received");
        return NULL;
    }
    int status = !holds(self)           ? 0
                 : self->heap != NULL   ? run_unshared(self, args)
                                        : status_of(PyObject_Vectorcall(self->run, args, 2, NULL), 0);
    if (status < 0)
        return NULL;
    if (status == 1) {
        count(self);
        Py_RETURN_NONE;
    }
    PyObject *result = status == 2 ? Py_NewRef(Py_None) : PyObject_Vectorcall(self->rest, args, 2, NULL);
    if (result != NULL && result != Py_True && ask(self) < 0) /* True: there is something faster, and this is not used again */
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
    if (ask(self) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int chosen_traverse(Chosen *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->plan);
    Py_VISIT(self->rest);
    Py_VISIT(self->run);
    Py_VISIT(self->heap);
    return 0;
}

static int chosen_clear(Chosen *self)
{
    forget(self);
    return 0;
}

static void chosen_dealloc(Chosen *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    forget(self);
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
    {Py_tp_doc, "Chosen(plan, rest): carries out calls as `plan.next_calls()` tells, while that holds, and else by `rest(send, "
                "recv)`, whose result it returns. `plan.go_on(send, recv)` goes on after the first step of a call if the arrays "
                "of a rank are shared, or the ranks' sizes are others."},
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
