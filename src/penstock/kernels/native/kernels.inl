// The kernels, written once over sixteen lanes; a path includes its lanes first, then this. Every sum has one order, whatever
// the path and however many rows there are. No function of the standard library is used that could be merged between paths.
#include <math.h>

#include <type_traits>

namespace penstock {
namespace {

// ---- lanes ----

// e^x for x between -87 and 88, to about one unit in the last place; NaN stays NaN
inline V exponential_of(V x) {
    const V magic = all(12582912.0f);
    const V t = fma(x, all(1.44269504f), magic);
    const V n = sub(t, magic);
    const V r = fma(n, all(-1.42860677e-6f), fma(n, all(-0.693145752f), x));
    V p = all(1.9875691500e-4f);
    p = fma(p, r, all(1.3981999507e-3f));
    p = fma(p, r, all(8.3334519073e-3f));
    p = fma(p, r, all(4.1665795894e-2f));
    p = fma(p, r, all(1.6666665459e-1f));
    p = fma(p, r, all(5.0000001201e-1f));
    p = fma(p, mul(r, r), add(r, all(1.0f)));
    return mul(p, power_of_two(t));
}

// e^x between e^-87 and e^88
inline V exponential(V x) {
    x = max(all(-87.0f), x);
    return exponential_of(sub(all(0.0f), max(all(-88.0f), sub(all(0.0f), x))));
}

#ifndef PS_OWN_FRACTION

// y - floor(y), and p * 2^floor(y), for y between -126 and 126
inline V fraction(V y) { return sub(y, floor(y)); }
inline V times_power(V p, V y) { return mul(p, power_of_two(add(floor(y), all(12582912.0f)))); }

#endif

// 2^y to 8 bits, for y of at most 0; below -125 it is 2^-125. What is added last has no lower bits than 2^-7, which rounds.
inline V short_power_of_two(V y) {
    y = max(all(-125.0f), y);
    const V f = fraction(y);
    V p = fma(f, all(0.00186713028f), all(0.00901702978f));
    p = fma(p, f, all(0.0557999127f));
    p = fma(p, f, all(0.240164444f));
    p = fma(p, f, all(0.693151295f));
    return times_power(sub(fma(p, f, all(98305.0f)), all(98304.0f)), y);
}

inline float exponential(float x) {
    float out[LANES];
    save(out, exponential(all(x)));
    return out[0];
}

inline float widen(int type, const void* p, int i) {
    if (type == PS_TYPE_F32) return static_cast<const float*>(p)[i];
    const uint16_t half = static_cast<const uint16_t*>(p)[i];
    return type == PS_TYPE_F16 ? from_f16(half) : from_bf16(half);
}

inline void widen_row(int type, const void* from, int n, float* to) {
    int i = 0;
    const uint16_t* halves = static_cast<const uint16_t*>(from);
    if (type == PS_TYPE_F16)
        for (; i + LANES <= n; i += LANES) save(to + i, load_f16(halves + i));
    else if (type == PS_TYPE_BF16)
        for (; i + LANES <= n; i += LANES) save(to + i, load_bf16(halves + i));
    for (; i < n; i++) to[i] = widen(type, from, i);
}

// ---- rows ----

inline float mean_square(const float* x, int n) {
    V squares = all(0.0f);
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        const V a = load(x + i);
        squares = fma(a, a, squares);
    }
    if (i < n) {
        float tail[LANES] = {};
        for (int j = i; j < n; j++) tail[j - i] = x[j];
        squares = fma(load(tail), load(tail), squares);
    }
    return sum_lanes(squares) / static_cast<float>(n);
}

#ifndef PS_OWN_GROUPS

inline int32_t nearest(float x) { return static_cast<int32_t>(bits_of(x + 12582912.0f) - 0x4b400000u); }  // below 2^22

// Codes of 8 bits; where a number is above `loud`, beside which 8 bits leave little of the others, 4 bits more
inline void quantise_group(const float* x, float loud, InputGroup& to) {
    uint32_t largest = 0;  // as bits, in which NaN is larger than all numbers: it must not vanish
    for (int i = 0; i < GROUP; i++) {
        const uint32_t bits = bits_of(x[i]) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    const InputScale scale(float_of(largest), loud);
    // at most 127 without a bound, since the scale is not rounded by more; what is not finite gets a scale that is not either
    if (scale.fine)
        for (int i = 0; i < GROUP; i++) {
            const int32_t sixteenths = nearest(x[i] * (16.0f * scale.inverse)), code = (sixteenths + 8) >> 4;
            to.codes[i] = static_cast<int8_t>(code);
            to.fine[i] = static_cast<int8_t>(sixteenths - 16 * code);
        }
    else
        for (int i = 0; i < GROUP; i++) to.codes[i] = static_cast<int8_t>(nearest(x[i] * scale.inverse)), to.fine[i] = 0;
    int32_t sum = 0, fine_sum = 0;
    for (int i = 0; i < GROUP; i++) sum += to.codes[i], fine_sum += to.fine[i];
    scale.finish(sum, fine_sum, to);
}

#endif

void quantise_row(const float* x, int n, int padded, InputGroup* groups) {
    const float loud = LOUD * sqrtf(mean_square(x, n));
    for (int start = 0; start < padded; start += GROUP, groups++) {
        if (start + GROUP <= n) {
            quantise_group(x + start, loud, *groups);
            continue;
        }
        float own[GROUP];
        for (int i = 0; i < GROUP; i++) own[i] = start + i < n ? x[start + i] : 0.0f;
        quantise_group(own, loud, *groups);
    }
}

void round_row(float* x, int n, uint16_t* halves) {
    for (int i = 0; i < n; i++) {
        halves[i] = to_bf16(x[i]);
        x[i] = from_bf16(halves[i]);
    }
}

void rms_norm_row(const float* x, const float* weight, int n, float eps, float* y, bool add_to) {
    const float factor = 1.0f / sqrtf(mean_square(x, n) + eps);
    const V factors = all(factor);
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        const V normed = mul(mul(load(x + i), factors), load(weight + i));
        save(y + i, add_to ? add(load(y + i), normed) : normed);
    }
    for (; i < n; i++) {
        const float normed = x[i] * factor * weight[i];
        y[i] = add_to ? y[i] + normed : normed;
    }
}

void rotate_head(float* head, int width, const float* cos, const float* sin) {
    const int half = width / 2;
    for (int i = 0; i < half; i++) {
        const float a = head[i], b = head[i + half];
        head[i] = __builtin_fmaf(-b, sin[i], a * cos[i]);
        head[i + half] = __builtin_fmaf(a, sin[i], b * cos[i]);
    }
}

inline V activated(int activation, V x) {
    V z = x;  // x / (1 + e^-z); gelu's tanh is a logistic function, too
    if (activation == PS_GELU_TANH) z = mul(all(1.5957691216f), fma(mul(all(0.044715f), mul(x, x)), x, x));
    return div(x, add(all(1.0f), exponential(sub(all(0.0f), z))));
}

void gate_row(int activation, const float* gate, const float* up, int n, float* y) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) save(y + i, mul(activated(activation, load(gate + i)), load(up + i)));
    if (i < n) {
        float tail[LANES] = {};
        for (int j = i; j < n; j++) tail[j - i] = gate[j];
        save(tail, activated(activation, load(tail)));
        for (int j = i; j < n; j++) y[j] = tail[j - i] * up[j];
    }
}

