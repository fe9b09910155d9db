/* Barrier: the base class of the compiled FlagBarrier. What the words mean is told in `flag_barrier`. */
#include "core.h"

#include <structmember.h>

PyTypeObject *barrier_type;

static const uint64_t STEP = 0xFFFFFFFF;
const Awaited ALL = {-1, -1, false, false};
/* The words of a signal, and which of them says for which call it is; those of a recorded call. As in `shared_region`. */
enum { SIGNAL_WORDS = 2, FINGERPRINT = 1 };
enum { CALL_LENGTH = 1, CALL_TEXT = 2, CALL_WORDS = CALL_TEXT + CALL_TEXT_BYTES / sizeof(Word) };

/* Where in a rank's signals that of a step is: those of steps in a row are in different cache lines. */
enum { LINE = 64 / sizeof(Word), NUM_LINES = NUM_PHASES * SIGNAL_WORDS / LINE };
static Py_ssize_t place_of(uint64_t step)
{
    return step % NUM_LINES * LINE + step / NUM_LINES % (LINE / SIGNAL_WORDS) * SIGNAL_WORDS;
}

/* Take a cache line from the other processors before it is written. */
static inline void prefetch_to_write(const Word *word)
{
#if defined(__x86_64__)
    __asm__ volatile("prefetchw %0" ::"m"(*word));
#else
    __builtin_prefetch((const void *)word, 1);
#endif
}

static Py_ssize_t *read_indices(PyObject *sequence, int *count)
{
    PyObject *fast = PySequence_Fast(sequence, "indices of words, as a sequence");
    if (fast == NULL)
        return NULL;
    Py_ssize_t size = PySequence_Fast_GET_SIZE(fast);
    Py_ssize_t *indices = PyMem_New(Py_ssize_t, size ? size : 1);
    for (Py_ssize_t i = 0; indices != NULL && i < size; i++) {
        indices[i] = PyLong_AsSsize_t(PySequence_Fast_GET_ITEM(fast, i));
        if (indices[i] == -1 && PyErr_Occurred()) {
            PyMem_Free(indices);
            indices = NULL;
        }
    }
    Py_DECREF(fast);
    *count = (int)size;
    if (indices == NULL && !PyErr_Occurred())
        PyErr_NoMemory();
    return indices;
}

static PyObject *barrier_attach(Barrier *self, PyObject *args)
{
    PyObject *words, *posts, *bells;
    if (self->words != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "Barrier: attached already");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "OnOOn", &words, &self->mine, &posts, &bells, &self->calls))
        return NULL;
    if ((self->posts = read_indices(posts, &self->num_peers)) == NULL
        || (self->bells = read_indices(bells, &self->num_bells)) == NULL)
        return NULL;
    if (PyObject_GetBuffer(words, &self->view, PyBUF_CONTIG) < 0)
        return NULL;
    self->words = self->view.buf;
    self->spins = SPINS, self->fewest_spins = FEWEST_SPINS;
    self->awaited = ALL;
    Py_RETURN_NONE;
}

uint64_t barrier_next_word(const Barrier *self, uint64_t fingerprint, int steps)
{
    return (fingerprint & ~STEP) | ((self->step + steps) & STEP);
}

int barrier_record(Barrier *self, PyObject *text)
{
    uint64_t step = self->step + 1;
    int phase = step % NUM_PHASES;
    Word *call = &self->words[self->calls + phase * CALL_WORDS];
    if (self->recorded[phase] != text) {
        Py_XSETREF(self->recorded[phase], Py_NewRef(text));
        store(call + CALL_LENGTH, PyBytes_GET_SIZE(text));
        memcpy((char *)(call + CALL_TEXT), PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text));
    }
    store(call, step);
    return phase;
}

int barrier_signal(Barrier *self, uint64_t fingerprint, Awaited awaited, uint64_t *word)
{
    uint64_t step = ++self->step;
    Word *mine = &self->words[self->mine + place_of(step)];
    self->word = *word = (fingerprint & ~STEP) | (step & STEP);
    self->fingerprint = fingerprint;
    self->awaited = awaited;
    self->long_steps = self->long_steps << 1 | awaited.is_long;
    if (load(mine + FINGERPRINT) != fingerprint) /* a peer may be polling this cache line */
        store(mine + FINGERPRINT, fingerprint);
    store(mine, *word);
    prefetch_to_write(&self->words[self->mine + place_of(step + 1)]); /* while this rank waits */
    for (int i = 0; i < self->num_bells; i++) {
        if (load(&self->words[self->bells[i]])) {
            PyObject *rang = PyObject_CallMethod((PyObject *)self, "_ring", NULL);
            Py_XDECREF(rang);
            return rang == NULL ? -1 : 0;
        }
    }
    return 0;
}

