/* The boards of an all-reduce on the CPU: each rank writes its own slots, and reads those of all others.
 *
 * Two slots in turn, no barrier at the end of a step: whoever has seen all others arrive at step n knows that they are
 * done reading step n - 1. A slot is one place, which carries the step that it was written in. How a rank sleeps on
 * another's word is the wait of ring.pml.
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef STEPS
#define STEPS 4
#endif
#define PROCESSES RANKS
#define SLOT(r, n) (2 * (r) + (n) % 2)
#define ARRIVED(r) (2 * RANKS + (r))
#define PLACES (3 * RANKS)

#ifdef NO_contribution_visible_publish
#define OF_RANK(r) OVERTAKE(r, 2 * r) OVERTAKE(r, 2 * r + 1) OVERTAKE(r, ARRIVED(r))
#else
#define OF_RANK(r) OVERTAKE(r, 2 * r) OVERTAKE(r, 2 * r + 1)
#endif
#if RANKS > 2
#define OVERTAKING OF_RANK(0) OF_RANK(1) OF_RANK(2)
#else
#define OVERTAKING OF_RANK(0) OF_RANK(1)
#endif
#include "memory.pml"

inline read_slots(step) {
    peer = 0;
    do
    :: peer == RANKS -> peer = 0; break
    :: peer == me -> peer++
    :: peer < RANKS && peer != me ->
        if
        :: early[peer] > 0 -> found = early[peer] - 1
        :: early[peer] == 0 -> found = mem[SLOT(peer, step)]
        fi;
        assert(found == step);  /* neither the step before, nor the one after the next */
        d_step { found = 0; early[peer] = 0; peer++ }
    od
}

inline await_all(step) {
    peer = 0;
    do
    :: peer == RANKS -> peer = 0; break
    :: peer == me -> peer++
    /* SYNC POINT contribution-visible (observe) */
    /* SYNC POINT contribution-read (observe) */
    :: peer < RANKS && peer != me -> mem[ARRIVED(peer)] >= step; peer++
    od
}

proctype Rank(byte me) {
    byte n, peer, found;
    byte early[RANKS];
    do
    :: n == STEPS -> break
    :: n < STEPS ->
        n++;
#ifdef NO_contribution_read_observe
        if
        :: n == 1 -> store(me, SLOT(me, n), n)
        :: else
        fi;
#else
        store(me, SLOT(me, n), n);
#endif
        /* SYNC POINT contribution-read (publish) */
        /* SYNC POINT contribution-visible (publish) */
        store(me, ARRIVED(me), n);
#ifdef NO_contribution_read_publish
        if
        :: n > 1 -> read_slots(n - 1)  /* the store above was hoisted over them */
        :: else
        fi;
#endif
#ifdef NO_contribution_visible_observe
        peer = 0;
        do
        :: peer == RANKS -> peer = 0; break
        :: peer < RANKS && peer != me -> early[peer] = mem[SLOT(peer, n)] + 1; peer++
        :: peer < RANKS -> peer++
        od;
#endif
#ifdef NO_contribution_read_observe
        if
        :: n < STEPS -> store(me, SLOT(me, n + 1), n + 1)  /* hoisted above the look at the others */
        :: else
        fi;
#endif
        await_all(n);
#ifndef NO_contribution_read_publish
        read_slots(n);
#endif
        skip
    od
}

init {
    atomic {
        run Rank(0);
        run Rank(1);
#if RANKS > 2
        run Rank(2)
#endif
    }
}
