// Sixteen lanes in plain C++: runs on every machine, and says what the other paths must compute to the last bit.
#pragma once
#include <stdint.h>

#include "halves.h"
#include "kernels.h"

namespace penstock {
namespace {

constexpr int MAX_ROWS_INT = 4, MAX_ROWS_FLOAT = 4, TILE = 4, VECTORS = 1;

struct V {
    float lane[LANES];
};

#define PS_LANES(expression)                                  \
    V out;                                                    \
    for (int i = 0; i < LANES; i++) out.lane[i] = expression; \
    return out

inline V load(const float* p) { PS_LANES(p[i]); }
inline void save(float* p, V a) { memcpy(p, a.lane, sizeof a.lane); }
inline V all(float x) { PS_LANES(x); }
inline V add(V a, V b) { PS_LANES(a.lane[i] + b.lane[i]); }
inline V sub(V a, V b) { PS_LANES(a.lane[i] - b.lane[i]); }
inline V mul(V a, V b) { PS_LANES(a.lane[i] * b.lane[i]); }
inline V div(V a, V b) { PS_LANES(a.lane[i] / b.lane[i]); }
inline V fma(V a, V b, V c) { PS_LANES(__builtin_fmaf(a.lane[i], b.lane[i], c.lane[i])); }
inline V max(V a, V b) { PS_LANES(a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]); }
// 2^n of magic + n, where magic = 1.5 * 2^23 puts n into the lowest bits
inline V power_of_two(V a) { PS_LANES(float_of((bits_of(a.lane[i]) << 23) + 0x3f800000u)); }
// of numbers below 2^22
inline V floor(V a) {
    const V near = sub(add(a, all(12582912.0f)), all(12582912.0f));
    PS_LANES(near.lane[i] > a.lane[i] ? near.lane[i] - 1.0f : near.lane[i]);
}
inline V load_f16(const uint16_t* p) { PS_LANES(from_f16(p[i])); }
inline V load_bf16(const uint16_t* p) { PS_LANES(from_bf16(p[i])); }
inline void save_f16(uint16_t* p, V a) {
    for (int i = 0; i < LANES; i++) p[i] = to_f16(a.lane[i]);
}
// Pairs of inputs of sixteen outputs
inline void load_pair_bf16(const uint16_t* p, V& even, V& odd) {
    for (int i = 0; i < LANES; i++) even.lane[i] = from_bf16(p[2 * i]), odd.lane[i] = from_bf16(p[2 * i + 1]);
}
inline void load_pair_f16(const uint16_t* p, V& even, V& odd) {
    for (int i = 0; i < LANES; i++) even.lane[i] = from_f16(p[2 * i]), odd.lane[i] = from_f16(p[2 * i + 1]);
}

#undef PS_LANES

// Halves are added: lane i and lane i + 8, then i + 4, and so on.
inline float sum_lanes(V a) {
    float* x = a.lane;
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}

inline float max_lanes(V a) {
    float* x = a.lane;
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
    return x[0];
}

// keys[16][n] -> out[n][16], whatever numbers of four bytes these are
inline void transpose(const char* const* keys, int n, void* out) {
    for (int d = 0; d < n; d++)
        for (int i = 0; i < LANES; i++) memcpy(static_cast<char*>(out) + 4 * (d * LANES + i), keys[i] + 4 * d, 4);
}

// R rows times 16 outputs. Every path does the same arithmetic in the same order: integers within a group, then groups in order.
template <int R, bool MINIMUM, int BITS>
inline void multiply(const Panel& w, const InputGroup* x, V* out) {
    for (int r = 0; r < R; r++) out[r] = all(0.0f);
    for (int g = 0; g < w.groups; g++) {
        const V scale = load_f16(w.scales + g * LANES);
        for (int r = 0; r < R; r++) {
            const InputGroup& row = x[r * w.groups + g];
            const auto input = [&](int k) { return 16 * row.codes[k] + row.fine[k]; };
            V dots;
            for (int n = 0; n < LANES; n++) {
                int32_t dot = BITS == 4 && !MINIMUM ? 8 * (16 * row.minus_sum - row.fine_sum) : 0;
                for (int j = 0; j < 4; j++)
                    for (int b = 0; b < 4; b++) {
                        const int32_t x0 = input(4 * j + b), x1 = input(16 + 4 * j + b);
                        if (BITS == 4) {
                            const uint8_t both = w.codes[g * 256 + j * 64 + n * 4 + b];
                            dot += (both & 15) * x0 + (both >> 4) * x1;
                        } else {
                            const int8_t* codes = reinterpret_cast<const int8_t*>(w.codes) + g * 512 + j * 64 + n * 4 + b;
                            dot += codes[0] * x0 + codes[256] * x1;
                        }
                    }
                dots.lane[n] = static_cast<float>(dot);
            }
            out[r] = fma(dots, mul(scale, all(0.0625f * row.scale)), out[r]);
            if (MINIMUM) out[r] = fma(load_f16(w.minima + g * LANES), all(row.sum), out[r]);
        }
    }
}

}  // namespace
}  // namespace penstock