/* Peers, by where they signal. */
typedef struct {
    const Py_ssize_t *begin, *end;
} Posts;

/* What this rank has signalled in a step; in the current one, also if it has taken that back. */
static uint64_t word_of(const Barrier *self, uint64_t step)
{
    return step == self->step ? self->word : load(&self->words[self->mine + place_of(step)]);
}

static Posts all_posts(const Barrier *self) { return (Posts){self->posts, self->posts + self->num_peers}; }

/* Whether peers that have signalled this rank's word of a step did so for its call. */
static bool is_same_call(const Barrier *self, uint64_t step, Posts posts)
{
    const Word *words = self->words + place_of(step) + FINGERPRINT;
    /* The cache line of the current step is on its way to those that poll it. */
    uint64_t fingerprint = step == self->step ? self->fingerprint : load(words + self->mine);
    for (const Py_ssize_t *post = posts.begin; post < posts.end; post++) {
        if (load(words + *post) != fingerprint)
            return false;
    }
    return true;
}

/* Python goes on with a wait: it sleeps in the end, and finds out why a peer does not come. */
static int await_rest(uint64_t word, PyObject *wait)
{
    PyObject *number = PyLong_FromUnsignedLongLong(word);
    PyObject *waited = number == NULL ? NULL : PyObject_CallOneArg(wait, number);
    Py_XDECREF(number);
    Py_XDECREF(waited);
    return waited == NULL ? -1 : 0;
}

/* Wait until peers have signalled this rank's call in a step; up to YIELD_NS. */
static bool poll_step(Barrier *self, uint64_t step, Posts posts)
{
    const Word *words = self->words + place_of(step);
    uint64_t word = word_of(self, step);
    const Py_ssize_t *post = posts.begin;
    int spins = self->spins;
    for (; post < posts.end; post++) {
        while (load(words + *post) != word) {
            if (--spins < 0)
                goto yield;
            pause_briefly();
        }
    }
    if (spins < self->spins)
        spun(&self->spins, false, self->fewest_spins);
    return is_same_call(self, step, posts);

yield:
    spun(&self->spins, true, self->fewest_spins);
    bool arrived = true;
    Py_BEGIN_ALLOW_THREADS
    int64_t until = now_ns() + YIELD_NS;
    for (; arrived && post < posts.end; post++) {
        while (load(words + *post) != word && (arrived = now_ns() < until))
            yield_processor();
    }
    Py_END_ALLOW_THREADS
    return arrived && is_same_call(self, step, posts);
}

/* Whether peers have signalled a word for this rank's call. */
static bool have_signalled(const Barrier *self, uint64_t word, Posts posts)
{
    const Word *words = self->words + place_of(word & STEP);
    for (const Py_ssize_t *post = posts.begin; post < posts.end; post++) {
        if (load(words + *post) != word)
            return false;
    }
    return is_same_call(self, word & STEP, posts);
}

static bool look_at_step(Barrier *self, uint64_t step, Posts posts)
{
    return have_signalled(self, word_of(self, step), posts);
}

/* Whether those have come whom the current step needs, as `look` sees it. */
static inline bool have_come(Barrier *self, bool (*look)(Barrier *, uint64_t, Posts))
{
    uint64_t step = self->step;
    Awaited awaited = self->awaited;
    bool needs_all = !returns_early(awaited) || awaited.end - awaited.first == self->num_peers;
    if (!needs_all && !look(self, step, (Posts){self->posts + awaited.first, self->posts + awaited.end}))
        return false;
    bool is_due = self->long_steps >> (NUM_EARLY_SLOTS - 1) & 1; /* the next step uses that early slot */
    uint64_t before = needs_all ? 0 : is_due ? NUM_EARLY_SLOTS - 2 : AHEAD;
    for (uint64_t next; (next = self->compared + 1) + before <= step; self->compared = next) {
        if (!look(self, next, all_posts(self)))
            return false;
    }
    return true;
}

bool barrier_poll(Barrier *self)
{
    if (returns_early(self->awaited) || self->compared + 1 != self->step)
        return have_come(self, poll_step);
    if (!poll_step(self, self->step, all_posts(self))) /* most calls need nothing else */
        return false;
    self->compared = self->step;
    return true;
}

int barrier_await(Barrier *self, uint64_t word, PyObject *wait)
{
    return barrier_poll(self) ? 0 : await_rest(word, wait);
}

