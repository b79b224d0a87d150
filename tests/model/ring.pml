/* The ring, waiting, waking, and death: one writer, two readers, two slots.
 *
 * A slot's bytes are two places, so that a torn frame can be seen. Frame n carries n + 1 in both.
 *
 *   -DDEATHS       reader 0 may be killed between any two steps, reader 1 may leave between two frames
 *   -DALL_DIE      both may be killed, and both may leave
 *   -DWRITER_DIES  the writer may be killed between any two steps
 *   -DUNBOUNDED    a sleep never ends by itself for a word that moved: then no wake may be lost
 *   -DDROP_WAKES   every wake is lost: then the bounded sleep must make up for it
 *
 * Properties: the assertions; and that no process is left waiting (an invalid end state, in Spin's words).
 */
#define SLOTS 2
#define READERS 2
#ifndef FRAMES
#define FRAMES 3
#endif
#define PROCESSES 3
#define WRITER 2

#define SLOT_A(n) (2 * ((n) % SLOTS))
#define SLOT_B(n) (2 * ((n) % SLOTS) + 1)
#define PUBLISHED 4
#define WRITER_PARKED 5
#define WRITER_CLOSED 6
#define CONSUMED(r) (7 + (r))
#define READER_PARKED(r) (9 + (r))
#define READER_CLOSED(r) (11 + (r))
#define PLACES 13

/* The slots are plain memory. A label that is left out makes a releasing store a plain one. */
#ifdef NO_frame_visible_publish
#define OVERTAKING OVERTAKE(WRITER, 0) OVERTAKE(WRITER, 1) OVERTAKE(WRITER, 2) OVERTAKE(WRITER, 3) OVERTAKE(WRITER, PUBLISHED)
#else
#define OVERTAKING OVERTAKE(WRITER, 0) OVERTAKE(WRITER, 1) OVERTAKE(WRITER, 2) OVERTAKE(WRITER, 3)
#endif
#include "memory.pml"

#ifdef UNBOUNDED
#define MOVED(condition) false
#else
#define MOVED(condition) (condition)
#endif

#ifdef NO_writer_fence
#define writer_fence skip
#else
#define writer_fence fence(WRITER)
#endif
#ifdef NO_reader_fence
#define reader_fence skip
#else
#define reader_fence fence(me)
#endif
#ifdef NO_parker_fence
#define parker_fence(p) skip
#else
#define parker_fence(p) fence(p)
#endif

/* Whether the writer may take r for dead or gone. */
#ifdef NO_proof_of_death
#define NEWS(r) true
#else
#define NEWS(r) (ended(r) || mem[READER_CLOSED(r)])
#endif
#define FREE(r) (mem[CONSUMED(r)] + SLOTS > n)  /* SYNC POINT slot-reusable (observe) */

inline write_slot() {
    store(WRITER, SLOT_A(n), n + 1);
    store(WRITER, SLOT_B(n), n + 1)
}

inline await_slot() {
    r = 0;
    do
    :: r == READERS -> break
    :: r < READERS && (!counted[r] || FREE(r)) -> r++
    :: r < READERS && counted[r] && !FREE(r) ->
        /* Spinning is a look that may come at any time; if it does not do: park. */
        if
        :: NEWS(r) -> counted[r] = false
        :: else
        fi;
        store(WRITER, WRITER_PARKED, r + 1);
        parker_fence(WRITER);
        do
        :: !counted[r] -> break
        :: counted[r] ->
            seen = mem[CONSUMED(r)];
            if
            :: seen + SLOTS > n -> break
            :: else
            fi;
            futex_wait(WRITER, CONSUMED(r), seen);
            if
            :: asleep[WRITER] == AWAKE
            :: MOVED(FREE(r)) -> asleep[WRITER] = AWAKE
            :: NEWS(r) -> asleep[WRITER] = AWAKE; counted[r] = false
            fi
        od;
        store(WRITER, WRITER_PARKED, 0)
    od
}

inline wake_readers() {
    if
    :: mem[READER_PARKED(0)] && counted[0] || mem[READER_PARKED(1)] && counted[1] ->
        futex_wake(0, PUBLISHED);
        futex_wake(1, PUBLISHED)
    :: else
    fi
}

