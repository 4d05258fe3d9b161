// Sixteen lanes as one register of AVX-512, with VNNI where PS_AVX512_VNNI is set.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#include "halves.h"
#include "kernels.h"
#include "eight_avx.h"

namespace penstock {
namespace {

constexpr int MAX_ROWS_INT = 8, MAX_ROWS_FLOAT = 8, TILE = 8;

struct V {
    __m512 v;
};

inline V load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void save(float* p, V a) { _mm512_storeu_ps(p, a.v); }
inline V all(float x) { return {_mm512_set1_ps(x)}; }
inline V add(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
inline V sub(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline V mul(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline V div(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
inline V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline V max(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }
inline __m256 upper_lanes(V a) { return _mm512_extractf32x8_ps(a.v, 1); }
inline float sum_lanes(V a) { return sum_of_8(_mm256_add_ps(_mm512_castps512_ps256(a.v), upper_lanes(a))); }
inline float max_lanes(V a) { return max_of_8(_mm256_max_ps(_mm512_castps512_ps256(a.v), upper_lanes(a))); }
inline V power_of_two(V a) {
    const __m512i shifted = _mm512_slli_epi32(_mm512_castps_si512(a.v), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(shifted, _mm512_set1_epi32(0x3f800000)))};
}
inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline V load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(load256(p))}; }
inline V load_bf16(const uint16_t* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load256(p)), 16))}; }
inline void save_f16(uint16_t* p, V a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline void load_pair_bf16(const uint16_t* p, V& even, V& odd) {
    const __m512i both = _mm512_loadu_si512(p);
    even = {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16))};
    odd = {_mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
inline void load_pair_f16(const uint16_t* p, V& even, V& odd) {
    const __m512i both = _mm512_loadu_si512(p);
    even = {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(both))};
    odd = {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(both, 16)))};
}

inline __m512i broadcast_inputs(const int8_t* x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    return _mm512_set1_epi32(four);
}

// The 4-bit codes of a group, as bytes
inline void unpack_codes(const uint8_t* from, __m512i* codes) {
    const __m512i low_bits = _mm512_set1_epi8(15);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const __m512i both = _mm512_loadu_si512(from + j * 64);
        codes[j] = _mm512_and_si512(both, low_bits);
        codes[4 + j] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_bits);
    }
}

#ifdef PS_AVX512_VNNI

// The instruction wants unsigned codes: signed ones are raised by 128, and 128 times the sum of the inputs is taken off.
template <int BITS>
struct GroupCodes {
    static constexpr int RAISED = BITS == 8 ? 128 : 0;
    __m512i codes[8];

    explicit GroupCodes(const uint8_t* from) {
        const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
        if (BITS == 4)
            unpack_codes(from, codes);
        else
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) codes[j] = _mm512_xor_si512(_mm512_loadu_si512(from + j * 64), sign);
    }

    // start + the products of 32 inputs with the codes of 16 outputs
    __m512i dot(int32_t start, const int8_t* x) const {
        __m512i even = _mm512_set1_epi32(start), odd = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int j = 0; j < 8; j += 2) {
            even = _mm512_dpbusd_epi32(even, codes[j], broadcast_inputs(x + 4 * j));
            odd = _mm512_dpbusd_epi32(odd, codes[j + 1], broadcast_inputs(x + 4 * j + 4));
        }
        return _mm512_add_epi32(even, odd);
    }
};

#else

// Pairs of products have 16 bits. Those of a group's 4-bit codes are summed in 16 bits, too: 16 * 15 * 127 < 2^15. Of 8-bit codes,
// |code| is multiplied with the input that has the code's sign: 2 * 128 * 127 < 2^15.
template <int BITS>
struct GroupCodes {
    static constexpr int RAISED = 0;
    __m512i codes[8];
    __mmask64 negative[8];

    explicit GroupCodes(const uint8_t* from) {
        if (BITS == 4)
            unpack_codes(from, codes);
        else
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) {
                const __m512i own = _mm512_loadu_si512(from + j * 64);
                negative[j] = _mm512_movepi8_mask(own);
                codes[j] = _mm512_abs_epi8(own);
            }
    }

    __m512i pairs(int j, const int8_t* x) const {
        const __m512i inputs = broadcast_inputs(x + 4 * j);
        if (BITS == 4) return _mm512_maddubs_epi16(codes[j], inputs);
        return _mm512_maddubs_epi16(codes[j], _mm512_mask_sub_epi8(inputs, negative[j], _mm512_setzero_si512(), inputs));
    }

    __m512i dot(int32_t start, const int8_t* x) const {
        const __m512i ones = _mm512_set1_epi16(1);
        if (BITS == 4) {
            __m512i sum = pairs(0, x);
#pragma GCC unroll 8
            for (int j = 1; j < 8; j++) sum = _mm512_add_epi16(sum, pairs(j, x));
            return _mm512_add_epi32(_mm512_madd_epi16(sum, ones), _mm512_set1_epi32(start));
        }
        __m512i sum = _mm512_set1_epi32(start);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) sum = _mm512_add_epi32(sum, _mm512_madd_epi16(pairs(j, x), ones));
        return sum;
    }
};

#endif

template <int R, bool MINIMUM, int BITS>
inline void multiply(const Panel& w, const int8_t* q, int64_t stride, const GroupInfo* info, V* out) {
    __m512 sums[R];
    for (int r = 0; r < R; r++) sums[r] = _mm512_setzero_ps();
    constexpr int zero_point = BITS == 4 && !MINIMUM ? 8 : GroupCodes<BITS>::RAISED;
    for (int g = 0; g < w.groups; g++) {
        const GroupCodes<BITS> codes(w.codes + g * 64 * BITS);
        const __m512 scale = _mm512_cvtph_ps(load256(w.scales + g * LANES));
        const __m512 minimum = MINIMUM ? _mm512_cvtph_ps(load256(w.minima + g * LANES)) : _mm512_setzero_ps();
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const int8_t* x = q + r * stride + g * 2 * GROUP;
            const GroupInfo& row = info[static_cast<int64_t>(r) * w.groups + g];
            __m512i dots = codes.dot(-zero_point * row.code_sum, x);
            float row_scale = row.scale;
            if (row.fine) {
                const __m512i fine = codes.dot(-zero_point * row.fine_sum, x + GROUP);
                dots = _mm512_add_epi32(_mm512_slli_epi32(dots, 4), fine);
                row_scale *= 0.0625f;
            }
            const __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(row_scale));
            sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), factor, sums[r]);
            if (MINIMUM) sums[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(row.sum), sums[r]);
        }
    }
    for (int r = 0; r < R; r++) out[r] = {sums[r]};
}

}  // namespace
}  // namespace penstock
