/* Ring: sends or receives messages of one kind. The reference is `shm.fast_path`; see `channel` too.

   A message that the ring cannot hold goes through it while its receiver reads, or is announced: its receiver copies it
   from the sender's array, once instead of twice, but alone. Which way is faster depends on where the processors are: with
   a common cache, 4 MiB there and back took 400 to 440 us announced and 410 to 510 through the ring on an AMD EPYC, without
   one 1,500 and 500. The sender finds out by trials.

   In an exchange, both ranks are busy with what they receive. So a message that the ring can hold may be announced
   as well, and the sender has nothing to do but to wait. Whether that is faster depends on the size and the
   processor: up to 128 KiB the ring took two thirds of the time on an AMD EPYC. Ranks find out by trials, each for
   itself, and wait for room in the ring if that is faster: messages of 1 MiB around 2 ranks took 0.85 of the time
   so, in the mean of many jobs. Where ranks share cores, they would choose differently, as one call takes what
   others have left, and would wait for each other in both ways: around 4 ranks on 2 cores, messages of 64 KiB took
   twice as long so as through the ring, and of 1 MiB 1.3 times as long as announced. */
#include "core.h"

#include <structmember.h>

PyTypeObject *ring_type;

/* Kinds of entries, as in `channel`; and the place in one of what is the message's own: address and number. */
enum { EAGER = 1, RTS = 2, RTS_CMA = 3, OWN = sizeof(Header) };
/* The queues of a ring that receives. */
enum { POSTED = 0, UNEXPECTED = 1 };
/* A receiver that can read the sender's memory. */
enum { READS = 1 };
/* The name of the dtype of a list of objects begins so, and ends with their number; as in `arrays.host`. */
#define OBJECTS "objects"
static const char digits[] = "0123456789abcdef";
enum { NAME = sizeof ((Header *)0)->dtype };
/* Up to here the receiver need not begin before all is written. */
enum { SHORT = 8 << 10 };
/* The longest message that goes through the ring; both sides copy a longer one, unless this rank receives as well. As in
   `shm.sender`. */
enum { MOST_BY_ONE = 4 << 20 };

/* Whether no thread is in the middle of a message: the lock is free, and the attributes are None. */
static int is_idle(const Ring *self)
{
    PyObject *locked = PyObject_CallNoArgs(self->locked);
    Py_XDECREF(locked); /* a bool */
    if (locked != Py_False)
        return locked == NULL ? -1 : 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->nones); i++) {
        PyObject *value = PyObject_GetAttr(self->owner, PyTuple_GET_ITEM(self->nones, i));
        Py_XDECREF(value);
        if (value != Py_None)
            return value == NULL ? -1 : 0;
    }
    return 1;
}

bool ring_waits(const Ring *self)
{
    return !self->receives && !self->is_async && self->kind.num_bytes > self->eager_bytes;
}

/* Whether the receiver of an `isend` may copy the message from the sender's array. */
static bool may_be_announced(const Ring *self) { return self->is_async && self->kind.num_bytes > self->eager_bytes; }

int ring_is_preceded(const Ring *self, bool by_any)
{
    int precedes = 0;
    /* The peer of a sender that waits may take the message only once this rank has received, which needs a request. */
    Py_ssize_t num_queues = self->receives || ring_waits(self) ? PyTuple_GET_SIZE(self->queues) : 1;
    for (Py_ssize_t i = 0; i < num_queues && precedes == 0; i++) {
        PyObject *queue = PyTuple_GET_ITEM(self->queues, i);
        if (!self->receives || !PyDict_CheckExact(queue)) {
            Py_ssize_t size = PyObject_Size(queue);
            precedes = size < 0 ? -1 : size > 0;
        } else if (by_any && i == UNEXPECTED) {
            precedes = PyDict_GET_SIZE(queue) > 0;
        }
        for (Py_ssize_t key = 0; !by_any && PyDict_CheckExact(queue) && PyDict_GET_SIZE(queue) > 0 && precedes == 0
                                 && key < PyTuple_GET_SIZE(self->keys); key++)
            precedes = PyDict_Contains(queue, PyTuple_GET_ITEM(self->keys, key));
    }
    return precedes;
}

