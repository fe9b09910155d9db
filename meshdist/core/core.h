/* What the parts of the compiled core share. The GIL is held everywhere but where a barrier or a ring yields. */
#ifndef MESHDIST_CORE_H
#define MESHDIST_CORE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

/* The head of NumPy's array object, as it has been since 1.7. `configure` compares it with a real array, so that the
   core is built without NumPy and works with every version of it. */
typedef struct {
    PyObject_HEAD
    char *data;
    int num_dims;
    Py_ssize_t *shape;
    Py_ssize_t *strides;
    PyObject *base;
    PyObject *dtype;
    int flags;
} Array;

enum { C_CONTIGUOUS = 0x1, ALIGNED = 0x100, WRITEABLE = 0x400, CARRAY = C_CONTIGUOUS | ALIGNED | WRITEABLE };

/* The type of arrays, and numpy.empty; set once, by `configure`. */
extern PyTypeObject *array_type;
extern PyObject *new_array;

static inline bool is_array(PyObject *object) { return Py_TYPE(object) == array_type; }

static inline Py_ssize_t least(Py_ssize_t one, Py_ssize_t other) { return one < other ? one : other; }

typedef _Atomic uint64_t Word;

static inline uint64_t load(const Word *word) { return atomic_load_explicit(word, memory_order_acquire); }
static inline void store(Word *word, uint64_t value) { atomic_store_explicit(word, value, memory_order_release); }

