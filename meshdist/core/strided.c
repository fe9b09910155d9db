/* Arrays with strides, such as a column. Messages go out of a packed copy, or into a contiguous array, of which the elements
   are copied; that is twice as fast as NumPy's copies where the elements are far apart. Data movement through slots copies
   rows straight between the arrays and the slots. */
#include "core.h"

PyObject *new_array;

enum { MOST_DIMS = 64 };

/* The elements of an array, in C order: pieces of so many bytes along dimensions, of which the first is the innermost. */
typedef struct {
    int num_dims;
    Py_ssize_t shape[MOST_DIMS], strides[MOST_DIMS], num_bytes;
} Pieces;

/* Dimensions that lie behind each other in memory count as one. */
static Pieces pieces_of(const Array *array, Py_ssize_t itemsize)
{
    Pieces pieces = {.num_bytes = itemsize};
    int last = -1;
    for (int i = array->num_dims - 1; i >= 0; i--) {
        Py_ssize_t length = array->shape[i], stride = array->strides[i];
        if (length == 1)
            continue;
        if (last < 0 && stride == pieces.num_bytes) {
            pieces.num_bytes *= length;
        } else if (last >= 0 && stride == pieces.shape[last] * pieces.strides[last]) {
            pieces.shape[last] *= length;
        } else {
            pieces.shape[++last] = length;
            pieces.strides[last] = stride;
        }
    }
    pieces.num_dims = last + 1;
    return pieces;
}

/* Of a size that the compiler knows, it is one load and one store. */
#define COPY_PIECES(size)                                                                                              \
    for (Py_ssize_t i = 0; i < count; i++)                                                                             \
        copy_bytes(packs ? plain + i * (size) : strided + i * stride, packs ? strided + i * stride : plain + i * (size), size)

static char *copy_row(Py_ssize_t count, Py_ssize_t stride, Py_ssize_t num_bytes, char *strided, char *plain, bool packs)
{
    switch (num_bytes) {
    case 1: COPY_PIECES(1); break;
    case 2: COPY_PIECES(2); break;
    case 4: COPY_PIECES(4); break;
    case 8: COPY_PIECES(8); break;
    case 16: COPY_PIECES(16); break;
    default: COPY_PIECES(num_bytes);
    }
    return plain + count * num_bytes;
}

/* Copy along the first dimensions; return the end of what was copied in the contiguous array. */
static char *copy_pieces(const Pieces *pieces, int num_dims, char *strided, char *plain, bool packs)
{
    if (num_dims == 1)
        return copy_row(pieces->shape[0], pieces->strides[0], pieces->num_bytes, strided, plain, packs);
    for (Py_ssize_t i = 0; i < pieces->shape[num_dims - 1]; i++, strided += pieces->strides[num_dims - 1])
        plain = copy_pieces(pieces, num_dims - 1, strided, plain, packs);
    return plain;
}

Py_ssize_t num_elements(const Array *array)
{
    Py_ssize_t number = 1;
    for (int i = 0; i < array->num_dims; i++)
        number *= array->shape[i];
    return number;
}

/* Copy all elements; `plain` is contiguous, and has at least one dimension, as every array with strides. */
static void copy_elements(Array *strided, Array *plain, bool packs)
{
    const Py_ssize_t itemsize = plain->strides[plain->num_dims - 1], size = num_elements(plain) * itemsize;
    if (size == 0)
        return;
    const Pieces pieces = pieces_of(strided, itemsize);
    PyThreadState *thread = without_gil(size > LONG);
    if (pieces.num_dims == 0)
        copy_bytes(packs ? plain->data : strided->data, packs ? strided->data : plain->data, size);
    else
        copy_pieces(&pieces, pieces.num_dims, strided->data, plain->data, packs);
    with_gil(thread);
}

bool rows_of(const Array *array, Rows *rows)
{
    *rows = (Rows){.data = array->data};
    if (array->flags & C_CONTIGUOUS)
        return true;
    PyObject *itemsize = PyObject_GetAttrString(array->dtype, "itemsize");
    Py_ssize_t num_bytes = itemsize == NULL ? -1 : PyLong_AsSsize_t(itemsize);
    Py_XDECREF(itemsize);
    if (num_bytes < 0)
        return false;
    const Pieces pieces = pieces_of(array, num_bytes);
    if (pieces.num_dims == 1)
        rows->num_bytes = pieces.num_bytes, rows->stride = pieces.strides[0];
    return pieces.num_dims <= 1;
}

void copy_rows(const Rows *rows, Py_ssize_t offset, char *plain, Py_ssize_t size, bool packs)
{
    if (rows->num_bytes == 0) {
        copy_bytes(packs ? plain : rows->data + offset, packs ? rows->data + offset : plain, size);
        return;
    }
    const Py_ssize_t before = offset % rows->num_bytes, rest = rows->num_bytes - before;
    char *row = rows->data + offset / rows->num_bytes * rows->stride;
    if (before != 0) {
        const Py_ssize_t length = rest < size ? rest : size;
        plain = copy_row(1, 0, length, row + before, plain, packs);
        row += rows->stride, size -= length;
    }
    const Py_ssize_t count = size / rows->num_bytes;
    plain = copy_row(count, rows->stride, rows->num_bytes, row, plain, packs);
    copy_row(1, 0, size - count * rows->num_bytes, row + count * rows->stride, plain, packs);
}