/* The GIL is held from here to the end of the message, so that it stays so. */
static int is_free(const Ring *self)
{
    int idle = is_idle(self), precedes = idle <= 0 ? 0 : ring_is_preceded(self, false);
    return precedes < 0 ? -1 : idle <= 0 ? idle : !precedes;
}

int ring_wake(Ring *self)
{
    if (!load(&self->words[self->others_bells]))
        return 1;
    PyObject *woken = PyObject_CallNoArgs(self->wake);
    Py_XDECREF(woken);
    return woken == NULL ? -1 : 1;
}

/* How much of the ring a message takes. */
static Py_ssize_t length_of(const Ring *self, Py_ssize_t num_bytes)
{
    return self->unit + ((num_bytes + self->unit - 1) & -self->unit);
}

/* The tail is read only where it has to be: the receiver has just written it. */
static bool has_room(Ring *self, Py_ssize_t length)
{
    const uint64_t end = load(self->pipe.head) + length, most = self->pipe.num_bytes;
    if (end - self->tail > most)
        self->tail = load(self->pipe.tail);
    return end - self->tail <= most;
}

/* Wait for room as long as the receiver makes some: it takes what this rank has sent before. */
static bool gets_room(Ring *self, Py_ssize_t length)
{
    if (length > self->pipe.num_bytes)
        return false;
    uint64_t tail = self->tail;
    for (int spins = SPINS; !has_room(self, length); tail = self->tail) {
        spins = self->tail != tail ? SPINS : spins - 1;
        if (spins <= 0)
            return false;
        pause_briefly();
    }
    return true;
}

/* After two sends in a row of a rank that did nothing but wait for them, so many are not announced; and after a wait for
   room in vain, so many go without one. */
enum { LONE = 64, IN_VAIN = 64 };

/* How long to wait for room for a message: as long as its receiver may take to copy one of that size in, or out. */
enum { BYTES_PER_NS = 8 };

/* Wait for room for a message that the ring can hold, also while the receiver makes none, as it copies its own message: an
   exchange begins anew before both have taken what the other sent. */
static bool waits_for_room(Ring *self, Py_ssize_t length)
{
    if (gets_room(self, length))
        return true;
    if (self->num_in_vain > 0 && self->num_in_vain--)
        return false;
    const uint64_t end = load(self->pipe.head) + length - self->pipe.num_bytes;
    Py_BEGIN_ALLOW_THREADS
    int64_t until = now_ns() + self->kind.num_bytes / BYTES_PER_NS;
    while (load(self->pipe.tail) < end && now_ns() < until)
        pause_briefly();
    Py_END_ALLOW_THREADS
    self->num_in_vain = has_room(self, length) ? 0 : IN_VAIN;
    return self->num_in_vain == 0;
}

/* Write the header of a message, and of one that its sender waits for what is its own. Returns the entry. */
static char *write_header(Ring *self, const Header *header, const char *data, uint64_t number)
{
    char *entry = self->pipe.ring + load(self->pipe.head) % self->pipe.num_bytes;
    memcpy(entry, header, sizeof *header);
    if (number) {
        uint64_t own[] = {(uintptr_t)data, number};
        memcpy(entry + OWN, own, sizeof own);
    }
    return entry;
}

/* Write the header of a message and its bytes. Its receiver may read the first pieces meanwhile. */
static void write_message(Ring *self, const Header *header, const char *data, uint64_t number)
{
    char *entry = write_header(self, header, data, number);
    const uint64_t head = load(self->pipe.head);
    const Py_ssize_t place = entry - self->pipe.ring, length = length_of(self, header->num_bytes);
    if (header->num_bytes <= SHORT && place + length <= self->pipe.num_bytes) {
        copy_out(self->pipe.pace, entry + self->unit, data, header->num_bytes);
        store(self->pipe.head, head + length);
    } else {
        store(self->pipe.head, head + self->unit);
        stream_fill(&self->pipe, data, header->num_bytes, 0, 0, false);
    }
    if (number)
        store(&self->words[self->written], number);
}

