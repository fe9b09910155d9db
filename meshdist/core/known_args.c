/* What the arguments of a known call were: the dtype and shape of arrays, NumPy's integers by type and value, what is in
   tuples, lists and dicts item by item, and all else by identity. */
#include "known_calls.h"

/* numpy.integer. */
static PyTypeObject *integer_type;
/* A tuple: values of these types are compared by identity, besides None, numbers and strings. */
static PyObject *identity_types;

void know_integers(PyTypeObject *type) { Py_XSETREF(integer_type, (PyTypeObject *)Py_NewRef(type)); }

void arg_clear(Arg *arg)
{
    Py_CLEAR(arg->value);
    for (int i = 0; i < arg->count; i++)
        arg_clear(&arg->items[i]);
    PyMem_Free(arg->items);
    PyMem_Free(arg->shape);
    PyMem_Free(arg->strides);
    arg->items = NULL, arg->shape = arg->strides = NULL, arg->count = 0;
}

static bool learn_array(Arg *arg, PyObject *object, int flags)
{
    Array *array = (Array *)object;
    bool keeps_strides = is_array(object) && (flags & C_CONTIGUOUS) && !(array->flags & C_CONTIGUOUS);
    flags &= keeps_strides ? ~C_CONTIGUOUS : ~0;
    if (!is_array(object) || (array->flags & flags) != flags)
        return false;
    arg->kind = ARRAY, arg->flags = flags, arg->num_dims = array->num_dims;
    arg->value = Py_NewRef(array->dtype);
    arg->shape = PyMem_New(Py_ssize_t, array->num_dims + 1);
    PyObject *num_bytes = PyObject_GetAttrString(object, "nbytes");
    if (arg->shape == NULL || num_bytes == NULL || (arg->num_bytes = PyLong_AsSsize_t(num_bytes)) < 0) {
        Py_XDECREF(num_bytes);
        PyErr_Clear();
        return false;
    }
    Py_DECREF(num_bytes);
    memcpy(arg->shape, array->shape, array->num_dims * sizeof *arg->shape);
    const Py_ssize_t size = num_elements(array);
    arg->itemsize = size == 0 ? 0 : arg->num_bytes / size;
    arg->begin = array->data;
    if (keeps_strides) {
        char *end;
        if ((arg->strides = PyMem_New(Py_ssize_t, array->num_dims)) == NULL)
            return false;
        memcpy(arg->strides, array->strides, array->num_dims * sizeof *arg->strides);
        extent_of(array, arg->itemsize, &arg->begin, &end);
    }
    return true;
}

bool learn_buffers(Arg *arg, PyObject *object, int flags)
{
    if (!PyList_CheckExact(object))
        return learn_array(arg, object, flags);
    Py_ssize_t size = PyList_GET_SIZE(object);
    if (size > MOST_KNOWN_ARRAYS || (arg->items = PyMem_Calloc(size + 1, sizeof *arg->items)) == NULL)
        return false;
    arg->kind = LIST, arg->count = (int)size;
    for (Py_ssize_t i = 0; i < size; i++) {
        if (!learn_array(&arg->items[i], PyList_GET_ITEM(object, i), flags))
            return false;
    }
    return true;
}

bool learn_objects(Arg *arg, PyObject *object, bool is_single)
{
    arg->kind = is_single ? OBJECT : OBJECTS;
    return is_single || PyList_CheckExact(object);
}

static bool learn_constant(Arg *arg, PyObject *object)
{
    bool is_constant = object == Py_None || PyBool_Check(object) || PyLong_CheckExact(object)
                       || PyUnicode_CheckExact(object);
    if (!is_constant && (identity_types == NULL || PyObject_IsInstance(object, identity_types) != 1)) {
        PyErr_Clear();
        return false;
    }
    arg->kind = IDENTICAL, arg->value = Py_NewRef(object);
    return true;
}

/* Tags and ranks may be computed: there is more than one object of a large number. */
static bool is_equal_integer(PyObject *object, PyObject *value)
{
    return PyLong_CheckExact(object) && PyLong_CheckExact(value) && PyObject_RichCompareBool(object, value, Py_EQ) == 1;
}

/* The value of an integer of NumPy, a new object at each use. */
static bool read_number(PyObject *object, int64_t *number)
{
    PyObject *index = PyNumber_Index(object);
    if (index != NULL) {
        *number = PyLong_AsLongLong(index);
        Py_DECREF(index);
    }
    if (!PyErr_Occurred())
        return true;
    PyErr_Clear();
    return false;
}

static bool is_number(PyObject *object)
{
    return integer_type != NULL && PyObject_TypeCheck(object, integer_type);
}

bool read_integer(PyObject *object, int64_t *number)
{
    return (PyLong_CheckExact(object) || is_number(object)) && read_number(object, number);
}

static bool learn_item(Arg *arg, PyObject *object)
{
    if (!is_number(object))
        return learn_constant(arg, object);
    arg->kind = NUMBER, arg->value = Py_NewRef((PyObject *)Py_TYPE(object));
    return read_number(object, &arg->number);
}

