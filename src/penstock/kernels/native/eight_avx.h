// What AVX2 and AVX-512 do with eight floats: sums and maxima of halves, and transposing eight by eight.
#pragma once
#include <immintrin.h>
#include <string.h>

#include "kernels.h"

namespace penstock {
namespace {

inline float sum_of_8(__m256 a) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

inline float max_of_8(__m256 a) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
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

}  // namespace
}  // namespace penstock
