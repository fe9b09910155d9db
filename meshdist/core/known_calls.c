/* Function: from the user's call to its plan, without Python where the same call was made before.

   The first calls of a kind run the Python function, which ends in the plan, or the ring, that carries them out, and is
   told here by `Calls.note`. The Function keeps what the arguments were: the dtype and shape of the arrays, NumPy's
   integers by type and value, tuples, lists and dicts item by item, and all others by identity. A later call with such
   arguments does what the Python function would do: it records the call, and runs the plan. All else is handed to the
   Python function: other arguments, arrays that overlap, a group with hooks, with outstanding calls, or without plans,
   such as one that is broken.

   A call that consists of messages, such as sendrecv, tells no facts: what carries it out again makes calls of its own,
   which record themselves and raise their errors; what it returns is the result, unless that is an argument, or a rank
   as before. */
#include "known_calls.h"

#include <structmember.h>

PyTypeObject *function_type, *calls_type, *try_lock_type, *array_type;

/* Adds to the message of a TypeError which argument was meant. */
static PyObject *explain;
/* Counts changes of the world, which functions without a group run over. */
static uint64_t num_worlds;
/* Ranks that are threads may have worlds of their own: what has the slot of the world of a context; NULL before. */
static PyObject *world_slots;

typedef struct Function {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *func;
    char is_bound;  /* to a group */
    int tag_place;  /* the argument that is the tag of a message, unless it is named; -1 if there is none */
    int next, last; /* the memo that is replaced next, and the one that was found last */
    Memo *memos[MOST_MEMOS];
    struct Function *before, *after;
} Function;

/* All functions, so that the end of a group can reach what they keep of it. */
static Function *functions;

/* A call of a Function that runs in Python, and what it has told. */
typedef struct Active {
    struct Active *outer;
    int num_notes;
    Calls *calls;
    PyObject *run, *facts, *prefix, *send, *recv, *kind, *go_on;
    bool apart;
} Active;

static _Thread_local Active *active;

/* ---- memos */

void memo_free(Memo *memo)
{
    if (memo->num_users-- > 0)
        return;
    for (int i = 0; i < memo->num_args; i++)
        arg_clear(&memo->args[i]);
    Py_XDECREF(memo->calls);
    Py_XDECREF(memo->run);
    Py_XDECREF(memo->facts);
    Py_XDECREF(memo->prefix);
    Py_XDECREF(memo->kwnames);
    Py_XDECREF(memo->result);
    Py_XDECREF(memo->kind);
    Py_XDECREF(memo->go_on);
    Py_XDECREF(memo->words);
    Py_XDECREF(memo->slot);
    PyMem_Free(memo);
}

/* Drop the memos of a group; of all groups if it is NULL. */
static void forget(Function *function, Calls *calls)
{
    for (int i = 0; i < MOST_MEMOS; i++) {
        Memo *memo = function->memos[i];
        if (memo != NULL && (calls == NULL || memo->calls == calls)) {
            function->memos[i] = NULL; /* first: what it frees may call */
            memo_free(memo);
        }
    }
}

/* Drop one memo, so that a call like it is learned anew. */
static void forget_memo(Function *function, Memo *memo)
{
    for (int i = 0; i < MOST_MEMOS; i++) {
        if (function->memos[i] == memo) {
            function->memos[i] = NULL;
            memo_free(memo);
        }
    }
}

static bool is_of_objects(PyObject *run)
{
    return Py_TYPE(run) == object_sender_type || (Py_TYPE(run) == inbox_type && ((Inbox *)run)->what == OBJECT_LISTS);
}

/* Async calls: those of one step with one array on each side; and messages, of which a receive by a ring knows its
   sender. */
static bool learn_async(Memo *memo)
{
    memo->source = -1;
    if (is_of_objects(memo->run))
        return true;
    if (Py_TYPE(memo->run) == inbox_type)
        return memo->recv >= 0 && memo->args[memo->recv].kind == ARRAY;
    bool is_message = Py_TYPE(memo->run) == ring_type;
    if (!is_message && Py_TYPE(memo->run) != step_type)
        return false;
    if ((memo->send >= 0 && memo->args[memo->send].kind != ARRAY)
        || (memo->recv >= 0 && memo->args[memo->recv].kind != ARRAY))
        return false;
    if (is_message && ring_waits((Ring *)memo->run))
        return false;
    if (is_message && ((Ring *)memo->run)->receives) {
        PyObject *source = PyObject_GetAttrString(memo->kind, "source");
        memo->source = source == NULL ? -1 : PyLong_AsLong(source);
        Py_XDECREF(source);
        if (PyErr_Occurred()) {
            PyErr_Clear();
            return false;
        }
    }
    return true;
}

/* The slot of the world of this context, a new reference; NULL where all have one. */
static PyObject *current_slot(void)
{
    PyObject *slot = NULL;
    if (world_slots != NULL && PyContextVar_Get(world_slots, NULL, &slot) < 0)
        PyErr_Clear();
    return slot;
}

/* Where a call has an argument of this name, which may stand at a place without it; -1 if it has none. */
static int place_of(const char *name, int place, int num_args, PyObject *kwnames)
{
    int num_names = kwnames == NULL ? 0 : (int)PyTuple_GET_SIZE(kwnames), num_places = num_args - num_names;
    for (int i = 0; i < num_names; i++) {
        if (PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(kwnames, i), name) == 0)
            return num_places + i;
    }
    return place < num_places ? place : -1;
}

static void keep_memo(Function *self, Memo *memo)
{
    Memo *old = self->memos[self->next];
    self->memos[self->next] = memo;
    self->next = (self->next + 1) % MOST_MEMOS;
    if (old != NULL)
        memo_free(old);
}

