/* SingleCopy: a call of many bytes, each copied once: its receiver reads the sender's memory, or the sender writes a share
   of it. What is read may be reduced. The references are `SingleCopyMove` and `SingleCopyReduce`. */
#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <structmember.h>
#ifdef __linux__
#include <sys/uio.h>
#endif

PyTypeObject *single_copy_type;

/* The words of a table for each pair of ranks, as in `shared_region`: the address and the size of the block that is
   given, the size and the address of the place for the one that is taken. */
enum { TABLE_WORDS = 4 };
/* Writing begins at a page. */
enum { PAGE = 4096 };
/* How much is written between two checks of whether all ranks still take part; as in `copying`. */
enum { PIECE = 4 << 20 };

typedef struct {
    int which; /* array; -1 for no block */
    Py_ssize_t offset, num_bytes;
} Block;

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    Barrier *barrier;
    uint64_t fingerprint;
    PyObject *wait;   /* goes on with a wait that takes longer */
    PyObject *check;  /* raises if a rank has given up */
    PyObject *refuse; /* called with a rank, what it refuses and an errno: raises */
    PyObject *keeps;  /* what the addresses point into */
    PyObject *agreed; /* if no rank knows all sizes: the sizes of all tables' rows as they were compared; else empty */
    int rank, num_ranks, num_sent, num_received;
    Block *gives, *takes; /* for each rank and from each rank */
    double written;       /* the share that the sender writes; of what is reduced, all or nothing */
    bool streams;         /* what the rank keeps is not left in the caches */
    bool reads_outputs;   /* what the receiver reads is what its sender has kept; nothing is written */
    long *pids;
    int64_t *tables[2];
    Reduction reduction; /* none if `combine` is NULL */
    bool keeps_segment;  /* else each rank takes the finished segments of the others */
    Py_ssize_t piece_bytes;
    char *scratch[2]; /* for a piece each: partial results, and what is read for them */
} SingleCopy;

#ifdef __linux__
static bool kernel_copies(bool writes, long pid, uint64_t address, char *data, Py_ssize_t size)
{
    Py_ssize_t copied = 0;
    for (Py_ssize_t done = 0; done < size; done += copied) {
        struct iovec here = {data + done, size - done}, there = {(void *)(uintptr_t)(address + done), size - done};
        copied = (writes ? process_vm_writev : process_vm_readv)((pid_t)pid, &here, 1, &there, 1, 0);
        if (copied <= 0)
            return false;
    }
    return true;
}
#else
static bool kernel_copies(bool writes, long pid, uint64_t address, char *data, Py_ssize_t size)
{
    errno = ENOSYS;
    return false;
}
#endif

/* Copy to or from another process; return whether all of it was, else with errno set. */
static bool transfer(bool writes, long pid, uint64_t address, char *data, Py_ssize_t size)
{
    uintptr_t own = (uintptr_t)data, other = (uintptr_t)address;
    char *detour = writes ? begin_detour(other, own, other, size) : begin_detour(own, other, other, size);
    if (detour == NULL)
        return kernel_copies(writes, pid, address, data, size);
    bool is_copied = true;
    for (Py_ssize_t done = 0, length; done < size && is_copied; done += length) {
        length = least(detour_bytes, size - done);
        if (writes)
            copy_bytes(detour, data + done, length);
        is_copied = kernel_copies(writes, pid, address + done, detour, length);
        if (is_copied && !writes)
            copy_bytes(data + done, detour, length);
    }
    end_detour();
    return is_copied;
}

bool read_memory(long pid, uint64_t address, char *data, Py_ssize_t size)
{
    return transfer(false, pid, address, data, size);
}

static bool write_memory(long pid, uint64_t address, char *data, Py_ssize_t size)
{
    return transfer(true, pid, address, data, size);
}

/* A copy for Python; returns 0, or the number of an error. */
static PyObject *copy_memory(PyObject *args, bool writes)
{
    long pid;
    unsigned long long address, own;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "lKKn", &pid, &address, &own, &size))
        return NULL;
    PyThreadState *thread = without_gil(size > LONG);
    int error = transfer(writes, pid, address, (char *)(uintptr_t)own, size) ? 0 : errno ? errno : EIO;
    with_gil(thread);
    return PyLong_FromLong(error);
}

static PyObject *read_method(PyObject *module, PyObject *args) { return copy_memory(args, false); }

static PyObject *write_method(PyObject *module, PyObject *args) { return copy_memory(args, true); }