/* The number of the next message that its sender waits for; 0 with an error set. */
static uint64_t next_number(Ring *self)
{
    PyObject *last = PyObject_GetAttrString(self->owner, "numbered");
    uint64_t number = last == NULL ? 0 : PyLong_AsUnsignedLongLong(last) + 1;
    Py_XDECREF(last);
    PyObject *next = PyErr_Occurred() ? NULL : PyLong_FromUnsignedLongLong(number);
    int status = next == NULL ? -1 : PyObject_SetAttrString(self->owner, "numbered", next);
    Py_XDECREF(next);
    return status < 0 ? 0 : number;
}

/* Of so many messages, the first are timed: some in each way. */
enum { PERIOD = 256, TIMED = 6 };
/* Where ranks share cores, the longest message of an exchange that goes through the ring. */
enum { MOST_ON_SHARED_CORES = 512 << 10 };

/* Whether the next message is announced, as it is its turn, or as that is faster. All messages count: both ranks of an
   exchange then try the same way in the same calls, as one rank alone would gain nothing by the faster one. */
static bool next_way(Ring *self, bool *is_timed)
{
    uint32_t turn = self->trial.messages++ % PERIOD;
    self->trial.began_ns = 0;
    if (turn < 2 * TIMED && turn % TIMED == 0)
        self->trial.best_ns[turn >= TIMED] = INT64_MAX;
    *is_timed = turn < 2 * TIMED;
    return *is_timed ? turn >= TIMED : self->trial.best_ns[true] < self->trial.best_ns[false];
}

bool ring_announces(Ring *self)
{
    Py_ssize_t length = length_of(self, self->kind.num_bytes);
    if (!may_be_announced(self))
        return false;
    bool is_timed, announces = next_way(self, &is_timed);
    if (length > self->pipe.num_bytes)
        return true;
    if (self->shares_cores)
        return self->kind.num_bytes > MOST_ON_SHARED_CORES || !gets_room(self, length);
    int64_t began_ns = now_ns();
    if (!announces && !waits_for_room(self, length))
        return true;
    if (is_timed)
        self->trial.announces = announces, self->trial.began_ns = began_ns;
    return announces;
}

bool ring_announces_first(Ring *self, unsigned long long num_messages)
{
    Py_ssize_t length = length_of(self, self->kind.num_bytes);
    self->messages_then = 0;
    if (!may_be_announced(self) || gets_room(self, length))
        return false;
    if (self->num_lone > 0 && --self->num_lone > 0)
        return false;
    self->messages_then = num_messages;
    return true;
}

void ring_is_awaited(Ring *self, unsigned long long num_messages)
{
    bool is_alone = num_messages == self->messages_then;
    /* The first one may come after receives that Python has posted. */
    self->is_lone = is_alone && (self->is_lone || num_messages == self->last_alone + 1);
    if (is_alone)
        self->last_alone = num_messages;
    if (self->is_lone)
        self->num_lone = LONE;
}

void ring_ended(Ring *self)
{
    if (self->trial.began_ns == 0)
        return;
    int64_t took = now_ns() - self->trial.began_ns, *best = &self->trial.best_ns[self->trial.announces];
    *best = took < *best ? took : *best;
    self->trial.began_ns = 0;
}

int ring_announce(Ring *self, char *data, uint64_t *number)
{
    int free = is_free(self);
    if (free <= 0)
        return free;
    if (load(&self->words[self->mode]) != READS || load(&self->words[self->others_state]) || !has_room(self, self->unit))
        return 0;
    if ((*number = next_number(self)) == 0)
        return -1;
    Header header = self->kind;
    header.kind = RTS_CMA;
    write_header(self, &header, data, *number);
    store(self->pipe.head, load(self->pipe.head) + self->unit);
    return ring_wake(self);
}

