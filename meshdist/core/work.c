/* Handle: the base class of Work and Future, and the known async calls; see `runtime.work`.

   A known call is begun here, and waits in the queue of its group. A thread that waits for it carries out the calls of
   the queue in their order, each as a sync call would be. What takes longer than a moment is Python's: it gets a Job,
   which goes on where this has stopped, and so does what the progress thread takes up, what has callbacks, and the
   calls of a group that has changed since. A receive that is known is deferred, and takes its message while it is waited
   for. A long send that is known is announced; its receiver does the rest. */
#include "core.h"

#include <structmember.h>

PyTypeObject *handle_type;

/* As many receives may be deferred, and from so many bytes on, `watch` is to know; set by `handles`, as
   `DeferredReceives` has them. */
static Py_ssize_t most_deferred, long_bytes;
/* `Work`, and its classes of known calls, of receives of arrays and of objects, of sends that are announced, and of
   those that are done; `Work.wait`, and `ObjectsWork.result`. */
static PyTypeObject *work_type, *planned_type, *deferred_type, *objects_type, *announced_type, *done_type;
static PyObject *wait_in_python, *result_in_python;

/* How many calls to carry out between two looks for signals. */
enum { CALLS_AT_ONCE = 64 };

/* ---- beginning a call */

static Handle *new_handle(PyTypeObject *type, PyObject *prefix)
{
    if (type == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the classes of works are not known to the core");
        return NULL;
    }
    Handle *self = (Handle *)type->tp_alloc(type, 0);
    if (self != NULL)
        self->prefix = Py_NewRef(prefix);
    return self;
}

static Handle *new_call(PyTypeObject *type, Calls *calls, PyObject *run, PyObject *kind, PyObject *prefix, PyObject *sent,
                        PyObject *received, Record *record, PyObject *queue)
{
    Handle *self = new_handle(type, prefix);
    if (self == NULL)
        return NULL;
    self->calls = (Calls *)Py_NewRef(calls);
    self->run = Py_NewRef(run), self->kind = Py_NewRef(kind), self->sent = Py_NewRef(sent);
    self->value = Py_NewRef(received), self->record = (Record *)Py_NewRef(record), self->queue = Py_NewRef(queue);
    if (sent != Py_None || received != Py_None) /* a barrier has no arrays that might be used too early */
        self->forgotten = Py_XNewRef(calls->forgotten);
    self->changes = calls->changes;
    self->source = -1;
    return self;
}