PyMethodDef memory_functions[] = {
    {"read_memory", read_method, METH_VARARGS,
     "read_memory(pid, address, own_address, num_bytes): copy from another process; return 0, or the number of an error."},
    {"write_memory", write_method, METH_VARARGS,
     "write_memory(pid, address, own_address, num_bytes): copy to another process; return 0, or the number of an error."},
    {NULL, NULL, 0, NULL},
};

static char *find(const Block *block, char *const *arrays)
{
    return block->which < 0 ? NULL : arrays[block->which] + block->offset;
}

static void announce(const SingleCopy *self, int phase, char *const *sent, char *const *received)
{
    int64_t *words = self->tables[phase] + (Py_ssize_t)self->rank * self->num_ranks * TABLE_WORDS;
    for (int peer = 0; peer < self->num_ranks; peer++, words += TABLE_WORDS) {
        words[0] = (intptr_t)find(&self->gives[peer], sent), words[1] = self->gives[peer].num_bytes;
        words[2] = self->takes[peer].num_bytes, words[3] = (intptr_t)find(&self->takes[peer], received);
    }
}

/* How many bytes of a block its receiver reads. */
static Py_ssize_t share_read(const SingleCopy *self, Py_ssize_t num_bytes)
{
    return self->written ? (Py_ssize_t)(num_bytes * (1 - self->written)) & -(Py_ssize_t)PAGE : num_bytes;
}

static int refused(const SingleCopy *self, int peer, const char *verb, int error)
{
    PyObject *raised = PyObject_CallFunction(self->refuse, "isi", peer, verb, error);
    Py_XDECREF(raised); /* it raises */
    return -1;
}

static int read_block(const SingleCopy *self, int peer, uint64_t address, char *data, Py_ssize_t size)
{
    PyThreadState *thread = without_gil(size > LONG);
    bool is_read = read_memory(self->pids[peer], address, data, size);
    int error = errno;
    with_gil(thread);
    return is_read ? 0 : refused(self, peer, "read", error);
}

/* If a rank has given up, its arrays belong to its user again, or are freed. */
static int check(const SingleCopy *self)
{
    PyObject *checked = PyObject_CallNoArgs(self->check);
    Py_XDECREF(checked);
    return checked == NULL ? -1 : 0;
}

static int write_block(const SingleCopy *self, int peer, uint64_t address, char *data, Py_ssize_t size)
{
    for (Py_ssize_t done = 0; done < size; done += PIECE) {
        if (check(self) < 0)
            return -1;
        Py_ssize_t length = size - done < PIECE ? size - done : PIECE;
        PyThreadState *thread = without_gil(length > LONG);
        bool is_written = write_memory(self->pids[peer], address + done, data + done, length);
        int error = errno;
        with_gil(thread);
        if (!is_written)
            return refused(self, peer, "write", error);
    }
    return 0;
}

static void keep_own(const SingleCopy *self, char *const *sent, char *const *received)
{
    const Block *give = &self->gives[self->rank], *take = &self->takes[self->rank];
    if (give->which < 0 || take->which < 0)
        return;
    PyThreadState *thread = without_gil(take->num_bytes > LONG);
    copy_in(self->streams, find(take, received), find(give, sent), take->num_bytes);
    with_gil(thread);
}

static int step(SingleCopy *self)
{
    uint64_t word;
    return barrier_signal(self->barrier, self->fingerprint, ALL, &word) < 0 ? -1
                                                                       : barrier_await(self->barrier, word, self->wait);
}

static int copy_blocks(SingleCopy *self, char *const *sent, char *const *received)
{
    keep_own(self, sent, received);
    if (self->reads_outputs && step(self) < 0) /* all have kept theirs */
        return -1;
    for (int ahead = 1; ahead < self->num_ranks; ahead++) { /* not all the same rank at once */
        int peer = (self->rank + ahead) % self->num_ranks;
        const Block *give = &self->gives[peer], *take = &self->takes[peer];
        int taker = self->reads_outputs ? peer : self->rank;
        const int64_t *words = self->tables[self->barrier->phase]
                               + ((Py_ssize_t)peer * self->num_ranks + taker) * TABLE_WORDS;
        uint64_t address = words[self->reads_outputs ? 3 : 0];
        Py_ssize_t read = share_read(self, take->num_bytes), begin = share_read(self, words[2]);
        if (read && read_block(self, peer, address, find(take, received), read) < 0)
            return -1;
        if (self->written && words[2] > begin
            && write_block(self, peer, words[3] + begin, find(give, sent) + begin, words[2] - begin) < 0)
            return -1;
    }
    return 0;
}

