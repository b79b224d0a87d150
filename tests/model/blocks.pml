/* The tensor arena: one block, two holds, one writer that lends it again and again, two readers that keep what they get.
 *
 * That frames arrive is what ring.pml shows; here a frame is an entry of a log, and publishing it one releasing store.
 * The block's bytes are two places, so that a torn tensor can be seen; tensor v carries v in both. A tensor may ride in
 * two frames. A reader takes frames, lets its views die at any later time, and looks at them then: a
 * tensor that was overwritten stays so. Then it leaves, with views or without.
 *
 * When it is done, reader 0's process ends, with views or without; reader 1's lives on, but lets its views die.
 *
 *   -DLEAVES   either reader may leave before it has taken everything
 *   -DDEATHS   reader 0 may be killed between any two steps
 *   -DALONE    without reader 1
 *   -DDEVICE   reader 0 may copy a view to a device; a dead view is given back once its copies have passed (the gate)
 *   -DTICKETS  with -DDEVICE: it is given back at once, naming a ticket; the device writes the ticket's number after
 *              the copy, and the writer waits for both
 *
 * Assumed: a process that has ended has no copy in flight (the driver tears its context down before the pidfd tells).
 *
 * Steps that nobody can tell apart are one: a look is as good at the end of what it looks for as anywhere before (a
 * tensor that was overwritten stays so), a look by the writer finds whatever an earlier one would have found, and a
 * process's own words are its own.
 *
 * Properties: the assertions; and that all holds come back once every view is dead (else the writer waits for ever).
 */
#define READERS 2
#define HOLDS 2
#ifndef FRAMES
#define FRAMES 3
#endif
#define PROCESSES 3
#define WRITER 2

#define BLOCK_A 0
#define BLOCK_B 1
#define PUBLISHED 2
#define CONSUMED(r) (3 + (r))
#define READER_CLOSED(r) (5 + (r))
#define RETURNED(r, h) (7 + 2 * (r) + (h))
#define HOLD_TICKET(h) (11 + (h))
#define TICKET 13
#define PLACES 14

#ifdef NO_hold_ticket_before_returned
#define TICKET_OVERTAKEN OVERTAKE(0, RETURNED(0, 0)) OVERTAKE(0, RETURNED(0, 1))
#else
#define TICKET_OVERTAKEN
#endif
#define OVERTAKING OVERTAKE(WRITER, BLOCK_A) OVERTAKE(WRITER, BLOCK_B) OVERTAKE(0, HOLD_TICKET(0)) OVERTAKE(0, HOLD_TICKET(1)) TICKET_OVERTAKEN
#include "memory.pml"

typedef Frame { byte hold; byte generation; byte tensor };
Frame frame[FRAMES];
bool copying;     /* the device has not stopped */
byte queued[HOLDS];  /* copies from each hold's view that have not passed */

/* ── the writer ─────────────────────────────────────────────────────────────────────────────── */
typedef Hold { bool used; byte generation; byte sequence };
Hold hold[HOLDS];
bool left[READERS];
bool dead[READERS];
#ifdef ALONE
#define BACK_FROM_OTHER(h) true
#define ALL_SEATED run Reader(0)
#else
#define BACK_FROM_OTHER(h) BACK(1, h)
#define ALL_SEATED run Reader(0); run Reader(1)
#endif

#if defined(NO_ticket_reached_observe) || !defined(TICKETS)
#define TICKET_REACHED(r, h) true
#else
/* SYNC POINT ticket-reached (observe) */
#define TICKET_REACHED(r, h) ((r) == 1 || mem[TICKET] >= mem[HOLD_TICKET(h)])
#endif
#ifdef NO_generation
#define STORED(r, h) (mem[RETURNED(r, h)] > 0)
#else
#define STORED(r, h) (mem[RETURNED(r, h)] == hold[h].generation)
#endif
#ifdef NO_left_may_hold
#define LEFT_FOR_GOOD(r) left[r]
#else
#define LEFT_FOR_GOOD(r) (left[r] && ended(r) && !(copying && (r) == 0))
#endif
#ifdef NO_never_taken
#define NEVER_TAKEN(r, h) false
#else
#define NEVER_TAKEN(r, h) (left[r] && mem[CONSUMED(r)] <= hold[h].sequence)
#endif
/* SYNC POINT block-reusable (observe) */
#define BACK(r, h) (STORED(r, h) && TICKET_REACHED(r, h) || NEVER_TAKEN(r, h) || dead[r] || LEFT_FOR_GOOD(r))

