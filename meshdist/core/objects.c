/* ObjectSender: sends lists of objects through the ring of a channel. Of them, only the size of a pickle differs. */
#include "core.h"

#include <structmember.h>

PyTypeObject *object_sender_type;

/* Returns the dtype that stands for a list of so many objects; set by `configure_objects`. */
static PyObject *dtype_of;

PyObject *objects_dump(ObjectSender *self, PyObject *list)
{
    PyObject *pickle = PyObject_CallOneArg(self->dumps, list);
    if (pickle == NULL && PyErr_ExceptionMatches(PyExc_Exception))
        PyErr_Clear(); /* Python says which object cannot be pickled */
    else if (pickle != NULL && !PyBytes_CheckExact(pickle))
        Py_CLEAR(pickle);
    return pickle;
}

PyObject *objects_facts(PyObject *facts, Py_ssize_t number, Py_ssize_t num_bytes)
{
    PyObject *count = PyLong_FromSsize_t(number), *last = PyTuple_GET_ITEM(facts, SHAPE);
    PyObject *dtype = count == NULL ? NULL : PyObject_CallOneArg(dtype_of, count);
    Py_XDECREF(count);
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
    PyObject *ring, *dumps, *rest;
    long long tag;
    Py_ssize_t most_bytes;
    int is_async;
    if (!PyArg_ParseTuple(args, "O!LnOOp", ring_type, &ring, &tag, &most_bytes, &dumps, &rest, &is_async))
        return NULL;
    ObjectSender *self = (ObjectSender *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->ring = (Ring *)Py_NewRef(ring), self->tag = tag, self->most_bytes = most_bytes;
    self->dumps = Py_NewRef(dumps), self->rest = Py_NewRef(rest), self->is_async = (char)is_async;
    return (PyObject *)self;
}

static int sender_traverse(ObjectSender *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->ring);
    Py_VISIT(self->dumps);
    Py_VISIT(self->rest);
    return 0;
}

static void sender_dealloc(ObjectSender *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->ring);
    Py_XDECREF(self->dumps);
    Py_XDECREF(self->rest);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *configure_objects(PyObject *module, PyObject *function)
{
    Py_XSETREF(dtype_of, Py_NewRef(function));
    Py_RETURN_NONE;
}

PyMethodDef object_functions[] = {
    {"configure_objects", configure_objects, METH_O, "Set what returns the dtype that stands for a list of objects."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, sender_new}, {Py_tp_dealloc, sender_dealloc}, {Py_tp_traverse, sender_traverse},
    {Py_tp_doc, "ObjectSender(ring, tag, most_bytes, dumps, rest, is_async): sends lists of objects of a tag. Sync, "
                "it waits until a pickle of more bytes is taken; `rest(pickle, number)` sends one that has no room."},
    {0, NULL},
};

PyType_Spec object_sender_spec = {
    "meshdist.core._core.ObjectSender", sizeof(ObjectSender), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots,
};
