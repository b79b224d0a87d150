// All-reduce and its relatives by pushing, for GPUs that can store into each other's memory (NVLink).
//
// Every rank stores its part straight into an inbox in the peer's memory and reads its own inbox until nothing is
// missing. There is no flag and no barrier: an inbox is armed with a pattern, SENTINEL in every 32-bit word, and a word
// that differs has arrived. That costs one trip over the link, and makes use of what the memory model promises: a
// 32-bit word is never seen half written, whatever happens to the 16 bytes around it.
//
// The idea of data as its own flag is that of NCCL's LL protocols and of the "Lamport" kernels in TensorRT-LLM and
// FlashInfer; posting stores instead of fetching, and three mailboxes so that re-arming is off the critical path, are
// described in "Every Microsecond Matters" (arXiv:2607.16100) and known from SGLang's push kernels. What is different
// here: slots and their generation belong to one block, whatever the size, so there is no ticket for the grid and nothing
// that the host counts; a captured graph may be replayed after any other operation.
//
// Why a slot is never overwritten too early. A block's operations are numbered by its own generation, kept in device
// memory. A peer that writes for operation k + GENERATIONS has finished k + GENERATIONS - 1, so it has my data of that
// operation, so my kernel of that operation had started, so all earlier kernels of mine were over: kernels of one
// communicator run one after the other. `one_shot` (three generations) re-arms what operation k used in operation
// k + 1, while it waits; the others (two) re-arm right after reading. Between two ranks of `two_shot` that exchange
// nothing the same holds through a third: a gathered sum contains something of everyone.
//
// A sum is made in 32-bit floats, in the order of ranks, and rounded once: all ranks get the same bits. A word of the
// input that happens to equal SENTINEL is a NaN (or two); it is sent as another NaN, and any NaN in a sum comes out as
// the canonical one, so nobody can tell.
//
// Whoever waits long looks now and then at a word in host memory, which whoever watches the peers sets, and at one beside
// its inbox, where a peer that closes says farewell. Then it gives up: what is missing becomes NaN, the host's other word
// is set, and the block is dead for good. A kernel never traps, which would take the context with it, and never gives up by
// itself: busy is not dead.
//
// A slot holds 16 bytes, and tensors are whole numbers of them: push.py pads what is not.
//
// Compiled at run time with -DWORLD=2..8 and -DELEMENT=Float32, Float16 or BFloat16. Needs no header.

typedef unsigned int u32;

constexpr u32 PEERS = WORLD - 1;
constexpr u32 SENTINEL = 0xFFFFFFFF;
constexpr u32 NEARLY_SENTINEL = 0xFFFFFFFE;  // still NaN, as one float and as two halves
constexpr u32 NOT_A_NUMBER = 0x7FFF7FFF;     // likewise, and no sentinel
constexpr u32 MAX_THREADS = 1024;
constexpr u32 ONE_SHOT_GENERATIONS = 3;
constexpr u32 SPLIT_THREADS = 512;
constexpr u32 PUSH_UNROLL = 8;
constexpr u32 TAKE_UNROLL = WORLD <= 4 ? 2 : 1;
constexpr u32 LOOKS_BETWEEN_CHECKS = 4096;  // a millisecond or two

struct alignas(16) State {
    u32 generation;
    u32 stale;  // one_shot: slots of a row that the operation before this one used, and that are still to be re-armed
    u32 dead;   // a word of its own, because it may be set while another thread writes the rest
};

// The same for every launch of one communicator; `Mail` in push.py is its twin.
struct Mail {
    uint4* outbox[PEERS];  // at each peer, the first row of slots that are mine to write
    uint4* inbox;          // rows of peers, in the order of ranks, without mine
    State* states;         // one for each block
    const u32* farewell;   // SENTINEL until a peer has closed
    volatile u32* abort;   // host memory
    volatile u32* failed;  // host memory
    u32 rank;
    u32 capacity;    // slots of one block
    u32 row;         // slots of one peer: capacity times blocks
    u32 generation;  // slots of one generation: row times rows
    u32 pushers;     // one_shot_split: blocks that push
};

// For one_shot_rms_norm: what else it takes. `NormMail` in one_shot.py is its twin.
struct NormMail {
    Mail mail;
    const uint4* residual;
    uint4* summed;  // the new residual
    const uint4* weight;
    u32 row;  // vectors of one row; a block has whole rows
    float eps;
};