/* Keep a call that has returned, if a later one like it can be told by its arguments. */
static void learn(Function *self, Active *told, PyObject *const *args, int num_args, PyObject *kwnames, PyObject *result)
{
    bool is_inbox = Py_TYPE(told->run) == inbox_type, of_objects = is_of_objects(told->run);
    bool is_message = Py_TYPE(told->run) == ring_type, is_exchange = told->facts == Py_None;
    bool sends_single = Py_TYPE(told->run) == object_sender_type && ((ObjectSender *)told->run)->is_single;
    const int single = sends_single ? place_of("obj", 0, num_args, kwnames) : -1;
    Memo *memo = num_args > MOST_ARGS ? NULL : PyMem_Calloc(1, sizeof *memo);
    if (memo == NULL)
        return;
    memo->send = memo->recv = memo->tag = memo->returned = -1;
    memo->num_args = num_args;
    memo->to = memo->come = -1;
    if (is_message)
        memo->tag = place_of("tag", self->tag_place, num_args, kwnames);
    if (Py_TYPE(told->run) == step_type && ((Step *)told->run)->splits.num_ranks > 0) {
        memo->come = place_of("output_split_sizes", 2, num_args, kwnames);
        memo->to = place_of("input_split_sizes", 3, num_args, kwnames);
    }
    /* The arrays of messages may have strides. */
    const int in = is_message || is_exchange ? 0 : C_CONTIGUOUS, out = is_message || is_exchange ? WRITEABLE : CARRAY;
    bool is_known = true;
    for (int i = 0; i < num_args && is_known; i++) {
        bool is_sent = sends_single ? i == single
                                    : args[i] == told->send && told->send != Py_None && memo->send < 0;
        bool is_received = args[i] == told->recv && told->recv != Py_None && memo->recv < 0;
        if (is_sent)
            memo->send = i;
        if (is_received)
            memo->recv = i;
        if (args[i] == result && result != Py_None)
            memo->returned = i;
        is_known = !is_sent && !is_received ? learn_value(&memo->args[i], args[i])
                   : of_objects             ? learn_objects(&memo->args[i], args[i], sends_single)
                                            : learn_buffers(&memo->args[i], args[i], is_received ? out : in);
    }
    is_known = is_known && (told->send == Py_None || memo->send >= 0) && (told->recv == Py_None || memo->recv >= 0);
    /* The result of a message is the rank of its sender, if any. */
    bool is_source = (is_message || is_exchange) && PyLong_CheckExact(result);
    is_known = is_known
               && (told->kind != NULL || is_exchange || is_inbox || of_objects || is_source || result == Py_None
                   || memo->returned >= 0);
    memo->calls = (Calls *)Py_NewRef(told->calls);
    memo->world = num_worlds, memo->slot = self->is_bound ? NULL : current_slot();
    memo->run = Py_NewRef(told->run), memo->facts = Py_NewRef(told->facts), memo->prefix = Py_NewRef(told->prefix);
    memo->kwnames = Py_XNewRef(kwnames), memo->words = Py_NewRef(told->calls->words);
    memo->result = Py_NewRef(is_source ? result : Py_None);
    memo->apart = told->apart, memo->go_on = Py_XNewRef(told->go_on);
    if (told->kind != NULL) {
        memo->kind = Py_NewRef(told->kind);
        is_known = is_known && learn_async(memo);
    }
    if (!is_known) {
        memo_free(memo);
        return;
    }
    keep_memo(self, memo);
}

static bool same_names(PyObject *names, PyObject *others)
{
    if (names == others)
        return true;
    if (names == NULL || others == NULL || PyTuple_GET_SIZE(names) != PyTuple_GET_SIZE(others))
        return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); i++) { /* names are interned */
        if (PyTuple_GET_ITEM(names, i) != PyTuple_GET_ITEM(others, i))
            return false;
    }
    return true;
}

/* Whether no earlier call of the group has to come before. */
static bool comes_next(const Memo *memo)
{
    if (Py_TYPE(memo->run) == inbox_type && memo->kind == NULL)
        return PyObject_Size(memo->calls->deferred) == 0;
    /* An async call waits for its turn, and so do a list of objects and the messages of a call. */
    if (memo->kind != NULL || Py_TYPE(memo->run) == object_sender_type || memo->facts == Py_None)
        return true;
    if (Py_TYPE(memo->run) != ring_type)
        return PyObject_Size(memo->calls->outstanding) == 0;
    return !((Ring *)memo->run)->receives || PyObject_Size(memo->calls->deferred) == 0;
}

static bool are_equal(PyObject *words, PyObject *others)
{
    return words == others || PyUnicode_Compare(words, others) == 0;
}

static bool is_current(const Function *self, const Memo *memo, PyObject *slot)
{
    bool is = self->is_bound || (memo->world == num_worlds && memo->slot == slot);
    return is && memo->calls->is_open && are_equal(memo->words, memo->calls->words);
}

static Memo *find(Function *self, PyObject *const *args, int num_args, PyObject *kwnames)
{
    PyObject *slot = self->is_bound ? NULL : current_slot();
    Py_XDECREF(slot); /* the context has it */
    for (int i = 0; i < MOST_MEMOS; i++) {
        int place = (self->last + i) % MOST_MEMOS;
        Memo *memo = self->memos[place];
        if (memo == NULL || memo->num_args != num_args || !same_names(memo->kwnames, kwnames))
            continue;
        int arg = 0;
        while (arg < num_args && matches(&memo->args[arg], args[arg]))
            arg++;
        if (arg == num_args && is_current(self, memo, slot)) {
            self->last = place;
            return memo;
        }
    }
    return NULL;
}