/* Between two polls: leaves the processor's resources to its other thread, and the bus to the peer that writes. */
static inline void pause_briefly(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

/* The same clock as `time.monotonic_ns`. */
static inline int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* How often a wait polls before it yields the processor: some microseconds, the delay of a peer that runs. After a poll in
   vain, the next one is shorter, as more ranks than processors keep each other from running; but not as short as a message
   takes between two ranks that run, unless there are known to be more. */
enum { SPINS = 300, FEWEST_SPINS = 8, FEWEST_FOR_MESSAGES = 64, FEWEST_ON_SHARED_CORES = 2 };
static inline void spun(int *spins, bool in_vain, int fewest)
{
    if (in_vain)
        *spins = *spins / 2 > fewest ? *spins / 2 : fewest;
    else if (*spins < SPINS)
        ++*spins;
}
/* How long a wait yields the processor, without the GIL, before Python goes on with it, which sleeps in the end. */
enum { YIELD_NS = 200000 };
/* How long it waits until an announced message is taken, before Python goes on with that. */
enum { TAKEN_NS = 1000000 };
/* Either of them for a message of so many bytes: where ranks share cores, the peer may have to wait for its turn, or to copy
   another message of this size first. That is at 2 GB/s; but meanwhile nobody looks for signals, or for ranks that are
   gone. */
enum { MOST_BYTES_AWAITED = 32 << 20 };
static inline int64_t for_bytes(int64_t ns, Py_ssize_t num_bytes) { return ns + least(num_bytes, MOST_BYTES_AWAITED) / 2; }

/* ---- copies.c: in which way bytes are copied */
/* Addresses for which `rep movsb` is slow; see page_aliasing.c. */
/* What is written is less than so much further in its page than what is read; and shorter copies do not matter. */
enum { ALIASED = 32, SHORTEST_ALIASED = 2 << 10 };
static inline bool is_aliased(uintptr_t to, uintptr_t from)
{
    uintptr_t further = (to - from) % 4096;
    return further > 0 && further < ALIASED;
}
void copy_aliased(char *to, const char *from, Py_ssize_t size);
/* A `memcpy` that is not slow for such addresses. */
static inline void copy_bytes(char *to, const char *from, Py_ssize_t size)
{
    if (size >= SHORTEST_ALIASED && is_aliased((uintptr_t)to, (uintptr_t)from))
        copy_aliased(to, from, size);
    else
        memcpy(to, from, size);
}
/* Which way is the faster one, for one rank that writes and those that read. */
typedef struct {
    uint32_t copies;
    int8_t votes;
    bool streams;
} Pace;

void copy_out(Pace *pace, char *to, const char *from, Py_ssize_t size);
/* Copy what a rank takes, or keeps; if it `streams`, the copy is not left in the caches. */
void copy_in(bool streams, char *to, const char *from, Py_ssize_t size);
/* The arguments of a function that copies one contiguous array into another of equal size; -1 with an error set. */
Py_ssize_t read_copy(const char *function, PyObject *const *args, Py_ssize_t num_args, char **to, char **from);
extern PyMethodDef copy_functions[];

/* ---- page_aliasing.c: copies between processes, for which `rep movsb` may be slow */
/* Of a copy between this process and an address of another one: return a buffer of `detour_bytes` to copy through, which
   the caller has until `end_detour`; NULL if the kernel should copy directly, or another thread has the buffer. */
char *begin_detour(uintptr_t to, uintptr_t from, uintptr_t other, Py_ssize_t size);
void end_detour(void);
extern const Py_ssize_t detour_bytes;

/* ---- cache_distance.c: how far the ranks' processors are apart */
extern PyMethodDef distance_functions[];
extern const int lines_bytes;

/* From so many bytes on, other threads may run during a copy. */
enum { LONG = 32 << 10 };
/* Let other threads run, where that is worth its cost, until `with_gil` is called with the result. */
static inline PyThreadState *without_gil(bool is_worth_it) { return is_worth_it ? PyEval_SaveThread() : NULL; }
static inline void with_gil(PyThreadState *thread)
{
    if (thread != NULL)
        PyEval_RestoreThread(thread);
}

/* ---- barrier.c: the steps of a group; see `flag_barrier` */
/* The phases of the steps, and how many steps a rank may be ahead of another; as in `shared_region` and `flag_barrier`. */
enum { NUM_PHASES = 32, AHEAD = NUM_PHASES / 2 - 1, NUM_EARLY_SLOTS = 4 };
/* The most bytes of a call that is recorded. */
enum { CALL_TEXT_BYTES = 240 };
/* The peers for whom a rank waits in a step, those from `first` to `end`; `first` is -1 for all, as all ranks do. As in
   `flag_barrier`, which alone needs `in_order`. */
typedef struct {
    int first, end, in_order, is_long;
} Awaited;
static inline bool returns_early(Awaited awaited) { return awaited.first >= 0; }

typedef struct {
    PyObject_HEAD
    Py_buffer view; /* of the words: it keeps them mapped */
    Word *words;
    unsigned long long step, word, compared; /* the last step of which the calls have been compared */
    uint64_t fingerprint;                    /* of the call of this step */
    Awaited awaited;
    unsigned int long_steps;                 /* bits, of the last steps */
    int phase, num_peers, num_bells, spins, fewest_spins;
    Py_ssize_t mine, calls; /* where this rank signals, and records its calls */
    Py_ssize_t *posts;      /* where the peers signal */
    Py_ssize_t *bells;
    PyObject *recorded[NUM_PHASES]; /* the texts of those calls */
    Pace pace;                      /* of what is put into the slots */
} Barrier;

extern PyTypeObject *barrier_type;
extern const Awaited ALL;
/* The word that this rank signals for a call so many steps from now. */
uint64_t barrier_next_word(const Barrier *barrier, uint64_t fingerprint, int steps);
/* Record the call that this rank makes in the next step, from which it may return early; return the phase. */
int barrier_record(Barrier *barrier, PyObject *text);
/* Enter the next step. Returns -1 with an error set, which ringing a sleeping peer may raise. */
int barrier_signal(Barrier *barrier, uint64_t fingerprint, Awaited awaited, uint64_t *word);
/* Return whether those have signalled whom the current step needs, for the same call; wait for them up to YIELD_NS. */
bool barrier_poll(Barrier *barrier);
/* The same, but after YIELD_NS call `wait(word)`. Returns -1 with an error set. */
int barrier_await(Barrier *barrier, uint64_t word, PyObject *wait);

/* ---- kernels.c: reductions, in rank order */
/* out[i] = rows[0][i] op rows[1][i] op ..., of two to so many rows; `out` may be one of them. */
enum { ROWS_AT_ONCE = 4 };
typedef void Kernel(char *out, char *const *rows, int num_rows, Py_ssize_t count);
typedef struct {
    Kernel *combine;
    Py_ssize_t element_bytes; /* of the kernel's type, of which one of the dtype's may have several */
    bool averages;
} Reduction;
/* The reduction of a dtype by its kind and size; false if it has to be NumPy's. */
bool find_reduction(const char *op, char kind, Py_ssize_t itemsize, Reduction *found);
/* Reduce rows of so many bytes, at least two; one of them may be `out`. */
void reduce_rows(const Reduction *reduction, char *out, char *const *rows, int num_rows, Py_ssize_t num_bytes);
/* Divide the sum of so many rows, if the reduction is their mean. */
void take_mean(const Reduction *reduction, char *total, Py_ssize_t num_bytes, int num_rows);

/* ---- step.c: calls of few bytes, carried out in one step; see `OneStep` */
/* As many arrays as a call may have on each side; with more, NumPy's part does not show. */
enum { MOST_ARRAYS = 512 };

/* An array whose elements lie in rows of so many bytes, at equal distances; of a contiguous array the number is 0. */
typedef struct {
    char *data;
    Py_ssize_t num_bytes, stride;
} Rows;

/* A block that a rank has itself, copied without a slot. */
typedef struct {
    int from, to; /* arrays */
    Py_ssize_t begin, place, num_bytes;
} Kept;

/* The arrays of a call that moves data, of which some are not contiguous, and how many bytes further in each its places
   are. */
typedef struct {
    Rows sent[MOST_ARRAYS], received[MOST_ARRAYS];
    Py_ssize_t begin;
} Strided;

/* How a call of another size is carried out in the same way; see step_like.c. */
typedef struct {
    Py_ssize_t num_bytes, least_bytes, most_bytes; /* that a rank puts: of this call, and of those like it; 0 for none */
    char *begin, *end; /* of all slots */
    Py_ssize_t slot_bytes;
    PyObject *words, *hasher; /* of the signature, around the shape of the arrays; and what makes its fingerprint */
    int by_received;          /* that shape is of what is received */
    Py_ssize_t num_sizes;     /* what is compared has the size so many times, or the shape if 0 */
} Alike;

/* An exchange whose sizes are in the table of all ranks; see step_splits.c. */
enum { MOST_SPLITS = 64 };
typedef struct {
    int num_ranks, rank;               /* no ranks: it is not one */
    Py_ssize_t row_bytes, limit_bytes; /* of a row; the most that a rank puts into its slot, as all ranks know */
    Py_ssize_t most_bytes;             /* the most that this rank can put there */
    char *slots[2];                    /* of the first rank, in each phase */
    Py_ssize_t slot_bytes;
    PyObject *sizes; /* of this rank, if the core has made them */
} Splits;

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    Barrier *barrier;
    uint64_t fingerprint;
    PyObject *wait;  /* goes on with a wait that takes longer */
    PyObject *keeps; /* what the addresses point into */
    int num_sent, num_received;
    /* For whom this rank waits. If not for all, the places below are those of the first phase, and lie so many bytes
       further in every next one; and the text of the call is recorded. */
    Awaited awaited;
    Py_ssize_t phase_bytes;
    PyObject *text;
    struct Parts {
        int count;
        struct Part {
            int which; /* array; -1 for `sizes` */
            Py_ssize_t offset, num_bytes;
            char *place; /* in a slot */
        } *parts;
    } puts[2], takes[2];
    int num_kept;
    Kept *kept;
    Reduction reduction; /* none if `combine` is NULL */
    int num_rows;
    char **rows[2]; /* if ranks return early, those of the first phase, and of the current one */
    char **part_rows; /* of one part, if the parts of a list are reduced one by one */
    struct Own { /* the row that is read from an array that is sent, not from a slot; -1 for none */
        int row, which; /* array; -1 for the parts of a list, if these are reduced one by one */
        Py_ssize_t offset;
    } own;
    Py_ssize_t total_bytes;
    char *totals[2]; /* where the result is put together, from which it is taken; the array received if NULL */
    bool is_second;  /* of two steps with the same phase */
    bool yields;     /* other threads may run while it copies and reduces */
    bool streams;    /* what is taken is not left in the caches */
    /* If no rank knows all sizes: those of this rank, and the table of all ranks' as it was when they were compared. */
    PyObject *agreed;
    char *sizes, *tables[2];
    Alike alike;
    Splits splits;
} Step;

