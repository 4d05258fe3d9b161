// Sixteen lanes as one register of AVX-512, with VNNI where PS_AVX512_VNNI is set.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#include "halves.h"
#include "kernels.h"
#include "eight_avx.h"

namespace penstock {
namespace {

constexpr int MAX_ROWS_INT = 8, MAX_ROWS_FLOAT = 8, TILE = 4, VECTORS = 2;

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
#define PS_OWN_FRACTION
inline V fraction(V y) { return sub(y, {_mm512_roundscale_ps(y.v, _MM_FROUND_TO_NEG_INF)}); }
inline V times_power(V p, V y) { return {_mm512_scalef_ps(p.v, y.v)}; }
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

#define PS_OWN_SELECT

// Stored whole: some processors take long to store what they compress.
inline int select_lanes(const float* weights, float bound, int id, float* to, int32_t* ids) {
    const __m512i ramp = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 values = _mm512_loadu_ps(weights);
    const __mmask16 likely = _mm512_cmp_ps_mask(values, _mm512_set1_ps(bound), _CMP_GE_OQ);
    _mm512_storeu_ps(to, _mm512_maskz_compress_ps(likely, values));
    _mm512_storeu_si512(ids, _mm512_maskz_compress_epi32(likely, _mm512_add_epi32(ramp, _mm512_set1_epi32(id))));
    return __builtin_popcount(likely);
}

#define PS_OWN_GROUPS

inline __m512i nearest(__m512 x) {
    return _mm512_sub_epi32(_mm512_castps_si512(_mm512_add_ps(x, _mm512_set1_ps(12582912.0f))), _mm512_set1_epi32(0x4b400000));
}
// The lowest bytes of 16 integers are stored -> their sum, lane by lane with `sum`
inline __m512i store_codes(__m512i codes, int8_t* to, __m512i sum) {
    const __m128i bytes = _mm512_cvtepi32_epi8(codes);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
    return _mm512_add_epi32(sum, _mm512_cvtepi8_epi32(bytes));
}

// As quantise_group in kernels.inl
inline void quantise_group(const float* x, float loud, InputGroup& to) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const __m512 parts[2] = {_mm512_loadu_ps(x), _mm512_loadu_ps(x + LANES)};
    const __m512i highest = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(parts[0]), magnitude),
                                             _mm512_and_si512(_mm512_castps_si512(parts[1]), magnitude));
    const InputScale scale(float_of(_mm512_reduce_max_epu32(highest)), loud);
    __m512i sum = _mm512_setzero_si512(), fine_sum = sum;
    if (scale.fine) {
        const __m512 inverse = _mm512_set1_ps(16.0f * scale.inverse);
        for (int i = 0; i < 2; i++) {
            const __m512i sixteenths = nearest(_mm512_mul_ps(parts[i], inverse));
            const __m512i codes = _mm512_srai_epi32(_mm512_add_epi32(sixteenths, _mm512_set1_epi32(8)), 4);
            sum = store_codes(codes, to.codes + i * LANES, sum);
            fine_sum = store_codes(_mm512_sub_epi32(sixteenths, _mm512_slli_epi32(codes, 4)), to.fine + i * LANES, fine_sum);
        }
    } else {
        const __m512 inverse = _mm512_set1_ps(scale.inverse);
        for (int i = 0; i < 2; i++) sum = store_codes(nearest(_mm512_mul_ps(parts[i], inverse)), to.codes + i * LANES, sum);
        memset(to.fine, 0, sizeof to.fine);
    }
    scale.finish(_mm512_reduce_add_epi32(sum), scale.fine ? _mm512_reduce_add_epi32(fine_sum) : 0, to);
}

// keys[16][n] -> out[n][16], whatever numbers of four bytes these are
inline void transpose(const char* const* keys, int n, void* out) {
    float* to = static_cast<float*>(out);
    int d = 0;
    for (; d + 4 <= n; d += 4) {
        __m512 part[4];  // four numbers of keys i, 4 + i, 8 + i and 12 + i
        for (int i = 0; i < 4; i++) {
            const auto four = [&](int key) { return _mm_loadu_ps(reinterpret_cast<const float*>(keys[key]) + d); };
            part[i] = _mm512_castps128_ps512(four(i));
            part[i] = _mm512_mask_broadcast_f32x4(part[i], 0x00f0, four(4 + i));
            part[i] = _mm512_mask_broadcast_f32x4(part[i], 0x0f00, four(8 + i));
            part[i] = _mm512_mask_broadcast_f32x4(part[i], 0xf000, four(12 + i));
        }
        const __m512 low01 = _mm512_unpacklo_ps(part[0], part[1]), high01 = _mm512_unpackhi_ps(part[0], part[1]);
        const __m512 low23 = _mm512_unpacklo_ps(part[2], part[3]), high23 = _mm512_unpackhi_ps(part[2], part[3]);
        _mm512_storeu_ps(to + d * LANES, _mm512_shuffle_ps(low01, low23, 0x44));
        _mm512_storeu_ps(to + (d + 1) * LANES, _mm512_shuffle_ps(low01, low23, 0xee));
        _mm512_storeu_ps(to + (d + 2) * LANES, _mm512_shuffle_ps(high01, high23, 0x44));
        _mm512_storeu_ps(to + (d + 3) * LANES, _mm512_shuffle_ps(high01, high23, 0xee));
    }
    for (; d < n; d++)
        for (int k = 0; k < LANES; k++) memcpy(to + d * LANES + k, keys[k] + 4 * d, 4);
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

// sum + the products of four unsigned codes of each output with four signed inputs. The compiler would broadcast these apart.
inline void add_dots(__m512i& sum, __m512i codes, const int8_t* x) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*reinterpret_cast<const int32_t*>(x)));
}

