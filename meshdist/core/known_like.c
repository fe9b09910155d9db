/* Calls like a known one: messages with another tag, or of another size, and calls of one step on arrays of other sizes, or
   of other numbers of rows. The core makes what carries them out from what carries out the known one. */
#include "known_calls.h"

static bool is_array_like(const Arg *arg, PyObject *object, int flags)
{
    return arg->kind == ARRAY && is_array(object) && ((Array *)object)->dtype == arg->value
           && (((Array *)object)->flags & flags) == flags;
}

/* Whether an argument is another tag, or an array of another shape, than in a call that is kept. */
static bool is_arg_like(const Memo *memo, int place, PyObject *object)
{
    const Arg *arg = &memo->args[place];
    if (place == memo->tag) {
        int overflow = 0;
        return PyLong_CheckExact(object) && PyLong_AsLongLongAndOverflow(object, &overflow) >= 0 && overflow == 0;
    }
    if (place == memo->to || place == memo->come)
        return object == Py_None || PyList_CheckExact(object) || PyTuple_CheckExact(object);
    if (place != memo->send && place != memo->recv)
        return arg->kind == IDENTICAL && matches(arg, object);
    if (arg->kind != LIST)
        return is_array_like(arg, object, place == memo->recv ? CARRAY : arg->flags);
    if (!PyList_CheckExact(object) || PyList_GET_SIZE(object) != arg->count)
        return false;
    for (int i = 0; i < arg->count; i++) {
        if (!is_array_like(&arg->items[i], PyList_GET_ITEM(object, i), arg->items[i].flags))
            return false;
    }
    return true;
}

static const Array *array_of(PyObject *const *args, int place, int i)
{
    return (Array *)(PyList_CheckExact(args[place]) ? PyList_GET_ITEM(args[place], i) : args[place]);
}

/* The argument with the array whose shape is in the words of a step. */
static int place_of_words(const Memo *memo)
{
    return ((Step *)memo->run)->alike.by_received ? memo->recv : memo->send;
}

/* Whether a step is carried out in the same way for arrays of these sizes. */
static bool is_step_like(const Memo *memo, PyObject *const *args)
{
    const int place = place_of_words(memo);
    if (num_arrays(memo, place) == 0)
        return false;
    const Arg *before = arg_of(memo, place, 0);
    const Py_ssize_t size = num_elements(array_of(args, place, 0));
    /* The shapes of fewer elements are all alike. */
    return size > 1 && before->num_bytes > before->itemsize
           && step_is_alike((Step *)memo->run, before->num_bytes, size * before->itemsize);
}

static bool is_list(PyObject *const *args, int place) { return place >= 0 && args[place] != Py_None; }

/* Whether an exchange says how many rows go to each rank, or come from it; without either, it is another call. And whether
   its blocks may be short enough for the slot. */
static bool is_exchange_like(const Memo *memo, PyObject *const *args)
{
    const Splits *splits = &((Step *)memo->run)->splits;
    const Array *sent = array_of(args, memo->send, 0);
    return (is_list(args, memo->to) || is_list(args, memo->come)) && sent->num_dims > 0
           && sent->shape[0] <= splits->most_bytes / splits->row_bytes;
}

bool is_like(const Memo *memo, PyObject *const *args)
{
    for (int arg = 0; arg < memo->num_args; arg++) {
        if (!is_arg_like(memo, arg, args[arg]))
            return false;
    }
    if (Py_TYPE(memo->run) != step_type)
        return true;
    return ((Step *)memo->run)->splits.num_ranks > 0 ? is_exchange_like(memo, args) : is_step_like(memo, args);
}

bool has_likes(const Memo *memo, bool of_messages)
{
    if (Py_TYPE(memo->run) == step_type) {
        const Step *step = (Step *)memo->run;
        bool is = memo->go_on == NULL ? step->alike.num_bytes > 0 : step->splits.num_ranks > 0;
        return is && memo->kind == NULL;
    }
    /* Not messages of other calls: Python keeps what these need, from the first on. */
    return Py_TYPE(memo->run) == ring_type && of_messages && PyTuple_CheckExact(memo->facts)
           && (memo->send >= 0) != (memo->recv >= 0);
}

static PyObject *shape_of(const Array *array)
{
    PyObject *shape = PyTuple_New(array->num_dims);
    for (int i = 0; shape != NULL && i < array->num_dims; i++)
        PyTuple_SET_ITEM(shape, i, PyLong_FromSsize_t(array->shape[i]));
    return shape;
}