extern PyTypeObject *step_type;
/* The lists of parts, one for each phase; or one for all, of which the places are so many bytes further. */
static inline int num_lists(const Step *step) { return returns_early(step->awaited) ? 1 : 2; }
/* The two halves of a call: put what is sent, signal, and copy what the rank keeps, which returns -1 with an error set; and,
   once all have signalled, take what is received. Of arrays that are `strided`, the others are NULL. */
int step_begin(Step *step, char *const *sent, char *const *received, const Strided *strided, uint64_t *word, int *phase);
void step_finish(Step *step, int phase, char *const *sent, char *const *received, const Strided *strided);
/* The first half, and wait until all have signalled. Returns -1 with an error set, and 1 if the ranks' sizes are not those
   agreed. */
int step_meet(Step *step, char *const *sent, char *const *received, const Strided *strided, int *phase);
/* The second half, and the wait before it. Returns as `step_run` does. */
int step_rest(Step *step, uint64_t word, int phase, char *const *sent, char *const *received, const Strided *strided);
/* Carry out a call with these arrays, whose sizes have been checked. Returns -1 with an error set, and 1 if nothing has
   been taken because the ranks' sizes are not those agreed. */
int step_run(Step *step, char *const *sent, char *const *received, const Strided *strided);

/* The data of an array, or of a list of them. Returns how many there are; -1 if they are not plain arrays. */
int read_arrays(PyObject *buffers, int flags, char **data);
/* The arrays of a call, so many or more on each side: the data of plain ones, or, if it `moves` data, what is `strided`.
   Returns 1 for plain arrays, 2 for strided ones, 0 for others, and -1 with an error set. */