#ifdef NO_proof_of_death
#define DEAD(r) true
#else
#define DEAD(r) (ended(r) && !(copying && (r) == 0))
#endif

#define BACK_FROM_ALL(h) (hold[h].used && BACK(0, h) && BACK_FROM_OTHER(h))
#define NEWS(r) (!left[r] && !dead[r] && mem[READER_CLOSED(r)])
/* The writer looks again and again; only looks that find something are steps here. */
#define SOMETHING (BACK_FROM_ALL(0) || BACK_FROM_ALL(1) || NEWS(0) || NEWS(1) || !left[0] && !dead[0] && DEAD(0))

inline reap() {
    if :: !left[0] && !dead[0] && mem[READER_CLOSED(0)] -> left[0] = true :: else fi;
    if :: !left[1] && !dead[1] && mem[READER_CLOSED(1)] -> left[1] = true :: else fi;
    if :: !left[0] && !dead[0] && DEAD(0) -> dead[0] = true :: else fi
}

#ifdef NO_hold_per_frame
#define FREE(h) forget(0); forget(1)  /* one frame's give-back frees the block */
#else
#define FREE(h) forget(h)
#endif
inline forget(h) { hold[h].used = false; hold[h].generation = 0; hold[h].sequence = 0 }

inline collect() {
    if :: BACK_FROM_ALL(0) -> FREE(0) :: else fi;
    if :: BACK_FROM_ALL(1) -> FREE(1) :: else fi
}

inline write_block() {
    store(WRITER, BLOCK_A, tensor);
    store(WRITER, BLOCK_B, tensor)
}

active proctype Writer() {
    byte n, h, tensor, generation;
    bool own;
    do
    :: n < FRAMES ->
        if
        :: own && hold[0].used != hold[1].used -> skip  /* the same tensor in one more frame */
        :: true ->
            own = false;  /* the writer's own tensor dies */
            tensor++;
#ifdef NO_block_reusable_observe
            write_block();  /* hoisted above the look at what came back */
#endif
            do
            :: d_step { (hold[0].used || hold[1].used) && SOMETHING -> reap(); collect() }
            :: !(hold[0].used || hold[1].used) -> break
            od;
            own = true;
#ifndef NO_block_reusable_observe
            write_block()
#endif
        fi;
        if
        :: !hold[0].used -> h = 0
        :: !hold[1].used -> h = 1
        fi;
        atomic { d_step {
            generation++;
            hold[h].used = true;
            hold[h].generation = generation;
            hold[h].sequence = n;
            frame[n].hold = h;
            frame[n].generation = generation;
            frame[n].tensor = tensor;
            h = 0;
            n++
        };
        store(WRITER, PUBLISHED, n) }
    :: n == FRAMES -> break
    od;
    do
    :: d_step { (hold[0].used || hold[1].used) && SOMETHING -> reap(); collect() }
    :: !(hold[0].used || hold[1].used) -> break
    od
}

/* ── a reader ───────────────────────────────────────────────────────────────────────────────── */
inline look_at(h) {
    assert(mem[BLOCK_A] == view[h]);  /* not reused while held */
    assert(mem[BLOCK_B] == view[h])
}

#ifdef TICKETS
#define GATE_OPEN(h) true
#else
#ifdef NO_gate
#define GATE_OPEN(h) true
#else
#define GATE_OPEN(h) (me == 1 || queued[h] == 0)
#endif
#endif