/* A new call is known by one that is like it. */
static Memo *find_like(Function *self, PyObject *const *args, int num_args, PyObject *kwnames)
{
    PyObject *slot = self->is_bound ? NULL : current_slot();
    Py_XDECREF(slot);
    for (int i = 0; i < MOST_MEMOS; i++) {
        Memo *memo = self->memos[(self->last + i) % MOST_MEMOS];
        if (memo == NULL || memo->num_args != num_args || !same_names(memo->kwnames, kwnames)
            || !has_likes(memo, self->tag_place >= 0) || !is_current(self, memo, slot) || !is_like(memo, args))
            continue;
        Memo *like = memo_like(memo, args);
        if (like != NULL) {
            keep_memo(self, like);
            return like;
        }
    }
    return NULL;
}

/* ---- the call itself */

/* The arrays on one side of a call; of one with strides, what lies between its elements as well. */
typedef struct {
    int count;
    char *data[MOST_KNOWN_ARRAYS];
    Py_ssize_t num_bytes[MOST_KNOWN_ARRAYS];
} Buffers;

static void gather_array(const Arg *arg, const Array *array, char **data, Py_ssize_t *num_bytes)
{
    *data = array->data, *num_bytes = arg->num_bytes;
    if (!(array->flags & C_CONTIGUOUS)) {
        char *end;
        extent_of(array, arg->itemsize, data, &end);
        *num_bytes = end - *data;
    }
}

static int gather(const Arg *arg, PyObject *object, Buffers *buffers)
{
    if (arg->kind != LIST) {
        gather_array(arg, (Array *)object, &buffers->data[0], &buffers->num_bytes[0]);
        return 1;
    }
    for (int i = 0; i < arg->count; i++)
        gather_array(&arg->items[i], (Array *)PyList_GET_ITEM(object, i), &buffers->data[i], &buffers->num_bytes[i]);
    return arg->count;
}

static bool overlap(const char *one, Py_ssize_t one_bytes, const char *other, Py_ssize_t other_bytes)
{
    return one < other + other_bytes && other < one + one_bytes;
}

void call_failed(Calls *calls, PyObject *prefix, const Record *record)
{
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace != NULL)
        PyException_SetTraceback(error, trace);
    PyObject *of_call = record == NULL ? Py_None : (PyObject *)record;
    PyObject *raised = PyObject_CallFunctionObjArgs(calls->fail, error, prefix, of_call, NULL);
    Py_XDECREF(raised); /* it raises */
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
}

/* Whether arrays lie as far apart as those of the call that is kept, which shared no elements; all with these strides. */
static bool lie_as_before(const Arg *one, char *data, const Arg *other, char *other_data)
{
    return (one->strides != NULL || other->strides != NULL) && data - other_data == one->begin - other->begin;
}

/* Whether arrays of a call that have to be apart share memory. */
static bool share_memory(const Memo *memo, const Buffers *sent, const Buffers *received, bool in_place)
{
    for (int i = 0; i < received->count; i++) {
        for (int j = 0; j < i; j++)
            if (overlap(received->data[i], received->num_bytes[i], received->data[j], received->num_bytes[j])
                && !lie_as_before(arg_of(memo, memo->recv, i), received->data[i], arg_of(memo, memo->recv, j),
                                  received->data[j]))
                return true;
        for (int j = 0; memo->apart && !in_place && j < sent->count; j++)
            if (overlap(received->data[i], received->num_bytes[i], sent->data[j], sent->num_bytes[j])
                && !lie_as_before(arg_of(memo, memo->recv, i), received->data[i], arg_of(memo, memo->send, j),
                                  sent->data[j]))
                return true;
    }
    return false;
}

/* Whether the arrays of sendrecv share memory, whose extents overlap. */
static bool share_elements(const Memo *memo, PyObject *send, PyObject *recv)
{
    bool have_strides = is_array(send) && is_array(recv)
                        && !(((Array *)send)->flags & ((Array *)recv)->flags & C_CONTIGUOUS);
    if (!have_strides)
        return true;
    return may_share_elements((Array *)send, (Array *)recv, memo->args[memo->recv].itemsize);
}

/* Post the receives that are deferred: a peer may wait for one of them before it takes what this rank has sent. */
static int post_deferred(Calls *calls)
{
    if (PyObject_Size(calls->deferred) == 0)
        return 1;
    PyObject *posted = PyObject_CallMethod(calls->deferral, "post_all", NULL);
    Py_XDECREF(posted);
    return posted == NULL ? -1 : 1;
}

/* Send or receive a message. It is recorded once it is done: one that needs a request is recorded by that. Returns 1, 0
   if it needs a request, or -1 with an error set; as do the two below. */
static int run_message(const Memo *memo, bool sends, Array *array, PyObject *code, int instruction, Record **record)
{
    Ring *ring = (Ring *)memo->run;
    Array *moved = sends ? packed(array) : room_of(array);
    if (moved == NULL)
        return PyErr_Occurred() ? -1 : 0;
    uint64_t number = 0;
    bool receives = sends && PyObject_Size(memo->calls->deferred) > 0, is_done = true;
    int status = sends ? ring_send(ring, moved, receives, &number) : ring_receive(ring, moved->data);
    if (status > 0 && !sends)
        unpack(array, moved);
    if (status == 2) {
        is_done = false;
    } else if (status > 0 && number) {
        int taken = receives ? await_sent(memo->calls, ring, number) : ring_is_taken_soon(ring, number);
        is_done = taken > 0, status = taken < 0 ? -1 : status;
    }
    if (status > 0)
        *record = record_call(memo->calls, memo->facts, ++memo->calls->num_messages, now_ns(),
                              is_done ? IS_DONE : HAS_STARTED, code, instruction);
    if (status > 0 && *record == NULL)
        status = -1;
    if (!is_done && status > 0 && (status = post_deferred(memo->calls)) > 0
        && (status = ring_rest(ring, (PyObject *)moved, number, memo->prefix)) > 0)
        status = record_done(*record);
    if (status > 0 && ring_waits(ring))
        ring_ended(ring);
    Py_DECREF(moved);
    return status;
}