int read_call(PyObject *const *args, int num_sent, int num_received, bool moves, char **sent, char **received,
              Strided *strided);

/* ---- step_like.c: calls of one step like a known one */
PyObject *step_set_alike(Step *step, PyObject *args);
/* A copy of a step that may be changed; NULL with an error set. */
Step *step_copy(const Step *other);
/* Whether a step is carried out in the same way if the array whose shape is in the words of the call, which had so many
   bytes `before`, has so many `now`; and such a step, with its call in words. NULL if there is none, or with an error set. */
bool step_is_alike(const Step *step, Py_ssize_t before, Py_ssize_t now);
Step *step_like(const Step *other, const Array *array, Py_ssize_t before, Py_ssize_t now, Py_ssize_t row_bytes,
                PyObject **text);

/* ---- step_splits.c: exchanges whose sizes no rank knows alone */
PyObject *step_set_splits(Step *step, PyObject *args);
/* Find in the table of all ranks' sizes what to take; false if two ranks disagree, or the blocks are not in the slots. */
bool step_find_takes(Step *step, int phase);
/* A new step like another one that sends so many bytes to each rank, and receives so many. NULL if they are too many, or with
   an error set. */
Step *step_of_splits(const Step *other, const Py_ssize_t *to, const Py_ssize_t *come);

/* ---- chunks.c: calls of many bytes, in a step for each chunk; see `InChunks` */
extern PyTypeObject *chunks_type;