__device__ __forceinline__ bool rarely(bool condition) { return __builtin_expect(condition, false); }

// --- element types ---------------------------------------------------------------------------------------------------

struct Float32 {
    static constexpr int PARTS = 1;
    __device__ static void unpack(u32 word, float* parts) { parts[0] = __uint_as_float(word); }
    __device__ static u32 pack(const float* parts) { return __float_as_uint(parts[0]); }
};

struct Float16 {
    static constexpr int PARTS = 2;
    __device__ static void unpack(u32 word, float* parts) {
        asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
            : "=f"(parts[0]), "=f"(parts[1])
            : "r"(word));
    }
    __device__ static u32 pack(const float* parts) {
        u32 word;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(parts[1]), "f"(parts[0]));
        return word;
    }
};

struct BFloat16 {
    static constexpr int PARTS = 2;
    __device__ static void unpack(u32 word, float* parts) {
        parts[0] = __uint_as_float(word << 16);
        parts[1] = __uint_as_float(word & 0xFFFF0000);
    }
    __device__ static u32 pack(const float* parts) {
        u32 word;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(parts[1]), "f"(parts[0]));
        return word;
    }
};

using Element = ELEMENT;

// The word of rank `r`, given mine and the peers' in the order of ranks.
__device__ __forceinline__ u32 word_of(u32 r, u32 rank, u32 mine, const u32* theirs) {
    const u32 before = theirs[r < PEERS ? r : PEERS - 1], after = theirs[r > 0 ? r - 1 : 0];
    return r < rank ? before : r == rank ? mine : after;
}

__device__ __forceinline__ u32 sum_words(u32 rank, u32 mine, const u32* theirs) {
    if (WORLD == 2) rank = 0;  // a + b is b + a, to the bit
    float total[Element::PARTS];
    Element::unpack(word_of(0, rank, mine, theirs), total);
#pragma unroll
    for (u32 r = 1; r < WORLD; ++r) {
        float parts[Element::PARTS];
        Element::unpack(word_of(r, rank, mine, theirs), parts);
#pragma unroll
        for (int i = 0; i < Element::PARTS; ++i) total[i] += parts[i];
    }
    return Element::pack(total);
}

__device__ __forceinline__ uint4 sum(u32 rank, uint4 mine, const uint4* theirs) {
    u32 words[4][PEERS];
#pragma unroll
    for (u32 peer = 0; peer < PEERS; ++peer) {
        words[0][peer] = theirs[peer].x;
        words[1][peer] = theirs[peer].y;
        words[2][peer] = theirs[peer].z;
        words[3][peer] = theirs[peer].w;
    }
    return make_uint4(sum_words(rank, mine.x, words[0]), sum_words(rank, mine.y, words[1]),
                      sum_words(rank, mine.z, words[2]), sum_words(rank, mine.w, words[3]));
}

// --- tensors, in vectors of 16 bytes ---------------------------------------------------------------------------------

// Not through the first-level cache, which the kernel before this one may have filled before `begin` returned.
__device__ __forceinline__ uint4 load(const uint4* x) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(x)
                 : "memory");
    return v;
}

// --- slots -----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 tame(u32 word) { return word == SENTINEL ? NEARLY_SENTINEL : word; }
__device__ __forceinline__ uint4 tame(uint4 v) { return make_uint4(tame(v.x), tame(v.y), tame(v.z), tame(v.w)); }

// SYNC POINT slot-filled: word by word, against `look`.
__device__ __forceinline__ void push(uint4* slot, uint4 v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(slot), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

// SYNC POINT slot-filled: word by word, against `push`.
__device__ __forceinline__ uint4 look(const uint4* slot) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(slot)
                 : "memory");
    return v;
}

// Ordered by the end of the kernel: nobody writes here before that is known to a peer.
__device__ __forceinline__ void arm(uint4* slot) { *slot = make_uint4(SENTINEL, SENTINEL, SENTINEL, SENTINEL); }

__device__ __forceinline__ bool missing(uint4 v) {
    return v.x == SENTINEL || v.y == SENTINEL || v.z == SENTINEL || v.w == SENTINEL;
}