/* Begin a send whose receiver copies the message. */
static int run_announced(const Memo *memo, Array *array, PyObject *code, int instruction, Record **record,
                         PyObject **work)
{
    Calls *calls = memo->calls;
    uint64_t number;
    if (!may_announce(calls, memo->run))
        return 0;
    Array *sent = packed(array);
    int status = sent == NULL ? -1 : ring_announce((Ring *)memo->run, sent->data, &number);
    if (status > 0) {
        *record = record_call(calls, memo->facts, ++calls->num_messages, now_ns(), HAS_STARTED, code, instruction);
        if (*record != NULL)
            *work = announced_send(calls, memo->run, memo->kind, memo->prefix, (PyObject *)sent, *record, number);
        if (*work != NULL && sent != array) /* the user may change the array at once */
            Py_CLEAR(((Handle *)*work)->forgotten);
        status = *work == NULL ? -1 : 1;
    }
    Py_XDECREF(sent);
    return status;
}

/* Python goes on with a step that has taken nothing, since the table of the ranks' sizes is not the agreed one: others
   have other sizes, or have announced blocks that were short before. */
static int go_on(Function *self, Memo *memo, PyObject *send, PyObject *recv)
{
    forget_memo(self, memo);
    PyObject *ran = PyObject_CallFunctionObjArgs(memo->go_on, send, recv, NULL);
    Py_XDECREF(ran);
    return ran == NULL ? -1 : 0;
}

/* Carry out a call of one step. It is recorded while the signals are on their way, so that no rank waits for that. */
static int run_step(Function *self, Memo *memo, PyObject *send, PyObject *recv, const Buffers *sent,
                    const Buffers *received, Record **record)
{
    Step *step = (Step *)memo->run;
    uint64_t word;
    int phase, instruction;
    int64_t began_ns = now_ns();
    unsigned long long number = ++memo->calls->num_calls;
    if (step_begin(step, sent->data, received->data, NULL, &word, &phase) < 0)
        return -1;
    PyObject *code = place_of_user(&instruction);
    if (code != NULL)
        *record = record_call(memo->calls, memo->facts, number, began_ns, HAS_STARTED, code, instruction);
    Py_XDECREF(code);
    int status = *record == NULL ? -1 : step_rest(step, word, phase, sent->data, received->data, NULL);
    if (status > 0)
        status = go_on(self, memo, send, recv);
    return status < 0 ? -1 : record_done(*record);
}

static int run_call(Function *self, Memo *memo, PyObject *send, PyObject *recv, PyObject *code, int instruction,
                    Record **record)
{
    *record = record_call(memo->calls, memo->facts, ++memo->calls->num_calls, now_ns(), HAS_STARTED, code, instruction);
    if (*record == NULL)
        return -1;
    PyObject *ran = PyObject_CallFunctionObjArgs(memo->run, send, recv, NULL);
    if (ran == Py_True) /* from now on there is something faster */
        forget_memo(self, memo);
    Py_XDECREF(ran);
    return ran == NULL ? -1 : record_done(*record);
}

/* What a message received, or found by a probe, returns: a single object, or the sender; then objects that have come
   replace those of a list. */
static PyObject *message_result(const Memo *memo, Found *found, PyObject *recv, bool is_bound)
{
    Inbox *inbox = (Inbox *)memo->run;
    const struct Channel *channel = &inbox->channels[found->channel];
    PyObject *rank = is_bound ? channel->rank : channel->global_rank;
    if (inbox->info != NULL)
        return inbox_info(inbox, &found->header, rank);
    if (found->pickle != NULL) {
        PyObject *objects = objects_load(found->pickle, memo->prefix);
        if (inbox->is_single) {
            PyObject *object = objects == NULL ? NULL : PySequence_GetItem(objects, 0);
            Py_XDECREF(objects);
            return object;
        }
        int set = objects == NULL ? -1 : PyList_SetSlice(recv, 0, PyList_GET_SIZE(recv), objects);
        Py_XDECREF(objects);
        if (set < 0)
            return NULL;
    }
    return Py_NewRef(rank);
}

/* Receive an array from any rank, or a list of objects; or probe for a message. */
static PyObject *run_inbox(Memo *memo, PyObject *recv, bool is_bound)
{
    Inbox *inbox = (Inbox *)memo->run;
    /* An empty list receives any number of objects. */
    Py_ssize_t number = PyList_CheckExact(recv) ? PyList_GET_SIZE(recv) : inbox->is_single;
    Found found = {.number = number > 0 ? number : -1};
    PyObject *facts = NULL, *result = NULL;
    Record *record = NULL;
    memo->num_users++;
    int status = inbox_await(inbox);
    if (status == 1)
        status = inbox_take(inbox, is_array(recv) ? ((Array *)recv)->data : NULL, &found);
    if (status == 1 && memo->facts != Py_None) {
        facts = found.pickle == NULL ? Py_NewRef(memo->facts)
                                     : objects_facts(memo->facts, found.number, PyBytes_GET_SIZE(found.pickle));
        status = facts == NULL ? -1 : record_message(memo->calls, facts, true, &record);
        if (facts != NULL) /* the next message may be like this one */
            Py_SETREF(memo->facts, Py_NewRef(facts));
    }
    if (status == 1 && inbox->info == NULL)
        status = inbox_wake(inbox, &found);
    if (status < 0)
        call_failed(memo->calls, memo->prefix, record);
    else if (status == 1)
        result = message_result(memo, &found, recv, is_bound);
    else if (status == 2)
        result = Py_NewRef(Py_None);
    Py_XDECREF(facts);
    Py_XDECREF(record);
    Py_XDECREF(found.pickle);
    memo_free(memo);
    return result;
}