/* ---- single_copy.c: calls of many bytes, which the ranks read from each other's memory; see `SingleCopyMove` */
extern PyTypeObject *single_copy_type;
/* Copy from another process; return whether all of it was, else with errno set. */
bool read_memory(long pid, uint64_t address, char *data, Py_ssize_t size);
extern PyMethodDef memory_functions[];

/* ---- chosen.c: calls whose way is chosen, without Python; see `BarrierPlan.next_calls` */
extern PyTypeObject *chosen_type, *countdown_type;

/* ---- strided.c: arrays that are not contiguous */
/* Return whether the elements of an array lie in rows; if not, an error may be set. */
bool rows_of(const Array *array, Rows *rows);
/* Copy bytes of an array, from an offset on in the order of its elements, to contiguous memory; or, unless it `packs`, from
   there. */
void copy_rows(const Rows *rows, Py_ssize_t offset, char *plain, Py_ssize_t size, bool packs);

Py_ssize_t num_elements(const Array *array);
/* What a message goes out of: the array itself if it is contiguous, else a packed copy. And what it comes into; the array is
   unpacked from that. A new reference; NULL with an error set, or without one if it cannot be filled, or Python has to see. */
Array *packed(Array *array);
Array *room_of(Array *array);
void unpack(Array *array, Array *room);
/* The memory from the first of the elements to the end of the last; there is at least one. */
void extent_of(const Array *array, Py_ssize_t itemsize, char **begin, char **end);
/* Whether two arrays whose extents overlap may share memory; two columns of one array do not. */
bool may_share_elements(const Array *one, const Array *other, Py_ssize_t itemsize);

/* ---- message_stream.c: messages through the ring of a channel, in pieces */
typedef struct {
    Word *head, *tail;
    Pace *pace; /* the sender's */
    char *ring;
    Py_ssize_t num_bytes;
} Pipe;

extern PyTypeObject *stream_type;
/* Write, or read, more of a message of `size` bytes while there is room, or bytes; return how many in all. With `polls`,
   wait some microseconds for more. */
Py_ssize_t stream_fill(const Pipe *pipe, const char *data, Py_ssize_t size, Py_ssize_t written, uint64_t free_to,
                       bool polls);
Py_ssize_t stream_drain(const Pipe *pipe, char *data, Py_ssize_t size, Py_ssize_t there, bool polls);
/* Read a message that begins at `begin`, and leave it in the ring; return how much of it has come. */
Py_ssize_t stream_look(const Pipe *pipe, uint64_t begin, char *data, Py_ssize_t size);

/* ---- message_ring.c: messages of few bytes of one kind to one rank, or from it; see `shm.fast_path` */
/* How an entry begins; as in `channel`. */
typedef struct {
    int64_t kind, tag, num_bytes;
    char dtype[16]; /* its name */
} Header;

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    bool receives, is_async, shares_cores;
    Py_buffer memory; /* of the channel */
    Word *words;
    Pipe pipe;
    Py_ssize_t unit; /* an entry: a unit, then the message, in units */
    Header kind;     /* how an entry begins */
    Py_ssize_t others_state, others_bells, taken, written; /* words */
    uint64_t tail;                                         /* as it was when there was no room last */
    PyObject *locked, *queues, *keys, *owner, *nones; /* what `is_free` looks at */
    PyObject *wake;
    Py_ssize_t eager_bytes, most_bytes; /* above the first, a sender waits, unless it is async; the longest message */
    /* Of messages that their receiver copies from the sender's array: the announced sends of this rank; where the
       receiver says whether it can; and its process. */
    PyObject *announced;
    Py_ssize_t mode;
    long pid;
    int spins, fewest_spins;
    /* Which way is the faster one for a message that may be announced, and has room: some are timed, in turns. */
    struct {
        uint32_t messages;
        bool announces;
        int64_t began_ns;   /* of the message that is timed, or 0 */
        int64_t best_ns[2]; /* through the ring, and announced */
    } trial;
    /* Of announced sends before which no receive was deferred: how many messages the group had begun then, and when this
       rank last did nothing but wait for one; and how many are not announced now, as that is what it does. */
    unsigned long long messages_then, last_alone;
    bool is_lone;
    int num_lone;
    int num_in_vain; /* how many messages do not wait for room now */
} Ring;