/* A call in two halves: all tell where their blocks are; all copy, and then the arrays may change. */
static int begin(SingleCopy *self, char *const *sent, char *const *received)
{
    self->barrier->phase ^= 1;
    announce(self, self->barrier->phase, sent, received);
    return step(self);
}

/* Whether the ranks' sizes are those that were compared, and all have told where their blocks are. */
static bool is_agreed(const SingleCopy *self)
{
    const int64_t *words = self->tables[self->barrier->phase];
    const int64_t *sizes = (const int64_t *)PyBytes_AS_STRING(self->agreed);
    for (int pairs = self->num_ranks * self->num_ranks; pairs > 0; pairs--, words += TABLE_WORDS, sizes += 2) {
        if (words[1] != sizes[0] || words[2] != sizes[1] || (words[1] && words[0] <= 0))
            return false;
    }
    return true;
}

/* Write a finished piece of this rank's segment into the results of the others. Returns -1, or the rank that refuses. */
static int pass_on(const SingleCopy *self, char *piece, Py_ssize_t offset, Py_ssize_t length)
{
    const int64_t *table = self->tables[self->barrier->phase];
    for (int ahead = 1; ahead < self->num_ranks; ahead++) {
        int peer = (self->rank + ahead) % self->num_ranks;
        const int64_t *words = table + ((Py_ssize_t)peer * self->num_ranks + self->rank) * TABLE_WORDS;
        if (words[2] && !write_memory(self->pids[peer], words[3] + offset, piece, length))
            return peer;
    }
    return -1;
}

/* Reduce the bytes of this rank's segment from `begin` to `end`, piece by piece: a piece stays in the cache between being
   read, being combined and being written to the others, if it is. Returns -1, or the rank that refuses to be read, or to
   be written, as `verb` then says. */
static int reduce_pieces(const SingleCopy *self, char *const *sent, char *const *received, Py_ssize_t begin,
                         Py_ssize_t end, const char **verb)
{
    char *own = find(&self->gives[self->rank], sent), *total = find(&self->takes[self->rank], received);
    const int64_t *table = self->tables[self->barrier->phase];
    for (Py_ssize_t done = begin; done < end; done += self->piece_bytes) {
        Py_ssize_t rest = end - done, length = rest < self->piece_bytes ? rest : self->piece_bytes;
        char *rows[2];
        for (int peer = 0; peer < self->num_ranks; peer++) {
            char *piece = peer == self->rank ? own + done : self->scratch[peer > 0];
            uint64_t address = table[((Py_ssize_t)peer * self->num_ranks + self->rank) * TABLE_WORDS] + done;
            if (peer != self->rank && !read_memory(self->pids[peer], address, piece, length)) {
                *verb = "read";
                return peer;
            }
            rows[peer > 0] = piece;
            if (peer > 0) {
                char *out = peer == self->num_ranks - 1 ? total + done : self->scratch[0];
                self->reduction.combine(out, rows, 2, length / self->reduction.element_bytes);
                rows[0] = out;
            }
        }
        take_mean(&self->reduction, total + done, length, self->num_ranks);
        int unwritten = self->written ? pass_on(self, total + done, done, length) : -1;
        if (unwritten >= 0) {
            *verb = "write";
            return unwritten;
        }
    }
    return -1;
}

static int reduce_segment(const SingleCopy *self, char *const *sent, char *const *received)
{
    Py_ssize_t size = self->gives[self->rank].num_bytes, most = self->written ? PIECE : size, end;
    for (Py_ssize_t begin = 0; begin < size; begin = end) {
        end = size - begin < most ? size : begin + most;
        if (self->written && check(self) < 0)
            return -1;
        const char *verb = NULL;
        PyThreadState *thread = PyEval_SaveThread();
        int other = reduce_pieces(self, sent, received, begin, end, &verb), error = errno;
        PyEval_RestoreThread(thread);
        if (other >= 0)
            return refused(self, other, verb, error);
    }
    return 0;
}

static int reduce_blocks(SingleCopy *self, char *const *sent, char *const *received)
{
    int phase = self->barrier->phase;
    if (reduce_segment(self, sent, received) < 0)
        return -1;
    if (self->keeps_segment || self->written)
        return 0;
    if (step(self) < 0) /* all segments are finished */
        return -1;
    for (int ahead = 1; ahead < self->num_ranks; ahead++) {
        int peer = (self->rank + ahead) % self->num_ranks;
        const Block *take = &self->takes[peer];
        uint64_t address = self->tables[phase][((Py_ssize_t)peer * self->num_ranks + peer) * TABLE_WORDS + 3];
        if (take->num_bytes && read_block(self, peer, address, find(take, received), take->num_bytes) < 0)
            return -1;
    }
    return 0;
}