// This block is lost, and says so to itself and to the host.
__device__ __forceinline__ uint4 give_up(const Mail& mail) {
    mail.states[blockIdx.x].dead = 1;
    *mail.failed = 1;
    return make_uint4(NOT_A_NUMBER, NOT_A_NUMBER, NOT_A_NUMBER, NOT_A_NUMBER);
}

__device__ __forceinline__ bool in_vain(const Mail& mail) {
    u32 farewell;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(farewell) : "l"(mail.farewell) : "memory");
    return farewell != SENTINEL || *mail.abort;
}

// What arrives in the slot, given a first look at it.
__device__ __forceinline__ uint4 await(uint4 v, const uint4* slot, const Mail& mail) {
    do {
        for (u32 looks = 0; looks < LOOKS_BETWEEN_CHECKS; ++looks) {
            if (!missing(v)) return v;
            v = look(slot);
        }
    } while (!in_vain(mail));
    return give_up(mail);
}

// The same slot of every peer's row: all looks are under way before the first answer is needed.
__device__ __forceinline__ void await_all(uint4* theirs, const uint4* slot, const Mail& mail) {
#pragma unroll
    for (u32 peer = 0; peer < PEERS; ++peer) theirs[peer] = look(slot + peer * mail.row);
#pragma unroll
    for (u32 peer = 0; peer < PEERS; ++peer) theirs[peer] = await(theirs[peer], slot + peer * mail.row, mail);
}

__device__ __forceinline__ void arm_all(uint4* slot, const Mail& mail) {
#pragma unroll
    for (u32 peer = 0; peer < PEERS; ++peer) arm(slot + peer * mail.row);
}

__device__ __forceinline__ void push_all(uint4* const* outbox, u32 slot, uint4 v) {
#pragma unroll
    for (u32 peer = 0; peer < PEERS; ++peer) push(outbox[peer] + slot, v);
}

// --- states ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ State read(const State* kept) {
    const uint4 words = load(reinterpret_cast<const uint4*>(kept));
    return {words.x, words.y, words.z};
}

__device__ __forceinline__ void advance(State* kept, u32 generation, u32 stale) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(kept), "r"(generation), "r"(stale) : "memory");
}

// A block of three generations goes on to the next one, and re-arms what the operation before this one used.
__device__ __forceinline__ void pass(const State& state, State* kept, u32 own, u32 count, const Mail& mail) {
    const u32 last = ONE_SHOT_GENERATIONS - 1;
    const u32 old = (state.generation == 0 ? last : state.generation - 1) * mail.generation + own;
    for (u32 i = threadIdx.x; i < state.stale; i += blockDim.x) arm_all(mail.inbox + old + i, mail);
    __syncthreads();  // all threads have read the state
    if (threadIdx.x == 0) advance(kept, state.generation == last ? 0 : state.generation + 1, count);
}

// What a dead block has to say about its part.
__device__ __forceinline__ void say_nothing(uint4* out, u32 first, u32 end, const Mail& mail) {
    for (u32 at = first + threadIdx.x; at < end; at += blockDim.x)
        out[at] = give_up(mail);
}

// --- kernels ---------------------------------------------------------------------------------------------------------

// Programmatic dependent launch: this kernel has taken its place while the one before was at work, and waits here until
// that is over and what it wrote can be read. Then the next one may take its place. (The other way round, two kernels
// ahead of time, cost 3 % at 64 MiB.)
__device__ __forceinline__ void begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A block's part of `vectors`.
struct Part {
    u32 first, count;

    __device__ __forceinline__ explicit Part(u32 vectors) {
        const u32 share = (vectors + gridDim.x - 1) / gridDim.x;
        first = blockIdx.x * share;
        count = first < vectors ? min(share, vectors - first) : 0;
    }
};

