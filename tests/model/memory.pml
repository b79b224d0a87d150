/* Shared memory as another process sees it.
 *
 * A store first goes into its owner's buffer; `Memory` makes it visible at any later moment. Three kinds of memory:
 *
 *   default   every store is visible at once (sequential consistency)
 *   -DTSO     the oldest store of a buffer first: x86-64
 *   -DWEAK    a plain store overtakes any other but one to its own place; a releasing store becomes visible only when
 *             nothing older is left in its owner's buffer ("dmb ish" before it): aarch64
 *
 * Each place has one owner, as in Arena. A place that is not named in OVERTAKING is stored to with release. A load by
 * another process sees what is visible; owners know their own words without looking. Loads are made in program order
 * except where a model says "early": an early load, or a store that is hoisted above a load, is what is allowed where
 * an (observe), or a (publish) behind loads, is left out.
 *
 * What a killed process had in its buffer still becomes visible: the kernel's way through exit is full of barriers.
 * So the proof of a death, its pidfd, is also a proof that its last store has been seen: `ended`.
 */
#ifndef BUFFER
#define BUFFER 3
#endif

byte mem[PLACES];
bool killed[PROCESSES];
bool gone[PROCESSES];

#if defined(TSO) || defined(WEAK)
chan late[PROCESSES] = [BUFFER] of { byte, byte };
hidden byte place_, value_;

#define store(p, place, value) late[p]!place,value
#define fence(p) d_step { do :: len(late[p]) > 0 -> late[p]?place_,value_; mem[place_] = value_ :: else -> break od; place_ = 0; value_ = 0 }
#define drained(p) (len(late[p]) == 0)

#define IN_TURN(p) :: d_step { len(late[p]) > 0 -> late[p]?place_,value_; mem[place_] = value_; place_ = 0; value_ = 0 }
#ifdef WEAK
#define OVERTAKE(p, place) :: d_step { late[p]??[eval(place),value_] -> late[p]??eval(place),value_; mem[place] = value_; value_ = 0 }
#else
#define OVERTAKE(p, place)
#endif

active proctype Memory() {
end: do
    IN_TURN(0) IN_TURN(1)
#if PROCESSES > 2
    IN_TURN(2)
#endif
#if PROCESSES > 3
    IN_TURN(3)
#endif
#if PROCESSES > 4
    IN_TURN(4)
#endif
    OVERTAKING
    od
}
#else
#define store(p, place, value) mem[place] = value
#define fence(p) skip
#define drained(p) true
#endif

#define ended(p) (gone[p] && drained(p))

/* A futex: `asleep[p]` is the place that p sleeps on, and SLEEPLESS. The kernel compares and sleeps in one step. */
#define AWAKE 255
byte asleep[PROCESSES] = AWAKE;
#define futex_wait(p, place, seen) d_step { if :: mem[place] == seen -> asleep[p] = place :: else fi }
#ifdef DROP_WAKES
#define futex_wake(p, place) skip
#else
#define futex_wake(p, place) d_step { if :: asleep[p] == place -> asleep[p] = AWAKE :: else fi }
#endif