static int append(PyObject *deque, PyObject *item)
{
    static PyObject *name;
    if (name == NULL && (name = PyUnicode_InternFromString("append")) == NULL)
        return -1;
    PyObject *done = PyObject_CallMethodOneArg(deque, name, item);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* The first item of a deque, a new reference; NULL without an error if there is none. */
static PyObject *first_of(PyObject *deque)
{
    return PyObject_Size(deque) > 0 ? PySequence_GetItem(deque, 0) : NULL;
}

static int drop_first(PyObject *deque)
{
    static PyObject *name;
    if (name == NULL && (name = PyUnicode_InternFromString("popleft")) == NULL)
        return -1;
    PyObject *item = PyObject_CallMethodNoArgs(deque, name);
    Py_XDECREF(item); /* the caller has it as well */
    return item == NULL ? -1 : 0;
}

/* See that the progress thread knows of the queue; as `Progress.submit` does. */
static int activate(Calls *calls)
{
    static PyObject *name;
    if (name == NULL && (name = PyUnicode_InternFromString("active")) == NULL)
        return -1;
    PyObject *is_active = PyObject_GetAttr(calls->queue, name);
    Py_XDECREF(is_active);
    if (is_active == NULL || is_active == Py_True)
        return is_active == NULL ? -1 : 0;
    PyObject *done = PyObject_CallMethod(calls->queue, "activate", NULL);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

PyObject *begin_call(Calls *calls, PyObject *run, PyObject *kind, PyObject *prefix, PyObject *sent, PyObject *received,
                     Record *record)
{
    Handle *self = new_call(planned_type, calls, run, kind, prefix, sent, received, record, calls->queue);
    if (self != NULL && (append(calls->outstanding, (PyObject *)self) < 0 || activate(calls) < 0))
        Py_CLEAR(self);
    return (PyObject *)self;
}

bool may_defer(const Calls *calls) { return PyObject_Size(calls->deferred) < most_deferred; }

bool may_announce(Calls *calls, PyObject *run)
{
    if (PyObject_Size(calls->announced) >= most_deferred)
        return false;
    if (PyObject_Size(calls->deferred) == 0)
        return ring_announces_first((Ring *)run, calls->num_messages + 1);
    Py_XSETREF(calls->timed, (Ring *)Py_NewRef(run));
    return ring_announces((Ring *)run);
}

/* How many bytes a receive is for; of objects, as many as the last one. */
static Py_ssize_t bytes_of(PyObject *run)
{
    if (Py_TYPE(run) == ring_type)
        return ((Ring *)run)->kind.num_bytes;
    const Inbox *inbox = (Inbox *)run;
    return inbox->what == OBJECT_LISTS ? inbox->num_bytes : inbox->channels[0].ring->kind.num_bytes;
}

PyObject *defer_receive(Calls *calls, PyObject *run, PyObject *kind, PyObject *prefix, PyObject *received,
                        Record *record, long source)
{
    bool of_objects = Py_TYPE(run) == inbox_type && ((Inbox *)run)->what == OBJECT_LISTS;
    Handle *self = new_call(of_objects ? objects_type : deferred_type, calls, run, kind, prefix, Py_None, received, record,
                            calls->deferral);
    if (self == NULL)
        return NULL;
    if (of_objects) /* there is no array, but the result is not to be forgotten */
        Py_XSETREF(self->forgotten, Py_XNewRef(calls->forgotten));
    self->source = source;
    if (append(calls->deferred, (PyObject *)self) < 0)
        Py_CLEAR(self);
    if (self != NULL && bytes_of(run) * PyObject_Size(calls->deferred) > long_bytes) {
        PyObject *watched = PyObject_CallMethod(calls->deferral, "watch", NULL);
        if (watched == NULL)
            Py_CLEAR(self);
        Py_XDECREF(watched);
    }
    return (PyObject *)self;
}

PyObject *announced_send(Calls *calls, PyObject *run, PyObject *kind, PyObject *prefix, PyObject *sent, Record *record,
                         uint64_t number)
{
    Handle *self = new_call(announced_type, calls, run, kind, prefix, sent, Py_None, record, calls->announcing);
    if (self == NULL)
        return NULL;
    self->word = number;
    if (append(calls->announced, (PyObject *)self) < 0 || PySet_Add(((Ring *)run)->announced, (PyObject *)self) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

PyObject *sent_at_once(PyObject *prefix)
{
    Handle *self = new_handle(done_type, prefix);
    if (self != NULL)
        self->is_done = 1;
    return (PyObject *)self;
}

/* ---- carrying it out */

static bool has_callbacks(const Handle *self) { return self->callbacks != NULL && PyObject_Size(self->callbacks) != 0; }

/* Let go of what carries out a call. */
static void release(Handle *self)
{
    Calls *calls = self->calls;
    PyObject *run = self->run;
    self->calls = NULL, self->run = NULL;
    if (run != NULL && Py_TYPE(self) == announced_type && PySet_Discard(((Ring *)run)->announced, (PyObject *)self) < 0)
        PyErr_Clear();
    Py_XDECREF(run);
    Py_CLEAR(self->sent);
    Py_CLEAR(self->kind);
    Py_CLEAR(self->job);
    Py_XDECREF(calls);
}

/* The call is done. What was asked for meanwhile, by another thread, is called by `call_back`. */
static void mark_done(Handle *self)
{
    record_done(self->record);
    self->is_done = 1;
}

static int call_back(Handle *self)
{
    PyObject *done = has_callbacks(self) ? PyObject_CallMethod((PyObject *)self, "complete", "O", Py_None)
                                         : Py_NewRef(Py_None);
    Py_XDECREF(done);
    return done == NULL ? -1 : 1;
}

/* The data of an array that a call has kept; false if it is no longer as it was. */
static bool data_of(PyObject *object, int flags, char **data)
{
    if (!is_array(object))
        return object == Py_None;
    *data = ((Array *)object)->data;
    return (((Array *)object)->flags & flags) == flags;
}

/* Carry out the first call of a queue. Returns 1, 0 if it is Python's, or -1 with an error set. */
static int advance(Handle *self, PyObject *deque)
{
    char *sent = NULL, *received = NULL;
    if (self->is_done || self->run == NULL || self->job != NULL || self->error != NULL || has_callbacks(self)
        || self->changes != self->calls->changes || !data_of(self->sent, C_CONTIGUOUS, &sent)
        || !data_of(self->value, CARRAY, &received))
        return 0;
    Step *step = (Step *)Py_NewRef(self->run);
    int status = 0;
    if (!self->has_begun) {
        uint64_t word;
        self->record->started = now_ns();
        self->has_begun = 1;
        status = step_begin(step, &sent, &received, NULL, &word, &self->phase);
        self->word = word;
    }
    if (status < 0) { /* Python raises it, as the error of this call */
        PyObject *type, *trace;
        PyErr_Fetch(&type, &self->error, &trace);
        PyErr_NormalizeException(&type, &self->error, &trace);
        Py_XDECREF(type);
        Py_XDECREF(trace);
        status = 0;
    } else if (barrier_poll(step->barrier)) {
        step_finish(step, self->phase, &sent, &received, NULL);
        status = drop_first(deque) < 0 ? -1 : 1;
        mark_done(self);
    }
    Py_DECREF(step);
    return status;
}

static int carry_some(Calls *calls, Handle *until)
{
    int status = 1;
    for (int left = CALLS_AT_ONCE; status > 0 && left > 0 && !until->is_done; left--) {
        if (calls->carrier->is_taken)
            return 0;
        PyObject *head = first_of(calls->outstanding);
        if (head == NULL || Py_TYPE(head) != planned_type) {
            Py_XDECREF(head);
            return 0;
        }
        calls->carrier->is_taken = 1;
        status = advance((Handle *)head, calls->outstanding);
        calls->carrier->is_taken = 0;
        if (status > 0) {
            release((Handle *)head);
            status = call_back((Handle *)head);
        }
        Py_DECREF(head);
    }
    return status;
}

/* Put a receive back whose message has not been taken. */
static int put_back(Handle *self, PyObject *deque)
{
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyObject *back = PyObject_CallMethod(deque, "appendleft", "O", self);
    Py_XDECREF(back);
    if (type != NULL)
        PyErr_Restore(type, error, trace);
    return PyErr_Occurred() ? -1 : 0;
}

/* Note what an inbox has received: its sender; of objects, their pickle, and how many they are. */
static int note_found(Handle *self, const Inbox *inbox, const Found *found)
{
    self->source = PyLong_AsLong(inbox->channels[found->channel].global_rank);
    if (found->pickle == NULL)
        return 1;
    Py_SETREF(self->value, Py_NewRef(found->pickle));
    PyObject *facts = objects_facts(self->record->facts, found->number, PyBytes_GET_SIZE(found->pickle));
    if (facts == NULL)
        return -1;
    Py_SETREF(self->record->facts, facts);
    return 1;
}

/* Take the message of the first receive, which is not in the deque meanwhile: other threads may run. */
static int take(Handle *self, PyObject *run, PyObject *deque)
{
    Found found = {.number = -1};
    bool by_ring = Py_TYPE(run) == ring_type, of_array = Py_TYPE(self) != objects_type;
    Array *array = (Array *)self->value, *room = of_array && is_array(self->value) ? room_of(array) : NULL;
    if (of_array && room == NULL)
        return PyErr_Occurred() ? -1 : 0;
    int status = drop_first(deque);
    if (status == 0) {
        char *data = of_array ? room->data : NULL;
        status = by_ring ? ring_take((Ring *)run, data) : inbox_take((Inbox *)run, data, &found);
        if (status > 0 && of_array)
            unpack(array, room);
        if (status > 0 && !by_ring)
            status = note_found(self, (Inbox *)run, &found);
        Py_XDECREF(found.pickle);
        if (status <= 0)
            status = put_back(self, deque);
    }
    Py_XDECREF(room);
    if (status <= 0)
        return status;
    mark_done(self);
    release(self);
    Py_CLEAR(self->queue);
    status = by_ring ? ring_wake((Ring *)run) : inbox_wake((Inbox *)run, &found);
    return status < 0 ? -1 : call_back(self);
}

static bool is_deferred(PyObject *head)
{
    return head != NULL && (Py_TYPE(head) == deferred_type || Py_TYPE(head) == objects_type)
           && ((Handle *)head)->run != NULL;
}

/* Wait for a moment for the message of the first receive of a group, and take it, as `DeferredReceives.carry` does. */
static int take_first(Calls *calls)
{
    int status = 0;
    PyObject *head = first_of(calls->deferred);
    if (is_deferred(head) && !calls->taking->is_taken) {
        PyObject *run = Py_NewRef(((Handle *)head)->run);
        /* Another thread may take, or post, this receive meanwhile. */
        status = Py_TYPE(run) == ring_type ? ring_await((Ring *)run) : inbox_await((Inbox *)run);
        PyObject *first = status > 0 ? first_of(calls->deferred) : NULL;
        if (status > 0)
            status = first == head && !calls->taking->is_taken ? take((Handle *)head, run, calls->deferred) : 0;
        Py_XDECREF(first);
        Py_DECREF(run);
    }
    Py_XDECREF(head);
    return status;
}

static int take_some(Calls *calls, Handle *until)
{
    int status = 1;
    for (int left = CALLS_AT_ONCE; status > 0 && left > 0 && !until->is_done; left--)
        status = take_first(calls);
    return status;
}

/* Whether the message of the first receive has come. */
static bool has_arrival(const Calls *calls)
{
    PyObject *head = first_of(calls->deferred), *run = is_deferred(head) ? ((Handle *)head)->run : NULL;
    bool has = run != NULL
               && (Py_TYPE(run) == ring_type ? ring_has_come((Ring *)run) : inbox_has_come((Inbox *)run));
    Py_XDECREF(head);
    return has;
}

/* An announced message is taken. Returns 0 if another thread has posted its send. */
static int finish_announced(Calls *calls, Handle *self)
{
    PyObject *removed = PyObject_CallMethod(calls->announced, "remove", "O", self);
    if (removed == NULL) {
        PyErr_Clear();
        return 0;
    }
    Py_DECREF(removed);
    mark_done(self);
    release(self);
    Py_CLEAR(self->queue);
    return call_back(self);
}

/* Look whether a message is taken, or take one that has come, whose sender may wait as well. Returns 1 if it is taken, 0 if
   not by this time, -1 with an error set, else 2. */
static int look_for_taken(Calls *calls, Ring *ring, uint64_t number, int64_t until)
{
    if (ring_is_taken(ring, number))
        return 1;
    if (has_arrival(calls)) {
        int status = take_first(calls);
        return status > 0 ? 2 : status;
    }
    if (now_ns() > until)
        return 0;
    Py_BEGIN_ALLOW_THREADS
    yield_processor();
    Py_END_ALLOW_THREADS
    return 2;
}

static int64_t end_of_wait(const Ring *ring) { return now_ns() + for_bytes(TAKEN_NS, ring->kind.num_bytes); }

/* Wait for a moment until an announced message is taken. */
static int await_taken(Calls *calls, Handle *self)
{
    Ring *ring = (Ring *)Py_NewRef(self->run);
    int status = 2;
    ring_is_awaited(ring, calls->num_messages);
    const int64_t until = end_of_wait(ring);
    while (status > 1 && self->run != NULL && !self->is_done)
        status = look_for_taken(calls, ring, self->word, until);
    if (status == 1 && self->run != NULL && !self->is_done)
        status = finish_announced(calls, self);
    Py_DECREF(ring);
    return status;
}

int await_sent(Calls *calls, Ring *ring, uint64_t number)
{
    const int64_t until = end_of_wait(ring);
    int status = 2;
    calls->num_waits++;
    while (status > 1)
        status = look_for_taken(calls, ring, number, until);
    calls->num_waits--;
    return status;
}

/* Carry out calls until one is done, or Python has to go on. Returns -1 with an error set. */
static int carry(Handle *self)
{
    Calls *calls = (Calls *)Py_NewRef(self->calls);
    int status = 1, takes = self->run != NULL && Py_TYPE(self->run) != step_type; /* messages */
    calls->num_waits += takes;
    while (status > 0 && !self->is_done && self->run != NULL) {
        status = Py_TYPE(self->run) == step_type   ? carry_some(calls, self)
                 : Py_TYPE(self) == announced_type ? await_taken(calls, self)
                                                   : take_some(calls, self);
        if (status >= 0 && PyErr_CheckSignals() < 0)
            status = -1;
    }
    if (calls->timed != NULL && PyObject_Size(calls->deferred) == 0 && PyObject_Size(calls->announced) == 0) {
        ring_ended(calls->timed);
        Py_CLEAR(calls->timed);
    }
    calls->num_waits -= takes;
    Py_DECREF(calls);
    return status;
}

static PyObject *handle_wait(Handle *self, PyObject *const *args, Py_ssize_t num_args, PyObject *kwnames)
{
    Py_CLEAR(self->forgotten);
    if (!self->is_done && self->run != NULL && self->observer == NULL && carry(self) < 0) {
        show_handled();
        return NULL;
    }
    if (self->is_done && self->error == NULL && num_args == 0 && kwnames == NULL) {
        self->was_awaited = true;
        Py_RETURN_TRUE;
    }
    PyObject *waits[4] = {(PyObject *)self};
    Py_ssize_t size = num_args + (kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames));
    if (size > 3) {
        PyErr_SetString(PyExc_TypeError, "wait(timeout=None)");
        return NULL;
    }
    if (size > 0)
        memcpy(waits + 1, args, size * sizeof *args);
    return PyObject_Vectorcall(wait_in_python, waits, num_args + 1, kwnames);
}

/* The list that has been received; the same one every time. */
static PyObject *handle_objects(Handle *self, PyObject *unused)
{
    PyObject *done = handle_wait(self, NULL, 0, NULL);
    if (done == NULL)
        return NULL;
    Py_DECREF(done);
    if (!PyBytes_CheckExact(self->value)) /* it is the list, or Python has received it */
        return PyList_CheckExact(self->value) ? Py_NewRef(self->value)
                                              : PyObject_CallOneArg(result_in_python, (PyObject *)self);
    PyObject *pickle = Py_NewRef(self->value), *objects = objects_load(pickle, self->prefix);
    if (objects != NULL && self->value == pickle)
        Py_SETREF(self->value, Py_NewRef(objects));
    else if (objects != NULL) /* another thread was faster */
        Py_SETREF(objects, Py_NewRef(self->value));
    Py_DECREF(pickle);
    return objects;
}

/* Whether a call is done; a receive that is deferred takes its message, if that has come, and an announced send ends when
   it is taken. Returns -1 with an error set. */
static int poll(Handle *self)
{
    if (!self->is_done && self->run != NULL && Py_TYPE(self) == announced_type
        && ring_is_taken((Ring *)self->run, self->word)) {
        Calls *calls = (Calls *)Py_NewRef(self->calls);
        int status = finish_announced(calls, self);
        Py_DECREF(calls);
        return status < 0 ? -1 : self->is_done;
    }
    if (!self->is_done && self->run != NULL && is_deferred((PyObject *)self) && has_arrival(self->calls)) {
        Calls *calls = (Calls *)Py_NewRef(self->calls);
        int status = take_first(calls);
        Py_DECREF(calls);
        if (status < 0)
            return -1;
    }
    return self->is_done;
}

static bool is_new(PyObject *work) { return PyObject_TypeCheck(work, handle_type) && !((Handle *)work)->was_awaited; }

static PyObject *poll_any(PyObject *module, PyObject *works)
{
    if (!PyList_CheckExact(works)) {
        PyErr_SetString(PyExc_TypeError, "poll_any: works must be a list");
        return NULL;
    }
    bool has_work = false;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(works); i++) {
        PyObject *work = PyList_GET_ITEM(works, i);
        if (work != Py_None && (work_type == NULL || !PyObject_TypeCheck(work, work_type)))
            return PyLong_FromLong(-1);
        has_work = has_work || is_new(work);
    }
    if (!has_work)
        return PyLong_FromLong(-1);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(works); i++)
        if (PyObject_TypeCheck(PyList_GET_ITEM(works, i), handle_type))
            Py_CLEAR(((Handle *)PyList_GET_ITEM(works, i))->forgotten);
    int64_t until = now_ns() + YIELD_NS;
    for (int spins = SPINS; spins > 0 || now_ns() < until; spins--) {
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(works); i++) {
            PyObject *work = PyList_GET_ITEM(works, i);
            int done = is_new(work) ? poll((Handle *)work) : 0;
            if (done != 0)
                return done < 0 ? NULL : PyLong_FromSsize_t(i);
        }
        if (spins > 0) {
            pause_briefly();
            continue;
        }
        Py_BEGIN_ALLOW_THREADS
        yield_processor();
        Py_END_ALLOW_THREADS
    }
    return PyLong_FromLong(-1);
}

