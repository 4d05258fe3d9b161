// A context: the kernels of one path, the threads, and scratch memory that grows as needed.
#pragma once
#include <sys/mman.h>

#include <cstdlib>
#include <new>

#include "checks.h"
#include "kernels.h"
#include "threads.h"

namespace penstock {

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__  // as GCC says it
#endif
#endif
#ifdef __SANITIZE_ADDRESS__  // which watches the heap
constexpr bool FROM_HEAP = true;
#else
constexpr bool FROM_HEAP = false;
#endif

// Memory that begins at a multiple of 64 bytes and keeps its largest size; what was in it is lost when it grows. It is mapped by
// itself: from the heap, every size that it once had would leave a hole there.
class Buffer {
public:
    Buffer() = default;
    ~Buffer() { release(); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    template <typename T>
    T* take(int64_t count) {
        const size_t bytes = static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(T)) + 64, 4096));
        if (bytes > size_) {
            release();
            if (FROM_HEAP) {
                data_ = std::aligned_alloc(64, bytes);
            } else {
                void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
                data_ = mapped == MAP_FAILED ? nullptr : mapped;
            }
            if (!data_) throw std::bad_alloc();
            size_ = bytes;
        }
        return static_cast<T*>(data_);
    }

private:
    void* data_ = nullptr;
    size_t size_ = 0;

    void release() {
        if (FROM_HEAP)
            std::free(data_);
        else if (data_)
            munmap(data_, size_);
        data_ = nullptr;
        size_ = 0;
    }
};

// What the matrices of a product want of their input rows. It follows from all of them together, so that a row's result does not
// depend on the rows beside it.
struct InputFormat {
    bool quantised = false, rounded = false;  // rounded: to bf16, for all of them

    InputFormat(const ps_matrix* parts, int count) { include(parts, count); }
    void include(const ps_matrix* parts, int count) {
        for (int p = 0; p < count; p++) {
            if (parts[p].rows == 0) continue;
            quantised = quantised || parts[p].kind <= PS_Q8M;
            rounded = rounded || parts[p].kind == PS_BF16;
        }
    }
};

// A matrix times rows [row, row + count) of the input
struct Product {
    const ps_matrix* matrix;
    int row, count;
    Output out;  // of the first of these rows
};

// Rows on their way into a product: as floats, and quantised or rounded where the matrix wants that.
struct Activations {
    Buffer x_memory, half_memory, group_memory;
    float* x = nullptr;
    uint16_t* halves = nullptr;
    InputGroup* groups = nullptr;
    int cols = 0, padded = 0;

    void resize(int m, int columns);
    float* row(int i) { return x + static_cast<int64_t>(i) * padded; }
    Rows rows(int from) const {
        const int64_t at = static_cast<int64_t>(from) * padded;
        return {x + at, halves + at, groups + at / GROUP, padded};
    }
};

}  // namespace penstock

struct ps_context {
    std::mutex one_call;  // its scratch memory is for one
    penstock::ThreadPool pool;
    const penstock::Kernels* kernels;
    penstock::Activations input;
    penstock::Buffer wide, positions, states, items, products, pieces, normed, routing;
    int32_t *row_span = nullptr, *row_position = nullptr;  // of the batch that runs

    ps_context(int threads, const penstock::Kernels* path) : pool(threads), kernels(path) {}

    // Call body(row) for m rows; a few are not worth waking threads for.
    template <typename F>
    void for_rows(int m, const F& body) {
        const int pieces = m < 4 ? 1 : m < 4 * pool.threads() ? m : 4 * pool.threads();
        pool.run(pieces, [&](int piece) {
            const int64_t end = static_cast<int64_t>(m) * (piece + 1) / pieces;
            for (int64_t row = static_cast<int64_t>(m) * piece / pieces; row < end; row++) body(static_cast<int>(row));
        });
    }

    // Finish row i of `input` for matrices that want this format.
    void finish_row(const penstock::InputFormat& format, int i) {
        float* x = input.row(i);
        for (int k = input.cols; k < input.padded; k++) x[k] = 0.0f;
        if (format.rounded) kernels->round(x, input.padded, input.halves + static_cast<int64_t>(i) * input.padded);
        if (!format.quantised) return;
        const int64_t at = static_cast<int64_t>(i) * input.padded;
        kernels->quantise(x, input.cols, input.padded, input.groups + at / penstock::GROUP);
    }

    // y[m, rows of all parts] = input times the parts, stacked; there are three at most
    void product(const ps_matrix* parts, int count, int m, const penstock::Output& out);
    // Products of one input, all at once
    void multiply(const penstock::Product* list, int count);

    // Store keys and values, rotate, and attend: qkv -> rows of `input`, or of `out` where it is given
    void attend(const ps_model& model, const ps_layer& layer, const ps_batch& batch, int m, float* qkv, float* out);

    // Find the span and the position of each row
    void locate(const ps_batch& batch, int m);
};
