// Sixteen lanes as two registers of AVX2, with VNNI where PS_AVX_VNNI is set.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#include "halves.h"
#include "kernels.h"
#include "eight_avx.h"

namespace penstock {
namespace {

constexpr int MAX_ROWS_INT = 4, MAX_ROWS_FLOAT = 3, TILE = 3, VECTORS = 1;

struct V {
    __m256 low, high;
};

inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void save(float* p, V a) {
    _mm256_storeu_ps(p, a.low);
    _mm256_storeu_ps(p + 8, a.high);
}
inline V all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline V add(V a, V b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline V sub(V a, V b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline V mul(V a, V b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline V div(V a, V b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)}; }
inline V max(V a, V b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline float sum_lanes(V a) { return sum_of_8(_mm256_add_ps(a.low, a.high)); }
inline float max_lanes(V a) { return max_of_8(_mm256_max_ps(a.low, a.high)); }
inline __m256 power_of_two(__m256 a) {
    const __m256i shifted = _mm256_slli_epi32(_mm256_castps_si256(a), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(shifted, _mm256_set1_epi32(0x3f800000)));
}
inline V power_of_two(V a) { return {power_of_two(a.low), power_of_two(a.high)}; }
inline V floor(V a) { return {_mm256_floor_ps(a.low), _mm256_floor_ps(a.high)}; }
inline __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m256 widen_f16(const uint16_t* p) { return _mm256_cvtph_ps(load128(p)); }
inline __m256 widen_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(p)), 16));
}
inline V load_f16(const uint16_t* p) { return {widen_f16(p), widen_f16(p + 8)}; }
inline V load_bf16(const uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
inline void save_f16(uint16_t* p, V a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.low, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(a.high, _MM_FROUND_TO_NEAREST_INT));
}
inline void transpose_8x8(const char* const* from, int d, float* to) {
    const auto at = [&](int i) { return _mm256_loadu_ps(reinterpret_cast<const float*>(from[i]) + d); };
    __m256 t[8], u[8];
    for (int i = 0; i < 8; i += 2) {
        const __m256 a = at(i), b = at(i + 1);
        t[i] = _mm256_unpacklo_ps(a, b);
        t[i + 1] = _mm256_unpackhi_ps(a, b);
    }
    for (int i = 0; i < 8; i += 4) {
        u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + i * LANES, _mm256_permute2f128_ps(u[i], u[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * LANES, _mm256_permute2f128_ps(u[i], u[i + 4], 0x31));
    }
}

// keys[16][n] -> out[n][16], whatever numbers of four bytes these are
inline void transpose(const char* const* keys, int n, void* out) {
    float* to = static_cast<float*>(out);
    int d = 0;
    for (; d + 8 <= n; d += 8)
        for (int k = 0; k < LANES; k += 8) transpose_8x8(keys + k, d, to + d * LANES + k);
    for (; d < n; d++)
        for (int k = 0; k < LANES; k++) memcpy(to + d * LANES + k, keys[k] + 4 * d, 4);
}

inline void load_pair_bf16(const uint16_t* p, V& even, V& odd) {
    const __m256i a = load256(p), b = load256(p + 16), mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    even = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
    odd = {_mm256_castsi256_ps(_mm256_and_si256(a, mask)), _mm256_castsi256_ps(_mm256_and_si256(b, mask))};
}
// The low 16 bits of eight lanes, as floats
inline __m256 narrow_f16(__m256i a) {
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, a), 0x08);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
}
inline void load_pair_f16(const uint16_t* p, V& even, V& odd) {
    const __m256i a = load256(p), b = load256(p + 16), mask = _mm256_set1_epi32(0xffff);
    even = {narrow_f16(_mm256_and_si256(a, mask)), narrow_f16(_mm256_and_si256(b, mask))};
    odd = {narrow_f16(_mm256_srli_epi32(a, 16)), narrow_f16(_mm256_srli_epi32(b, 16))};
}