/* ---- what Python sees of it */

/* The Job of a call that Python carries out; made once. */
static PyObject *handle_job(Handle *self, PyObject *unused)
{
    if (self->job == NULL) {
        if (self->calls == NULL) {
            PyErr_SetString(PyExc_IndexError, "the call is done");
            return NULL;
        }
        PyObject *job = PyObject_CallOneArg(self->calls->make_job, (PyObject *)self);
        if (job == NULL)
            return NULL;
        if (self->job == NULL && self->calls != NULL)
            self->job = Py_NewRef(job);
        else if (self->job != NULL) /* another thread was faster */
            Py_SETREF(job, Py_NewRef(self->job));
        return job;
    }
    return Py_NewRef(self->job);
}

static PyObject *handle_release(Handle *self, PyObject *unused)
{
    release(self);
    Py_RETURN_NONE;
}

static PyObject *handle_callbacks(Handle *self, void *unused)
{
    if (self->callbacks == NULL)
        self->callbacks = PyList_New(0);
    return Py_XNewRef(self->callbacks);
}

static int handle_set_callbacks(Handle *self, PyObject *value, void *unused)
{
    Py_XSETREF(self->callbacks, Py_XNewRef(value));
    return 0;
}

static int handle_traverse(Handle *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->value);
    Py_VISIT(self->error);
    Py_VISIT(self->callbacks);
    Py_VISIT(self->observer);
    Py_VISIT(self->queue);
    Py_VISIT(self->forgotten);
    Py_VISIT(self->kind);
    Py_VISIT(self->sent);
    Py_VISIT(self->run);
    Py_VISIT(self->job);
    Py_VISIT(self->calls);
    return 0;
}

