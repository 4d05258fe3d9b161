// The table of kernels that each path fills in, and the values they share. Included by code built for different
// processors, so it defines no function that a linker could merge.
#pragma once
#include <stdint.h>

#include "penstock.h"

namespace penstock {

constexpr int LANES = 16;        // outputs of a block of weights; lanes of every sum
constexpr int GROUP = 32;        // inputs that share a scale
constexpr float LOUD = 6.0f;     // times a row's root mean square: a group with so large an input has fine codes
constexpr int KEY_BLOCK = 64;    // keys between two updates of a running softmax
constexpr int KEY_CHUNK = 256;   // keys whose softmax is computed on its own, then merged in order
constexpr int QUERY_TILE = 192;  // queries that share one conversion of keys and values, at most
constexpr int FEW_QUERIES = 48;  // of several heads together, and of a tile where larger ones would leave threads without work
constexpr int MAX_HEAD_DIM = 512;

// 32 inputs of a row: each is scale * (code + fine code / 16).
struct InputGroup {
    int8_t codes[GROUP], fine[GROUP];
    float scale;
    float sum;                  // of the inputs
    int32_t minus_sum;          // of the codes
    int16_t fine_sum, is_fine;  // 0 where all fine codes are 0: where all inputs are near the others in size
};

// How a group of inputs is rounded. Each path has its own.
namespace {
struct InputScale {
    float scale, inverse;
    bool fine;

    InputScale(float largest, float loud) : scale(largest / 127.0f), fine(largest > loud) {
        // below this, a sixteenth of the scale times that of a weight might be rounded as a subnormal number
        inverse = scale > 0x1p-96f ? 1.0f / scale : 0.0f;
    }

    void finish(int32_t sum, int32_t fine_sum, InputGroup& to) const {
        to.scale = scale;
        to.sum = scale * (static_cast<float>(sum) + 0.0625f * static_cast<float>(fine_sum));
        to.minus_sum = -sum;
        to.fine_sum = static_cast<int16_t>(fine_sum);
        to.is_fine = fine;
    }
};
}  // namespace

// Rows of activations, padded to padded_cols with zeros: groups for quantised weights, x for the others, and halves, which are
// the same numbers as x, for bf16.
struct Rows {
    const float* x;            // [m, padded_cols]
    const uint16_t* halves;    // [m, padded_cols], and memory for 16 rows behind them
    const InputGroup* groups;  // [m, padded_cols / 32]
    int padded_cols;
};

// Sixteen outputs of a quantised matrix.
struct Panel {
    const uint8_t* codes;
    const uint16_t* scales;
    const uint16_t* minima;  // NULL where the layout has none
    int groups;
    const char* next;  // the panel to be multiplied afterwards, or this one
};

// Where the products of a matrix go: y[row * stride + output].
struct Output {
    float* y;
    int64_t stride;
    bool add;                     // to what is there
    const char* ahead = nullptr;  // weights that this thread is likely to multiply afterwards
};

// The queries of a span that some key-value heads answer.
struct Attention {
    const float* q;      // first query of the first head's group
    int64_t row_stride;  // between rows of q
    int heads;           // key-value heads, side by side
    int group;           // query heads of each of them, side by side
    int rows, start;     // positions start .. start + rows
    int head_dim, type, window;
    float scale;
    const char* kv;  // first key of the first head
    int64_t slot_bytes, value_offset;
    const int32_t* table;  // of its group, in every `groups`-th entry
    int groups, block_size;
};

struct Kernels {
    const char* name;
    // x[n] -> groups[padded / 32]
    void (*quantise)(const float* x, int n, int padded, InputGroup* groups);
    // Round x[n] to bf16, in place and as halves.
    void (*round)(float* x, int n, uint16_t* halves);
    // rows [row, row_end) times blocks [block, block_end) of 16 outputs
    void (*product)(const ps_matrix& matrix, const Rows& rows, int row, int row_end, int block, int block_end, const Output& out);
    // y = x / rms(x) * weight; y may be x. add: y += instead
    void (*rms_norm)(const float* x, const float* weight, int n, float eps, float* y, bool add);
    void (*rotate)(float* head, int width, const float* cos, const float* sin);
    void (*gate)(int activation, const float* gate, const float* up, int n, float* y);
    void (*store)(int type, const float* x, int n, void* to);
    // The k largest of n scores, best first, the lower of equals, and their shares of a softmax over all scores, or over these
    // k where they are normalised. Overwrites the scores.
    void (*choose)(float* scores, int n, int k, bool normalised, int32_t* chosen, float* shares);
    float (*largest)(const float* x, int n);  // any number where one is NaN
    // weights[i] = e^(logits[i] / temperature - largest / temperature); weights may be logits
    void (*weigh)(const float* logits, int n, float temperature, float largest, float* weights);
    // The weights of at least `bound` and their ids, of which the first is `id` -> how many. They need room for 16 more.
    int (*select)(const float* weights, int n, float bound, int id, float* to, int32_t* ids);
    // Queries [first, first + count) of each head's rows, over the keys of one chunk -> state[heads][count][state_size]: o, max,
    // sum. There are QUERY_TILE of one head at most, or FEW_QUERIES of several.
    void (*attend)(const Attention& task, int first, int count, int chunk, float* scratch, float* state);
    void (*merge)(float* total, const float* part, int head_dim);
    void (*finish)(const float* state, int head_dim, float* out);
};

// Whether any of R rows has fine codes in this group
template <int R>
static inline bool any_fine(const InputGroup* first, int64_t groups) {
    int any = 0;
    for (int r = 0; r < R; r++) any |= first[r * groups].is_fine;
    return any != 0;
}

// Ask for a part of a panel, as large as a group of 32 inputs. Panels are too short for the processor to see the next one coming:
// one row is a sixth faster with this, and eight are a quarter.
template <int BYTES>
static inline void fetch_ahead(const char* next, int64_t group) {
#pragma GCC unroll 16
    for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(next + group * BYTES + i, 0, 2);
}

static constexpr int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
static constexpr int state_size(int head_dim) { return static_cast<int>(round_up(head_dim, LANES)) + LANES; }  // floats
static constexpr int attend_scratch(int head_dim) {                                                            // floats
    return (KEY_BLOCK + 3 * QUERY_TILE / 2) * state_size(head_dim) + 96 * KEY_BLOCK;
}
// Bytes of 16 outputs of a matrix.
static constexpr int64_t panel_bytes(int kind, int64_t padded_cols) {
    const int64_t groups = padded_cols / GROUP;
    switch (kind) {
        case PS_Q4:
            return round_up(groups * (256 + 32), 64);
        case PS_Q4M:
            return groups * (256 + 64);
        case PS_Q8:
            return round_up(groups * (512 + 32), 64);
        case PS_Q8M:
            return groups * (512 + 64);
        case PS_BF16:
        case PS_F16:
            return padded_cols * 32;
        case PS_F32:
            return padded_cols * 64;
        default:
            return 0;
    }
}

struct Path {
    const Kernels* kernels;
    bool (*usable)();
};

}  // namespace penstock
