// A pool of threads for work of microseconds: workers spin for a moment, then sleep.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace penstock {

int usable_processors();  // as many as the affinity mask allows

class ThreadPool {
public:
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int threads() const { return threads_; }

    // Call run(argument, i) for each i below items. The caller works along; returns when all calls have returned.
    void run(int items, void (*run)(void* argument, int item), void* argument);

    template <typename F>
    void run(int items, const F& body) {
        run(items, [](void* argument, int item) { (*static_cast<const F*>(argument))(item); }, const_cast<F*>(&body));
    }

private:
    struct State;
    void start();
    static void* work(void* state);

    int threads_;
    State* state_ = nullptr;
    uint64_t fork_generation_ = 0;
};

}  // namespace penstock