static bool is_older(const Record *record, PyObject *other)
{
    return Py_TYPE(other) != record_type || record->created < ((Record *)other)->created;
}

/* The last reference to a work goes. If the user has not asked whether its call is done, the group is to know. */
static void note_forgotten(Handle *self)
{
    PyObject *type, *error, *trace, *forgotten = self->forgotten;
    self->forgotten = NULL;
    PyErr_Fetch(&type, &error, &trace); /* of the code that drops it */
    if (self->record != NULL && PyList_CheckExact(forgotten) && PyList_GET_SIZE(forgotten) == 2) {
        PyObject *count = PyLong_FromLong(PyLong_AsLong(PyList_GET_ITEM(forgotten, 0)) + 1);
        if (count != NULL)
            PyList_SetItem(forgotten, 0, count);
        if (is_older(self->record, PyList_GET_ITEM(forgotten, 1)))
            PyList_SetItem(forgotten, 1, Py_NewRef(self->record));
    }
    Py_DECREF(forgotten);
    PyErr_Restore(type, error, trace); /* one of the above is lost */
}

static int handle_clear(Handle *self)
{
    if (self->forgotten != NULL)
        note_forgotten(self);
    release(self);
    Py_CLEAR(self->value);
    Py_CLEAR(self->error);
    Py_CLEAR(self->callbacks);
    Py_CLEAR(self->observer);
    Py_CLEAR(self->queue);
    Py_CLEAR(self->record);
    return 0;
}