// Everything to everyone. A thread sends its next vector before it waits for the one before. Where there is one peer, two
// blocks fit on a multiprocessor, so that the next kernel can take its place early.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, WORLD == 2 ? 2 : 1)
    one_shot(const uint4* x, uint4* out, u32 vectors, const Mail mail) {
    const Part part(vectors);  // before the wait, because it can be
    begin();
    if (part.count == 0) return;  // with nothing to exchange, a generation must not pass
    x += part.first;
    out += part.first;

    uint4 mine = make_uint4(0, 0, 0, 0);
    if (threadIdx.x < part.count) mine = load(x + threadIdx.x);
    State* const kept = mail.states + blockIdx.x;
    const State state = read(kept);
    if (rarely(state.dead)) return say_nothing(out, 0, part.count, mail);
    const u32 own = blockIdx.x * mail.capacity;
    const u32 slots = state.generation * mail.generation + own;
    if (threadIdx.x < part.count) push_all(mail.outbox, slots + threadIdx.x, tame(mine));

    pass(state, kept, own, part.count, mail);

    for (u32 i = threadIdx.x; i < part.count; i += blockDim.x) {
        uint4 next = mine;
        if (i + blockDim.x < part.count) {
            next = load(x + i + blockDim.x);
            push_all(mail.outbox, slots + i + blockDim.x, tame(next));
        }
        uint4 theirs[PEERS];
        await_all(theirs, mail.inbox + slots + i, mail);
        out[i] = sum(mail.rank, mine, theirs);
        mine = next;
    }
}

// Everything to everyone, with blocks that only push and blocks that only take: on one multiprocessor, loads would wait
// behind stores that wait for the link. The slots are one row as long as the tensor, and all blocks count alike.
extern "C" __global__ void __launch_bounds__(SPLIT_THREADS)
    one_shot_split(const uint4* x, uint4* out, u32 vectors, const Mail mail) {
    begin();
    State* const kept = mail.states + blockIdx.x;
    const State state = read(kept);
    __syncthreads();  // all threads have read the state
    if (threadIdx.x == 0) advance(kept, state.generation ^ 1, 0);
    const u32 slots = state.generation * mail.generation;
    const u32 width = blockDim.x;

    if (blockIdx.x < mail.pushers) {
        const u32 tile = PUSH_UNROLL * width;
        for (u32 at = blockIdx.x * tile + threadIdx.x; at < vectors; at += mail.pushers * tile) {
            uint4 mine[PUSH_UNROLL];
#pragma unroll
            for (u32 i = 0; i < PUSH_UNROLL; ++i)
                if (at + i * width < vectors) mine[i] = load(x + at + i * width);
#pragma unroll
            for (u32 i = 0; i < PUSH_UNROLL; ++i)
                if (at + i * width < vectors) push_all(mail.outbox, slots + at + i * width, tame(mine[i]));
        }
        return;
    }

    const u32 tile = TAKE_UNROLL * width, step = (gridDim.x - mail.pushers) * tile;
    for (u32 start = (blockIdx.x - mail.pushers) * tile; start < vectors; start += step) {
        if (rarely(state.dead)) {
            say_nothing(out, start, min(start + tile, vectors), mail);
            continue;
        }
        const u32 at = start + threadIdx.x;
        uint4* const slot = mail.inbox + slots + at;
        uint4 mine[TAKE_UNROLL], theirs[TAKE_UNROLL][PEERS];
#pragma unroll
        for (u32 i = 0; i < TAKE_UNROLL; ++i)
            if (at + i * width < vectors) mine[i] = load(x + at + i * width);
#pragma unroll
        for (u32 i = 0; i < TAKE_UNROLL; ++i)
#pragma unroll
            for (u32 peer = 0; peer < PEERS; ++peer)
                if (at + i * width < vectors) theirs[i][peer] = look(slot + i * width + peer * mail.row);
#pragma unroll
        for (u32 i = 0; i < TAKE_UNROLL; ++i) {
            if (at + i * width >= vectors) continue;
#pragma unroll
            for (u32 peer = 0; peer < PEERS; ++peer)
                theirs[i][peer] = await(theirs[i][peer], slot + i * width + peer * mail.row, mail);
            out[at + i * width] = sum(mail.rank, mine[i], theirs[i]);
            arm_all(slot + i * width, mail);
        }
    }
}

