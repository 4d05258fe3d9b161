// Sixteen lanes on arm64 with dot products.
#pragma once
#include <arm_neon.h>
#include <stdint.h>

#include "halves.h"
#include "kernels.h"

namespace penstock {
namespace {

constexpr int MAX_ROWS_INT = 4, MAX_ROWS_FLOAT = 2, TILE = 3, VECTORS = 1;

struct V {
    float32x4_t part[4];
};

// Without a loop, so that the compiler keeps each part in a register
#define PS_PARTS(expression)                            \
    const auto own = [&](int i) { return expression; }; \
    return {                                            \
        {                                               \
            own(0), own(1), own(2), own(3)              \
        }                                               \
    }

inline V load(const float* p) { PS_PARTS(vld1q_f32(p + 4 * i)); }
inline void save(float* p, V a) {
    for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.part[i]);
}
inline V all(float x) {
    const float32x4_t same = vdupq_n_f32(x);
    return {{same, same, same, same}};
}
inline V add(V a, V b) { PS_PARTS(vaddq_f32(a.part[i], b.part[i])); }
inline V sub(V a, V b) { PS_PARTS(vsubq_f32(a.part[i], b.part[i])); }
inline V mul(V a, V b) { PS_PARTS(vmulq_f32(a.part[i], b.part[i])); }
inline V div(V a, V b) { PS_PARTS(vdivq_f32(a.part[i], b.part[i])); }
inline V fma(V a, V b, V c) { PS_PARTS(vfmaq_f32(c.part[i], a.part[i], b.part[i])); }
inline V max(V a, V b) { PS_PARTS(vmaxq_f32(a.part[i], b.part[i])); }
inline V power_of_two(V a) {
    PS_PARTS(vreinterpretq_f32_s32(vaddq_s32(vshlq_n_s32(vreinterpretq_s32_f32(a.part[i]), 23), vdupq_n_s32(0x3f800000))));
}
inline V floor(V a) { PS_PARTS(vrndmq_f32(a.part[i])); }
inline float32x4_t widen_f16(uint16x4_t h) { return vcvt_f32_f16(vreinterpret_f16_u16(h)); }
inline float32x4_t widen_bf16(uint16x4_t h) { return vreinterpretq_f32_u32(vshll_n_u16(h, 16)); }
inline V load_f16(const uint16_t* p) { PS_PARTS(widen_f16(vld1_u16(p + 4 * i))); }
inline V load_bf16(const uint16_t* p) { PS_PARTS(widen_bf16(vld1_u16(p + 4 * i))); }
inline void save_f16(uint16_t* p, V a) {
    for (int i = 0; i < 4; i++) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.part[i])));
}
inline void load_pair_bf16(const uint16_t* p, V& even, V& odd) {
    for (int i = 0; i < 4; i++) {
        const uint32x4_t both = vreinterpretq_u32_u16(vld1q_u16(p + 8 * i));
        even.part[i] = vreinterpretq_f32_u32(vshlq_n_u32(both, 16));
        odd.part[i] = vreinterpretq_f32_u32(vandq_u32(both, vdupq_n_u32(0xffff0000u)));
    }
}
inline void load_pair_f16(const uint16_t* p, V& even, V& odd) {
    for (int i = 0; i < 4; i++) {
        const uint16x4x2_t both = vld2_u16(p + 8 * i);
        even.part[i] = widen_f16(both.val[0]);
        odd.part[i] = widen_f16(both.val[1]);
    }
}

#undef PS_PARTS

inline float sum_lanes(V a) {
    const float32x4_t four = vaddq_f32(vaddq_f32(a.part[0], a.part[2]), vaddq_f32(a.part[1], a.part[3]));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline float max_lanes(V a) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.part[0], a.part[2]), vmaxq_f32(a.part[1], a.part[3])));
}

