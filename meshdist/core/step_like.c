/* Steps like a known one, for arrays of other sizes: the rest of such a call is the same; see `OneStep.alike`. */
#include "core.h"

/* The words of a call, and what is compared of them, come apart around the shape of its arrays; see `SignatureForm`. */
enum { BEFORE, AFTER, COMPARED_BEFORE, COMPARED_AFTER, NUM_WORDS };

PyObject *step_set_alike(Step *self, PyObject *args)
{
    Alike alike = {0};
    unsigned long long begin, end;
    PyObject *words[NUM_WORDS], *hasher;
    if (!PyArg_ParseTuple(args, "n(nn)(KKn)((UU)(UU)in)O", &alike.num_bytes, &alike.least_bytes, &alike.most_bytes, &begin,
                          &end, &alike.slot_bytes, &words[BEFORE], &words[AFTER], &words[COMPARED_BEFORE],
                          &words[COMPARED_AFTER], &alike.by_received, &alike.num_sizes, &hasher))
        return NULL;
    if (alike.num_bytes <= 0 || alike.slot_bytes <= 0 || self->agreed != NULL || self->part_rows != NULL
        || self->totals[0] != NULL || self->text == NULL) {
        PyErr_SetString(PyExc_ValueError, "set_alike: a step of this kind is for arrays of one size");
        return NULL;
    }
    alike.begin = (char *)(uintptr_t)begin, alike.end = (char *)(uintptr_t)end;
    alike.words = PyTuple_Pack(NUM_WORDS, words[BEFORE], words[AFTER], words[COMPARED_BEFORE], words[COMPARED_AFTER]);
    if (alike.words == NULL)
        return NULL;
    alike.hasher = Py_NewRef(hasher);
    PyObject *before = self->alike.words;
    Py_XDECREF(self->alike.hasher);
    self->alike = alike;
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

/* ---- numbers in proportion */

/* A number of bytes, or an offset, for arrays of `now` bytes, where it was for arrays of `before`; only whole units. */
typedef struct {
    Py_ssize_t before, now, unit;
    bool is_whole;
} Ratio;

static Py_ssize_t scaled(Ratio *ratio, Py_ssize_t value)
{
    Py_ssize_t product = value * ratio->now, scaled = product / ratio->before;
    if (product % ratio->before || scaled % ratio->unit)
        ratio->is_whole = false;
    return scaled;
}

/* A place in a slot; the slot stays the same. */
static char *scaled_place(Ratio *ratio, const Alike *alike, char *place)
{
    if (place < alike->begin || place >= alike->end) {
        ratio->is_whole = false;
        return place;
    }
    Py_ssize_t offset = (place - alike->begin) % alike->slot_bytes;
    return place - offset + scaled(ratio, offset);
}

static void scale_parts(Ratio *ratio, const Alike *alike, struct Parts *parts)
{
    for (struct Part *part = parts->parts; part < parts->parts + parts->count; part++) {
        part->offset = scaled(ratio, part->offset), part->num_bytes = scaled(ratio, part->num_bytes);
        part->place = scaled_place(ratio, alike, part->place);
    }
}

static void scale_step(Ratio *ratio, Step *self)
{
    for (int list = 0; list < 2; list++) {
        scale_parts(ratio, &self->alike, &self->puts[list]);
        scale_parts(ratio, &self->alike, &self->takes[list]);
        for (int row = 0; self->rows[list] != NULL && row < self->num_rows && list < num_lists(self); row++)
            self->rows[list][row] = scaled_place(ratio, &self->alike, self->rows[list][row]);
    }
    for (Kept *kept = self->kept; kept < self->kept + self->num_kept; kept++) {
        kept->begin = scaled(ratio, kept->begin), kept->place = scaled(ratio, kept->place);
        kept->num_bytes = scaled(ratio, kept->num_bytes);
    }
    self->own.offset = scaled(ratio, self->own.offset), self->total_bytes = scaled(ratio, self->total_bytes);
    self->alike.num_bytes = scaled(ratio, self->alike.num_bytes);
}

/* ---- what the ranks compare */

/* The shape of an array, or how often `num_sizes` says its size, as a list in Python's words. */
static PyObject *in_words(const Array *array, Py_ssize_t num_sizes)
{
    Py_ssize_t count = num_sizes ? num_sizes : array->num_dims, size = num_elements(array);
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++)
        PyList_SET_ITEM(list, i, PyLong_FromSsize_t(num_sizes ? size : array->shape[i]));
    PyObject *words = list == NULL || PyErr_Occurred() ? NULL : PyObject_Repr(list);
    Py_XDECREF(list);
    return words;
}

static PyObject *around(const Alike *alike, int place, PyObject *words)
{
    return words == NULL ? NULL
                         : PyUnicode_FromFormat("%U%U%U", PyTuple_GET_ITEM(alike->words, place), words,
                                                PyTuple_GET_ITEM(alike->words, place + 1));
}