// Each rank sums one part of the tensor: rows 0..PEERS-1 carry what it is to sum, the rest the sums of the others.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    two_shot(const uint4* x, uint4* out, u32 vectors, const Mail mail) {
    const u32 chunk = (vectors + WORLD - 1) / WORLD;  // what one rank sums
    const Part part(chunk);
    begin();
    if (part.count == 0) return;
    State* const kept = mail.states + blockIdx.x;
    const State state = read(kept);
    if (rarely(state.dead)) {
        for (u32 first = part.first; first < vectors; first += chunk)
            say_nothing(out, first, min(first + part.count, vectors), mail);
        return;
    }
    const u32 slots = state.generation * mail.generation + blockIdx.x * mail.capacity;
    const u32 sums = slots + PEERS * mail.row;

    for (u32 i = threadIdx.x; i < part.count; i += blockDim.x) {
#pragma unroll
        for (u32 peer = 0; peer < PEERS; ++peer) {
            const u32 at = (peer + (peer >= mail.rank)) * chunk + part.first + i;
            if (at < vectors) push(mail.outbox[peer] + slots + i, tame(load(x + at)));
        }
    }
    __syncthreads();  // all threads have read the state
    if (threadIdx.x == 0) advance(kept, state.generation ^ 1, 0);

    for (u32 i = threadIdx.x; i < part.count; i += blockDim.x) {
        const u32 at = mail.rank * chunk + part.first + i;
        if (at >= vectors) break;
        const uint4 mine = load(x + at);
        uint4 theirs[PEERS];
        await_all(theirs, mail.inbox + slots + i, mail);
        const uint4 total = tame(sum(mail.rank, mine, theirs));
        push_all(mail.outbox, sums + i, total);
        out[at] = total;
        arm_all(mail.inbox + slots + i, mail);
    }

    for (u32 i = threadIdx.x; i < part.count; i += blockDim.x) {
        uint4* const slot = mail.inbox + sums + i;
        uint4 theirs[PEERS];
#pragma unroll
        for (u32 peer = 0; peer < PEERS; ++peer) theirs[peer] = look(slot + peer * mail.row);
#pragma unroll
        for (u32 peer = 0; peer < PEERS; ++peer) {
            const u32 at = (peer + (peer >= mail.rank)) * chunk + part.first + i;
            if (at >= vectors) continue;
            out[at] = await(theirs[peer], slot + peer * mail.row, mail);
            arm(slot + peer * mail.row);
        }
    }
}

// Each rank gives a row of `vectors` to every peer, the same or one of its own, and takes one from each.
enum Move { GATHER, REDUCE_SCATTER, SWAP };

__device__ __forceinline__ u32 rank_of(u32 peer, u32 rank) { return peer + (peer >= rank); }