active proctype Writer() {
    byte n, r, seen;
    bool counted[READERS] = true;
    {
        do
        :: n < FRAMES && (counted[0] || counted[1]) ->
#ifdef NO_slot_reusable_observe
            write_slot();  /* hoisted above the look at CONSUMED */
            await_slot();
#else
            await_slot();
            write_slot();
#endif
            store(WRITER, PUBLISHED, n + 1);  /* SYNC POINT frame-visible (publish) */
            n++;
            writer_fence;
            wake_readers()
        :: n == FRAMES || !(counted[0] || counted[1]) -> break
        od;
#ifdef UNBOUNDED
        /* An engine that has its answers before it closes: the last wake must not be made up for by closing. */
        mem[CONSUMED(0)] == n && mem[CONSUMED(1)] == n;
#endif
        store(WRITER, WRITER_CLOSED, 1);
        futex_wake(0, PUBLISHED);
        futex_wake(1, PUBLISHED)
    } unless { killed[WRITER] };
    d_step { gone[WRITER] = true; asleep[WRITER] = AWAKE }
}

#ifdef ALL_DIE
#define DEATHS
#define MAY_LEAVE true
#else
#define MAY_LEAVE (me == 1)
#endif
#define OVER (mem[WRITER_CLOSED] || ended(WRITER))

proctype Reader(byte me) {
    byte n, seen, a, b;
    bool early, over;
    {
        do
        :: over -> break
#ifdef DEATHS
        :: !over && MAY_LEAVE -> store(me, READER_CLOSED(me), 1); futex_wake(WRITER, CONSUMED(me)); over = true; goto left
#endif
        :: !over ->
#ifdef NO_frame_visible_observe
            if
            :: d_step { a = mem[SLOT_A(n)]; b = mem[SLOT_B(n)]; early = true }
            :: early = false
            fi;
#endif
            if
            :: mem[PUBLISHED] > n  /* SYNC POINT frame-visible (observe) */
            :: true ->
                store(me, READER_PARKED(me), 1);
                parker_fence(me);
                do
                :: seen = mem[PUBLISHED];
                    if
                    :: seen > n -> break
                    :: else
                    fi;
                    futex_wait(me, PUBLISHED, seen);
                    if
                    :: asleep[me] == AWAKE
                    :: MOVED(mem[PUBLISHED] > n) -> asleep[me] = AWAKE
                    :: OVER -> asleep[me] = AWAKE
                    fi;
                    if
                    :: OVER ->
#ifndef NO_last_look
                        if
                        :: mem[PUBLISHED] > n -> break
                        :: else
                        fi;
#else
                        if
                        :: seen > n -> break
                        :: else
                        fi;
#endif
                        over = true;
                        break
                    :: !OVER
                    fi
                od;
                store(me, READER_PARKED(me), 0)
            fi;
            if
            :: over
            :: !over ->
#ifdef NO_slot_reusable_publish
                store(me, CONSUMED(me), n + 1);  /* hoisted above the reads */
#endif
                if
                :: early
                :: !early -> a = mem[SLOT_A(n)]; b = mem[SLOT_B(n)]
                fi;
                assert(a == n + 1);  /* not lost, not seen twice, in order */
                assert(b == n + 1);  /* not torn */
                d_step { a = 0; b = 0; early = false };
#ifndef NO_slot_reusable_publish
                store(me, CONSUMED(me), n + 1);  /* SYNC POINT slot-reusable (publish) */
#endif
                n++;
                reader_fence;
                if
                :: mem[WRITER_PARKED] -> futex_wake(WRITER, CONSUMED(me))
                :: else
                fi
            fi
        od;
        assert(n == mem[PUBLISHED]);  /* what was published before the end is taken */
left:   skip
    } unless { killed[me] };
    d_step { gone[me] = true; asleep[me] = AWAKE; n = 0; seen = 0; a = 0; b = 0; early = false; over = false }
}

#if defined(DEATHS) || defined(WRITER_DIES)
active proctype Killer() {
#ifdef DEATHS
    if :: killed[0] = true :: true fi;
#endif
#ifdef ALL_DIE
    if :: killed[1] = true :: true fi;
#endif
#ifdef WRITER_DIES
    if :: killed[WRITER] = true :: true fi
#endif
}
#endif

init { atomic { run Reader(0); run Reader(1) } }