void store_row(int type, const float* x, int n, void* to) {
    if (type == PS_TYPE_F32) {
        memcpy(to, x, static_cast<size_t>(n) * sizeof(float));
        return;
    }
    uint16_t* halves = static_cast<uint16_t*>(to);
    int i = 0;
    if (type == PS_TYPE_F16) {
        for (; i + LANES <= n; i += LANES) save_f16(halves + i, load(x + i));
        for (; i < n; i++) halves[i] = to_f16(x[i]);
    } else {
        for (; i < n; i++) halves[i] = to_bf16(x[i]);
    }
}

void choose_experts(float* scores, int n, int k, bool normalised, int32_t* chosen, float* shares) {
    for (int j = 0; j < k; j++) {
        const auto taken = [&](int i) {
            for (int other = 0; other < j; other++)
                if (chosen[other] == i) return true;
            return false;
        };
        int best = -1;  // there is always one, also among what is not a number
        for (int i = 0; i < n; i++)
            if ((best < 0 || scores[i] > scores[best]) && !taken(i)) best = i;
        chosen[j] = best;
    }
    const V largest = all(scores[chosen[0]]);
    float sum = 0.0f;
    for (int i = 0; i < n; i += LANES) {
        const int count = n - i < LANES ? n - i : LANES;
        float part[LANES] = {};
        memcpy(part, scores + i, static_cast<size_t>(count) * sizeof(float));
        save(part, exponential(sub(load(part), largest)));
        memcpy(scores + i, part, static_cast<size_t>(count) * sizeof(float));
        for (int j = 0; j < count; j++) sum += part[j];
    }
    if (normalised) {
        sum = 0.0f;
        for (int j = 0; j < k; j++) sum += scores[chosen[j]];
    }
    for (int j = 0; j < k; j++) shares[j] = scores[chosen[j]] / sum;
}