static void handle_dealloc(Handle *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    handle_clear(self);
    Py_CLEAR(self->prefix);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *handles(PyObject *module, PyObject *args)
{
    PyTypeObject **kept[] = {&work_type, &planned_type, &deferred_type, &objects_type, &announced_type, &done_type};
    enum { NUM_TYPES = sizeof kept / sizeof *kept };
    PyTypeObject *types[NUM_TYPES];
    PyObject *wait, *result;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!O!OOnn", &PyType_Type, &types[0], &PyType_Type, &types[1], &PyType_Type,
                          &types[2], &PyType_Type, &types[3], &PyType_Type, &types[4], &PyType_Type, &types[5], &wait,
                          &result, &most_deferred, &long_bytes))
        return NULL;
    for (int i = 0; i < NUM_TYPES; i++)
        if (!PyType_IsSubtype(types[i], handle_type)) {
            PyErr_SetString(PyExc_TypeError, "handles: the classes must be derived from Handle");
            return NULL;
        }
    for (int i = 0; i < NUM_TYPES; i++)
        Py_XSETREF(*kept[i], (PyTypeObject *)Py_NewRef(types[i]));
    Py_XSETREF(wait_in_python, Py_NewRef(wait));
    Py_XSETREF(result_in_python, Py_NewRef(result));
    Py_RETURN_NONE;
}