// keys[16][n] -> out[n][16], whatever numbers of four bytes these are
inline void transpose(const char* const* keys, int n, void* out) {
    const auto at = [&](int key, int d) { return vld1q_f32(reinterpret_cast<const float*>(keys[key]) + d); };
    float* rows = static_cast<float*>(out);
    int d = 0;
    for (; d + 4 <= n; d += 4)
        for (int k = 0; k < LANES; k += 4) {
            const float32x4_t a = at(k, d), b = at(k + 1, d), c = at(k + 2, d), e = at(k + 3, d);
            const float64x2_t ab0 = vreinterpretq_f64_f32(vtrn1q_f32(a, b)), ab1 = vreinterpretq_f64_f32(vtrn2q_f32(a, b));
            const float64x2_t ce0 = vreinterpretq_f64_f32(vtrn1q_f32(c, e)), ce1 = vreinterpretq_f64_f32(vtrn2q_f32(c, e));
            float* to = rows + d * LANES + k;
            vst1q_f32(to, vreinterpretq_f32_f64(vtrn1q_f64(ab0, ce0)));
            vst1q_f32(to + LANES, vreinterpretq_f32_f64(vtrn1q_f64(ab1, ce1)));
            vst1q_f32(to + 2 * LANES, vreinterpretq_f32_f64(vtrn2q_f64(ab0, ce0)));
            vst1q_f32(to + 3 * LANES, vreinterpretq_f32_f64(vtrn2q_f64(ab1, ce1)));
        }
    for (; d < n; d++)
        for (int k = 0; k < LANES; k++) memcpy(rows + d * LANES + k, keys[k] + 4 * d, 4);
}

// Sums of integer products begin with the bits of 1.5 * 2^23, so that they are floats at once: exact below 2^22, and four times
// as fast as converting them.
constexpr int32_t MAGIC = 0x4b400000;
inline float32x4_t as_floats(int32x4_t sums) { return vsubq_f32(vreinterpretq_f32_s32(sums), vdupq_n_f32(12582912.0f)); }

// R rows of inputs [4 LANE, 4 LANE + 4) times four outputs
template <int LANE, int R, int S>
inline void add_dots(int32x4_t (*dots)[S], int s, int8x16_t codes, const int8x16_t* x) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) dots[r][s] = vdotq_laneq_s32(dots[r][s], codes, x[r], LANE);
}

// Add sixteen inputs of R rows, times S times four outputs: codes(j, s) are those of inputs [4 j, 4 j + 4). The sums of different
// outputs take turns, so that none waits for itself.
template <int R, int S, typename F>
inline void add_inputs(int32x4_t (*dots)[S], const int8_t* q, int64_t stride, const F& codes) {
    int8x16_t x[R];
    for (int r = 0; r < R; r++) x[r] = vld1q_s8(q + r * stride);
#pragma GCC unroll 4
    for (int s = 0; s < S; s++) add_dots<0, R, S>(dots, s, codes(0, s), x);
#pragma GCC unroll 4
    for (int s = 0; s < S; s++) add_dots<1, R, S>(dots, s, codes(1, s), x);
#pragma GCC unroll 4
    for (int s = 0; s < S; s++) add_dots<2, R, S>(dots, s, codes(2, s), x);
#pragma GCC unroll 4
    for (int s = 0; s < S; s++) add_dots<3, R, S>(dots, s, codes(3, s), x);
}

// Integer sums -> floats. Where a row has fine codes, `add_fine` sums their products, and all are in sixteenths: the unit returned.
template <int R, int S, typename F>
inline float finish_dots(const int32x4_t (*dots)[S], float32x4_t (*numbers)[S], const InputGroup* x, int64_t groups,
                         const F& add_fine) {
    for (int r = 0; r < R; r++)
        for (int s = 0; s < S; s++) numbers[r][s] = as_floats(dots[r][s]);
    if (!any_fine<R>(x, groups)) return 1.0f;
    int32x4_t fine[R][S];
    add_fine(fine);
    for (int r = 0; r < R; r++)
        for (int s = 0; s < S; s++) numbers[r][s] = vfmaq_n_f32(as_floats(fine[r][s]), numbers[r][s], 16.0f);
    return 0.0625f;
}