/* The facts of a message like another one; a new reference. */
static PyObject *facts_like(PyObject *facts, const Array *array, PyObject *tag)
{
    Py_ssize_t size = PyTuple_GET_SIZE(facts);
    PyObject *like = PyTuple_New(size), *shape = shape_of(array);
    for (Py_ssize_t i = 0; like != NULL && shape != NULL && i < size; i++) {
        PyObject *fact = i == SHAPE ? shape : i == TAG && tag != NULL ? tag : PyTuple_GET_ITEM(facts, i);
        PyTuple_SET_ITEM(like, i, Py_NewRef(fact));
    }
    Py_XDECREF(shape);
    if (PyErr_Occurred())
        Py_CLEAR(like);
    return like;
}

/* Here and below, objects are made without running Python: a signal handler would raise in it, for nobody. */
static int copy_attributes(PyObject *self, PyObject *other, const char *const *names)
{
    for (; *names != NULL; names++) {
        PyObject *value = PyObject_GetAttrString(other, *names);
        int status = value == NULL ? -1 : PyObject_SetAttrString(self, *names, value);
        Py_XDECREF(value);
        if (status < 0)
            return -1;
    }
    return 0;
}

/* A PersistentRequest like another one. */
static PyObject *request_like(PyObject *other, PyObject *facts, PyObject *ring)
{
    static const char *const kept[] = {"source", "label", NULL};
    PyObject *self = Py_TYPE(other)->tp_alloc(Py_TYPE(other), 0);
    if (self != NULL
        && (copy_attributes(self, other, kept) < 0 || PyObject_SetAttrString(self, "facts", facts) < 0
            || PyObject_SetAttrString(self, "fast_path", ring) < 0 || PyObject_SetAttrString(self, "caller", Py_None) < 0))
        Py_CLEAR(self);
    return self;
}

/* The dtypes and shapes of the arrays on one side of a call like another one. */
static PyObject *kinds_like(PyObject *others, const char *name, const Memo *memo, PyObject *const *args, int place)
{
    PyObject *kinds = PyObject_GetAttrString(others, name), *like = NULL;
    int count = num_arrays(memo, place);
    if (kinds != NULL && PyList_CheckExact(kinds) && PyList_GET_SIZE(kinds) == count)
        like = PyList_New(count);
    for (int i = 0; like != NULL && i < count; i++) {
        PyObject *dtype = PySequence_GetItem(PyList_GET_ITEM(kinds, i), 0), *shape = shape_of(array_of(args, place, i));
        PyObject *kind = dtype == NULL || shape == NULL ? NULL : PyTuple_Pack(2, dtype, shape);
        Py_XDECREF(dtype);
        Py_XDECREF(shape);
        if (kind == NULL)
            Py_CLEAR(like);
        else
            PyList_SET_ITEM(like, i, kind);
    }
    Py_XDECREF(kinds);
    return like;
}

/* The CallFacts of a call like another one. */
static PyObject *call_facts_like(PyObject *facts, PyObject *text, const Memo *memo, PyObject *const *args)
{
    static const char *const kept[] = {"name", "group", "label", "root", "timeout_s", "tag", "words", NULL};
    PyObject *self = Py_TYPE(facts)->tp_alloc(Py_TYPE(facts), 0);
    PyObject *sent = kinds_like(facts, "sent", memo, args, memo->send);
    PyObject *received = kinds_like(facts, "received", memo, args, memo->recv);
    if (self != NULL
        && (sent == NULL || received == NULL || copy_attributes(self, facts, kept) < 0
            || PyObject_SetAttrString(self, "text", text) < 0 || PyObject_SetAttrString(self, "sent", sent) < 0
            || PyObject_SetAttrString(self, "received", received) < 0))
        Py_CLEAR(self);
    Py_XDECREF(sent);
    Py_XDECREF(received);
    return self;
}

static bool same_shape(const Py_ssize_t *shape, int num_dims, const Py_ssize_t *other, int num_others)
{
    return num_dims == num_others && memcmp(shape, other, num_dims * sizeof *shape) == 0;
}

static bool same_rows(const Py_ssize_t *shape, int num_dims, const Py_ssize_t *other, int num_others)
{
    return num_dims > 0 && num_others > 0 && same_shape(shape + 1, num_dims - 1, other + 1, num_others - 1);
}