/* Send objects. Python sends a pickle that has no room; the objects' code may have changed the group. */
static PyObject *run_objects(Memo *memo, PyObject *send)
{
    ObjectSender *sender = (ObjectSender *)memo->run;
    Calls *calls = memo->calls;
    unsigned long long changes = calls->changes;
    uint64_t number;
    PyObject *facts = NULL, *result = NULL;
    Record *record = NULL;
    PyObject *list = sender->is_single ? PyList_New(1) : Py_NewRef(send);
    if (list == NULL)
        return NULL;
    if (sender->is_single)
        PyList_SET_ITEM(list, 0, Py_NewRef(send));
    memo->num_users++;
    PyObject *pickle = objects_dump(list);
    Py_ssize_t count = PyList_GET_SIZE(list), num_bytes = pickle == NULL ? 0 : PyBytes_GET_SIZE(pickle);
    bool waits = !sender->is_async && num_bytes > sender->most_bytes;
    bool goes = pickle != NULL && calls->changes == changes && calls->is_open;
    int status = goes ? ring_put_objects(sender->ring, sender->tag, count, pickle, waits, &number) : 0;
    if (status > 0) {
        facts = objects_facts(memo->facts, count, num_bytes);
        bool is_done = status == 1;
        status = facts == NULL ? -1 : record_message(calls, facts, is_done, &record);
        if (facts != NULL) /* the next message may be like this one */
            Py_SETREF(memo->facts, Py_NewRef(facts));
        if (status > 0 && !is_done && (status = post_deferred(calls)) > 0
            && (status = ring_rest(sender->ring, pickle, number, memo->prefix)) > 0)
            status = record_done(record);
    }
    if (status < 0)
        call_failed(calls, memo->prefix, record);
    else if (status > 0)
        result = sender->is_async ? sent_at_once(memo->prefix) : Py_NewRef(Py_None);
    else if (pickle != NULL)
        result = PyObject_CallFunction(sender->rest, "On", pickle, count);
    Py_DECREF(list);
    Py_XDECREF(facts);
    Py_XDECREF(record);
    Py_XDECREF(pickle);
    memo_free(memo);
    return result;
}

/* Make the calls that a call consists of. */
static PyObject *run_exchange(Memo *memo, PyObject *const *args, PyObject *send, PyObject *recv)
{
    memo->num_users++;
    PyObject *result = PyObject_CallFunctionObjArgs(memo->run, send, recv, NULL);
    if (result != NULL && memo->returned >= 0)
        Py_SETREF(result, Py_NewRef(args[memo->returned]));
    else if (result != NULL && memo->result != Py_None)
        Py_SETREF(result, Py_NewRef(memo->result));
    memo_free(memo);
    return result;
}

/* Begin a call that is carried out later. */
static int run_later(const Memo *memo, PyObject *send, PyObject *recv, PyObject *code, int instruction,
                     Record **record, PyObject **work)
{
    Calls *calls = memo->calls;
    bool is_message = Py_TYPE(memo->run) != step_type;
    unsigned long long number = is_message ? ++calls->num_messages : ++calls->num_calls;
    *record = record_call(calls, memo->facts, number, now_ns(), is_message ? HAS_STARTED : CREATED_ONLY, code,
                          instruction);
    if (*record == NULL)
        return -1;
    *work = is_message ? defer_receive(calls, memo->run, memo->kind, memo->prefix, recv, *record, memo->source)
                       : begin_call(calls, memo->run, memo->kind, memo->prefix, send, recv, *record);
    return *work == NULL ? -1 : 1;
}