/* The fingerprint of a signature: eight bytes, the lowest first. Returns -1 with an error set. */
static int hash(const Alike *alike, PyObject *compared, uint64_t *fingerprint)
{
    PyObject *data = PyUnicode_AsUTF8String(compared);
    PyObject *state = data == NULL ? NULL : PyObject_CallOneArg(alike->hasher, data);
    PyObject *bytes = state == NULL ? NULL : PyObject_CallMethod(state, "digest", NULL);
    Py_XDECREF(data);
    Py_XDECREF(state);
    if (bytes == NULL)
        return -1;
    *fingerprint = 0;
    for (int i = 0; i < 8; i++)
        *fingerprint |= (uint64_t)(unsigned char)PyBytes_AS_STRING(bytes)[i] << 8 * i;
    Py_DECREF(bytes);
    return 0;
}

/* A Signature like another one, and what goes on with a wait for it: a `partial` whose last argument is the Signature. */
static PyObject *wait_like(PyObject *other, PyObject *text, PyObject *compared)
{
    PyObject *func = PyObject_GetAttrString(other, "func"), *args = PyObject_GetAttrString(other, "args"), *wait = NULL;
    Py_ssize_t size = args == NULL ? 0 : PyTuple_GET_SIZE(args);
    PyTypeObject *type = size == 0 ? NULL : Py_TYPE(PyTuple_GET_ITEM(args, size - 1));
    PyObject *signature = func == NULL || type == NULL ? NULL : type->tp_alloc(type, 0);
    PyObject *all = signature == NULL || PyObject_SetAttrString(signature, "text", text) < 0
                            || PyObject_SetAttrString(signature, "compared", compared) < 0
                        ? NULL
                        : PyTuple_New(size + 1);
    if (all != NULL) {
        PyTuple_SET_ITEM(all, 0, Py_NewRef(func));
        for (Py_ssize_t i = 0; i < size; i++)
            PyTuple_SET_ITEM(all, i + 1, Py_NewRef(i < size - 1 ? PyTuple_GET_ITEM(args, i) : signature));
        wait = PyObject_Call((PyObject *)Py_TYPE(other), all, NULL);
    }
    Py_XDECREF(all);
    Py_XDECREF(signature);
    Py_XDECREF(args);
    Py_XDECREF(func);
    return wait;
}

/* ---- the step */

static void *copied(const void *from, size_t size)
{
    void *copy = from == NULL ? NULL : PyMem_Malloc(size + 1);
    if (copy != NULL)
        memcpy(copy, from, size);
    else if (from != NULL)
        PyErr_NoMemory();
    return copy;
}

Step *step_copy(const Step *other)
{
    Step *self = (Step *)Py_TYPE(other)->tp_alloc(Py_TYPE(other), 0);
    if (self == NULL)
        return NULL;
    /* What comes after the head of an object; then all that is counted. */
    memcpy((char *)self + sizeof(PyObject), (const char *)other + sizeof(PyObject), sizeof *self - sizeof(PyObject));
    Py_INCREF(self->barrier), Py_INCREF(self->keeps), Py_INCREF(self->wait), Py_INCREF(self->text);
    Py_XINCREF(self->agreed), Py_XINCREF(self->alike.words), Py_XINCREF(self->alike.hasher);
    Py_XINCREF(self->splits.sizes);
    for (int list = 0; list < 2; list++) {
        self->puts[list].parts = copied(other->puts[list].parts, other->puts[list].count * sizeof(struct Part));
        self->takes[list].parts = copied(other->takes[list].parts, other->takes[list].count * sizeof(struct Part));
        self->rows[list] = copied(other->rows[list], other->num_rows * sizeof(char *));
    }
    self->kept = copied(other->kept, other->num_kept * sizeof(Kept));
    self->part_rows = NULL;
    if (PyErr_Occurred())
        Py_CLEAR(self);
    return self;
}

bool step_is_alike(const Step *step, Py_ssize_t before, Py_ssize_t now)
{
    Ratio ratio = {before, now, 1, true};
    Py_ssize_t num_bytes = scaled(&ratio, step->alike.num_bytes);
    return ratio.is_whole && step->alike.least_bytes <= num_bytes && num_bytes <= step->alike.most_bytes;
}

Step *step_like(const Step *other, const Array *array, Py_ssize_t before, Py_ssize_t now, Py_ssize_t row_bytes,
                PyObject **text)
{
    const Alike *alike = &other->alike;
    Ratio ratio = {before, now, row_bytes, true};
    Step *self = step_copy(other);
    if (self == NULL)
        return NULL;
    scale_step(&ratio, self);
    if (!ratio.is_whole) {
        Py_DECREF(self);
        return NULL;
    }
    PyObject *shape = in_words(array, 0), *sizes = in_words(array, alike->num_sizes);
    PyObject *words = around(alike, BEFORE, shape), *compared = around(alike, COMPARED_BEFORE, sizes);
    PyObject *encoded = words == NULL || compared == NULL ? NULL : PyUnicode_AsUTF8String(words);
    if (encoded != NULL && hash(alike, compared, &self->fingerprint) == 0) {
        Py_ssize_t length = least(PyBytes_GET_SIZE(encoded), CALL_TEXT_BYTES);
        Py_SETREF(self->wait, wait_like(other->wait, words, compared));
        Py_SETREF(self->text, PyBytes_FromStringAndSize(PyBytes_AS_STRING(encoded), length));
    }
    Py_XDECREF(encoded);
    Py_XDECREF(compared);
    Py_XDECREF(sizes);
    Py_XDECREF(shape);
    if (PyErr_Occurred()) {
        Py_XDECREF(words);
        Py_DECREF(self);
        return NULL;
    }
    *text = words;
    return self;
}
