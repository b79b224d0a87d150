/* Messages of several frames, messages that are given up half-way, and a reader that joins a queue that runs.
 *
 * One writer, a steady reader of rank 0, and a joiner: the second incarnation of rank 1, whose first one has died. Two
 * slots. A message has one frame or two; after the first of two the writer may give up (its time is over), and owes an
 * ABORT, which its next call publishes before all else. The joiner attaches at any moment, by the writer's attach
 * thread, and is admitted between two messages. Sleeps never end by themselves here, so no wake may be lost.
 *
 * A slot is one place (torn frames are ring.pml's): 16 x message + kind.
 *
 * Properties: the assertions; and that nobody is left waiting.
 */
#define SLOTS 2
#ifndef MESSAGES
#define MESSAGES 3
#endif
#define PROCESSES 3
#define WRITER 2
#define JOINER 1
#define UNBOUNDED

#define SLOT(n) ((n) % SLOTS)
#define PUBLISHED 2
#define WRITER_CLOSED 3
#define FIRST 4  /* the sequence that rank 1's present incarnation takes part from */
#define CONSUMED(r) (5 + (r))
#define READER_PARKED(r) (7 + (r))
#define PLACES 9
#define NOT_ADMITTED 200

#define WHOLE 1
#define BEGINS 2
#define ENDS 3
#define ABORT 4

#define OVERTAKING OVERTAKE(WRITER, 0) OVERTAKE(WRITER, 1)
#include "memory.pml"

bool joining;            /* the attach thread has seated the joiner; the writer has yet to admit it */
bool came;               /* it will come at all */
bool complete[MESSAGES + 1];
byte joiner_starts;      /* the message that it is admitted before */

inline admit() {
    d_step {
        joining = false;
        counted = true;
        first = n;
#ifdef NO_between_messages
        joiner_starts = (under_way -> m + 1 : m);
#else
        joiner_starts = m;
#endif
    };
    store(WRITER, FIRST, n)
}

#define SEEN_OF_JOINER (mem[CONSUMED(JOINER)] > first -> mem[CONSUMED(JOINER)] : first)

inline publish(kind) {
    mem[CONSUMED(0)] + SLOTS > n && (!counted || SEEN_OF_JOINER + SLOTS > n);
#ifdef NO_between_messages
    if
    :: joining && under_way -> admit()
    :: else
    fi;
#endif
    store(WRITER, SLOT(n), 16 * m + kind);
    if
    :: kind == ENDS || kind == WHOLE -> complete[m] = true  /* from here on, every counted reader gets it */
    :: else
    fi;
    store(WRITER, PUBLISHED, n + 1);
    n++;
    fence(WRITER);
    if
    :: mem[READER_PARKED(0)] || counted && mem[READER_PARKED(JOINER)] ->
        futex_wake(0, PUBLISHED);
        futex_wake(JOINER, PUBLISHED)
    :: else
    fi
}

active proctype Writer() {
    byte n, m = 1, first;
    bool counted, owed, under_way;
    do
    :: m <= MESSAGES ->
        if
        :: joining -> admit()
        :: else
        fi;
        if
        :: owed ->
#ifndef NO_abort
            publish(ABORT);
#endif
            owed = false
        :: !owed
        fi;
        if
        :: publish(WHOLE)
        :: publish(BEGINS);
            under_way = true;
            if
            :: publish(ENDS)
            :: owed = true  /* given up */
            fi;
            under_way = false
        fi;
        m++
    :: m > MESSAGES -> break
    od;
    /* An engine has its answers before it closes, and a joiner that never got a message is only told of the end. */
    mem[CONSUMED(0)] == n && (!counted || SEEN_OF_JOINER == n);
    store(WRITER, WRITER_CLOSED, 1);
    fence(WRITER);
    futex_wake(0, PUBLISHED);
    futex_wake(JOINER, PUBLISHED)
}

inline sleep_until(floor) {
    store(me, READER_PARKED(me), 1);
    fence(me);
    do
    :: seen = mem[PUBLISHED];
        if
        :: seen > floor -> break
        :: else
        fi;
        futex_wait(me, PUBLISHED, seen);
        if
        :: asleep[me] == AWAKE
        :: mem[WRITER_CLOSED] -> asleep[me] = AWAKE
        fi;
        if
        :: mem[WRITER_CLOSED] -> over = (mem[PUBLISHED] <= floor); break
        :: else
        fi
    od;
    store(me, READER_PARKED(me), 0)
}

inline deliver() {
    d_step {
        assert(frame / 16 > last);  /* in order, and not twice */
        last++;
        do
        :: last < frame / 16 -> assert(!complete[last]); last++  /* none that was completed is left out */
        :: else -> break
        od
    }
}

inline take() {
    frame = mem[SLOT(n)];
    if
    :: frame % 16 == WHOLE -> assert(partial == 0); deliver()
    :: frame % 16 == BEGINS -> assert(partial == 0); partial = frame / 16
    :: frame % 16 == ENDS -> assert(partial == frame / 16); deliver(); partial = 0
    :: frame % 16 == ABORT -> partial = 0
    fi;
    d_step { frame = 0; n++ };
    store(me, CONSUMED(me), n);
    fence(me)
}

inline read_to_the_end() {
    do
    :: over -> break
    :: !over && mem[PUBLISHED] > n -> take()
    :: !over && mem[PUBLISHED] <= n ->
        sleep_until(n);
        if
        :: over && mem[PUBLISHED] > n -> over = false
        :: else
        fi
    od;
    assert(n == mem[PUBLISHED])
}

active proctype Steady() {
    byte me = 0, n, seen, frame, partial, last;
    bool over;
    read_to_the_end();
    do
    :: last < MESSAGES -> last++; assert(!complete[last])
    :: last == MESSAGES -> break
    od
}

active proctype Joiner() {
    byte me = JOINER, n, seen, frame, partial, last;
    bool over;
    if
    :: came = true
    :: goto ended_unadmitted
    fi;
    d_step { mem[FIRST] = NOT_ADMITTED; joining = true };
    do
    :: over -> goto ended_unadmitted
    :: !over ->
#ifdef NO_published_before_first
        if
        :: mem[FIRST] != NOT_ADMITTED -> break
        :: else
        fi;
        n = mem[PUBLISHED];
#else
        n = mem[PUBLISHED];  /* before the look: a frame that admits us and comes after it moves this on */
        if
        :: mem[FIRST] != NOT_ADMITTED -> break
        :: else
        fi;
#endif
        sleep_until(n)
    od;
    n = mem[FIRST];
    store(me, CONSUMED(me), n);
    last = joiner_starts - 1;
    read_to_the_end();
    do
    :: last < MESSAGES -> last++; assert(!complete[last])
    :: last == MESSAGES -> break
    od;
ended_unadmitted:
    skip
}
