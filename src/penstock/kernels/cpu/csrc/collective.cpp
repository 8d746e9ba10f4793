// What the ranks of a stage do together, over memory that all of them map.
//
// Each rank copies its part into a buffer of its own, says that it has come, waits for the others and reads what
// all have brought. There are two buffers a rank, used in turns. A rank that comes to meeting n + 1 has read all of
// meeting n, so the buffer of meeting n may be written again for meeting n + 2: a meeting takes one wait and not two.
//
// A wait spins for a while (`spin_ns`), then sleeps on a futex, at most kSleepNs at a time, so that the
// end of the group and the deadline are seen. A rank whose wait has failed does nothing any more until it joins
// another group. Python reads `outcome` and raises the error.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "abi.h"
#include "vec.h"

static constexpr int64_t kLine = 64;  // bytes; each rank's words have a cache line
static constexpr int64_t kSleepNs = 50'000'000;

// Line 0 of the shared memory is the group's: word 0 is not 0 if the group is over. Line 1 + r is that of rank r:
struct alignas(kLine) RankLine {
    uint32_t num_meetings;  // meetings that the rank has come to; wraps around
    uint32_t num_sleepers;  // ranks that sleep until it comes
};

static int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1'000'000'000 + t.tv_nsec;
}

static RankLine& line(const GroupState& group, int64_t rank) { return ((RankLine*)group.memory)[1 + rank]; }

static bool is_over(const GroupState& group) {
    return __atomic_load_n((uint32_t*)group.memory, __ATOMIC_ACQUIRE) != 0;
}

static bool has_come(const RankLine& other, uint32_t meeting) {
    return (int32_t)(__atomic_load_n(&other.num_meetings, __ATOMIC_SEQ_CST) - meeting) >= 0;
}

static void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#else
    asm volatile("yield");
#endif
}

static void sleep_at(RankLine& other, uint32_t meeting) {
    __atomic_fetch_add(&other.num_sleepers, 1, __ATOMIC_SEQ_CST);
    uint32_t seen = __atomic_load_n(&other.num_meetings, __ATOMIC_SEQ_CST);
    if ((int32_t)(seen - meeting) < 0) {
        timespec limit{0, kSleepNs};
        syscall(SYS_futex, &other.num_meetings, FUTEX_WAIT, seen, &limit, nullptr, 0);
    }
    __atomic_fetch_sub(&other.num_sleepers, 1, __ATOMIC_SEQ_CST);
}

static bool wait_for(GroupState& group, int64_t rank, uint32_t meeting) {
    RankLine& other = line(group, rank);
    if (has_come(other, meeting)) return true;
    int64_t started = now_ns(), now = started;
    while (!has_come(other, meeting)) {
        if (is_over(group)) group.outcome = kGroupOver;
        if (now - started > group.timeout_ns) group.outcome = kRankAbsent;
        if (group.outcome) {
            group.absent = rank;
            return false;
        }
        if (now - started < group.spin_ns)
            for (int i = 0; i < 16; i++) pause_briefly();
        else
            sleep_at(other, meeting);
        now = now_ns();
    }
    group.waited_ns += now_ns() - started;
    return true;
}

// Says that this rank's buffer is filled, and waits until all are.
static bool meet(GroupState& group) {
    uint32_t meeting = (uint32_t)++group.num_meetings;
    RankLine& own = line(group, group.rank);
    __atomic_store_n(&own.num_meetings, meeting, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&own.num_sleepers, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &own.num_meetings, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
    for (int64_t rank = 0; rank < group.size; rank++)
        if (rank != group.rank && !wait_for(group, rank, meeting)) return false;
    return true;
}

// The buffer of a rank for the meeting that comes next.
static uint8_t* buffer(const GroupState& group, int64_t rank) {
    int64_t lines = (1 + group.size) * (int64_t)sizeof(RankLine);
    int64_t first = (lines + kPage - 1) / kPage * kPage;
    return group.memory + first + (2 * rank + (group.num_meetings & 1)) * group.buffer_bytes;
}

template <class T>
static void sum_pieces(uint8_t* const* pieces, int64_t num_pieces, T* y, int64_t count) {
#pragma omp parallel for schedule(static) if (count >= 1 << 15)
    for (int64_t k = 0; k < count; k += kLanes) {
        f32x16 total = load_some((const T*)pieces[0] + k, count - k);
        for (int64_t i = 1; i < num_pieces; i++) total += load_some((const T*)pieces[i] + k, count - k);
        store_some(y + k, total, count - k);
    }
}

template <class T>
static void all_reduce(GroupState& group, T* x, int64_t count) {
    int64_t at_once = group.buffer_bytes / (int64_t)sizeof(T);
    uint8_t* pieces[kMaxGroup];
    for (int64_t first = 0; first < count && !group.outcome; first += at_once) {
        int64_t some = count - first < at_once ? count - first : at_once;
        for (int64_t rank = 0; rank < group.size; rank++) pieces[rank] = buffer(group, rank);
        memcpy(pieces[group.rank], x + first, some * sizeof(T));
        if (meet(group)) sum_pieces(pieces, group.size, x + first, some);
    }
}

PENSTOCK_EXPORT void penstock_all_reduce(const void* args, const Step* step) {
    const AllReduceArgs& reduce = *(const AllReduceArgs*)args;
    GroupState& group = *reduce.group;
    int64_t count = step->num_tokens * reduce.width, started = now_ns();
    if (reduce.dtype == kBFloat16)
        all_reduce(group, (bf16*)reduce.x, count);
    else
        all_reduce(group, (float*)reduce.x, count);
    group.num_calls++;
    group.spent_ns += now_ns() - started;
}

PENSTOCK_EXPORT void penstock_all_gather(const void* args, const Step*) {
    const AllGatherArgs& gather = *(const AllGatherArgs*)args;
    GroupState& group = *gather.group;
    int64_t started = now_ns();
    for (int64_t first = 0; first < gather.num_bytes && !group.outcome; first += group.buffer_bytes) {
        int64_t left = gather.num_bytes - first, some = left < group.buffer_bytes ? left : group.buffer_bytes;
        uint8_t* pieces[kMaxGroup];
        for (int64_t rank = 0; rank < group.size; rank++) pieces[rank] = buffer(group, rank);
        memcpy(pieces[group.rank], gather.x + first, some);
        if (!meet(group)) break;
        for (int64_t rank = 0; rank < group.size; rank++)
            memcpy(gather.y + rank * gather.num_bytes + first, pieces[rank], some);
    }
    group.spent_ns += now_ns() - started;
}
