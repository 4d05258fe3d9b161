#include "blocks.h"

#include <cstring>

#include "halves.h"

namespace penstock {
namespace {

float half_at(const uint8_t* p) {
    uint16_t half;
    memcpy(&half, p, sizeof half);
    return from_f16(half);
}

// The scales and minima of Q4_K and Q5_K: eight pairs of 6 bits in 12 bytes
void scale_and_minimum(const uint8_t* packed, int i, int& scale, int& minimum) {
    if (i < 4) {
        scale = packed[i] & 63;
        minimum = packed[i + 4] & 63;
    } else {
        scale = (packed[i + 4] & 15) | (packed[i - 4] >> 6) << 4;
        minimum = packed[i + 4] >> 4 | (packed[i] >> 6) << 4;
    }
}

void read_small(int type, const uint8_t* block, SourceGroup& out) {
    const bool with_minimum = type == PS_TYPE_Q4_1 || type == PS_TYPE_Q5_1;
    out.scale = half_at(block);
    block += 2;
    if (with_minimum) {
        out.minimum = half_at(block);
        block += 2;
    }
    if (type == PS_TYPE_Q8_0) {
        memcpy(out.codes, block, 32);
        return;
    }
    uint32_t fifth = 0;
    const bool five = type == PS_TYPE_Q5_0 || type == PS_TYPE_Q5_1;
    if (five) {
        memcpy(&fifth, block, 4);
        block += 4;
    }
    const int zero = with_minimum ? 0 : five ? 16 : 8;
    for (int i = 0; i < 32; i++) {
        const int low = i < 16 ? block[i] & 15 : block[i - 16] >> 4;
        out.codes[i] = static_cast<int8_t>((low | static_cast<int>(fifth >> i & 1) << 4) - zero);
    }
}

void read_super(int type, const uint8_t* block, int part, SourceGroup& out) {
    const bool five = type == PS_TYPE_Q5_K;
    int scale, minimum;
    scale_and_minimum(block + 4, part, scale, minimum);
    out.scale = half_at(block) * static_cast<float>(scale);
    out.minimum = -half_at(block + 2) * static_cast<float>(minimum);
    const uint8_t* high = block + 16;
    const uint8_t* low = high + (five ? 32 : 0) + part / 2 * 32;
    for (int i = 0; i < 32; i++) {
        const int code = part % 2 ? low[i] >> 4 : low[i] & 15;
        out.codes[i] = static_cast<int8_t>(code | (five ? (high[i] >> part & 1) << 4 : 0));
    }
}

// Q6_K has a scale for every 16 numbers: two to a group, so they are read as values
void read_q6(const uint8_t* block, int part, SourceGroup& out) {
    const uint8_t *low = block + part / 4 * 64, *high = block + 128 + part / 4 * 32;
    const uint8_t* scales = block + 192;
    const float d = half_at(block + 208);
    const int quarter = part % 4;
    out.coded = false;
    for (int i = 0; i < 32; i++) {
        const int four = quarter < 2 ? low[i + quarter * 32] & 15 : low[i + (quarter - 2) * 32] >> 4;
        const int code = (four | (high[i] >> 2 * quarter & 3) << 4) - 32;
        const int scale = static_cast<int8_t>(scales[part * 2 + i / 16]);
        out.values[i] = d * static_cast<float>(scale) * static_cast<float>(code);
    }
}

}  // namespace

int natural_kind(int type) {
    switch (type) {
        case PS_TYPE_F32:
            return PS_F32;
        case PS_TYPE_F16:
            return PS_F16;
        case PS_TYPE_BF16:
            return PS_BF16;
        case PS_TYPE_Q4_0:
            return PS_Q4;
        case PS_TYPE_Q4_1:
        case PS_TYPE_Q4_K:
            return PS_Q4M;
        case PS_TYPE_Q5_0:
        case PS_TYPE_Q6_K:
        case PS_TYPE_Q8_0:
            return PS_Q8;
        case PS_TYPE_Q5_1:
        case PS_TYPE_Q5_K:
            return PS_Q8M;
        default:
            return 0;
    }
}

int row_bytes(int type, int cols) {
    int size = 0, numbers = 32;
    switch (type) {
        case PS_TYPE_F32:
            size = 4, numbers = 1;
            break;
        case PS_TYPE_F16:
        case PS_TYPE_BF16:
            size = 2, numbers = 1;
            break;
        case PS_TYPE_Q4_0:
            size = 18;
            break;
        case PS_TYPE_Q4_1:
            size = 20;
            break;
        case PS_TYPE_Q5_0:
            size = 22;
            break;
        case PS_TYPE_Q5_1:
            size = 24;
            break;
        case PS_TYPE_Q8_0:
            size = 34;
            break;
        case PS_TYPE_Q4_K:
            size = 144, numbers = 256;
            break;
        case PS_TYPE_Q5_K:
            size = 176, numbers = 256;
            break;
        case PS_TYPE_Q6_K:
            size = 210, numbers = 256;
            break;
        default:
            return 0;
    }
    return cols % numbers ? 0 : cols / numbers * size;
}

SourceGroup read_group(int type, const uint8_t* row, int group, int cols) {
    SourceGroup out{};
    out.coded = true;
    switch (type) {
        case PS_TYPE_F32:
        case PS_TYPE_F16:
        case PS_TYPE_BF16:
            out.coded = false;
            for (int i = 0; i < 32 && group * 32 + i < cols; i++) {
                const int at = group * 32 + i;
                uint16_t half;
                if (type == PS_TYPE_F32) {
                    memcpy(&out.values[i], row + at * 4, 4);
                } else {
                    memcpy(&half, row + at * 2, 2);
                    out.values[i] = type == PS_TYPE_F16 ? from_f16(half) : from_bf16(half);
                }
            }
            return out;
        case PS_TYPE_Q6_K:
            read_q6(row + group / 8 * 210, group % 8, out);
            return out;
        case PS_TYPE_Q4_K:
        case PS_TYPE_Q5_K:
            read_super(type, row + group / 8 * (type == PS_TYPE_Q4_K ? 144 : 176), group % 8, out);
            return out;
        default:
            read_small(type, row + group * row_bytes(type, 32), out);
            return out;
    }
}

}  // namespace penstock