/* Whether the arrays of a call have the shapes that follow from one of them, as in a call that is kept: all had, and have,
   the same shape; or the same rows as that one, now as before, and so many times as many. The blocks of ranks that are
   stacked along a dimension of their own do neither. */
static bool are_alike(const Memo *memo, PyObject *const *args, const Arg *one_before, const Array *one)
{
    bool are_same = true;
    bool have_rows = same_rows(one->shape, one->num_dims, one_before->shape, one_before->num_dims);
    const int places[] = {memo->send, memo->recv};
    for (int side = 0; side < 2; side++) {
        for (int i = 0; i < num_arrays(memo, places[side]); i++) {
            const Arg *before = arg_of(memo, places[side], i);
            const Array *now = array_of(args, places[side], i);
            if (before->strides != NULL)
                return false;
            are_same = are_same && same_shape(before->shape, before->num_dims, one_before->shape, one_before->num_dims)
                       && same_shape(now->shape, now->num_dims, one->shape, one->num_dims);
            have_rows = have_rows && same_rows(before->shape, before->num_dims, one_before->shape, one_before->num_dims)
                        && same_rows(now->shape, now->num_dims, one->shape, one->num_dims)
                        && before->shape[0] * one->shape[0] == now->shape[0] * one_before->shape[0];
        }
    }
    return are_same || have_rows;
}

/* A step like that of a call that is kept, for these arguments, and the facts of the call. */
static PyObject *step_for(const Memo *other, const Memo *memo, PyObject *const *args, PyObject **facts)
{
    const int place = place_of_words(other);
    const Arg *before = arg_of(other, place, 0), *now = arg_of(memo, place, 0);
    const Array *array = array_of(args, place, 0);
    if (!are_alike(other, args, before, array))
        return NULL;
    const Py_ssize_t num_rows = array->num_dims > 0 ? array->shape[0] : 1;
    PyObject *text = NULL;
    Step *like = step_like((Step *)other->run, array, before->num_bytes, now->num_bytes, now->num_bytes / num_rows, &text);
    *facts = like == NULL ? NULL : call_facts_like(other->facts, text, other, args);
    Py_XDECREF(text);
    return (PyObject *)like;
}

/* Read how many bytes go to each rank, or come from it: as many rows as a list says, or without one equal numbers. */
static bool read_rows(PyObject *const *args, int place, const Step *step, const Array *array, Py_ssize_t *num_bytes)
{
    const int num_ranks = step->splits.num_ranks;
    PyObject *rows = place < 0 ? Py_None : args[place];
    int64_t left = array->shape[0], even = left / num_ranks;
    if (rows == Py_None ? left % num_ranks != 0 : PySequence_Fast_GET_SIZE(rows) != num_ranks)
        return false;
    for (int rank = 0; rank < num_ranks; rank++) {
        int64_t number = even;
        if ((rows != Py_None && !read_integer(PySequence_Fast_GET_ITEM(rows, rank), &number)) || number < 0
            || number > left)
            return false;
        left -= number, num_bytes[rank] = number * step->splits.row_bytes;
    }
    return left == 0;
}

/* What goes on with an exchange like one that is kept: `go_on_with` of its plan, with these numbers of rows. The user may
   change a list. */
static PyObject *go_on_like(const Memo *other, PyObject *const *args)
{
    PyTypeObject *partial = Py_TYPE(((Step *)other->run)->wait);
    PyObject *with = Py_TYPE(other->go_on) == partial ? PyObject_GetAttrString(other->go_on, "func")
                     : PyMethod_Check(other->go_on)
                         ? PyObject_GetAttrString(PyMethod_GET_SELF(other->go_on), "go_on_with")
                         : NULL;
    PyObject *rows[2] = {NULL, NULL}, *go_on = NULL;
    const int places[] = {other->come, other->to};
    for (int i = 0; i < 2; i++)
        rows[i] = places[i] < 0 || args[places[i]] == Py_None ? Py_NewRef(Py_None) : PySequence_Tuple(args[places[i]]);
    if (with != NULL && rows[0] != NULL && rows[1] != NULL)
        go_on = PyObject_CallFunctionObjArgs((PyObject *)partial, with, rows[0], rows[1], NULL);
    Py_XDECREF(with);
    Py_XDECREF(rows[0]);
    Py_XDECREF(rows[1]);
    return go_on;
}