static int finish(SingleCopy *self, char *const *sent, char *const *received)
{
    int status = self->reduction.combine != NULL ? reduce_blocks(self, sent, received) : copy_blocks(self, sent, received);
    return status < 0 ? -1 : step(self);
}

typedef int Half(SingleCopy *, char *const *, char *const *);

/* Record that peers write into what is received between the next two steps; with NULL, that they no longer do. */
static int lend(const SingleCopy *self, PyObject *recv)
{
    if (!self->written)
        return 0;
    unsigned long long begin = barrier_next_word(self->barrier, self->fingerprint, 1);
    unsigned long long end = barrier_next_word(self->barrier, self->fingerprint, 2);
    PyObject *lent = recv == NULL ? Py_NewRef(Py_None) : Py_BuildValue("(OKK)", recv, begin, end);
    int status = lent == NULL ? -1 : PyObject_SetAttrString(self->keeps, "lent", lent);
    Py_XDECREF(lent);
    return status;
}

static PyObject *run(SingleCopy *self, PyObject *const *args, Py_ssize_t num_args, Half *first, Half *second)
{
    char *sent[MOST_ARRAYS], *received[MOST_ARRAYS];
    if (num_args != 2) {
        PyErr_SetString(PyExc_TypeError, "a SingleCopy takes what is sent and what is received");
        return NULL;
    }
    if (read_arrays(args[0], C_CONTIGUOUS, sent) < self->num_sent
        || read_arrays(args[1], CARRAY, received) < self->num_received)
        Py_RETURN_FALSE;
    if ((first == begin && lend(self, args[1]) < 0) || first(self, sent, received) < 0
        || (second != NULL && second(self, sent, received) < 0) || ((first == finish || second == finish) && lend(self, NULL) < 0))
        return NULL;
    Py_RETURN_TRUE;
}

static PyObject *single_copy_call(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    return run((SingleCopy *)object, args, kwnames == NULL ? PyVectorcall_NARGS(nargsf) : -1, begin, finish);
}

static PyObject *single_copy_begin(SingleCopy *self, PyObject *const *args, Py_ssize_t num_args)
{
    PyObject *begun = run(self, args, num_args, begin, NULL);
    if (begun == Py_True && PyBytes_GET_SIZE(self->agreed) && !is_agreed(self)) {
        Py_DECREF(begun);
        Py_RETURN_NONE;
    }
    return begun;
}

static PyObject *single_copy_finish(SingleCopy *self, PyObject *const *args, Py_ssize_t num_args)
{
    return run(self, args, num_args, finish, NULL);
}

/* A list of (array, offset, bytes), one for each rank. */
static Block *read_blocks(PyObject *list, int num_ranks)
{
    Block *blocks = PyMem_New(Block, num_ranks);
    for (int rank = 0; blocks != NULL && rank < num_ranks; rank++) {
        Block *block = &blocks[rank];
        PyObject *entry = PySequence_GetItem(list, rank);
        if (entry == NULL || !PyArg_ParseTuple(entry, "inn", &block->which, &block->offset, &block->num_bytes)) {
            PyMem_Free(blocks);
            blocks = NULL;
        }
        Py_XDECREF(entry);
    }
    return blocks;
}

static long *read_pids(PyObject *list, int num_ranks)
{
    long *pids = PyMem_New(long, num_ranks);
    for (int rank = 0; pids != NULL && rank < num_ranks; rank++) {
        PyObject *pid = PySequence_GetItem(list, rank);
        pids[rank] = pid == NULL ? -1 : PyLong_AsLong(pid);
        Py_XDECREF(pid);
        if (PyErr_Occurred()) {
            PyMem_Free(pids);
            pids = NULL;
        }
    }
    return pids;
}