/* Make a call again. Returns NULL without an error if Python has to make it. */
static PyObject *run_memo(Function *self, Memo *memo, PyObject *const *args)
{
    Buffers sent, received;
    int instruction = 0;
    PyObject *send = memo->send < 0 ? Py_None : args[memo->send], *recv = memo->recv < 0 ? Py_None : args[memo->recv];
    if (Py_TYPE(memo->run) == inbox_type && memo->kind == NULL)
        return run_inbox(memo, recv, self->is_bound);
    if (Py_TYPE(memo->run) == object_sender_type)
        return run_objects(memo, send);
    sent.count = memo->send < 0 ? 0 : gather(&memo->args[memo->send], send, &sent);
    received.count = memo->recv < 0 ? 0 : gather(&memo->args[memo->recv], recv, &received);
    bool is_inbox = Py_TYPE(memo->run) == inbox_type, is_async = memo->kind != NULL;
    bool is_message = Py_TYPE(memo->run) == ring_type || is_inbox;
    bool is_later = is_async && (!is_message || is_inbox || received.count), is_exchange = memo->facts == Py_None;
    bool is_step = Py_TYPE(memo->run) == step_type && !is_async;
    if ((share_memory(memo, &sent, &received, memo->send == memo->recv && !is_exchange) && share_elements(memo, send, recv))
        || (is_later && is_message && !may_defer(memo->calls)))
        return NULL;
    if (is_exchange)
        return run_exchange(memo, args, send, recv);
    memo->num_users++; /* it may be dropped while this waits */
    PyObject *code = is_step ? NULL : place_of_user(&instruction);
    if (is_step ? PyEval_GetFrame() == NULL : code == NULL) {
        memo_free(memo);
        return NULL;
    }
    PyObject *result = NULL;
    Record *record = NULL;
    int status = 0;
    if (is_async && is_message && sent.count)
        status = run_announced(memo, (Array *)send, code, instruction, &record, &result);
    if (status == 0)
        status = is_step      ? run_step(self, memo, send, recv, &sent, &received, &record)
                 : is_later   ? run_later(memo, send, recv, code, instruction, &record, &result)
                 : is_message ? run_message(memo, sent.count, (Array *)(sent.count ? send : recv), code, instruction,
                                            &record)
                              : run_call(self, memo, send, recv, code, instruction, &record);
    if (status > 0 && result == NULL) {
        result = is_async             ? sent_at_once(memo->prefix)
                 : memo->returned < 0 ? Py_NewRef(memo->result)
                                      : Py_NewRef(args[memo->returned]);
    }
    if (status < 0)
        call_failed(memo->calls, memo->prefix, record);
    Py_XDECREF(record);
    Py_XDECREF(code);
    memo_free(memo);
    return result;
}

/* Whether an exception is behind another one, as its cause or context. */
static bool is_behind(PyObject *error, PyObject *other)
{
    enum { MOST = 100 };
    for (int i = 0; i < MOST && other != NULL; i++) {
        if (other == error)
            return true;
        PyBaseExceptionObject *base = (PyBaseExceptionObject *)other;
        other = base->cause != NULL ? base->cause : base->context;
    }
    return other != NULL;
}

void show_handled(void)
{
    PyObject *type, *error, *trace, *handled_type, *handled, *handled_trace;
    PyFrameObject *frame = PyEval_GetFrame();
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    PyErr_GetExcInfo(&handled_type, &handled, &handled_trace);
    PyBaseExceptionObject *base = (PyBaseExceptionObject *)error;
    if (frame != NULL && handled != NULL && handled != Py_None && error != NULL && base->suppress_context
        && base->cause == NULL && !is_behind(error, handled)) {
        PyObject *code = (PyObject *)PyFrame_GetCode(frame);
        if (is_our_code(code) == 0) {
            PyException_SetContext(error, Py_NewRef(handled));
            base->suppress_context = 0;
        }
        Py_DECREF(code);
        PyErr_Clear();
    }
    Py_XDECREF(handled_type);
    Py_XDECREF(handled);
    Py_XDECREF(handled_trace);
    PyErr_Restore(type, error, trace);
}

/* Let Python add to a TypeError that was raised, which stays as it is otherwise. */
static void explain_type_error(Function *self)
{
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    PyObject *done = PyObject_CallFunctionObjArgs(explain, self->func, error, NULL);
    Py_XDECREF(done);
    PyErr_Clear();
    PyErr_Restore(type, error, trace);
}

static PyObject *function_call(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Function *self = (Function *)object;
    int num_args = (int)PyVectorcall_NARGS(nargsf) + (kwnames == NULL ? 0 : (int)PyTuple_GET_SIZE(kwnames));
    Memo *memo = find(self, args, num_args, kwnames);
    if (memo == NULL)
        memo = find_like(self, args, num_args, kwnames);
    if (memo != NULL && comes_next(memo)) {
        PyObject *result = run_memo(self, memo, args);
        if (result == NULL && PyErr_Occurred())
            show_handled();
        if (result != NULL || PyErr_Occurred())
            return result;
    }
    Active told = {.outer = active};
    active = &told;
    PyObject *result = PyObject_Vectorcall(self->func, args, nargsf, kwnames);
    active = told.outer;
    if (result == NULL && explain != NULL && PyErr_ExceptionMatches(PyExc_TypeError))
        explain_type_error(self);
    if (result == NULL)
        show_handled();
    /* A call that Python made although it is known stays known. */
    if (result != NULL && told.num_notes == 1 && memo == NULL && told.calls->is_open)
        learn(self, &told, args, num_args, kwnames, result);
    if (told.num_notes) {
        Py_DECREF(told.calls);
        Py_DECREF(told.run);
        Py_DECREF(told.facts);
        Py_DECREF(told.prefix);
        Py_DECREF(told.send);
        Py_DECREF(told.recv);
        Py_XDECREF(told.kind);
        Py_XDECREF(told.go_on);
    }
    return result;
}

static PyObject *function_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"", "is_bound", NULL};
    PyObject *func;
    int is_bound = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O|$p", names, &func, &is_bound))
        return NULL;
    Function *self = (Function *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    /* Before Python 3.12 subclasses do not inherit it. */
    if (type->tp_call == PyVectorcall_Call)
        type->tp_flags |= Py_TPFLAGS_HAVE_VECTORCALL;
    self->call = function_call;
    self->func = Py_NewRef(func);
    self->is_bound = (char)is_bound, self->tag_place = -1;
    self->after = functions;
    if (functions != NULL)
        functions->before = self;
    functions = self;
    return (PyObject *)self;
}