extern PyTypeObject *ring_type;
/* Receive or send one message. Returns 1, 0 if it needs a request, or -1 with an error set. If the sender has to wait until
   the message is taken, `number` is that of the message, else 0; for a moment by `ring_is_taken_soon`, then by `ring_rest`.
   A rank that `receives` as well, meanwhile, announces what has no room. `ring_send` returns 2 if Python writes the rest of
   the message, for which `ring_rest` waits at once. */
int ring_receive(Ring *ring, char *data);
int ring_send(Ring *ring, Array *array, bool receives, uint64_t *number);
bool ring_is_taken_soon(Ring *ring, uint64_t number);
int ring_rest(Ring *ring, PyObject *data, uint64_t number, PyObject *prefix);
/* Whether senders wait until a message is taken. */
bool ring_waits(const Ring *ring);
/* A new ring for messages to, or from, the same rank that have another tag and size; NULL if they are too long, or with an
   error set. */
PyObject *ring_like(const Ring *ring, int64_t tag, Py_ssize_t num_bytes);
/* Whether the next send is to be announced, as this rank receives as well, for which it may wait for room in the ring;
   announce it, and return 1, or as above; and note that what began with it has ended. */
bool ring_announces(Ring *ring);
/* Whether a send is to be announced before this rank receives anything: a long one, unless this rank does nothing but wait
   for it, as its receiver copies it alone; and note that it is awaited. `num_messages` is how many the group has begun. */
bool ring_announces_first(Ring *ring, unsigned long long num_messages);
void ring_is_awaited(Ring *ring, unsigned long long num_messages);
int ring_announce(Ring *ring, char *data, uint64_t *number);
void ring_ended(Ring *ring);
bool ring_is_taken(const Ring *ring, uint64_t number);
/* Whether the next message, of any kind, has come. */
bool ring_has_come(const Ring *ring);
/* Receive in three parts: wait for a message, for a moment; take it if it is of this kind, during which other threads may
   run if it is announced; wake the sender. */
int ring_await(Ring *ring);
int ring_take(Ring *ring, char *data);
int ring_wake(Ring *ring);
/* Whether other messages come before: sends that wait for room; or, of a receive, one like it that is posted, or a message
   for it that has left the ring, or, with `by_any`, any message that has. */
int ring_is_preceded(const Ring *ring, bool by_any);
/* The header of the next message, of any kind, if it has come; and whether a probe finds it, as no receive for it is
   posted. */
bool ring_next(const Ring *ring, Header *header);
int ring_look(Ring *ring, PyObject *rank, Header *header);
/* How many objects a message has, by the name of its dtype: a prefix and hexadecimal digits; -1 if it has none. */
Py_ssize_t count_objects(const char *dtype);
/* Take the next message if it is a list of so many objects, any if negative, with this tag; and send one, if it has room:
   returns 2 if it is not taken yet, though its sender waits for that. */
int ring_take_objects(Ring *ring, int64_t tag, Py_ssize_t *number, PyObject **pickle);
int ring_put_objects(Ring *ring, int64_t tag, Py_ssize_t count, PyObject *pickle, bool waits, uint64_t *number);

/* ---- inbox.c: messages from any of several ranks, and probes */
typedef struct {
    PyObject_HEAD
    Py_ssize_t num_senders; /* how many ranks may send */
    int num_channels, turn; /* those that have sent, and the one to begin with */
    struct Channel {
        Ring *ring;
        PyObject *rank, *global_rank;
    } *channels;
    int spins, fewest_spins;
    int64_t asked_ns; /* when Python has looked last for ranks that have begun to send, or have ended */
    enum { ARRAYS, OBJECT_LISTS, PROBES, IPROBES } what;
    char is_single;           /* a list of one object, whose result is the object */
    int64_t tag;              /* of probes and objects; negative for any */
    PyObject *info, *dtypes;  /* of a probe: the type of what it returns, and the dtypes by their names */
    Py_ssize_t num_bytes;     /* of objects: the size of the last pickle */
} Inbox;