static PyObject *single_copy_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *barrier, *wait, *check, *refuse, *keeps, *gives, *takes, *pids, *reduced, *agreed;
    double written;
    unsigned long long fingerprint, even_table, odd_table;
    int rank, num_ranks, num_sent, num_received, streams, reads_outputs;
    if (!PyArg_ParseTuple(args, "O!KOOOO(ii)(ii)OOdpp(KK)OOS", barrier_type, &barrier, &fingerprint, &wait, &check, &refuse,
                          &keeps, &rank, &num_ranks, &num_sent, &num_received, &gives, &takes, &written, &streams,
                          &reads_outputs, &even_table, &odd_table, &pids, &reduced, &agreed))
        return NULL;
    if (PyBytes_GET_SIZE(agreed) && PyBytes_GET_SIZE(agreed) != (Py_ssize_t)(2 * sizeof(int64_t)) * num_ranks * num_ranks) {
        PyErr_SetString(PyExc_ValueError, "SingleCopy: two sizes for each pair of ranks");
        return NULL;
    }
    const char *op;
    int kind, keeps_segment = 0;
    unsigned long long first = 0, second = 0;
    Py_ssize_t itemsize = 1, piece_bytes = 0;
    Reduction reduction = {NULL, 1, false};
    if (reduced != Py_None
        && !PyArg_ParseTuple(reduced, "sCnp(KK)n", &op, &kind, &itemsize, &keeps_segment, &first, &second, &piece_bytes))
        return NULL;
    if (num_sent > MOST_ARRAYS || num_received > MOST_ARRAYS
        || (reduced != Py_None && !find_reduction(op, (char)kind, itemsize, &reduction)))
        Py_RETURN_NONE; /* it is NumPy's */
    SingleCopy *self = (SingleCopy *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->call = single_copy_call;
    self->barrier = (Barrier *)Py_NewRef(barrier);
    self->fingerprint = fingerprint;
    self->wait = Py_NewRef(wait), self->check = Py_NewRef(check), self->refuse = Py_NewRef(refuse);
    self->keeps = Py_NewRef(keeps), self->agreed = Py_NewRef(agreed);
    self->written = written, self->streams = streams, self->reads_outputs = reads_outputs;
    self->reduction = reduction, self->keeps_segment = keeps_segment;
    self->piece_bytes = piece_bytes;
    self->scratch[0] = (char *)(uintptr_t)first, self->scratch[1] = (char *)(uintptr_t)second;
    self->rank = rank, self->num_ranks = num_ranks, self->num_sent = num_sent, self->num_received = num_received;
    self->tables[0] = (int64_t *)(uintptr_t)even_table, self->tables[1] = (int64_t *)(uintptr_t)odd_table;
    if ((self->gives = read_blocks(gives, num_ranks)) == NULL || (self->takes = read_blocks(takes, num_ranks)) == NULL
        || (self->pids = read_pids(pids, num_ranks)) == NULL) {
        Py_DECREF(self);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static int single_copy_traverse(SingleCopy *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->barrier);
    Py_VISIT(self->wait);
    Py_VISIT(self->check);
    Py_VISIT(self->refuse);
    Py_VISIT(self->keeps);
    return 0;
}

static int single_copy_clear(SingleCopy *self)
{
    Py_CLEAR(self->barrier);
    Py_CLEAR(self->wait);
    Py_CLEAR(self->check);
    Py_CLEAR(self->refuse);
    Py_CLEAR(self->keeps);
    Py_CLEAR(self->agreed);
    return 0;
}

static void single_copy_dealloc(SingleCopy *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    single_copy_clear(self);
    PyMem_Free(self->gives);
    PyMem_Free(self->takes);
    PyMem_Free(self->pids);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"begin", (PyCFunction)(void (*)(void))single_copy_begin, METH_FASTCALL,
     "begin(send, recv): the first step; return False if nothing was done, and None if the ranks' sizes are not those "
     "agreed: then there is no second half."},
    {"finish", (PyCFunction)(void (*)(void))single_copy_finish, METH_FASTCALL, "finish(send, recv): the rest."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(SingleCopy, call), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, single_copy_new}, {Py_tp_dealloc, single_copy_dealloc}, {Py_tp_traverse, single_copy_traverse},
    {Py_tp_clear, single_copy_clear}, {Py_tp_call, PyVectorcall_Call}, {Py_tp_members, members},
    {Py_tp_methods, methods},
    {Py_tp_doc, "SingleCopy(barrier, fingerprint, wait, check, refuse, keeps, (rank, num_ranks), (num_sent, num_received), "
                "gives, takes, written, streams, reads_outputs, tables, pids, reduced, agreed): a call of many bytes. It returns "
                "True, or False if it did nothing."},
    {0, NULL},
};

PyType_Spec single_copy_spec = {
    "meshdist.core._core.SingleCopy", sizeof(SingleCopy), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots,
};