bool ring_is_taken(const Ring *self, uint64_t number) { return load(&self->words[self->taken]) >= number; }

bool ring_has_come(const Ring *self) { return load(self->pipe.head) != load(self->pipe.tail); }

bool ring_is_taken_soon(Ring *self, uint64_t number)
{
    const Word *taken = &self->words[self->taken];
    for (int spins = self->spins; spins > 0; spins--) {
        if (load(taken) >= number) {
            spun(&self->spins, false, self->fewest_spins);
            return true;
        }
        pause_briefly();
    }
    spun(&self->spins, true, self->fewest_spins);
    bool is = false;
    Py_BEGIN_ALLOW_THREADS
    int64_t until = now_ns() + for_bytes(YIELD_NS, self->kind.num_bytes);
    while (!(is = load(taken) >= number) && now_ns() < until)
        yield_processor();
    Py_END_ALLOW_THREADS
    return is;
}

/* Write a message that is longer than the ring as long as its receiver makes room. Returns how much is written, or -1 with
   an error set. */
static Py_ssize_t stream_message(Ring *self, const char *data, uint64_t number)
{
    const Py_ssize_t size = self->kind.num_bytes;
    write_header(self, &self->kind, data, number);
    store(self->pipe.head, load(self->pipe.head) + self->unit);
    if (ring_wake(self) < 0)
        return -1;
    Py_ssize_t written = 0;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t until = now_ns() + YIELD_NS; written < size && !ring_is_taken(self, number) && now_ns() < until;) {
        Py_ssize_t before = written;
        if ((written = stream_fill(&self->pipe, data, size, written, 0, true)) > before)
            until = now_ns() + YIELD_NS;
        else
            yield_processor();
    }
    Py_END_ALLOW_THREADS
    if (written == size)
        store(&self->words[self->written], number);
    return written;
}

/* Send a message that is longer than the ring through it, while its receiver reads. The lock keeps other threads from the
   ring meanwhile, and from what Python goes on with. */
static int send_in_pieces(Ring *self, Array *array, uint64_t *number)
{
    PyObject *lock = PyObject_GetAttrString(self->owner, "lock");
    PyObject *is_mine = lock == NULL ? NULL : PyObject_CallMethod(lock, "acquire", "O", Py_False);
    int status = is_mine == NULL ? -1 : is_mine == Py_True;
    if (status > 0) {
        *number = next_number(self);
        Py_ssize_t written = *number == 0 ? -1 : stream_message(self, array->data, *number);
        status = written < 0 ? -1 : 1;
        if (status > 0 && written < self->kind.num_bytes) {
            PyObject *goes_on = PyObject_CallMethod(self->owner, "write_on", "OKny#L", array, (unsigned long long)*number,
                                                    written, self->kind.dtype, (Py_ssize_t)NAME, (long long)self->kind.tag);
            Py_XDECREF(goes_on);
            status = goes_on == NULL ? -1 : 2;
        }
        PyObject *type, *error, *trace;
        PyErr_Fetch(&type, &error, &trace); /* of Python, such as KeyboardInterrupt */
        PyObject *released = PyObject_CallMethod(lock, "release", NULL);
        Py_XDECREF(released);
        if (released == NULL)
            PyErr_Clear();
        PyErr_Restore(type, error, trace);
    }
    Py_XDECREF(is_mine);
    Py_XDECREF(lock);
    int woken = status > 0 ? ring_wake(self) : 1;
    return woken < 0 ? woken : status;
}

