// 16-bit floats in plain C++, rounded to nearest even.
#pragma once
#include <stdint.h>
#include <string.h>

namespace penstock {

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float from_bf16(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }

static inline uint16_t to_bf16(float x) {
    const uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

static inline float from_f16(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, exponent = h >> 10 & 0x1fu, mantissa = h & 0x3ffu;
    if (exponent == 0x1f) return float_of(sign | 0x7f800000u | mantissa << 13 | (mantissa ? 0x400000u : 0u));
    if (exponent != 0) return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
    const float small = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -small : small;
}

static inline uint16_t to_f16(float x) {
    const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    uint32_t half;
    if (rest > 0x7f800000u) {
        half = 0x7e00u | (rest >> 13 & 0x3ffu);
    } else if (rest >= 0x477ff000u) {  // rounds to 65536 or more
        half = 0x7c00u;
    } else if (rest < 0x38800000u) {  // a subnormal half: the addition rounds
        half = bits_of(float_of(rest) + 0.5f) - 0x3f000000u;
    } else {
        half = (rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13;
    }
    return static_cast<uint16_t>(sign | half);
}

}  // namespace penstock
