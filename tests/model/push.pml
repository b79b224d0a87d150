/* The all-reduce kernels that push: a word that is not the sentinel has arrived (one_shot: three generations).
 *
 * Two ranks. A slot is two words, each a place; 0 is the sentinel, and operation k pushes k + 1 into both. Pushed words
 * become visible in any order, and so do the owner's when it arms a slot again; all of a kernel's stores are visible
 * when it has ended, and the next one of that rank begins after that.
 *
 * SYNC POINT slot-filled (publish): a word arrives whole. Left out: the two places are halves of one word.
 * SYNC POINT slot-filled (observe): every word of a vector is looked at. Left out: the first stands for all.
 */
#ifndef GENERATIONS
#define GENERATIONS 3
#endif
#ifndef OPERATIONS
#define OPERATIONS 5
#endif
#define PROCESSES 2
#define BUFFER 6
#define INBOX(r, k, word) (2 * GENERATIONS * (r) + 2 * ((k) % GENERATIONS) + (word))
#define PLACES (4 * GENERATIONS)

#define ANY_OF(p) OVERTAKE(p, 0) OVERTAKE(p, 1) OVERTAKE(p, 2) OVERTAKE(p, 3) OVERTAKE(p, 4) OVERTAKE(p, 5) OVERTAKE(p, 6) OVERTAKE(p, 7)
#if GENERATIONS > 2
#define OVERTAKING ANY_OF(0) ANY_OF(1) OVERTAKE(0, 8) OVERTAKE(0, 9) OVERTAKE(0, 10) OVERTAKE(0, 11) OVERTAKE(1, 8) OVERTAKE(1, 9) OVERTAKE(1, 10) OVERTAKE(1, 11)
#else
#define OVERTAKING ANY_OF(0) ANY_OF(1)
#endif
#include "memory.pml"

#define FIRST_WORD mem[INBOX(me, k, 0)]
#define SECOND_WORD mem[INBOX(me, k, 1)]
#if defined(NO_slot_filled_publish)
#define FILLED (FIRST_WORD > 0 || SECOND_WORD > 0)
#elif defined(NO_slot_filled_observe)
#define FILLED (FIRST_WORD > 0)
#else
#define FILLED (FIRST_WORD > 0 && SECOND_WORD > 0)
#endif

proctype Rank(byte me) {
    byte k, a, b;
    do
    :: k == OPERATIONS -> break
    :: k < OPERATIONS ->
        store(me, INBOX(1 - me, k, 0), k + 1);
        store(me, INBOX(1 - me, k, 1), k + 1);
        if
        :: k > 0 -> store(me, INBOX(me, k - 1, 0), 0); store(me, INBOX(me, k - 1, 1), 0)
        :: else
        fi;
        d_step { FILLED -> a = FIRST_WORD; b = SECOND_WORD };
        assert(a == k + 1 && b == k + 1);
        fence(me);
        d_step { k++; a = 0; b = 0 }
    od
}

init { atomic { run Rank(0); run Rank(1) } }