/* The user may change a list or a dict later, so what is in it is kept; a dict's keys and values in its order. */
static bool learn_items(Arg *arg, PyObject *object)
{
    bool is_dict = PyDict_CheckExact(object);
    Py_ssize_t size = PyObject_Size(object), place = 0;
    if (size > MOST_KNOWN_ITEMS || (arg->items = PyMem_Calloc(2 * size + 1, sizeof *arg->items)) == NULL)
        return false;
    arg->kind = ITEMS, arg->value = Py_NewRef((PyObject *)Py_TYPE(object));
    arg->count = (int)(is_dict ? 2 * size : size);
    PyObject *key, *value;
    if (is_dict) {
        for (int i = 0; PyDict_Next(object, &place, &key, &value); i += 2) {
            if (!learn_item(&arg->items[i], key) || !learn_item(&arg->items[i + 1], value))
                return false;
        }
        return true;
    }
    for (int i = 0; i < arg->count; i++) {
        if (!learn_item(&arg->items[i], PySequence_Fast_GET_ITEM(object, i)))
            return false;
    }
    return true;
}

bool learn_value(Arg *arg, PyObject *object)
{
    bool has_items = PyTuple_CheckExact(object) || PyList_CheckExact(object) || PyDict_CheckExact(object);
    return (has_items ? learn_items : learn_item)(arg, object);
}

static bool matches_items(const Arg *arg, PyObject *object)
{
    if (PyDict_CheckExact(object)) {
        PyObject *key, *value;
        Py_ssize_t place = 0;
        if (2 * PyDict_GET_SIZE(object) != arg->count)
            return false;
        for (int i = 0; i < arg->count && PyDict_Next(object, &place, &key, &value); i += 2) {
            if (!matches(&arg->items[i], key) || !matches(&arg->items[i + 1], value))
                return false;
        }
        return true;
    }
    if (PySequence_Fast_GET_SIZE(object) != arg->count)
        return false;
    for (int i = 0; i < arg->count; i++) {
        if (!matches(&arg->items[i], PySequence_Fast_GET_ITEM(object, i)))
            return false;
    }
    return true;
}

/* Whether a dimension of an array has one element in all places: it is not received into. */
static bool repeats_elements(const Array *array)
{
    for (int i = 0; i < array->num_dims && !(array->flags & C_CONTIGUOUS); i++) {
        if (array->shape[i] > 1 && array->strides[i] == 0)
            return true;
    }
    return false;
}

bool matches(const Arg *arg, PyObject *object)
{
    if (arg->kind == NUMBER) {
        int64_t number = 0;
        return (PyObject *)Py_TYPE(object) == arg->value && read_number(object, &number) && number == arg->number;
    }
    if (arg->kind == ITEMS)
        return (PyObject *)Py_TYPE(object) == arg->value && matches_items(arg, object);
    if (arg->kind == ARRAY) {
        const Array *array = (Array *)object;
        return is_array(object) && array->dtype == arg->value && (array->flags & arg->flags) == arg->flags
               && array->num_dims == arg->num_dims
               && memcmp(array->shape, arg->shape, arg->num_dims * sizeof *arg->shape) == 0
               && !((arg->flags & WRITEABLE) && repeats_elements(array))
               && (arg->strides == NULL
                   || memcmp(array->strides, arg->strides, arg->num_dims * sizeof *arg->strides) == 0);
    }
    if (arg->kind == IDENTICAL)
        return object == arg->value || is_equal_integer(object, arg->value);
    if (arg->kind == OBJECTS || arg->kind == OBJECT)
        return arg->kind == OBJECT || PyList_CheckExact(object);
    if (!PyList_CheckExact(object) || PyList_GET_SIZE(object) != arg->count)
        return false;
    for (int i = 0; i < arg->count; i++) {
        if (!matches(&arg->items[i], PyList_GET_ITEM(object, i)))
            return false;
    }
    return true;
}

int num_arrays(const Memo *memo, int place)
{
    return place < 0 ? 0 : memo->args[place].kind == LIST ? memo->args[place].count : 1;
}

const Arg *arg_of(const Memo *memo, int place, int i)
{
    const Arg *arg = &memo->args[place];
    return arg->kind == LIST ? &arg->items[i] : arg;
}

static PyObject *compare_by_identity(PyObject *module, PyObject *type)
{
    PyObject *types = PyTuple_New(identity_types == NULL ? 1 : PyTuple_GET_SIZE(identity_types) + 1);
    if (types == NULL)
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types) - 1; i++)
        PyTuple_SET_ITEM(types, i, Py_NewRef(PyTuple_GET_ITEM(identity_types, i)));
    PyTuple_SET_ITEM(types, PyTuple_GET_SIZE(types) - 1, Py_NewRef(type));
    Py_XSETREF(identity_types, types);
    return Py_NewRef(type);
}

PyMethodDef argument_functions[] = {
    {"compare_by_identity", compare_by_identity, METH_O, "Compare arguments of a type by identity; a decorator."},
    {NULL, NULL, 0, NULL},
};
