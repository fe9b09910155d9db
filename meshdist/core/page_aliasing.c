/* Copies between addresses that differ by little more than whole pages. `rep movsb`, with which the C library copies up
   to some hundred KiB, and the kernel all that ranks read of each other, takes five to twenty times as long then: on an
   AMD EPYC (Zen 3), if the place that it writes is 1 to 31 bytes further in its page than the one that it reads. Arrays
   often lie so: of two of a power of two bytes that malloc gives one after the other out of its heap, the second is 16
   bytes further.

   glibc's bug 30994 tells of the same on Zen 4. */
#include "core.h"

#include <stdatomic.h>

#ifdef __SSE2__
#include <x86intrin.h>

/* Of a copy through the detour, so much at once: it stays in the second cache. */
enum { PAGE = 4096, DETOUR = 256 << 10 };
/* How much is copied to find out about this processor, and how often. */
enum { PROBED = PAGE, TIMES_PROBED = 5 };

/* The detour, for one thread at a time. A child that is forked while another thread has it does without. */
static _Alignas(PAGE) char detour[DETOUR + PAGE];
static atomic_flag is_in_use = ATOMIC_FLAG_INIT;

static uint64_t shortest_copy(char *to, const char *from)
{
    uint64_t shortest = UINT64_MAX;
    for (int probe = 0; probe < TIMES_PROBED; probe++) {
        char *target = to;
        const char *source = from;
        size_t left = PROBED;
        uint64_t begin = __rdtsc();
        __asm__ volatile("rep movsb" : "+D"(target), "+S"(source), "+c"(left) : : "memory");
        uint64_t took = __rdtsc() - begin;
        shortest = took < shortest ? took : shortest;
    }
    return shortest;
}

/* Whether this processor is slow then; found out once, by a thread that has the detour. */
static bool is_slow(void)
{
    static enum { UNKNOWN, NO, YES } known;
    if (known == UNKNOWN) {
        char *to = detour + 2 * PROBED;
        known = shortest_copy(to + ALIASED / 2, detour) > 2 * shortest_copy(to, detour) ? YES : NO;
    }
    return known == YES;
}

char *begin_detour(uintptr_t to, uintptr_t from, uintptr_t other, Py_ssize_t size)
{
    if (size < SHORTEST_ALIASED || !is_aliased(to, from) || atomic_flag_test_and_set(&is_in_use))
        return NULL;
    if (is_slow())
        return detour + other % PAGE;
    end_detour();
    return NULL;
}

void end_detour(void) { atomic_flag_clear(&is_in_use); }

const Py_ssize_t detour_bytes = DETOUR;

#else

char *begin_detour(uintptr_t to, uintptr_t from, uintptr_t other, Py_ssize_t size) { return NULL; }
void end_detour(void) {}
const Py_ssize_t detour_bytes = 1;

#endif
