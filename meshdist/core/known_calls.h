/* What the three parts of the known calls share: arguments in known_args.c, calls like a known one in known_like.c, and
   the calls themselves in known_calls.c. */
#ifndef MESHDIST_KNOWN_CALLS_H
#define MESHDIST_KNOWN_CALLS_H

#include "core.h"

enum { MOST_ARGS = 8, MOST_MEMOS = 64, MOST_KNOWN_ARRAYS = 64, MOST_KNOWN_ITEMS = 16 };

typedef struct Arg {
    enum { IDENTICAL, ARRAY, LIST, OBJECTS, OBJECT, NUMBER, ITEMS } kind;
    PyObject *value; /* or the dtype of an ARRAY, the type of a NUMBER or of what has ITEMS */
    int64_t number;
    int flags, num_dims, count;
    Py_ssize_t *shape, num_bytes, itemsize; /* the last: 0 of an array without elements */
    Py_ssize_t *strides; /* of an array that is not contiguous; NULL if any will do */
    char *begin;         /* where its memory was */
    struct Arg *items;
} Arg;

/* A kind of call: what its arguments are, and what carries it out. */
typedef struct {
    Calls *calls;
    uint64_t world; /* at the time */
    PyObject *slot; /* of the world of a function without a group */
    PyObject *run, *facts, *prefix, *kwnames, *result; /* facts: None of a call that consists of messages */
    PyObject *words; /* those of its Calls at the time */
    PyObject *kind; /* of an async call, whose result is a new work: its Plan or PersistentRequest; else NULL */
    PyObject *go_on; /* goes on with a step whose table was not the agreed one; else NULL */
    long source;    /* of a message to receive */
    int send, recv, tag, returned; /* arguments; -1 for none */
    int to, come;                  /* those with the numbers of rows to and from each rank, of an exchange; -1 for none */
    bool apart;               /* inputs may not share memory with outputs */
    int num_users; /* besides the Function */
    int num_args;
    Arg args[MOST_ARGS];
} Memo;

/* ---- known_args.c */
/* Keep what an argument was; return whether it can be kept. An array, or a list of arrays, that is sent or received: unless
   an array is contiguous, its strides are kept if `flags` ask for a contiguous one. Objects that are sent or received: a
   call is like another one with any, in a list or without. And others: what is in a list, or is compared by itself. */
bool learn_buffers(Arg *arg, PyObject *object, int flags);
bool learn_objects(Arg *arg, PyObject *object, bool is_single);
bool learn_value(Arg *arg, PyObject *object);
void arg_clear(Arg *arg);
/* Whether an argument is as one that is kept. */
bool matches(const Arg *arg, PyObject *object);
/* The value of an integer, also of NumPy's; return whether it is one. */
bool read_integer(PyObject *object, int64_t *number);
/* The arrays among what is sent, or received: of a list, its items. */
int num_arrays(const Memo *memo, int place);
const Arg *arg_of(const Memo *memo, int place, int i);
extern PyMethodDef argument_functions[];
void know_integers(PyTypeObject *type);

/* ---- known_like.c */
/* Make the memo of a call like one that is kept, and has been looked up for these arguments: with another tag, or on arrays
   of other sizes. NULL if there is none. */
Memo *memo_like(Memo *other, PyObject *const *args);
/* Whether there may be such calls, `of_messages` if the function is one of those that send or receive one; and whether these
   are the arguments of one. */
bool has_likes(const Memo *memo, bool of_messages);
bool is_like(const Memo *memo, PyObject *const *args);

/* ---- known_calls.c */
/* A memo is freed by the last that uses it: the Function, and calls that it is making. */
void memo_free(Memo *memo);

#endif