inline __m256i broadcast_inputs(const int8_t* x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    return _mm256_set1_epi32(four);
}

// sum + the dot product of four unsigned codes with four signed inputs, for eight outputs
inline __m256i dot_unsigned(__m256i sum, __m256i codes, __m256i x) {
#ifdef PS_AVX_VNNI
    return _mm256_dpbusd_avx_epi32(sum, codes, x);
#else
    // pairs of a 4-bit code stay below 2^15: nothing saturates
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1)));
#endif
}

// The same for signed codes: |code| times the input with the code's sign. 2 * 128 * 127 fits into 16 bits.
inline __m256i dot_signed(__m256i sum, __m256i codes, __m256i x) {
    return dot_unsigned(sum, _mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes));
}

// Add the products of 32 inputs of R rows, `stride` bytes apart, with the codes of 8 outputs.
template <int R, int BITS>
inline void dot_group(const uint8_t* codes, const int8_t* q, int64_t stride, __m256i* dots) {
    const __m256i low_bits = _mm256_set1_epi8(15);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        __m256i first, second;
        if (BITS == 4) {
            const __m256i both = load256(codes + j * 64);
            first = _mm256_and_si256(both, low_bits);
            second = _mm256_and_si256(_mm256_srli_epi16(both, 4), low_bits);
        } else {
            first = load256(codes + j * 64);
            second = load256(codes + 256 + j * 64);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const int8_t* x = q + r * stride + 4 * j;
            const __m256i x0 = broadcast_inputs(x), x1 = broadcast_inputs(x + 16);
            dots[r] = BITS == 4 ? dot_unsigned(dot_unsigned(dots[r], first, x0), second, x1)
                                : dot_signed(dot_signed(dots[r], first, x0), second, x1);
        }
    }
}

template <int R, bool MINIMUM, int BITS>
inline void multiply(const Panel& w, const InputGroup* x, V* out) {
    __m256 sums[R][2];
    for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = _mm256_setzero_ps();
    constexpr int zero_point = BITS == 4 && !MINIMUM ? 8 : 0;
    const int64_t groups = w.groups, stride = groups * static_cast<int64_t>(sizeof(InputGroup));
    for (int64_t g = 0; g < groups; g++, x++) {
        fetch_ahead<64 * BITS + (MINIMUM ? 64 : 32)>(w.next, g);
#pragma GCC unroll 2
        for (int s = 0; s < 2; s++) {
            const uint8_t* codes = w.codes + g * 64 * BITS + s * 32;
            __m256i dots[R];
            for (int r = 0; r < R; r++) dots[r] = _mm256_set1_epi32(zero_point * x[r * groups].minus_sum);
            dot_group<R, BITS>(codes, x->codes, stride, dots);
            __m256 scale = widen_f16(w.scales + g * LANES + 8 * s);
            if (any_fine<R>(x, groups)) {
                __m256i fine[R];
                for (int r = 0; r < R; r++) fine[r] = _mm256_set1_epi32(-zero_point * x[r * groups].fine_sum);
                dot_group<R, BITS>(codes, x->fine, stride, fine);
                for (int r = 0; r < R; r++) dots[r] = _mm256_add_epi32(_mm256_slli_epi32(dots[r], 4), fine[r]);
                scale = _mm256_mul_ps(scale, _mm256_set1_ps(0.0625f));
            }
            for (int r = 0; r < R; r++) {
                const InputGroup& row = x[r * groups];
                const __m256 factor = _mm256_mul_ps(scale, _mm256_set1_ps(row.scale));
                sums[r][s] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r]), factor, sums[r][s]);
                if (MINIMUM) {
                    const __m256 minimum = widen_f16(w.minima + g * LANES + 8 * s);
                    sums[r][s] = _mm256_fmadd_ps(minimum, _mm256_set1_ps(row.sum), sums[r][s]);
                }
            }
        }
    }
    for (int r = 0; r < R; r++) out[r] = {sums[r][0], sums[r][1]};
}

}  // namespace
}  // namespace penstock
