/* ObjectSender: sends lists of objects, or objects as lists of one, through the ring of a channel. Of them, only the size of
   a pickle differs. */
#include "core.h"

#include <structmember.h>

PyTypeObject *object_sender_type;

/* What returns the dtype that stands for a list of so many objects; what pickles, and unpickles, and what raises the error
   where that fails. Set by `configure_objects`. */
static PyObject *dtype_of, *dumps, *loads, *unpickle;

/* The dtypes of short lists. */
enum { NUM_DTYPES = 16 };
static PyObject *dtypes[NUM_DTYPES];

PyObject *objects_dump(PyObject *list)
{
    PyObject *pickle = PyObject_CallOneArg(dumps, list);
    if (pickle == NULL && PyErr_ExceptionMatches(PyExc_Exception))
        PyErr_Clear(); /* Python says which object cannot be pickled */
    else if (pickle != NULL && !PyBytes_CheckExact(pickle))
        Py_CLEAR(pickle);
    return pickle;
}

PyObject *objects_load(PyObject *pickle, PyObject *prefix)
{
    PyObject *objects = PyObject_CallOneArg(loads, pickle);
    if (objects == NULL) {
        PyObject *type, *error, *trace;
        PyErr_Fetch(&type, &error, &trace);
        PyErr_NormalizeException(&type, &error, &trace);
        PyException_SetTraceback(error, trace == NULL ? Py_None : trace); /* without frames of importlib */
        objects = PyObject_CallFunctionObjArgs(unpickle, pickle, prefix, error, NULL);
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(trace);
    }
    return objects;
}

static PyObject *dtype_of_list(Py_ssize_t number)
{
    if (number < NUM_DTYPES && dtypes[number] != NULL)
        return Py_NewRef(dtypes[number]);
    PyObject *count = PyLong_FromSsize_t(number), *dtype = count == NULL ? NULL : PyObject_CallOneArg(dtype_of, count);
    Py_XDECREF(count);
    if (dtype != NULL && number < NUM_DTYPES)
        Py_XSETREF(dtypes[number], Py_NewRef(dtype));
    return dtype;
}

PyObject *objects_facts(PyObject *facts, Py_ssize_t number, Py_ssize_t num_bytes)
{
    PyObject *dtype = dtype_of_list(number), *last = PyTuple_GET_ITEM(facts, SHAPE);
    if (dtype == PyTuple_GET_ITEM(facts, DTYPE) && PyTuple_GET_SIZE(last) == 1
        && PyLong_AsSsize_t(PyTuple_GET_ITEM(last, 0)) == num_bytes) {
        Py_DECREF(dtype);
        return Py_NewRef(facts);
    }
    PyObject *told = PyTuple_New(PyTuple_GET_SIZE(facts)), *shape = Py_BuildValue("(n)", num_bytes);
    if (told == NULL || dtype == NULL || shape == NULL) {
        Py_XDECREF(told);
        Py_XDECREF(dtype);
        Py_XDECREF(shape);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(facts); i++)
        PyTuple_SET_ITEM(told, i, i == DTYPE ? dtype : i == SHAPE ? shape : Py_NewRef(PyTuple_GET_ITEM(facts, i)));
    return told;
}

static PyObject *sender_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *ring, *rest;
    long long tag;
    Py_ssize_t most_bytes;
    int is_async, is_single;
    if (!PyArg_ParseTuple(args, "O!LnOpp", ring_type, &ring, &tag, &most_bytes, &rest, &is_async, &is_single))
        return NULL;
    ObjectSender *self = (ObjectSender *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->ring = (Ring *)Py_NewRef(ring), self->tag = tag, self->most_bytes = most_bytes;
    self->rest = Py_NewRef(rest), self->is_async = (char)is_async, self->is_single = (char)is_single;
    return (PyObject *)self;
}

static int sender_traverse(ObjectSender *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->ring);
    Py_VISIT(self->rest);
    return 0;
}

static void sender_dealloc(ObjectSender *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->ring);
    Py_XDECREF(self->rest);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *configure_objects(PyObject *module, PyObject *args)
{
    PyObject **kept[] = {&dtype_of, &dumps, &loads, &unpickle};
    enum { NUM_KEPT = sizeof kept / sizeof *kept };
    PyObject *given[NUM_KEPT];
    if (!PyArg_ParseTuple(args, "OOOO", &given[0], &given[1], &given[2], &given[3]))
        return NULL;
    for (int i = 0; i < NUM_KEPT; i++)
        Py_XSETREF(*kept[i], Py_NewRef(given[i]));
    Py_RETURN_NONE;
}

PyMethodDef object_functions[] = {
    {"configure_objects", configure_objects, METH_VARARGS,
     "configure_objects(dtype_of, dumps, loads, unpickle): what returns the dtype that stands for a list of so many objects; "
     "what pickles, and unpickles; `unpickle(pickle, prefix, error)` raises the error where that fails."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, sender_new}, {Py_tp_dealloc, sender_dealloc}, {Py_tp_traverse, sender_traverse},
    {Py_tp_doc, "ObjectSender(ring, tag, most_bytes, rest, is_async, is_single): sends lists of objects of a tag, or "
                "if `is_single`, what is passed as a list of one. Sync, it waits until a pickle of more bytes is taken; `rest(pickle, number)` sends one that has no room."},
    {0, NULL},
};

PyType_Spec object_sender_spec = {
    "meshdist.core._core.ObjectSender", sizeof(ObjectSender), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots,
};