int ring_send(Ring *self, Array *array, bool receives, uint64_t *number)
{
    int free = is_free(self);
    Py_ssize_t length = length_of(self, self->kind.num_bytes);
    *number = 0;
    if (free <= 0)
        return free;
    if (load(&self->words[self->others_state]) || !has_room(self, self->unit))
        return 0;
    if (ring_waits(self) && receives && !has_room(self, length))
        return ring_announce(self, array->data, number);
    if (ring_waits(self) && length > self->pipe.num_bytes) {
        if (self->kind.num_bytes > MOST_BY_ONE)
            return 0;
        bool is_timed, announces = next_way(self, &is_timed) && load(&self->words[self->mode]) == READS;
        if (is_timed)
            self->trial.announces = announces, self->trial.began_ns = now_ns();
        return announces ? ring_announce(self, array->data, number) : send_in_pieces(self, array, number);
    }
    if (!has_room(self, length))
        return 0;
    if (ring_waits(self) && (*number = next_number(self)) == 0)
        return -1;
    write_message(self, &self->kind, array->data, *number);
    return ring_wake(self);
}

/* A message that both sides copy is not taken here, unless it is announced, as in an exchange: its receive is posted at
   once. */
static bool is_in_vain(const Ring *self)
{
    return self->kind.num_bytes > MOST_BY_ONE && PySet_GET_SIZE(self->announced) == 0 && !ring_has_come(self);
}

int ring_await(Ring *self)
{
    int precedes = ring_is_preceded(self, false);
    if (precedes != 0 || is_in_vain(self))
        return precedes < 0 ? -1 : 0;
    Word *head = self->pipe.head;
    uint64_t tail = load(self->pipe.tail);
    if (load(head) != tail)
        return 1;
    for (int spins = self->spins; spins > 0; spins--) {
        if (load(head) != tail) {
            spun(&self->spins, false, self->fewest_spins);
            return 1;
        }
        pause_briefly();
    }
    spun(&self->spins, true, self->fewest_spins);
    bool has_come = false;
    Py_BEGIN_ALLOW_THREADS
    /* Another thread may read the message meanwhile: then this one needs a request. */
    int64_t until = now_ns() + for_bytes(YIELD_NS, self->kind.num_bytes);
    while (!(has_come = load(head) != tail) && now_ns() < until)
        yield_processor();
    Py_END_ALLOW_THREADS
    return has_come;
}

static char *next_entry(const Ring *self) { return self->pipe.ring + load(self->pipe.tail) % self->pipe.num_bytes; }

bool ring_next(const Ring *self, Header *header)
{
    if (!ring_has_come(self))
        return false;
    memcpy(header, next_entry(self), sizeof *header);
    return true;
}

/* Whether a message is of this kind; its sender waits for it, or not. */
static bool is_mine(const Ring *self, const Header *header)
{
    return (header->kind == EAGER || header->kind == RTS || header->kind == RTS_CMA) && header->tag == self->kind.tag
           && header->num_bytes == self->kind.num_bytes && memcmp(header->dtype, self->kind.dtype, NAME) == 0;
}

/* Copy an announced message. Other threads run meanwhile: `moving` keeps them from the ring. If the copy fails, it is
   left to a request. */
static int copy_announced(Ring *self, char *data, Py_ssize_t num_bytes, uint64_t address)
{
    PyObject *moving = PyObject_GetAttrString(self->owner, "moving");
    PyObject *is_mine = moving == NULL ? NULL : PyObject_CallMethod(moving, "acquire", "O", Py_False);
    int status = is_mine == NULL ? -1 : is_mine == Py_True;
    if (status > 0) {
        Py_BEGIN_ALLOW_THREADS
        status = read_memory(self->pid, address, data, num_bytes);
        Py_END_ALLOW_THREADS
        PyObject *released = PyObject_CallMethod(moving, "release", NULL);
        Py_XDECREF(released);
        status = released == NULL ? -1 : status;
    }
    Py_XDECREF(is_mine);
    Py_XDECREF(moving);
    return status;
}

/* Whether so much has come. */
static bool ring_holds(const Ring *self, Py_ssize_t length)
{
    return load(self->pipe.head) - load(self->pipe.tail) >= (uint64_t)length;
}

