#include "threads.h"

#include <pthread.h>
#include <signal.h>
#ifdef __linux__
#include <sched.h>
#endif
#include <unistd.h>

#include <chrono>
#include <vector>

namespace penstock {
namespace {

constexpr int SPIN_US = 100;       // a layer's next product is rarely further away
constexpr int MAX_ITEMS = 0xffff;  // that one round can count

std::atomic<uint64_t> forks{0};  // threads do not survive a fork: each child starts its own

void count_fork() { forks.fetch_add(1); }

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
}

// True once `done` is; false after SPIN_US.
template <typename F>
bool spin_until(const F& done) {
    if (done()) return true;
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(SPIN_US);
    do {
        for (int i = 0; i < 32; i++) {
            relax();
            if (done()) return true;
        }
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

}  // namespace

int usable_processors() {
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
    const long found = sysconf(_SC_NPROCESSORS_ONLN);
    return found > 0 ? static_cast<int>(found) : 1;
}

// A round is one call of run(). Its number, its items and the next item share a word, so that an item can only be claimed
// from the round that it belongs to, however late a worker wakes.
struct ThreadPool::State {
    std::atomic<uint64_t> round{0};  // number << 32 | items << 16 | next item
    std::atomic<void (*)(void*, int)> body{nullptr};
    std::atomic<void*> argument{nullptr};
    std::atomic<int> finished{0};
    std::atomic<int> sleeping{0};
    std::atomic<bool> stop{false};
    std::atomic<bool> caller_sleeps{false};
    std::mutex mutex;  // for both conditions
    std::condition_variable work_there, all_finished;
    std::mutex one_round;  // one caller at a time
    std::vector<pthread_t> workers;

    static int items(uint64_t word) { return static_cast<int>(word >> 16 & 0xffff); }
    static int next(uint64_t word) { return static_cast<int>(word & 0xffff); }
    static bool has_items(uint64_t word) { return next(word) < items(word); }

    void run_items() {
        uint64_t word = round.load();
        while (has_items(word)) {
            const auto call = body.load(std::memory_order_relaxed);
            void* const with = argument.load(std::memory_order_relaxed);
            if (!round.compare_exchange_weak(word, word + 1)) continue;
            call(with, next(word));
            if (finished.fetch_add(1) + 1 == items(word) && caller_sleeps.load()) {
                const std::lock_guard<std::mutex> lock(mutex);
                all_finished.notify_one();
            }
            word = round.load();
        }
    }

    void wait_for_work() {
        const auto ready = [this] { return has_items(round.load()) || stop.load(); };
        if (spin_until(ready)) return;
        std::unique_lock<std::mutex> lock(mutex);
        sleeping.fetch_add(1);
        work_there.wait(lock, ready);
        sleeping.fetch_sub(1);
    }
};

ThreadPool::ThreadPool(int threads) : threads_(threads > 0 ? threads : usable_processors()) {
    static const int registered = pthread_atfork(nullptr, nullptr, count_fork);
    (void)registered;
    start();
}

void ThreadPool::start() {
    fork_generation_ = forks.load();
    state_ = new State;  // of a parent's threads: left alone, its locks may be held for ever
    if (threads_ == 1) return;
    sigset_t all, before;  // signals are for the threads of the program
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int i = 1; i < threads_; i++) {
        pthread_t worker;
        if (pthread_create(&worker, nullptr, work, state_) == 0) state_->workers.push_back(worker);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

ThreadPool::~ThreadPool() {
    if (fork_generation_ != forks.load()) return;
    state_->stop.store(true);
    {
        const std::lock_guard<std::mutex> lock(state_->mutex);
        state_->work_there.notify_all();
    }
    for (const pthread_t worker : state_->workers) pthread_join(worker, nullptr);
    delete state_;
}

void* ThreadPool::work(void* argument) {
    State& state = *static_cast<State*>(argument);
    while (!state.stop.load()) {
        state.run_items();
        state.wait_for_work();
    }
    return nullptr;
}

void ThreadPool::run(int items, void (*run)(void*, int), void* argument) {
    if (fork_generation_ != forks.load()) start();
    State& state = *state_;
    if (items <= 1 || state.workers.empty()) {
        for (int i = 0; i < items; i++) run(argument, i);
        return;
    }
    const std::lock_guard<std::mutex> alone(state.one_round);
    for (int first = 0; first < items; first += MAX_ITEMS) {
        struct Part {
            void (*run)(void*, int);
            void* argument;
            int first;
        } part{run, argument, first};
        const auto call = [](void* p, int i) {
            static_cast<Part*>(p)->run(static_cast<Part*>(p)->argument, static_cast<Part*>(p)->first + i);
        };
        const uint64_t count = static_cast<uint64_t>(items - first < MAX_ITEMS ? items - first : MAX_ITEMS);
        state.body.store(call, std::memory_order_relaxed);
        state.argument.store(&part, std::memory_order_relaxed);
        state.finished.store(0, std::memory_order_relaxed);
        state.round.store(((state.round.load() >> 32) + 1) << 32 | count << 16);
        if (state.sleeping.load() > 0) {
            const std::lock_guard<std::mutex> lock(state.mutex);
            state.work_there.notify_all();
        }
        state.run_items();
        const auto finished = [&] { return state.finished.load() == static_cast<int>(count); };
        if (spin_until(finished)) continue;
        std::unique_lock<std::mutex> lock(state.mutex);
        state.caller_sleeps.store(true);
        state.all_finished.wait(lock, finished);
        state.caller_sleeps.store(false);
    }
}

}  // namespace penstock