static int function_traverse(Function *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->func);
    for (int i = 0; i < MOST_MEMOS; i++) {
        Memo *memo = self->memos[i];
        if (memo == NULL)
            continue;
        Py_VISIT(memo->calls);
        Py_VISIT(memo->run);
        Py_VISIT(memo->facts);
        Py_VISIT(memo->kind);
        Py_VISIT(memo->go_on);
        for (int arg_number = 0; arg_number < memo->num_args; arg_number++) {
            if (memo->args[arg_number].kind == IDENTICAL)
                Py_VISIT(memo->args[arg_number].value);
        }
    }
    return 0;
}

static int function_clear(Function *self)
{
    forget(self, NULL);
    Py_CLEAR(self->func);
    return 0;
}

static void function_dealloc(Function *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    function_clear(self);
    if (self->before != NULL)
        self->before->after = self->after;
    else
        functions = self->after;
    if (self->after != NULL)
        self->after->before = self->before;
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMemberDef function_members[] = {
    {"tag_place", T_INT, offsetof(Function, tag_place), 0, "Which argument is the tag of a message, -1 if none is."},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Function, call), READONLY, NULL},
    {"func", T_OBJECT_EX, offsetof(Function, func), READONLY, "What is called for a call that is not known."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot function_slots[] = {
    {Py_tp_new, function_new}, {Py_tp_dealloc, function_dealloc}, {Py_tp_traverse, function_traverse},
    {Py_tp_clear, function_clear}, {Py_tp_call, PyVectorcall_Call}, {Py_tp_members, function_members},
    {Py_tp_doc, "Function(func, *, is_bound=False): calls `func`, or what carries out a call that was made before."},
    {0, NULL},
};

PyType_Spec function_spec = {
    "meshdist.core._core.Function", sizeof(Function), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, function_slots,
};

/* ---- Calls */

static PyObject *calls_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *queue, *deferral, *announcing, *keep, *fail, *make_job;
    if (!PyArg_ParseTuple(args, "OOOOOO", &queue, &deferral, &announcing, &keep, &fail, &make_job))
        return NULL;
    Calls *self = (Calls *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->is_open = 1;
    self->queue = Py_NewRef(queue), self->deferral = Py_NewRef(deferral), self->announcing = Py_NewRef(announcing);
    self->keep = Py_NewRef(keep), self->fail = Py_NewRef(fail), self->make_job = Py_NewRef(make_job);
    self->outstanding = PyObject_GetAttrString(queue, "jobs");
    self->deferred = PyObject_GetAttrString(deferral, "works");
    self->announced = PyObject_GetAttrString(announcing, "works");
    self->carrier = (TryLock *)PyObject_GetAttrString(queue, "carrier");
    self->taking = (TryLock *)PyObject_GetAttrString(deferral, "taking");
    self->forgotten = Py_BuildValue("[iO]", 0, Py_None), self->words = PyUnicode_FromString("");
    if (PyErr_Occurred() || Py_TYPE(self->carrier) != try_lock_type || Py_TYPE(self->taking) != try_lock_type) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "Calls: carrier and taking must be of type TryLock");
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyObject *calls_note(Calls *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args < 6 || num_args > 8) {
        PyErr_SetString(PyExc_TypeError, "note(run, facts, prefix, send, recv, apart, kind=None, go_on=None)");
        return NULL;
    }
    if (active != NULL && active->num_notes++ == 0) {
        active->calls = (Calls *)Py_NewRef(self);
        active->run = Py_NewRef(args[0]), active->facts = Py_NewRef(args[1]), active->prefix = Py_NewRef(args[2]);
        active->send = Py_NewRef(args[3]), active->recv = Py_NewRef(args[4]);
        active->apart = args[5] == Py_True;
        active->kind = num_args >= 7 && args[6] != Py_None ? Py_NewRef(args[6]) : NULL;
        active->go_on = num_args == 8 && args[7] != Py_None ? Py_NewRef(args[7]) : NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *calls_forget(Calls *self, PyObject *unused)
{
    self->changes++;
    Py_CLEAR(self->timed);
    for (Function *function = functions, *next; function != NULL; function = next) {
        Py_INCREF(function); /* what is freed may free functions */
        forget(function, self);
        next = function->after;
        Py_DECREF(function);
    }
    Py_RETURN_NONE;
}

static int calls_traverse(Calls *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->queue);
    Py_VISIT(self->deferral);
    Py_VISIT(self->announcing);
    Py_VISIT(self->outstanding);
    Py_VISIT(self->deferred);
    Py_VISIT(self->announced);
    Py_VISIT(self->carrier);
    Py_VISIT(self->taking);
    Py_VISIT(self->make_job);
    Py_VISIT(self->keep);
    Py_VISIT(self->fail);
    Py_VISIT(self->forgotten);
    Py_VISIT(self->words);
    Py_VISIT(self->timed);
    return 0;
}

static int calls_clear(Calls *self)
{
    self->is_open = 0;
    Py_CLEAR(self->queue);
    Py_CLEAR(self->deferral);
    Py_CLEAR(self->announcing);
    Py_CLEAR(self->outstanding);
    Py_CLEAR(self->deferred);
    Py_CLEAR(self->announced);
    Py_CLEAR(self->carrier);
    Py_CLEAR(self->taking);
    Py_CLEAR(self->make_job);
    Py_CLEAR(self->keep);
    Py_CLEAR(self->fail);
    Py_CLEAR(self->forgotten);
    Py_CLEAR(self->words);
    Py_CLEAR(self->timed);
    return 0;
}

static void calls_dealloc(Calls *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    calls_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef calls_methods[] = {
    {"note", (PyCFunction)(void (*)(void))calls_note, METH_FASTCALL,
     "note(run, facts, prefix, send, recv, apart, kind=None, go_on=None): tell the Function that is being called "
     "what carried the call out; of an async call, what carries it out, and its Plan or PersistentRequest; of a call that "
     "consists of others, what makes these, and None as facts. What carries a sync call out may return True, for the "
     "call to be learned anew. `go_on(send, recv)` goes on with a Step that has taken nothing, since the table of "
     "the ranks' sizes was not the agreed one."},
    {"forget", (PyCFunction)calls_forget, METH_NOARGS, "Forget all known calls of the group."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef calls_members[] = {
    {"num_calls", T_ULONGLONG, offsetof(Calls, num_calls), 0, NULL},
    {"num_messages", T_ULONGLONG, offsetof(Calls, num_messages), 0, NULL},
    {"num_waits", T_INT, offsetof(Calls, num_waits), READONLY, NULL},
    {"is_open", T_BOOL, offsetof(Calls, is_open), 0, NULL},
    {"words", T_OBJECT, offsetof(Calls, words), 0, NULL},
    {"forgotten", T_OBJECT, offsetof(Calls, forgotten), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot calls_slots[] = {
    {Py_tp_new, calls_new}, {Py_tp_dealloc, calls_dealloc}, {Py_tp_traverse, calls_traverse},
    {Py_tp_clear, calls_clear}, {Py_tp_methods, calls_methods}, {Py_tp_members, calls_members},
    {Py_tp_doc, "Calls(queue, deferral, announcing, keep, fail, make_job): the known calls of one group, and their "
                "numbers."},
    {0, NULL},
};

PyType_Spec calls_spec = {
    "meshdist.core._core.Calls", sizeof(Calls), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, calls_slots,
};

/* ---- TryLock */

static PyObject *try_lock_acquire(TryLock *self, PyObject *unused)
{
    if (self->is_taken)
        Py_RETURN_FALSE;
    self->is_taken = 1;
    Py_RETURN_TRUE;
}

static PyObject *try_lock_release(TryLock *self, PyObject *unused)
{
    self->is_taken = 0;
    Py_RETURN_NONE;
}

static PyObject *try_lock_locked(TryLock *self, PyObject *unused) { return PyBool_FromLong(self->is_taken); }

static void plain_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef try_lock_methods[] = {
    {"acquire", (PyCFunction)try_lock_acquire, METH_O, "acquire(False): return whether it was free; it does not wait."},
    {"release", (PyCFunction)try_lock_release, METH_NOARGS, "Release it."},
    {"locked", (PyCFunction)try_lock_locked, METH_NOARGS, "Return whether it is taken."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot try_lock_slots[] = {
    {Py_tp_dealloc, plain_dealloc}, {Py_tp_methods, try_lock_methods},
    {Py_tp_doc, "TryLock(): a lock that is only tried."}, {0, NULL},
};

PyType_Spec try_lock_spec = {
    "meshdist.core._core.TryLock", sizeof(TryLock), 0, Py_TPFLAGS_DEFAULT, try_lock_slots,
};

/* ---- of the module */

static PyObject *configure(PyObject *module, PyObject *args)
{
    PyObject *array, *function, *integer, *empty;
    if (!PyArg_ParseTuple(args, "OOO!O", &array, &function, &PyType_Type, &integer, &empty))
        return NULL;
    const Array *head = (const Array *)array;
    PyObject *dtype = PyObject_GetAttrString(array, "dtype"), *data = PyObject_GetAttrString(array, "ctypes");
    if (data != NULL)
        Py_SETREF(data, PyObject_GetAttrString(data, "data"));
    bool is_head = data != NULL && dtype == head->dtype && head->num_dims == 2 && head->shape[0] == 2
                   && head->shape[1] == 3 && head->data == PyLong_AsVoidPtr(data) && (head->flags & CARRAY) == CARRAY;
    Py_XDECREF(dtype);
    Py_XDECREF(data);
    if (!is_head) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ImportError, "the core does not know the arrays of this NumPy");
        return NULL;
    }
    Py_XSETREF(array_type, (PyTypeObject *)Py_NewRef(Py_TYPE(array)));
    know_integers((PyTypeObject *)integer);
    tell_ours_by(function);
    Py_XSETREF(new_array, Py_NewRef(empty));
    Py_RETURN_NONE;
}

static PyObject *explain_type_errors(PyObject *module, PyObject *function)
{
    Py_XSETREF(explain, Py_NewRef(function));
    Py_RETURN_NONE;
}

static PyObject *world_changed(PyObject *module, PyObject *unused)
{
    num_worlds++;
    Py_RETURN_NONE;
}

static PyObject *use_many_worlds(PyObject *module, PyObject *variable)
{
    if (!PyContextVar_CheckExact(variable)) {
        PyErr_SetString(PyExc_TypeError, "use_many_worlds: expected a ContextVar");
        return NULL;
    }
    num_worlds += world_slots == NULL; /* calls that are known have no slot */
    Py_XSETREF(world_slots, Py_NewRef(variable));
    Py_RETURN_NONE;
}

PyMethodDef call_functions[] = {
    {"configure", configure, METH_VARARGS, "configure(array, is_ours, integer, empty): an array of shape (2, 3), what tells "
                                           "of a file whether it is the package's, numpy.integer and numpy.empty."},
    {"explain_type_errors", explain_type_errors, METH_O, "Call it with the function and the error where a Function raises "
                                                         "TypeError; it may change the message."},
    {"world_changed", world_changed, METH_NOARGS, "Functions without a group may run over another from now on."},
    {"use_many_worlds", use_many_worlds, METH_O, "use_many_worlds(slots): threads may have worlds of their own from now on; "
                                                 "of each context, the ContextVar has the slot of its world."},
    {NULL, NULL, 0, NULL},
};