/* Take the next message as a whole: if its rest does not come, what has come stays for a request. */
static int take_next(Ring *self, const Header *header, char *data)
{
    uint64_t tail = load(self->pipe.tail), own[2];
    Py_ssize_t length = length_of(self, header->num_bytes);
    memcpy(own, next_entry(self) + OWN, sizeof own);
    if (header->kind == RTS_CMA) {
        int copied = copy_announced(self, data, header->num_bytes, own[0]);
        if (copied <= 0)
            return copied;
        length = self->unit;
    } else if (ring_holds(self, length)) { /* the sender may wait for its room */
        store(self->pipe.tail, tail + self->unit);
        stream_drain(&self->pipe, data, header->num_bytes, 0, false);
    } else if (length > self->pipe.num_bytes
               || stream_look(&self->pipe, tail + self->unit, data, header->num_bytes) < header->num_bytes) {
        return 0;
    }
    store(self->pipe.tail, tail + length);
    if (header->kind != EAGER)
        store(&self->words[self->taken], own[1]);
    return 1;
}

int ring_take(Ring *self, char *data)
{
    int free = is_free(self);
    Header header;
    if (free <= 0)
        return free;
    return ring_next(self, &header) && is_mine(self, &header) ? take_next(self, &header, data) : 0;
}

Py_ssize_t count_objects(const char *dtype)
{
    Py_ssize_t count = 0;
    if (memcmp(dtype, OBJECTS, sizeof OBJECTS - 1) != 0 || dtype[sizeof OBJECTS - 1] == 0)
        return -1;
    for (size_t i = sizeof OBJECTS - 1; i < NAME && dtype[i] != 0; i++) {
        const char *digit = strchr(digits, dtype[i]);
        if (digit == NULL)
            return -1;
        count = count * 16 + (digit - digits);
    }
    return count;
}

/* The other way round, into what is filled with zeros. */
static void name_objects(char *dtype, Py_ssize_t count)
{
    size_t end = sizeof OBJECTS;
    for (Py_ssize_t rest = count >> 4; rest > 0 && end < NAME; rest >>= 4)
        end++;
    memcpy(dtype, OBJECTS, sizeof OBJECTS - 1);
    for (size_t i = end; i >= sizeof OBJECTS; i--, count >>= 4)
        dtype[i - 1] = digits[count & 15];
}

int ring_take_objects(Ring *self, int64_t tag, Py_ssize_t *number, PyObject **pickle)
{
    int free = is_free(self);
    Header header;
    if (free <= 0 || !ring_next(self, &header))
        return free < 0 ? -1 : 0;
    Py_ssize_t count = count_objects(header.dtype);
    if (header.tag != tag || count < 0 || (*number >= 0 && *number != count))
        return 0;
    if ((*pickle = PyBytes_FromStringAndSize(NULL, header.num_bytes)) == NULL)
        return -1;
    int taken = take_next(self, &header, PyBytes_AS_STRING(*pickle));
    if (taken <= 0)
        Py_CLEAR(*pickle);
    else
        *number = count;
    return taken;
}

int ring_put_objects(Ring *self, int64_t tag, Py_ssize_t count, PyObject *pickle, bool waits, uint64_t *number)
{
    Header header = {waits ? RTS : EAGER, tag, PyBytes_GET_SIZE(pickle), {0}};
    int free = is_free(self);
    if (free <= 0)
        return free;
    name_objects(header.dtype, count);
    if (load(&self->words[self->others_state]) || !has_room(self, length_of(self, header.num_bytes)))
        return 0;
    *number = 0;
    if (waits && (*number = next_number(self)) == 0)
        return -1;
    write_message(self, &header, PyBytes_AS_STRING(pickle), *number);
    int woken = ring_wake(self);
    return woken > 0 && waits && !ring_is_taken_soon(self, *number) ? 2 : woken;
}