// The instruction wants unsigned codes: signed ones are raised by 128, and sums begin with -128 times the sum of the inputs.
template <int ZERO_POINT>
inline __m512i first_sum(int32_t minus_sum) {
    if (ZERO_POINT == 0) return _mm512_setzero_si512();
    return _mm512_slli_epi32(_mm512_set1_epi32(minus_sum), ZERO_POINT == 8 ? 3 : 7);
}

// Add the products of 32 inputs of R rows with the codes of 16 outputs. The rows take turns, since each sum has to wait for its
// last addition; where there are few, each has two.
template <int R, int BITS, bool FINE>
inline void dot_group(const uint8_t* from, const InputGroup* const (&x)[R], __m512i (&sums)[R]) {
    constexpr bool two = R < 8;
    const __m512i low_bits = _mm512_set1_epi8(15), sign = _mm512_set1_epi8(static_cast<char>(0x80));
    __m512i more[R];
    if (two)
        for (int r = 0; r < R; r++) more[r] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        __m512i first = _mm512_loadu_si512(from + j * 64), second;
        if (BITS == 4) {
            second = _mm512_and_si512(_mm512_srli_epi16(first, 4), low_bits);
            first = _mm512_and_si512(first, low_bits);
        } else {
            second = _mm512_xor_si512(_mm512_loadu_si512(from + 256 + j * 64), sign);
            first = _mm512_xor_si512(first, sign);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) add_dots(sums[r], first, (FINE ? x[r]->fine : x[r]->codes) + 4 * j);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) add_dots(two ? more[r] : sums[r], second, (FINE ? x[r]->fine : x[r]->codes) + 16 + 4 * j);
    }
    if (two)
        for (int r = 0; r < R; r++) sums[r] = _mm512_add_epi32(sums[r], more[r]);
}

// Add the products of group g. FINE: where a row has fine codes in it
template <int R, bool MINIMUM, int BITS, bool FINE>
inline void add_group(const Panel& w, int64_t g, const InputGroup* const (&x)[R], __m512 (&sums)[R]) {
    constexpr int zero_point = BITS == 8 ? 128 : MINIMUM ? 0 : 8;
    const uint8_t* codes = w.codes + g * 64 * BITS;
    __m512i dots[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) dots[r] = first_sum<zero_point>(x[r]->minus_sum);
    dot_group<R, BITS, false>(codes, x, dots);
    __m512 scale = _mm512_cvtph_ps(load256(w.scales + g * LANES));
    if (FINE) {
        __m512i fine[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) fine[r] = first_sum<zero_point>(-x[r]->fine_sum);
        dot_group<R, BITS, true>(codes, x, fine);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) dots[r] = _mm512_add_epi32(_mm512_slli_epi32(dots[r], 4), fine[r]);
        scale = _mm512_mul_ps(scale, _mm512_set1_ps(0.0625f));
    }
    const __m512 minimum = MINIMUM ? _mm512_cvtph_ps(load256(w.minima + g * LANES)) : scale;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        const __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(x[r]->scale));
        sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[r]), factor, sums[r]);
        if (MINIMUM) sums[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(x[r]->sum), sums[r]);
    }
}

template <int R, bool MINIMUM, int BITS>
inline void multiply(const Panel& w, const InputGroup* rows, V* out) {
    const int64_t groups = w.groups;
    __m512 sums[R];
    const InputGroup* x[R];
    for (int r = 0; r < R; r++) sums[r] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++, rows++) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            x[r] = rows + r * groups;
            asm("" : "+r"(x[r]));  // each in a register: the compiler would make every address of a base and an index
        }
        fetch_ahead<64 * BITS + (MINIMUM ? 64 : 32)>(w.next, g);
        if (__builtin_expect(any_fine<R>(rows, groups), 0))
            add_group<R, MINIMUM, BITS, true>(w, g, x, sums);
        else
            add_group<R, MINIMUM, BITS, false>(w, g, x, sums);
    }
    for (int r = 0; r < R; r++) out[r] = {sums[r]};
}

#else

// Pairs of products have 16 bits. Those of a group's 4-bit codes are summed in 16 bits, too: 16 * 15 * 127 < 2^15. Of 8-bit
// codes, |code| is multiplied with the input that has the code's sign: 2 * 128 * 127 < 2^15.
template <int BITS>
struct GroupCodes {
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

template <int R, bool MINIMUM, int BITS>
inline void multiply(const Panel& w, const InputGroup* x, V* out) {
    __m512 sums[R];
    for (int r = 0; r < R; r++) sums[r] = _mm512_setzero_ps();
    constexpr int zero_point = BITS == 4 && !MINIMUM ? 8 : 0;
    for (int g = 0; g < w.groups; g++) {
        fetch_ahead<64 * BITS + (MINIMUM ? 64 : 32)>(w.next, g);
        const GroupCodes<BITS> codes(w.codes + g * 64 * BITS);
        const __m512 scale = _mm512_cvtph_ps(load256(w.scales + g * LANES));
        const __m512 minimum = MINIMUM ? _mm512_cvtph_ps(load256(w.minima + g * LANES)) : _mm512_setzero_ps();
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const InputGroup& row = x[static_cast<int64_t>(r) * w.groups + g];
            __m512i dots = codes.dot(zero_point * row.minus_sum, row.codes);
            float row_scale = row.scale;
            if (row.is_fine) {
                const __m512i fine = codes.dot(-zero_point * row.fine_sum, row.fine);
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

#endif

}  // namespace
}  // namespace penstock