/* A step like that of an exchange that is kept, for these numbers of rows, the facts of the call, and what goes on with it. */
static PyObject *exchange_for(const Memo *other, PyObject *const *args, PyObject **facts, PyObject **go_on)
{
    const Step *step = (Step *)other->run;
    Py_ssize_t to[MOST_SPLITS], come[MOST_SPLITS];
    const Array *arrays[] = {(Array *)args[other->send], (Array *)args[other->recv]};
    const Arg *before[] = {&other->args[other->send], &other->args[other->recv]};
    for (int i = 0; i < 2; i++) {
        if (before[i]->strides != NULL
            || !same_rows(before[i]->shape, before[i]->num_dims, arrays[i]->shape, arrays[i]->num_dims))
            return NULL;
    }
    if (!read_rows(args, other->to, step, arrays[0], to) || !read_rows(args, other->come, step, arrays[1], come))
        return NULL;
    Step *like = step_of_splits(step, to, come);
    PyObject *text = like == NULL ? NULL : PyObject_GetAttrString(other->facts, "text");
    *facts = text == NULL ? NULL : call_facts_like(other->facts, text, other, args);
    *go_on = *facts == NULL ? NULL : go_on_like(other, args);
    if (*go_on == NULL)
        Py_CLEAR(*facts);
    Py_XDECREF(text);
    return (PyObject *)like;
}

/* A ring like that of a message that is kept, the facts of the message, and its request if it has one. */
static PyObject *ring_for(const Memo *other, const Memo *memo, PyObject *const *args, PyObject **facts, PyObject **kind)
{
    const int place = other->send >= 0 ? other->send : other->recv;
    PyObject *tag = other->tag < 0 ? NULL : args[other->tag];
    int64_t number = tag == NULL ? ((Ring *)other->run)->kind.tag : PyLong_AsLongLong(tag);
    PyObject *like = ring_like((Ring *)other->run, number, memo->args[place].num_bytes);
    *facts = like == NULL ? NULL : facts_like(other->facts, (Array *)args[place], tag);
    *kind = *facts == NULL || other->kind == NULL ? NULL : request_like(other->kind, *facts, like);
    return like;
}

static bool learn_args(Memo *memo, const Memo *other, PyObject *const *args)
{
    for (int i = 0; i < memo->num_args; i++) {
        Arg *arg = &memo->args[i];
        const Arg *before = &other->args[i];
        if (i == memo->to || i == memo->come) {
            if (!learn_value(arg, args[i]))
                return false;
        } else if (i != memo->send && i != memo->recv)
            arg->kind = IDENTICAL, arg->value = Py_NewRef(args[i]);
        else if (!learn_buffers(arg, args[i], before->kind == LIST && before->count ? before->items[0].flags : before->flags))
            return false;
    }
    return true;
}

Memo *memo_like(Memo *other, PyObject *const *args)
{
    Memo *memo = PyMem_Calloc(1, sizeof *memo);
    if (memo == NULL)
        return NULL;
    other->num_users++; /* the collector of garbage may let other threads run, which drop it */
    memo->num_args = other->num_args, memo->send = other->send, memo->recv = other->recv, memo->tag = other->tag;
    memo->to = other->to, memo->come = other->come;
    memo->returned = other->returned, memo->apart = other->apart, memo->source = other->source;
    memo->world = other->world, memo->slot = Py_XNewRef(other->slot);
    memo->calls = (Calls *)Py_NewRef(other->calls), memo->prefix = Py_NewRef(other->prefix);
    memo->kwnames = Py_XNewRef(other->kwnames), memo->result = Py_NewRef(other->result);
    memo->words = Py_NewRef(other->words);
    if (learn_args(memo, other, args))
        memo->run = Py_TYPE(other->run) != step_type ? ring_for(other, memo, args, &memo->facts, &memo->kind)
                    : other->go_on == NULL           ? step_for(other, memo, args, &memo->facts)
                                                     : exchange_for(other, args, &memo->facts, &memo->go_on);
    if (memo->facts == NULL || (memo->kind == NULL) != (other->kind == NULL)) {
        PyErr_Clear(); /* there is no memory, or it is carried out in another way */
        memo_free(memo);
        memo = NULL;
    }
    memo_free(other);
    return memo;
}