template <Move MOVE>
__device__ __forceinline__ void exchange(const uint4* x, uint4* out, u32 vectors, const Mail& mail) {
    const Part part(vectors);
    begin();
    if (part.count == 0) return;
    State* const kept = mail.states + blockIdx.x;
    const State state = read(kept);
    if (rarely(state.dead)) {
        for (u32 r = 0; r < (MOVE == REDUCE_SCATTER ? 1 : WORLD); ++r)
            say_nothing(out, r * vectors + part.first, r * vectors + part.first + part.count, mail);
        return;
    }
    const u32 slots = state.generation * mail.generation + blockIdx.x * mail.capacity;

    for (u32 i = threadIdx.x; i < part.count; i += blockDim.x) {
        const uint4* const row = x + part.first + i;
        if constexpr (MOVE == GATHER) {
            push_all(mail.outbox, slots + i, tame(load(row)));
        } else {
#pragma unroll
            for (u32 peer = 0; peer < PEERS; ++peer)
                push(mail.outbox[peer] + slots + i, tame(load(row + rank_of(peer, mail.rank) * vectors)));
        }
    }
    __syncthreads();  // all threads have read the state
    if (threadIdx.x == 0) advance(kept, state.generation ^ 1, 0);

    for (u32 i = threadIdx.x; i < part.count; i += blockDim.x) {
        const u32 at = part.first + i;
        const uint4 mine = load(x + (MOVE == GATHER ? 0 : mail.rank * vectors) + at);
        uint4 theirs[PEERS];
        await_all(theirs, mail.inbox + slots + i, mail);
        arm_all(mail.inbox + slots + i, mail);
        if constexpr (MOVE == REDUCE_SCATTER) {
            out[at] = sum(mail.rank, mine, theirs);
        } else {
            out[mail.rank * vectors + at] = tame(mine);  // as the others get it
#pragma unroll
            for (u32 peer = 0; peer < PEERS; ++peer) out[rank_of(peer, mail.rank) * vectors + at] = theirs[peer];
        }
    }
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    all_gather(const uint4* x, uint4* out, u32 vectors, const Mail mail) {
    exchange<GATHER>(x, out, vectors, mail);
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    reduce_scatter(const uint4* x, uint4* out, u32 vectors, const Mail mail) {
    exchange<REDUCE_SCATTER>(x, out, vectors, mail);
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    all_to_all(const uint4* x, uint4* out, u32 vectors, const Mail mail) {
    exchange<SWAP>(x, out, vectors, mail);
}

// --- one-shot, then residual and RMSNorm -----------------------------------------------------------------------------

__device__ __forceinline__ u32 add_words(u32 a, u32 b, float& squares) {
    float left[Element::PARTS], right[Element::PARTS];
    Element::unpack(a, left);
    Element::unpack(b, right);
#pragma unroll
    for (int i = 0; i < Element::PARTS; ++i) left[i] += right[i];
    const u32 total = Element::pack(left);
    Element::unpack(total, left);  // as it was rounded
#pragma unroll
    for (int i = 0; i < Element::PARTS; ++i) squares += left[i] * left[i];
    return total;
}

__device__ __forceinline__ u32 scale_words(u32 word, u32 weight, float scale) {
    float parts[Element::PARTS], weights[Element::PARTS];
    Element::unpack(word, parts);
    Element::unpack(weight, weights);
#pragma unroll
    for (int i = 0; i < Element::PARTS; ++i) parts[i] = parts[i] * scale * weights[i];
    return Element::pack(parts);
}

// The same at every thread, and in the same order on every rank.
__device__ __forceinline__ float sum_over_block(float value) {
    __shared__ float of_warps[MAX_THREADS / 32];
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, lanes);
    __syncthreads();  // what the row before left has been read
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
    __syncthreads();
    float total = 0;
    for (u32 warp = 0; warp < blockDim.x / 32; ++warp) total += of_warps[warp];
    return total;
}

// With the slots, states and generations of one_shot, between whose operations it may come.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    one_shot_rms_norm(const uint4* x, uint4* out, u32 vectors, const NormMail norm) {
    const Mail& mail = norm.mail;
    const Part part(vectors / norm.row);  // in rows
    begin();
    if (part.count == 0) return;
    const u32 first = part.first * norm.row, count = part.count * norm.row;
    State* const kept = mail.states + blockIdx.x;
    const State state = read(kept);
    if (rarely(state.dead)) {
        say_nothing(out, first, first + count, mail);
        say_nothing(norm.summed, first, first + count, mail);
        return;
    }
    const u32 own = blockIdx.x * mail.capacity;
    const u32 slots = state.generation * mail.generation + own;
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) push_all(mail.outbox, slots + i, tame(load(x + first + i)));

    pass(state, kept, own, count, mail);

    for (u32 row = 0; row < count; row += norm.row) {
        float squares = 0;
        for (u32 i = row + threadIdx.x; i < row + norm.row; i += blockDim.x) {
            uint4 theirs[PEERS];
            await_all(theirs, mail.inbox + slots + i, mail);
            const uint4 total = sum(mail.rank, load(x + first + i), theirs), before = load(norm.residual + first + i);
            norm.summed[first + i] =
                make_uint4(add_words(total.x, before.x, squares), add_words(total.y, before.y, squares),
                           add_words(total.z, before.z, squares), add_words(total.w, before.w, squares));
        }
        const float elements = norm.row * 4 * Element::PARTS;
        const float scale = rsqrtf(sum_over_block(squares) / elements + norm.eps);
        for (u32 i = threadIdx.x; i < norm.row; i += blockDim.x) {
            const uint4 v = norm.summed[first + row + i], by = load(norm.weight + i);  // this thread's own words
            out[first + row + i] = make_uint4(scale_words(v.x, by.x, scale), scale_words(v.y, by.y, scale),
                                              scale_words(v.z, by.z, scale), scale_words(v.w, by.w, scale));
        }
    }
}

// The launch alone, for measuring what a launch costs.
extern "C" __global__ void nothing(const uint4* x, uint4* out, u32 vectors, const Mail mail) { begin(); }
