/* DeferringLock: a lock in which Ctrl-C waits until the main thread has released it.

   Python raises KeyboardInterrupt between any two instructions of the main thread: also behind a call that has taken bytes
   out of a socket, and before they are counted. The handler of SIGINT is therefore one that remembers the signal while the
   main thread is in a section, and otherwise calls the one that was there before, which is Python's own: no handler that
   `signal.signal` knows is replaced. */
#include "core.h"
#include <errno.h>
#include <pthread.h>
#include <signal.h>

/* Whoever calls `signal.signal` puts Python's handler back. How often a section looks for that, which is a system call. */
enum { SECTIONS_OF_A_LOOK = 16 };

static struct sigaction before;   /* what was there, and is called: Python's, as a rule */
static bool has_before;
static atomic_int depth;          /* how many sections the main thread is in, one within the other */
static atomic_bool has_come;      /* a signal in one */
static atomic_int num_handling;   /* in how many threads the handler runs */
static unsigned sections_to_look;

static void handle(int number, siginfo_t *info, void *context)
{
    int error = errno;
    atomic_fetch_add(&num_handling, 1);
    atomic_store(&has_come, true);
    /* The main thread first leaves its section and then looks at `has_come`: one of the two finds the signal. */
    if (atomic_load(&depth) == 0 && atomic_exchange(&has_come, false)) {
        if (before.sa_flags & SA_SIGINFO)
            before.sa_sigaction(number, info, context);
        else
            before.sa_handler(number);
    }
    atomic_fetch_sub(&num_handling, 1);
    errno = error;
}

static void take_over(void)
{
    struct sigaction now;
    if (sigaction(SIGINT, NULL, &now) < 0)
        return;
    bool has_info = now.sa_flags & SA_SIGINFO;
    if (has_info ? now.sa_sigaction == handle : now.sa_handler == SIG_DFL || now.sa_handler == SIG_IGN)
        return; /* what ends the process, or does nothing, raises nothing */
    /* Another one may call this one, which would then call it. */
    if (has_before && (has_info != !!(before.sa_flags & SA_SIGINFO) || now.sa_handler != before.sa_handler))
        return;
    before = now, has_before = true;
    now.sa_flags |= SA_SIGINFO;
    now.sa_sigaction = handle;
    sigaction(SIGINT, &now, NULL);
}

static void forget_sections(void) /* in a forked child: the thread that was in them may not be there */
{
    atomic_store(&depth, 0);
    atomic_store(&num_handling, 0);
}

static void leave(void)
{
    if (atomic_fetch_sub(&depth, 1) == 1 && atomic_exchange(&has_come, false))
        raise(SIGINT);
}

/* From here on, signals wait; one that came before is handled. */
static int enter(void)
{
    if (atomic_fetch_add(&depth, 1) > 0)
        return 0;
    if (sections_to_look-- == 0) {
        sections_to_look = SECTIONS_OF_A_LOOK - 1;
        take_over();
    }
    while (atomic_load(&num_handling) > 0) /* in another thread, which has seen no section */
        pause_briefly();
    if (PyErr_CheckSignals() == 0)
        return 0;
    leave();
    return -1;
}

typedef struct {
    PyObject_HEAD
    PyThread_type_lock lock;
    unsigned long main_thread;
    unsigned long owner; /* the thread that has it; may be old unless `times` says that it is this one's */
    unsigned long times; /* how often that thread has it */
} DeferringLock;

PyTypeObject *deferring_lock_type;

static PyObject *lock_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"main_thread", NULL};
    static bool is_known = false;
    unsigned long main_thread;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "k", names, &main_thread))
        return NULL;
    if (!is_known && pthread_atfork(NULL, NULL, forget_sections) != 0)
        return PyErr_NoMemory();
    is_known = true;
    DeferringLock *self = (DeferringLock *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    sections_to_look = 0;
    self->main_thread = main_thread;
    self->lock = PyThread_allocate_lock();
    if (self->lock == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void lock_dealloc(DeferringLock *self)
{
    PyTypeObject *type = Py_TYPE(self);
    if (self->lock != NULL)
        PyThread_free_lock(self->lock);
    type->tp_free(self);
    Py_DECREF(type);
}

/* 1: this thread has it; 0: another one has it; -1: a signal handler has raised. */
static int acquire(DeferringLock *self, bool blocks)
{
    unsigned long me = PyThread_get_thread_ident();
    if (self->times > 0 && self->owner == me) {
        self->times++;
        return 1;
    }
    if (PyThread_acquire_lock(self->lock, NOWAIT_LOCK) == 0) {
        if (!blocks)
            return 0;
        Py_BEGIN_ALLOW_THREADS
        PyThread_acquire_lock(self->lock, WAIT_LOCK);
        Py_END_ALLOW_THREADS
    }
    self->owner = me;
    self->times = 1;
    if (me != self->main_thread || enter() == 0)
        return 1;
    self->times = 0;
    PyThread_release_lock(self->lock);
    return -1;
}

static int release(DeferringLock *self)
{
    unsigned long me = PyThread_get_thread_ident();
    if (self->times == 0 || self->owner != me) {
        PyErr_SetString(PyExc_RuntimeError, "cannot release a lock that this thread has not acquired");
        return -1;
    }
    if (--self->times == 0) {
        PyThread_release_lock(self->lock);
        if (me == self->main_thread)
            leave();
    }
    return 0;
}

static PyObject *lock_acquire(DeferringLock *self, PyObject *const *args, Py_ssize_t count)
{
    int blocks = count == 0 ? 1 : PyObject_IsTrue(args[0]);
    if (count > 1)
        return PyErr_Format(PyExc_TypeError, "acquire takes at most 1 argument");
    int has = blocks < 0 ? -1 : acquire(self, blocks);
    return has < 0 ? NULL : PyBool_FromLong(has);
}

static PyObject *lock_enter(DeferringLock *self, PyObject *unused)
{
    return acquire(self, true) < 0 ? NULL : Py_NewRef(Py_True);
}

static PyObject *lock_release(DeferringLock *self, PyObject *unused)
{
    return release(self) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *lock_exit(DeferringLock *self, PyObject *const *args, Py_ssize_t count)
{
    return lock_release(self, NULL);
}

static PyMethodDef lock_methods[] = {
    {"acquire", (PyCFunction)(void (*)(void))lock_acquire, METH_FASTCALL,
     "acquire(blocking=True): return whether this thread has it now; it may take it again."},
    {"release", (PyCFunction)lock_release, METH_NOARGS, "Release it as often as it was acquired."},
    {"__enter__", (PyCFunction)lock_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))lock_exit, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot lock_slots[] = {
    {Py_tp_new, lock_new}, {Py_tp_dealloc, lock_dealloc}, {Py_tp_methods, lock_methods},
    {Py_tp_doc, "DeferringLock(main_thread): a lock in which Ctrl-C waits for its release by the main thread."}, {0, NULL},
};

PyType_Spec deferring_lock_spec = {
    "meshdist.core._core.DeferringLock", sizeof(DeferringLock), 0, Py_TPFLAGS_DEFAULT, lock_slots,
};