int ring_look(Ring *self, PyObject *rank, Header *header)
{
    int idle = is_idle(self);
    if (idle <= 0 || !ring_next(self, header))
        return idle < 0 ? -1 : 0;
    PyObject *posted = PyTuple_GET_ITEM(self->queues, POSTED);
    for (int any = 0; any < 2 && PyDict_GET_SIZE(posted) > 0; any++) {
        PyObject *key = Py_BuildValue("(OL)", any ? Py_None : rank, (long long)header->tag);
        int is_posted = key == NULL ? -1 : PyDict_Contains(posted, key);
        Py_XDECREF(key);
        if (is_posted != 0)
            return is_posted < 0 ? -1 : 0;
    }
    return 1;
}

int ring_receive(Ring *self, char *data)
{
    int come = ring_await(self), taken = come <= 0 ? come : ring_take(self, data);
    return taken <= 0 ? taken : ring_wake(self);
}

int ring_rest(Ring *self, PyObject *data, uint64_t number, PyObject *prefix)
{
    PyObject *done = PyObject_CallMethod(self->owner, "finish", "OKOy#L", data, (unsigned long long)number, prefix,
                                         self->kind.dtype, (Py_ssize_t)NAME, (long long)self->kind.tag);
    Py_XDECREF(done);
    return done == NULL ? -1 : 1;
}

static PyObject *ring_call(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Ring *self = (Ring *)object;
    Array *array = PyVectorcall_NARGS(nargsf) == 1 && kwnames == NULL ? (Array *)args[0] : NULL;
    if (array == NULL || !is_array((PyObject *)array)) {
        PyErr_SetString(PyExc_TypeError, "a Ring is called with an array");
        return NULL;
    }
    uint64_t number;
    int moved = (array->flags & CARRAY) != CARRAY || ring_waits(self) ? 0
                : self->receives                                      ? ring_receive(self, array->data)
                                                                      : ring_send(self, array, false, &number);
    return moved < 0 ? NULL : PyBool_FromLong(moved);
}

PyObject *ring_like(const Ring *other, int64_t tag, Py_ssize_t num_bytes)
{
    if (num_bytes > other->most_bytes)
        return NULL;
    Ring *self = (Ring *)Py_TYPE(other)->tp_alloc(Py_TYPE(other), 0);
    if (self == NULL)
        return NULL;
    /* What comes after the head of an object; then all that is counted. */
    memcpy((char *)self + sizeof(PyObject), (const char *)other + sizeof(PyObject), sizeof *self - sizeof(PyObject));
    self->trial.messages = 0, self->trial.began_ns = 0;
    self->messages_then = self->last_alone = 0, self->is_lone = false;
    self->num_lone = self->num_in_vain = 0, self->spins = SPINS;
    self->kind.tag = tag, self->kind.num_bytes = num_bytes;
    self->kind.kind = ring_waits(self) ? RTS : EAGER;
    Py_INCREF(self->locked), Py_INCREF(self->queues), Py_INCREF(self->owner), Py_INCREF(self->nones);
    Py_INCREF(self->wake), Py_INCREF(self->announced);
    PyObject *memory = other->memory.obj;
    self->keys = NULL, self->words = NULL;
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_CONTIG) == 0) {
        self->words = self->memory.buf;
        PyObject *source = self->receives ? PyTuple_GET_ITEM(PyTuple_GET_ITEM(other->keys, 0), 0) : NULL;
        self->keys = source == NULL ? Py_NewRef(other->keys)
                                    : Py_BuildValue("((OL)(OL))", source, (long long)tag, Py_None, (long long)tag);
    }
    if (self->keys == NULL)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyObject *ring_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *memory, *start, *locked, *queues, *keys, *owner, *nones, *wake_up, *announced;
    int receives, is_async, shares_cores;
    Py_ssize_t ring_begin, ring_bytes, unit, others_state, others_bells, head, tail;
    Py_ssize_t pace, taken, written, mode, eager_bytes, most_bytes;
    long pid;
    if (!PyArg_ParseTuple(args, "pO(nn)(nnnnnnnn)nO!OO!O!OO!OO!lnnpp", &receives, &memory, &ring_begin, &ring_bytes,
                          &head, &tail, &pace, &others_state, &others_bells, &taken, &written, &mode, &unit,
                          &PyBytes_Type, &start, &locked, &PyTuple_Type, &queues, &PyTuple_Type, &keys, &owner,
                          &PyTuple_Type, &nones, &wake_up, &PySet_Type, &announced, &pid, &eager_bytes, &most_bytes,
                          &is_async, &shares_cores))
        return NULL;
    if (PyBytes_GET_SIZE(start) != sizeof(Header)) {
        PyErr_SetString(PyExc_ValueError, "Ring: start must be a header without what is a message's own");
        return NULL;
    }
    Ring *self = (Ring *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->call = ring_call, self->spins = SPINS;
    self->fewest_spins = shares_cores ? FEWEST_ON_SHARED_CORES : FEWEST_FOR_MESSAGES;
    self->receives = receives, self->is_async = is_async, self->shares_cores = shares_cores;
    self->eager_bytes = eager_bytes, self->most_bytes = most_bytes;
    memcpy(&self->kind, PyBytes_AS_STRING(start), sizeof self->kind);
    self->locked = Py_NewRef(locked), self->queues = Py_NewRef(queues);
    self->keys = Py_NewRef(keys);
    self->owner = Py_NewRef(owner), self->nones = Py_NewRef(nones), self->wake = Py_NewRef(wake_up);
    self->announced = Py_NewRef(announced), self->mode = mode, self->pid = pid;
    self->taken = taken, self->written = written;
    self->unit = unit;
    self->others_state = others_state, self->others_bells = others_bells;
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_CONTIG) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    self->words = self->memory.buf;
    self->pipe = (Pipe){&self->words[head], &self->words[tail], (Pace *)&self->words[pace],
                       (char *)self->memory.buf + ring_begin, ring_bytes};
    return (PyObject *)self;
}