/* A new contiguous array of the same shape and dtype. */
static Array *new_like(const Array *array)
{
    PyObject *shape = PyTuple_New(array->num_dims);
    for (int i = 0; shape != NULL && i < array->num_dims; i++)
        PyTuple_SET_ITEM(shape, i, PyLong_FromSsize_t(array->shape[i]));
    PyObject *made = shape == NULL || PyErr_Occurred()
                         ? NULL
                         : PyObject_CallFunctionObjArgs(new_array, shape, array->dtype, NULL);
    Py_XDECREF(shape);
    return (Array *)made;
}

Array *packed(Array *array)
{
    if (array->flags & C_CONTIGUOUS)
        return (Array *)Py_NewRef(array);
    Array *copy = new_like(array);
    if (copy != NULL)
        copy_elements(array, copy, true);
    return copy;
}

/* The dimensions of which an element's place depends, from the longest stride on, without its sign; how many. */
static int sorted_dims(const Array *array, Py_ssize_t *strides, Py_ssize_t *lengths)
{
    int count = 0;
    for (int i = 0; i < array->num_dims; i++) {
        if (array->shape[i] == 1)
            continue;
        Py_ssize_t stride = array->strides[i] < 0 ? -array->strides[i] : array->strides[i];
        int place = count++;
        for (; place > 0 && strides[place - 1] < stride; place--)
            strides[place] = strides[place - 1], lengths[place] = lengths[place - 1];
        strides[place] = stride, lengths[place] = array->shape[i];
    }
    return count;
}

/* Whether each element has bytes of its own: each stride exceeds the reach of the shorter ones. That is sufficient. */
static bool has_own_elements(const Array *array, Py_ssize_t itemsize)
{
    Py_ssize_t strides[MOST_DIMS], lengths[MOST_DIMS], reach = itemsize;
    for (int i = sorted_dims(array, strides, lengths) - 1; i >= 0; i--) {
        if (strides[i] < reach)
            return false;
        reach += strides[i] * (lengths[i] - 1);
    }
    return true;
}

Array *room_of(Array *array)
{
    if ((array->flags & CARRAY) == CARRAY)
        return (Array *)Py_NewRef(array);
    if (!(array->flags & WRITEABLE) || array->num_dims == 0) /* of no dimension, but not aligned */
        return NULL;
    Array *room = new_like(array);
    if (room != NULL && !has_own_elements(array, room->strides[room->num_dims - 1]))
        Py_CLEAR(room);
    return room;
}

void unpack(Array *array, Array *room)
{
    if (array != room)
        copy_elements(array, room, false);
}

void extent_of(const Array *array, Py_ssize_t itemsize, char **begin, char **end)
{
    *begin = *end = array->data;
    for (int i = 0; i < array->num_dims; i++)
        *(array->strides[i] < 0 ? begin : end) += array->strides[i] * (array->shape[i] - 1);
    *end += itemsize;
}

/* Whether steps along the dimensions from `first` on, less than a length each, lead `distance` bytes far, or to less than
   an element from there; also if it takes too long to see. */
static bool reaches(Py_ssize_t distance, const Py_ssize_t *strides, const Py_ssize_t *lengths, int first, int count,
                    Py_ssize_t itemsize, int *budget)
{
    if (first == count || --*budget < 0)
        return *budget < 0 || (distance < itemsize && -distance < itemsize);
    Py_ssize_t rest = itemsize - 1, stride = strides[first];
    for (int i = first + 1; i < count; i++)
        rest += strides[i] * (lengths[i] - 1);
    Py_ssize_t most = lengths[first] - 1, least = -most;
    if (stride > 0) { /* as many steps as leave a distance that the rest covers */
        least = (distance - rest) / stride - 1 > least ? (distance - rest) / stride - 1 : least;
        most = (distance + rest) / stride + 1 < most ? (distance + rest) / stride + 1 : most;
    }
    for (Py_ssize_t steps = least; steps <= most; steps++) {
        Py_ssize_t left = distance - steps * stride;
        if (left <= rest && -left <= rest && reaches(left, strides, lengths, first + 1, count, itemsize, budget))
            return true;
    }
    return false;
}

bool may_share_elements(const Array *one, const Array *other, Py_ssize_t itemsize)
{
    enum { MOST_STEPS = 64 };
    Py_ssize_t strides[MOST_DIMS], lengths[MOST_DIMS];
    char *begin, *other_begin, *end;
    int budget = MOST_STEPS;
    if (one->num_dims != other->num_dims
        || memcmp(one->strides, other->strides, one->num_dims * sizeof *one->strides) != 0
        || memcmp(one->shape, other->shape, one->num_dims * sizeof *one->shape) != 0)
        return true;
    extent_of(one, itemsize, &begin, &end);
    extent_of(other, itemsize, &other_begin, &end);
    int count = sorted_dims(one, strides, lengths);
    return reaches(begin - other_begin, strides, lengths, 0, count, itemsize, &budget);
}