/* What has come: from which channel; its header, for a probe; the number of objects that are wanted, any if negative, or
   have come, and their pickle. */
typedef struct {
    int channel;
    Header header;
    Py_ssize_t number;
    PyObject *pickle;
} Found;

extern PyTypeObject *inbox_type;
/* Wait for a message, for a moment; receive it, into `data` if it is an array, or look at it; wake its sender if it was
   received. Returns 1, 2 if there is none and a probe does not wait, 0 if Python has to go on, or -1 with an error set. */
int inbox_await(Inbox *inbox);
int inbox_take(Inbox *inbox, char *data, Found *found);
int inbox_wake(Inbox *inbox, const Found *found);
bool inbox_has_come(const Inbox *inbox);
/* What a probe returns, a new reference. */
PyObject *inbox_info(Inbox *inbox, const Header *header, PyObject *rank);

/* ---- objects.c: lists of objects, of which each is one pickle; see `runtime.object_messages` */
typedef struct {
    PyObject_HEAD
    Ring *ring;
    int64_t tag;
    Py_ssize_t most_bytes; /* that are buffered; with more, a sync call waits until they are taken */
    PyObject *rest; /* sends a pickle of so many objects that this does not */
    char is_async, is_single; /* single: the user passes an object, which is sent as a list of one */
} ObjectSender;

extern PyTypeObject *object_sender_type;
/* The pickle of a list, a new reference; NULL without an error if Python has to raise it. And the list of a pickle. */
PyObject *objects_dump(PyObject *list);
PyObject *objects_load(PyObject *pickle, PyObject *prefix);
/* The facts of a list of objects, of which `facts` may have a different number or size; a new reference. */
PyObject *objects_facts(PyObject *facts, Py_ssize_t number, Py_ssize_t num_bytes);
extern PyMethodDef object_functions[];

/* Places in the facts of a message; as in `flight_recorder`. */
enum { DTYPE = 3, SHAPE = 4, TAG = 6 };

/* ---- known_calls.c: from the user's call to its plan */
/* A lock that is only tried; the GIL guards it. */
typedef struct {
    PyObject_HEAD
    char is_taken;
} TryLock;

/* A record of a call, with times in ns, 0 for not yet; how far a call may be when it is recorded. */
typedef struct {
    PyObject_HEAD
    PyObject *facts, *code;
    unsigned long long sequence;
    int64_t created, started, completed;
    int instruction;
    PyObject *error, *peer; /* NULL if the call has not failed */
} Record;

typedef enum { CREATED_ONLY, HAS_STARTED, IS_DONE } Progress;

extern PyTypeObject *record_type;

/* One group's counts, and what is the same for all its calls. */
typedef struct {
    PyObject_HEAD
    unsigned long long num_calls, num_messages;
    char is_open;               /* no hooks */
    unsigned long long changes; /* how often its known calls were forgotten */
    PyObject *queue, *deferral, *announcing; /* of async calls, receives that are not posted, and announced sends */
    PyObject *outstanding, *deferred, *announced; /* their deques */
    TryLock *carrier, *taking;  /* taken by the thread that carries out calls, and by one that receives */
    PyObject *keep;             /* of the flight recorder */
    PyObject *fail;             /* called with the error, its prefix and the record: raises */
    PyObject *make_job;         /* called with a work that Python is to carry out */
    int num_waits;              /* threads that take the messages of deferred receives while they wait */
    Ring *timed;                /* of the last isend while receives are deferred */
    PyObject *words;            /* what the ranks compare in the calls of now besides their arrays, a string */
    PyObject *forgotten;        /* how many works were dropped that nobody has asked, and the record of the first */
} Calls;