inline give_back(h) {
#ifdef NO_block_reusable_publish
    store(me, RETURNED(me, h), generation[h]);  /* hoisted above the last look */
    atomic { look_at(h); forget_view(h) }
#else
#ifdef TICKETS
    if
    :: atomic { me == 0 && asked[h] > 0 -> look_at(h); store(me, HOLD_TICKET(h), asked[h]); asked[h] = 0 }
    :: else
    fi;
#endif
    atomic {
        GATE_OPEN(h) -> look_at(h);
        store(me, RETURNED(me, h), generation[h]);  /* SYNC POINT block-reusable (publish) */
        forget_view(h)
    }
#endif
}

inline forget_view(h) { d_step { view[h] = 0; generation[h] = 0; asked[h] = 0 } }

/* How far a reader is matters to the writer only if it leaves early: otherwise nobody reads this word here. */
#ifdef LEAVES
#define MAY_LEAVE true
#define consume(r) store(r, CONSUMED(r), n)
#else
#define MAY_LEAVE false
#define consume(r) skip
#endif

#ifdef DEVICE
chan copies = [2] of { byte, byte };  /* hold, tensor */
byte last_ticket;
#endif

proctype Reader(byte me) {
    byte n;
    byte view[HOLDS], generation[HOLDS], asked[HOLDS];
    bool leaving;
    {
        do
        :: atomic { !leaving && mem[PUBLISHED] > n ->
            d_step {
                assert(view[frame[n].hold] == 0);  /* a hold in use is not given away again */
                view[frame[n].hold] = frame[n].tensor;
                generation[frame[n].hold] = frame[n].generation;
                n++
            };
            consume(me) }
        :: view[0] > 0 -> give_back(0)
        :: view[1] > 0 -> give_back(1)
#ifdef DEVICE
        :: me == 0 && view[0] > 0 && asked[0] == 0 && len(copies) < 2 ->
            d_step { last_ticket++; asked[0] = last_ticket; queued[0]++; copies!0,view[0] }
        :: me == 0 && view[1] > 0 && asked[1] == 0 && len(copies) < 2 ->
            d_step { last_ticket++; asked[1] = last_ticket; queued[1]++; copies!1,view[1] }
#endif
        :: atomic { !leaving && (MAY_LEAVE || n == FRAMES) -> store(me, READER_CLOSED(me), 1); leaving = true }
        :: me == 0 && leaving -> break  /* the process ends, and with it its views */
        :: me == 1 && leaving && view[0] == 0 && view[1] == 0 ->
end_lives_on:
            false
        od;
        skip
    } unless { killed[me] };
    d_step {
        n = 0; leaving = false;
        view[0] = 0; view[1] = 0; generation[0] = 0; generation[1] = 0; asked[0] = 0; asked[1] = 0;
        killed[me] = true;
        gone[me] = true
    }
}

#ifdef DEVICE
inline copy() {
    assert(mem[BLOCK_A] == tensor);  /* the copy's source stands still */
    assert(mem[BLOCK_B] == tensor)
}

active proctype Device() {
    byte h, tensor, done;
    copying = true;
    {
end:    do
#ifdef NO_ticket_reached_publish
        :: copies?h,tensor ->
            done++;
            mem[TICKET] = done;  /* not behind the copy */
            d_step { copy(); queued[h]--; h = 0; tensor = 0 }
#else
        :: d_step {
            copies?h,tensor ->
            copy();
            done++;
            mem[TICKET] = done;  /* SYNC POINT ticket-reached (publish) */
            queued[h]--;
            h = 0;
            tensor = 0
        }
#endif
        od
    } unless { killed[0] };
    d_step { h = 0; tensor = 0; done = 0; copying = false }
}
#endif

#ifdef DEATHS
active proctype Killer() {
    if :: killed[0] = true :: true fi
}
#endif

init { atomic { ALL_SEATED } }