float largest_of_row(const float* x, int n) {
    V found = all(-INFINITY);
    int i = 0;
    for (; i + LANES <= n; i += LANES) found = max(found, load(x + i));
    float largest = max_lanes(found);
    for (; i < n; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
}

void weigh_logits(const float* logits, int n, float temperature, float largest, float* weights) {
    const V divisor = all(temperature), highest = all(largest / temperature);
    int i = 0;
    for (; i + LANES <= n; i += LANES) save(weights + i, exponential(sub(div(load(logits + i), divisor), highest)));
    if (i < n) {
        float tail[LANES] = {};
        memcpy(tail, logits + i, static_cast<size_t>(n - i) * sizeof(float));
        save(tail, exponential(sub(div(load(tail), divisor), highest)));
        memcpy(weights + i, tail, static_cast<size_t>(n - i) * sizeof(float));
    }
}

int select_weights(const float* weights, int n, float bound, int id, float* to, int32_t* ids) {
    int i = 0, count = 0;
#ifdef PS_OWN_SELECT
    for (; i + LANES <= n; i += LANES) count += select_lanes(weights + i, bound, id + i, to + count, ids + count);
#endif
    for (; i < n; i++) {
        to[count] = weights[i];
        ids[count] = id + i;
        count += weights[i] >= bound;
    }
    return count;
}

// ---- products ----

template <int KIND>
inline void load_pair(const char* panel, int64_t k, V& even, V& odd) {
    if (KIND == PS_F32) {
        const float* p = reinterpret_cast<const float*>(panel) + k * LANES;
        even = load(p);
        odd = load(p + LANES);
    } else {
        const uint16_t* p = reinterpret_cast<const uint16_t*>(panel) + k * LANES;
        if (KIND == PS_BF16)
            load_pair_bf16(p, even, odd);
        else
            load_pair_f16(p, even, odd);
    }
}

// R rows times 16 outputs: for every 32 inputs a sum of the even and one of the odd, as tiles of bf16 compute them
template <int R, int KIND>
inline void multiply_floats(const char* panel, const char* next, int padded, const float* x, V* out) {
    for (int r = 0; r < R; r++) out[r] = all(0.0f);
    for (int start = 0; start < padded; start += GROUP) {
        fetch_ahead<(KIND == PS_F32 ? 64 : 32) * GROUP>(next, start / GROUP);
        V even[R], odd[R];
        for (int r = 0; r < R; r++) even[r] = odd[r] = all(0.0f);
        for (int k = start; k < start + GROUP; k += 2) {
            V w0, w1;
            load_pair<KIND>(panel, k, w0, w1);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                even[r] = fma(w0, all(x[static_cast<int64_t>(r) * padded + k]), even[r]);
                odd[r] = fma(w1, all(x[static_cast<int64_t>(r) * padded + k + 1]), odd[r]);
            }
        }
        for (int r = 0; r < R; r++) out[r] = add(out[r], add(even[r], odd[r]));
    }
}

template <int KIND>
inline Panel panel_at(const char* panel, const char* next, int groups) {
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(panel);
    const uint16_t* scales =
        reinterpret_cast<const uint16_t*>(codes + static_cast<int64_t>(groups) * (KIND <= PS_Q4M ? 256 : 512));
    const uint16_t* minima = KIND == PS_Q4M || KIND == PS_Q8M ? scales + static_cast<int64_t>(groups) * LANES : nullptr;
    return {codes, scales, minima, groups, next};
}

