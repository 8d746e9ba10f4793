// Shares the items of a loop out to the threads of a team.
#pragma once
#include <omp.h>
#include <stdint.h>

#include <atomic>

constexpr int64_t kMostShares = 64;  // threads beyond it have no run of their own

// Items [0, count), each of which is taken once. A thread first takes the items of its own run, in order and some at a
// time: it reads memory on without a break, and writes no cache line that other threads write. Then it takes single
// items from the ends of other threads' runs, so that no thread waits long for one whose core is shared.
class Shares {
public:
    explicit Shares(int64_t count) {
        const int64_t threads = omp_get_max_threads();
        num_runs_ = threads < kMostShares ? threads : kMostShares;
        for (int64_t run = 0; run < num_runs_; run++) {
            const int64_t first = count * run / num_runs_, end = count * (run + 1) / num_runs_;
            runs_[run].rest.store(packed(first, end), std::memory_order_relaxed);
        }
        const int64_t eighth = count / (8 * num_runs_);
        at_once_ = eighth > 1 ? eighth : 1;
    }

    // Calls use(item) for every item that this thread takes; each thread of the team calls this once.
    template <class Use>
    void each(const Use& use) {
        const int64_t own = omp_get_thread_num() % num_runs_;
        int64_t first, end;
        while (take<true>(own, at_once_, &first, &end))
            for (int64_t item = first; item < end; item++) use(item);
        for (int64_t other = 1; other < num_runs_; other++)
            while (take<false>((own + other) % num_runs_, 1, &first, &end)) use(first);
    }

private:
    struct alignas(64) Run {
        std::atomic<uint64_t> rest;  // [first, end): first in the low half
    };

    static uint64_t packed(int64_t first, int64_t end) { return (uint64_t)first | (uint64_t)end << 32; }

    template <bool from_front>
    bool take(int64_t run, int64_t most, int64_t* first, int64_t* end) {
        uint64_t rest = runs_[run].rest.load(std::memory_order_relaxed), left;
        do {
            *first = (int64_t)(uint32_t)rest, *end = (int64_t)(rest >> 32);
            if (*first == *end) return false;
            const int64_t count = *end - *first < most ? *end - *first : most;
            if (from_front)
                left = packed(*first + count, *end), *end = *first + count;
            else
                left = packed(*first, *end - count), *first = *end - count;
        } while (!runs_[run].rest.compare_exchange_weak(rest, left, std::memory_order_relaxed));
        return true;
    }

    Run runs_[kMostShares];
    int64_t num_runs_;
    int64_t at_once_;
};
