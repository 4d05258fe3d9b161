// Sixteen lanes on arm64 with dot products.
#pragma once
#include <arm_neon.h>
#include <stdint.h>

#include "halves.h"
#include "kernels.h"

namespace penstock {
namespace {

constexpr int MAX_ROWS_INT = 4, MAX_ROWS_FLOAT = 2, TILE = 4;

struct V {
    float32x4_t part[4];
};

#define PS_PARTS(expression)                              \
    V out;                                                \
    for (int i = 0; i < 4; i++) out.part[i] = expression; \
    return out

inline V load(const float* p) { PS_PARTS(vld1q_f32(p + 4 * i)); }
inline void save(float* p, V a) {
    for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.part[i]);
}
inline V all(float x) { PS_PARTS(vdupq_n_f32(x)); }
inline V add(V a, V b) { PS_PARTS(vaddq_f32(a.part[i], b.part[i])); }
inline V sub(V a, V b) { PS_PARTS(vsubq_f32(a.part[i], b.part[i])); }
inline V mul(V a, V b) { PS_PARTS(vmulq_f32(a.part[i], b.part[i])); }
inline V div(V a, V b) { PS_PARTS(vdivq_f32(a.part[i], b.part[i])); }
inline V fma(V a, V b, V c) { PS_PARTS(vfmaq_f32(c.part[i], a.part[i], b.part[i])); }
inline V max(V a, V b) { PS_PARTS(vmaxq_f32(a.part[i], b.part[i])); }
inline V power_of_two(V a) {
    PS_PARTS(vreinterpretq_f32_s32(vaddq_s32(vshlq_n_s32(vreinterpretq_s32_f32(a.part[i]), 23), vdupq_n_s32(0x3f800000))));
}
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

// keys[16][n] -> out[n][16]
inline void transpose(const float* const* keys, int n, float* out) {
    int d = 0;
    for (; d + 4 <= n; d += 4)
        for (int k = 0; k < LANES; k += 4) {
            const float32x4_t a = vld1q_f32(keys[k] + d), b = vld1q_f32(keys[k + 1] + d);
            const float32x4_t c = vld1q_f32(keys[k + 2] + d), e = vld1q_f32(keys[k + 3] + d);
            const float64x2_t ab0 = vreinterpretq_f64_f32(vtrn1q_f32(a, b)), ab1 = vreinterpretq_f64_f32(vtrn2q_f32(a, b));
            const float64x2_t ce0 = vreinterpretq_f64_f32(vtrn1q_f32(c, e)), ce1 = vreinterpretq_f64_f32(vtrn2q_f32(c, e));
            float* to = out + d * LANES + k;
            vst1q_f32(to, vreinterpretq_f32_f64(vtrn1q_f64(ab0, ce0)));
            vst1q_f32(to + LANES, vreinterpretq_f32_f64(vtrn1q_f64(ab1, ce1)));
            vst1q_f32(to + 2 * LANES, vreinterpretq_f32_f64(vtrn2q_f64(ab0, ce0)));
            vst1q_f32(to + 3 * LANES, vreinterpretq_f32_f64(vtrn2q_f64(ab1, ce1)));
        }
    for (; d < n; d++)
        for (int k = 0; k < LANES; k++) out[d * LANES + k] = keys[k][d];
}

// Four outputs times the inputs of a group: codes [8][4 outputs][4 inputs]
inline int32x4_t dot(int32x4_t sum, const int8x16_t* codes, int8x16_t x0, int8x16_t x1) {
    sum = vdotq_laneq_s32(sum, codes[0], x0, 0);
    sum = vdotq_laneq_s32(sum, codes[1], x0, 1);
    sum = vdotq_laneq_s32(sum, codes[2], x0, 2);
    sum = vdotq_laneq_s32(sum, codes[3], x0, 3);
    sum = vdotq_laneq_s32(sum, codes[4], x1, 0);
    sum = vdotq_laneq_s32(sum, codes[5], x1, 1);
    sum = vdotq_laneq_s32(sum, codes[6], x1, 2);
    return vdotq_laneq_s32(sum, codes[7], x1, 3);
}

template <int R, bool MINIMUM, int BITS>
inline void multiply(const Panel& w, const int8_t* q, int64_t stride, const GroupInfo* info, V* out) {
    float32x4_t sums[R][4];
    for (int r = 0; r < R; r++)
        for (int s = 0; s < 4; s++) sums[r][s] = vdupq_n_f32(0.0f);
    for (int g = 0; g < w.groups; g++) {
#pragma GCC unroll 4
        for (int s = 0; s < 4; s++) {
            int8x16_t codes[8];
            if (BITS == 4) {
                for (int j = 0; j < 4; j++) {
                    const uint8x16_t both = vld1q_u8(w.codes + g * 256 + j * 64 + s * 16);
                    codes[j] = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
                    codes[4 + j] = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
                }
            } else {
                for (int j = 0; j < 8; j++) codes[j] = vreinterpretq_s8_u8(vld1q_u8(w.codes + g * 512 + j * 64 + s * 16));
            }
            const float32x4_t scale = widen_f16(vld1_u16(w.scales + g * LANES + 4 * s));
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const int8_t* x = q + r * stride + g * GROUP;
                const GroupInfo& row = info[r * w.groups + g];
                const int32x4_t zero = vdupq_n_s32(BITS == 4 && !MINIMUM ? -8 * row.code_sum : 0);
                const float32x4_t dots = vcvtq_f32_s32(dot(zero, codes, vld1q_s8(x), vld1q_s8(x + 16)));
                sums[r][s] = vfmaq_f32(sums[r][s], dots, vmulq_n_f32(scale, row.scale));
                if (MINIMUM) {
                    const float32x4_t minimum = widen_f16(vld1_u16(w.minima + g * LANES + 4 * s));
                    sums[r][s] = vfmaq_n_f32(sums[r][s], minimum, row.sum);
                }
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int s = 0; s < 4; s++) out[r].part[s] = sums[r][s];
}

}  // namespace
}  // namespace penstock