static PyObject *ring_follow(Ring *self, PyObject *args)
{
    PyObject *array;
    unsigned long long number;
    if (!PyArg_ParseTuple(args, "OK", &array, &number))
        return NULL;
    return PyObject_CallMethod(self->owner, "follow", "OKy#L", array, number, self->kind.dtype, (Py_ssize_t)NAME,
                               (long long)self->kind.tag);
}

static int ring_traverse(Ring *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->locked);
    Py_VISIT(self->queues);
    Py_VISIT(self->owner);
    Py_VISIT(self->wake);
    Py_VISIT(self->announced);
    return 0;
}

static void ring_dealloc(Ring *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (self->words != NULL)
        PyBuffer_Release(&self->memory);
    Py_XDECREF(self->locked);
    Py_XDECREF(self->queues);
    Py_XDECREF(self->keys);
    Py_XDECREF(self->owner);
    Py_XDECREF(self->nones);
    Py_XDECREF(self->wake);
    Py_XDECREF(self->announced);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Ring, call), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef methods[] = {
    {"follow", (PyCFunction)ring_follow, METH_VARARGS,
     "follow(array, number): make the request that waits for an announced send."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, ring_new}, {Py_tp_dealloc, ring_dealloc}, {Py_tp_traverse, ring_traverse},
    {Py_tp_call, PyVectorcall_Call}, {Py_tp_members, members}, {Py_tp_methods, methods},
    {Py_tp_doc, "Ring(receives, memory, (ring_begin, ring_bytes), (head, tail, pace, others_state, others_bells, "
                "taken, written, mode), unit, start, locked, queues, keys, owner, nones, wake, announced, pid, "
                "eager_bytes, most_bytes, is_async, shares_cores): called with an array, it moves a message and "
                "returns True, or False if it needs a request. Senders of more than `eager_bytes` wait until a message "
                "is taken, in the end by `owner.finish(array, number, prefix, dtype, tag)`, unless they are async."},
    {0, NULL},
};

PyType_Spec ring_spec = {
    "meshdist.core._core.Ring", sizeof(Ring), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots,
};