static PyObject *barrier_signal_method(Barrier *self, PyObject *const *args, Py_ssize_t num_args)
{
    Awaited awaited = ALL;
    if (num_args < 1 || num_args > 2) {
        PyErr_SetString(PyExc_TypeError, "signal(fingerprint, awaited=ALL)");
        return NULL;
    }
    uint64_t word, fingerprint = PyLong_AsUnsignedLongLong(args[0]);
    if (PyErr_Occurred()
        || (num_args == 2
            && !PyArg_ParseTuple(args[1], "iipp", &awaited.first, &awaited.end, &awaited.in_order, &awaited.is_long)))
        return NULL;
    return barrier_signal(self, fingerprint, awaited, &word) < 0 ? NULL : PyLong_FromUnsignedLongLong(word);
}

static PyObject *barrier_record_call(Barrier *self, PyObject *text)
{
    if (!PyBytes_CheckExact(text) || PyBytes_GET_SIZE(text) > CALL_TEXT_BYTES) {
        PyErr_SetString(PyExc_ValueError, "record_call(text): bytes, at most as many as there is room for");
        return NULL;
    }
    return PyLong_FromLong(barrier_record(self, text));
}

static PyObject *barrier_await_others(Barrier *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 2) {
        PyErr_SetString(PyExc_TypeError, "await_others(word, plan)");
        return NULL;
    }
    uint64_t word = PyLong_AsUnsignedLongLong(args[0]);
    if (word == (uint64_t)-1 && PyErr_Occurred())
        return NULL;
    PyObject *wait = PyObject_GetAttrString(args[1], "await_rest");
    if (wait == NULL)
        return NULL;
    int status = barrier_await(self, word, wait);
    Py_DECREF(wait);
    if (status < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *barrier_arrived(Barrier *self, PyObject *number)
{
    uint64_t word = PyLong_AsUnsignedLongLong(number);
    if (word == (uint64_t)-1 && PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(word == self->word ? have_come(self, look_at_step)
                                              : have_signalled(self, word, all_posts(self)));
}

static PyObject *barrier_put(Barrier *self, PyObject *const *args, Py_ssize_t num_args)
{
    char *place, *data;
    Py_ssize_t size = read_copy("put(place, data)", args, num_args, &place, &data);
    if (size < 0)
        return NULL;
    PyThreadState *thread = without_gil(size > LONG);
    copy_out(&self->pace, place, data, size);
    with_gil(thread);
    Py_RETURN_NONE;
}

static void barrier_dealloc(Barrier *self)
{
    PyTypeObject *type = Py_TYPE(self);
    for (int phase = 0; phase < NUM_PHASES; phase++)
        Py_CLEAR(self->recorded[phase]);
    PyMem_Free(self->posts);
    PyMem_Free(self->bells);
    if (self->words != NULL)
        PyBuffer_Release(&self->view);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"attach", (PyCFunction)barrier_attach, METH_VARARGS,
     "attach(words, mine, posts, bells, calls): set the words, and the indices of this rank's, the peers', the bells, and "
     "of where this rank records its calls."},
    {"record_call", (PyCFunction)barrier_record_call, METH_O,
     "Record the call that this rank makes in the next step, from which it may return early; return the phase."},
    {"signal", (PyCFunction)(void (*)(void))barrier_signal_method, METH_FASTCALL,
     "signal(fingerprint, awaited=ALL): enter the next step; return its word."},
    {"await_others", (PyCFunction)(void (*)(void))barrier_await_others, METH_FASTCALL,
     "await_others(word, plan): wait for those whom the current step needs."},
    {"put", (PyCFunction)(void (*)(void))barrier_put, METH_FASTCALL, "put(place, data): copy an array into a slot."},
    {"arrived", (PyCFunction)barrier_arrived, METH_O,
     "Return whether those have come whom the step of a word needs: in an earlier step than the current one, all."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"step", T_ULONGLONG, offsetof(Barrier, step), 0, NULL},
    {"phase", T_INT, offsetof(Barrier, phase), 0, NULL},
    {"fewest_spins", T_INT, offsetof(Barrier, fewest_spins), 0, "How often to poll at least before yielding."},
    {"_word", T_ULONGLONG, offsetof(Barrier, word), 0, NULL},
    {"_compared", T_ULONGLONG, offsetof(Barrier, compared), 0, NULL},
    {"_first", T_INT, offsetof(Barrier, awaited.first), 0, NULL},
    {"_end", T_INT, offsetof(Barrier, awaited.end), 0, NULL},
    {"_in_order", T_INT, offsetof(Barrier, awaited.in_order), 0, NULL},
    {"_long_steps", T_UINT, offsetof(Barrier, long_steps), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_dealloc, barrier_dealloc}, {Py_tp_methods, methods}, {Py_tp_members, members},
    {Py_tp_doc, "The steps of a group: the compiled part of FlagBarrier."}, {0, NULL},
};

PyType_Spec barrier_spec = {
    "meshdist.core._core.Barrier", sizeof(Barrier), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots,
};
