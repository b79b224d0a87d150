/* Streamed hand-over: a frame is published first, its block filled after that, chunk by chunk, and a device follows.
 *
 * One slot and one block, used again and again; that frames arrive and that blocks come back are ring.pml's and
 * blocks.pml's. The block has two chunks; message n carries n in both. FILLED counts chunks, or says that the frame was
 * given up. The writer may give up after any chunk: at once, or, where two interrupts kept it from that, with its next
 * call. The reader has each chunk copied by its device as it comes, takes the message once it is full, or skips it, and
 * releases slot and block when its copies have passed.
 *
 *   -DWRITER_DIES   the writer may be killed between any two steps
 *
 * Properties: the assertions; and that the reader comes to an end (else it waits for ever).
 */
#ifndef MESSAGES
#define MESSAGES 3
#endif
#define PROCESSES 2
#define WRITER 0
#define READER 1
#define GIVEN_UP 9

#define CHUNK(c) (c)
#define FILLED 2
#define PUBLISHED 3
#define CONSUMED 4
#define PLACES 5

#ifdef NO_bytes_filled_publish
#define OVERTAKING OVERTAKE(WRITER, CHUNK(0)) OVERTAKE(WRITER, CHUNK(1)) OVERTAKE(WRITER, FILLED)
#else
#define OVERTAKING OVERTAKE(WRITER, CHUNK(0)) OVERTAKE(WRITER, CHUNK(1))
#endif
#include "memory.pml"

bool given[MESSAGES + 1];
byte under_way;  /* copies that have not passed */
chan copies = [2] of { byte, byte };  /* chunk, message */

/* ── the writer ─────────────────────────────────────────────────────────────────────────────── */
active proctype Writer() {
    byte n, chunk;
    bool owed;
    {
        do
        :: n == MESSAGES -> break
        :: n < MESSAGES ->
            if
            :: owed -> owed = false; store(WRITER, FILLED, GIVEN_UP)  /* what the last call left open */
            :: !owed -> skip
            fi;
            mem[CONSUMED] == n;  /* slot and block are free */
            n++;
            store(WRITER, FILLED, 0);
            store(WRITER, PUBLISHED, n);
            chunk = 0;
            do
            :: chunk == 2 -> break
            :: chunk < 2 ->
                store(WRITER, CHUNK(chunk), n);
                chunk++;
                store(WRITER, FILLED, chunk)  /* SYNC POINT bytes-filled (publish) */
            :: chunk < 2 ->
                given[n] = true;
#ifndef NO_ended
                if
                :: true -> store(WRITER, FILLED, GIVEN_UP)
                :: true -> owed = true
                fi;
#endif
                break
            od
        od;
        if
        :: owed -> store(WRITER, FILLED, GIVEN_UP)  /* closing the queue is a call, too */
        :: !owed -> skip
        fi
    } unless { killed[WRITER] };
    d_step { n = 0; chunk = 0; owed = false; gone[WRITER] = true }
}

/* ── the reader ─────────────────────────────────────────────────────────────────────────────── */
#ifdef NO_gate
#define PASSED true
#else
#define PASSED (under_way == 0)
#endif

inline copy(c) {
    d_step { under_way++; copies!c,n }
}

active proctype Reader() {
    byte n, done, found, early;
    bool over, taken;
    do
    :: n == MESSAGES || over -> break
    :: n < MESSAGES && !over ->
        /* A frame that was published is taken, if it is full, whatever became of its writer. */
        if
        :: mem[PUBLISHED] > n -> skip
        :: ended(WRITER) && mem[PUBLISHED] == n -> over = true
        fi;
        if
        :: over -> skip
        :: else ->
            n++;
            do
            :: done == 2 -> taken = true; break
            :: done < 2 ->
#ifdef NO_bytes_filled_observe
                early = mem[CHUNK(done)];  /* made before the look */
#endif
#ifdef NO_last_look
                found = mem[FILLED];
#endif
                /* SYNC POINT bytes-filled (observe) */
                if
                :: mem[FILLED] > done -> found = mem[FILLED]
                :: ended(WRITER) ->
#ifndef NO_last_look
                    found = mem[FILLED];
#endif
                    if
                    :: found <= done -> over = true
                    :: else
                    fi
                fi;
                if
                :: over -> break
                :: !over && found == GIVEN_UP -> break
                :: else ->
#ifdef NO_bytes_filled_observe
                    assert(early == n);
#endif
                    copy(done);
                    done++;
                    d_step { found = 0; early = 0 }
                fi
            od;
            assert(!(taken && given[n]));
            assert(!(over && mem[FILLED] == 2 && mem[PUBLISHED] == n));  /* it was full: it had been sent */
            PASSED;
            d_step { done = 0; found = 0; early = 0; taken = false };
            if
            :: !over -> store(READER, CONSUMED, n)
            :: over
            fi
        fi
    od
}

/* What it copies is what the message carries, whenever its turn comes. */
active proctype Device() {
    byte c, n;
end:
    do
    :: copies?c,n ->
        assert(mem[CHUNK(c)] == n);
        d_step { under_way--; c = 0; n = 0 }
    od
}

#ifdef WRITER_DIES
active proctype Killer() {
    if :: killed[WRITER] = true :: true fi
}
#endif