PyMethodDef work_functions[] = {
    {"poll_any", poll_any, METH_O, "poll_any(works): wait for a moment for one of several works, None is passed over; return "
                                   "its index, or -1, as if there is none or something else. Receives that are deferred "
                                   "take their messages."},
    {"handles", handles, METH_VARARGS,
     "handles(work, planned, deferred, objects, announced, done, wait, result, most_deferred, long_bytes): the class of all "
     "works, those of the works that are made here, `Work.wait`, `ObjectsWork.result`, how many receives may be deferred, "
     "and from how many bytes on `watch` is to know."},
    {NULL, NULL, 0, NULL},
};

static PyMethodDef methods[] = {
    {"_wait", (PyCFunction)(void (*)(void))handle_wait, METH_FASTCALL | METH_KEYWORDS,
     "wait(timeout=None)\n--\n\nBlock until the call is done and return True; see Work.wait."},
    {"_objects", (PyCFunction)handle_objects, METH_NOARGS,
     "result()\n--\n\nBlock until the objects have come and return their list; see ObjectsWork."},
    {"job", (PyCFunction)handle_job, METH_NOARGS, "Return the Job of a known call, which Python carries out."},
    {"_release", (PyCFunction)handle_release, METH_NOARGS, "Let go of what carries out the call."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"_is_done", T_BOOL, offsetof(Handle, is_done), 0, NULL},
    {"_was_awaited", T_BOOL, offsetof(Handle, was_awaited), 0, NULL},
    {"_value", T_OBJECT, offsetof(Handle, value), 0, NULL},
    {"_error", T_OBJECT, offsetof(Handle, error), 0, NULL},
    {"_observer", T_OBJECT_EX, offsetof(Handle, observer), 0, NULL},
    {"_error_prefix", T_OBJECT, offsetof(Handle, prefix), 0, NULL},
    {"queue", T_OBJECT, offsetof(Handle, queue), 0, NULL},
    {"forgotten", T_OBJECT, offsetof(Handle, forgotten), 0, NULL},
    {"kind", T_OBJECT, offsetof(Handle, kind), 0, NULL},
    {"sent", T_OBJECT, offsetof(Handle, sent), READONLY, NULL},
    {"has_begun", T_BOOL, offsetof(Handle, has_begun), READONLY, NULL},
    {"word", T_ULONGLONG, offsetof(Handle, word), READONLY, NULL},
    {"phase", T_INT, offsetof(Handle, phase), READONLY, NULL},
    {"source", T_LONG, offsetof(Handle, source), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyObject *handle_record(Handle *self, void *closure)
{
    return Py_NewRef(self->record == NULL ? Py_None : (PyObject *)self->record);
}

static int handle_set_record(Handle *self, PyObject *record, void *closure)
{
    if (record == NULL || Py_TYPE(record) != record_type) {
        PyErr_SetString(PyExc_TypeError, "record must be a Record");
        return -1;
    }
    Py_XSETREF(self->record, (Record *)Py_NewRef(record));
    return 0;
}

static PyGetSetDef properties[] = {
    {"_callbacks", (getter)handle_callbacks, (setter)handle_set_callbacks, NULL, NULL},
    {"record", (getter)handle_record, (setter)handle_set_record, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, PyType_GenericNew}, {Py_tp_dealloc, handle_dealloc}, {Py_tp_traverse, handle_traverse},
    {Py_tp_clear, handle_clear}, {Py_tp_methods, methods}, {Py_tp_members, members}, {Py_tp_getset, properties},
    {Py_tp_doc, "What a handle of a result that is available later consists of."}, {0, NULL},
};

PyType_Spec handle_spec = {
    "meshdist.core._core.Handle", sizeof(Handle), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots,
};