// Outputs [4 first, 4 (first + S)) of a panel, for R rows. The next panel is fetched into the first or second cache meanwhile:
// the processor does not look far enough ahead by itself.
template <int R, int S, bool MINIMUM, int BITS, int CACHE>
inline void multiply_part(const Panel& w, int first, const InputGroup* x, V* out) {
    float32x4_t sums[R][S];
    for (int r = 0; r < R; r++)
        for (int s = 0; s < S; s++) sums[r][s] = vdupq_n_f32(0.0f);
    const uint8_t* codes = w.codes + first * 16;
    constexpr int group_bytes = 64 * BITS + 32 * (MINIMUM ? 2 : 1);
    const uint8_t* next = w.codes + static_cast<int64_t>(w.groups) * group_bytes;
    const int64_t groups = w.groups, stride = groups * static_cast<int64_t>(sizeof(InputGroup));
    const auto dot_group = [&](int32x4_t(*dots)[S], const int8_t* q) {
        add_inputs<R, S>(dots, q, stride, [&](int j, int s) {
            const uint8x16_t own = vld1q_u8(codes + j * 64 + s * 16);
            return vreinterpretq_s8_u8(BITS == 4 ? vandq_u8(own, vdupq_n_u8(15)) : own);
        });
        add_inputs<R, S>(dots, q + 16, stride, [&](int j, int s) {
            const uint8x16_t own = vld1q_u8(codes + (BITS == 4 ? j : j + 4) * 64 + s * 16);
            return vreinterpretq_s8_u8(BITS == 4 ? vshrq_n_u8(own, 4) : own);
        });
    };
    constexpr int zero_point = BITS == 4 && !MINIMUM ? 8 : 0;
    for (int g = 0; g < groups; g++, codes += 64 * BITS, x++, next += group_bytes) {
        if (first == 0)
            for (int line = 0; line < group_bytes; line += 64) __builtin_prefetch(next + line, 0, 4 - CACHE);
        int32x4_t dots[R][S];
        for (int r = 0; r < R; r++)
            for (int s = 0; s < S; s++) dots[r][s] = vdupq_n_s32(MAGIC + zero_point * x[r * groups].minus_sum);
        dot_group(dots, x->codes);
        float32x4_t numbers[R][S];
        const float unit = finish_dots<R, S>(dots, numbers, x, groups, [&](int32x4_t(*fine)[S]) {
            for (int r = 0; r < R; r++)
                for (int s = 0; s < S; s++) fine[r][s] = vdupq_n_s32(MAGIC - zero_point * x[r * groups].fine_sum);
            dot_group(fine, x->fine);
        });
#pragma GCC unroll 4
        for (int s = 0; s < S; s++) {
            const float32x4_t scale = widen_f16(vld1_u16(w.scales + g * LANES + 4 * (first + s)));
            const float32x4_t minimum = MINIMUM ? widen_f16(vld1_u16(w.minima + g * LANES + 4 * (first + s))) : scale;
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const InputGroup& row = x[r * groups];
                sums[r][s] = vfmaq_f32(sums[r][s], numbers[r][s], vmulq_n_f32(scale, unit * row.scale));
                if (MINIMUM) sums[r][s] = vfmaq_n_f32(sums[r][s], minimum, row.sum);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int s = 0; s < S; s++) out[r].part[first + s] = sums[r][s];
}

template <int R, bool MINIMUM, int BITS>
inline void multiply(const Panel& w, const InputGroup* x, V* out) {
    constexpr int S = R <= 2 ? 4 : 2;  // as many sums as there are registers for
    const bool small = w.groups * 64 * BITS <= 8192;
    for (int first = 0; first < 4; first += S)
        small ? multiply_part<R, S, MINIMUM, BITS, 1>(w, first, x, out) : multiply_part<R, S, MINIMUM, BITS, 2>(w, first, x, out);
}

}  // namespace
}  // namespace penstock