template <int R, int KIND>
inline void multiply_block(const char* panel, const char* next, const Rows& rows, int row, V* out) {
    constexpr bool quantised = KIND <= PS_Q8M, minimum = KIND == PS_Q4M || KIND == PS_Q8M;
    constexpr int bits = KIND <= PS_Q4M ? 4 : 8;
    const int64_t padded = rows.padded_cols;
    if constexpr (quantised) {
        const int groups = static_cast<int>(padded / GROUP);
        const Panel w = panel_at<KIND>(panel, next, groups);
        multiply<R, minimum, bits>(w, rows.groups + static_cast<int64_t>(row) * groups, out);
    } else {
        multiply_floats<R, KIND>(panel, next, rows.padded_cols, rows.x + row * padded, out);
    }
}

inline void put_block(const ps_matrix& matrix, int block, int row, V sums, const Output& out) {
    const int first = block * LANES, n = matrix.rows - first < LANES ? matrix.rows - first : LANES;
    const float* bias = matrix.bias;
    float* y = out.y + row * out.stride + first;
    if (n == LANES) {
        if (bias) sums = add(sums, load(bias + first));
        save(y, out.add ? add(load(y), sums) : sums);
        return;
    }
    float values[LANES];
    save(values, sums);
    for (int i = 0; i < n; i++) {
        const float value = bias ? values[i] + bias[first + i] : values[i];
        y[i] = out.add ? y[i] + value : value;
    }
}

template <int R, int KIND>
inline void multiply_rows(const ps_matrix& matrix, const char* panel, const char* next, const Rows& rows, int row, int block,
                          const Output& out) {
    V sums[R];
    multiply_block<R, KIND>(panel, next, rows, row, sums);
    for (int r = 0; r < R; r++) put_block(matrix, block, row + r, sums[r], out);
}

template <int N>
using Number = std::integral_constant<int, N>;

template <int KIND>
void product_of_kind(const ps_matrix& matrix, const Rows& rows, int row, int row_end, int block, int block_end,
                     const Output& out) {
    constexpr int most = KIND <= PS_Q8M ? MAX_ROWS_INT : MAX_ROWS_FLOAT;
    const int64_t bytes = panel_bytes(KIND, rows.padded_cols);
    for (; block < block_end; block++) {
        const char* panel = static_cast<const char*>(matrix.data) + block * bytes;
        const char* next = block + 1 < block_end ? panel + bytes : out.ahead ? out.ahead : panel;
        int r = row;
        const auto take = [&](auto count) {
            multiply_rows<count.value, KIND>(matrix, panel, next, rows, r, block, out);
            r += count.value;
            next = panel;  // the first rows have asked for what follows
        };
        while (r + most <= row_end) take(Number<most>());
        if (most > 4 && r + 4 <= row_end) take(Number<4>());
        if (most > 2 && r + 2 <= row_end) take(Number<2>());
        while (r < row_end) take(Number<1>());
    }
}

void product(const ps_matrix& matrix, const Rows& rows, int row, int row_end, int block, int block_end, const Output& out) {
    switch (matrix.kind) {
        case PS_Q4:
            return product_of_kind<PS_Q4>(matrix, rows, row, row_end, block, block_end, out);
        case PS_Q4M:
            return product_of_kind<PS_Q4M>(matrix, rows, row, row_end, block, block_end, out);
        case PS_Q8:
            return product_of_kind<PS_Q8>(matrix, rows, row, row_end, block, block_end, out);
        case PS_Q8M:
            return product_of_kind<PS_Q8M>(matrix, rows, row, row_end, block, block_end, out);
        case PS_BF16:
            return product_of_kind<PS_BF16>(matrix, rows, row, row_end, block, block_end, out);
        case PS_F16:
            return product_of_kind<PS_F16>(matrix, rows, row, row_end, block, block_end, out);
        case PS_F32:
            return product_of_kind<PS_F32>(matrix, rows, row, row_end, block, block_end, out);
    }
}

}  // namespace
}  // namespace penstock