extern PyTypeObject *function_type, *calls_type, *try_lock_type;
/* Have Python raise the error that is set as that of a call with this record, NULL if it has none. */
void call_failed(Calls *calls, PyObject *prefix, const Record *record);
/* An error that is set hides those that it replaces, and with them what the user's code was handling when it made the call:
   show that again. */
void show_handled(void);
/* ---- record.c: records of calls, and where the user's code makes them; see `flight_recorder` */
/* Put a record of a call into the flight recorder, as `submit` does; a new reference. */
Record *record_call(Calls *calls, PyObject *facts, unsigned long long number, int64_t began_ns, Progress progress,
                    PyObject *code, int instruction);
/* Record a message, which is done or will be. Returns 1, or -1 with an error set. */
int record_message(Calls *calls, PyObject *facts, bool is_done, Record **record);
static inline int record_done(Record *record) { return record->completed = now_ns(), 1; }
/* The code and instruction of the user's call, the innermost that is not the package's; a new reference. NULL if there
   is no frame, or with an error. */
PyObject *place_of_user(int *instruction);
/* Whether code is the package's; -1 with an error. A function of its file, which `tell_ours_by` sets, knows. */
int is_our_code(PyObject *code);
void tell_ours_by(PyObject *function);

/* ---- exchange.c: several messages as one call; see `groups.message_exchanges` */
extern PyTypeObject *exchange_type;
extern PyMethodDef call_functions[];

/* ---- work.c: the handles of async calls, and waiting for them; see `runtime.work` */
typedef struct {
    PyObject_HEAD
    char is_done;
    char was_awaited; /* `wait` has returned, or raised the error of the call: `wait_any` skips it */
    PyObject *forgotten; /* that of the group's Calls, until the user asks whether it is done; NULL if nobody need */
    PyObject *value, *error, *callbacks, *observer, *prefix, *queue;
    Record *record;
    /* Of a known call: until it is done, what carries it out. */
    PyObject *kind, *sent, *run, *job;
    Calls *calls;
    unsigned long long changes; /* of the group, when the call was made */
    char has_begun;             /* it has signalled `word`, and uses the slot `phase` */
    unsigned long long word;
    int phase;
    long source;
} Handle;

extern PyTypeObject *handle_type;
/* Begin a known call that takes its place in the queue, or a receive that is deferred; or return the handle of a send
   that is announced, or done. The result is a new reference; NULL with an error set. */
PyObject *begin_call(Calls *calls, PyObject *run, PyObject *kind, PyObject *prefix, PyObject *sent, PyObject *received,
                     Record *record);
PyObject *defer_receive(Calls *calls, PyObject *run, PyObject *kind, PyObject *prefix, PyObject *received,
                        Record *record, long source);
PyObject *announced_send(Calls *calls, PyObject *run, PyObject *kind, PyObject *prefix, PyObject *sent, Record *record,
                         uint64_t number);
PyObject *sent_at_once(PyObject *prefix);
/* Whether one more receive may be deferred; and one more send by a ring is to be announced. */
bool may_defer(const Calls *calls);
bool may_announce(Calls *calls, PyObject *run);
/* Wait for a moment until a message is taken that this rank has sent; meanwhile, take those for receives that are deferred.
   Returns 1, 0 if it is not taken, or -1 with an error set. */
int await_sent(Calls *calls, Ring *ring, uint64_t number);
extern PyMethodDef work_functions[];

/* ---- spreading.c: where ranks run that share processors */
/* Let another thread run on this processor, while this one waits; without the GIL, or where that takes no time. */
void yield_processor(void);
extern PyMethodDef spreading_functions[];

/* ---- deferring_lock.c: a lock that Ctrl-C waits for; see `system.deferring_lock` */
extern PyTypeObject *deferring_lock_type;

extern PyType_Spec barrier_spec, step_spec, chunks_spec, ring_spec, inbox_spec, object_sender_spec, exchange_spec, function_spec,
    calls_spec, try_lock_spec, record_spec, handle_spec, stream_spec, single_copy_spec, chosen_spec,
    countdown_spec, deferring_lock_spec;

#endif
