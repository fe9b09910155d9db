/* Exchanges in one step whose sizes no rank knows alone: each rank puts its own into a table, and finds in that of all ranks
   what to take; see `AgreedMove`. A step for other sizes is made from a known one. */
#include "core.h"

/* The words of a rank's block for another one in the table; as in `shared_region`. */
enum { TO = 1, COME = 2, TABLE_WORDS = 4 };

static int64_t *entry(char *table, const Splits *splits, int rank, int peer)
{
    return (int64_t *)table + (rank * splits->num_ranks + peer) * TABLE_WORDS;
}

/* Make room for what is taken from each rank. */
static int allocate_takes(Step *self)
{
    for (int phase = 0; phase < 2; phase++) {
        struct Part *parts = PyMem_Realloc(self->takes[phase].parts, self->splits.num_ranks * sizeof *parts);
        if (parts == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        self->takes[phase].parts = parts, self->takes[phase].count = 0;
    }
    return 0;
}

PyObject *step_set_splits(Step *self, PyObject *args)
{
    Splits splits = {0};
    unsigned long long even_slots, odd_slots;
    if (!PyArg_ParseTuple(args, "iinnn(KKn)", &splits.rank, &splits.num_ranks, &splits.row_bytes, &splits.limit_bytes,
                          &splits.most_bytes, &even_slots, &odd_slots, &splits.slot_bytes))
        return NULL;
    bool has_sizes = self->puts[0].count > 0 && self->puts[0].parts[0].which < 0 && self->agreed != NULL;
    if (splits.num_ranks < 1 || splits.num_ranks > MOST_SPLITS || splits.row_bytes < 1 || !has_sizes
        || returns_early(self->awaited)) {
        PyErr_SetString(PyExc_ValueError, "set_splits: this is no exchange with a table of few ranks");
        return NULL;
    }
    splits.slots[0] = (char *)(uintptr_t)even_slots, splits.slots[1] = (char *)(uintptr_t)odd_slots;
    self->splits = splits;
    if (allocate_takes(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

bool step_find_takes(Step *self, int phase)
{
    const Splits *splits = &self->splits;
    char *table = self->tables[phase];
    for (int rank = 0; rank < splits->num_ranks; rank++) {
        Py_ssize_t total = 0;
        for (int peer = 0; peer < splits->num_ranks; peer++) {
            int64_t given = entry(table, splits, rank, peer)[TO];
            if (given < 0 || given != entry(table, splits, peer, rank)[COME] || given > splits->limit_bytes - total)
                return false;
            total += given;
        }
    }
    struct Parts *takes = &self->takes[phase];
    Py_ssize_t offset = 0;
    takes->count = 0;
    for (int peer = 0; peer < splits->num_ranks; peer++) {
        Py_ssize_t begin = 0, size = entry(table, splits, peer, splits->rank)[TO];
        for (int before = 0; before < splits->rank; before++)
            begin += entry(table, splits, peer, before)[TO];
        if (peer != splits->rank && size > 0)
            takes->parts[takes->count++]
                = (struct Part){0, offset, size, splits->slots[phase] + peer * splits->slot_bytes + begin};
        offset += size;
    }
    return true;
}

/* Put the sizes, and the blocks of other ranks; keep this rank's own. */
static int set_copies(Step *self, const Py_ssize_t *to, const Py_ssize_t *come)
{
    const Splits *splits = &self->splits;
    Py_ssize_t begin = 0, place = 0, total = 0, own = to[splits->rank];
    for (int peer = 0; peer < splits->num_ranks; peer++) {
        begin += peer < splits->rank ? to[peer] : 0, place += peer < splits->rank ? come[peer] : 0;
        total += to[peer];
        int64_t *sizes = entry(self->sizes, splits, 0, peer);
        memset(sizes, 0, TABLE_WORDS * sizeof *sizes);
        sizes[TO] = to[peer], sizes[COME] = come[peer];
    }
    for (int phase = 0; phase < 2; phase++) {
        struct Parts *puts = &self->puts[phase];
        struct Part *parts = PyMem_Realloc(puts->parts, 3 * sizeof *parts); /* the first one is that of the sizes */
        if (parts == NULL)
            goto no_memory;
        char *slot = splits->slots[phase] + splits->rank * splits->slot_bytes;
        puts->parts = parts, puts->count = 1;
        if (begin > 0)
            parts[puts->count++] = (struct Part){0, 0, begin, slot};
        if (total > begin + own)
            parts[puts->count++] = (struct Part){0, begin + own, total - begin - own, slot + begin + own};
    }
    Kept *kept = PyMem_Realloc(self->kept, sizeof *kept);
    if (kept == NULL)
        goto no_memory;
    self->kept = kept, self->num_kept = own > 0;
    *kept = (Kept){0, 0, begin, place, own};
    return 0;
no_memory:
    PyErr_NoMemory();
    return -1;
}

Step *step_of_splits(const Step *other, const Py_ssize_t *to, const Py_ssize_t *come)
{
    const Splits *splits = &other->splits;
    Py_ssize_t total = 0;
    for (int peer = 0; peer < splits->num_ranks; peer++) {
        if (to[peer] > splits->most_bytes - total)
            return NULL;
        total += to[peer];
    }
    Step *self = step_copy(other);
    if (self == NULL)
        return NULL;
    /* What the address of the sizes points into; it is nobody else's. */
    Py_XSETREF(self->splits.sizes,
               PyBytes_FromStringAndSize(NULL, splits->num_ranks * TABLE_WORDS * (Py_ssize_t)sizeof(int64_t)));
    self->sizes = self->splits.sizes == NULL ? NULL : PyBytes_AS_STRING(self->splits.sizes);
    if (self->sizes == NULL || set_copies(self, to, come) < 0 || allocate_takes(self) < 0)
        Py_CLEAR(self);
    return self;
}
