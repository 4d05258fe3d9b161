// Packs weights into the layouts that the kernels read, and unpacks them.
#include <cmath>
#include <cstring>

#include "blocks.h"
#include "checks.h"
#include "halves.h"
#include "kernels.h"

namespace penstock {
namespace {

struct Group {
    int8_t codes[32];  // q4: 0 to 15; q8: -128 to 127
    uint16_t scale, minimum;
};

bool has_minimum(int kind) { return kind == PS_Q4M || kind == PS_Q8M; }
int bits(int kind) { return kind <= PS_Q4M ? 4 : 8; }

float value_of(const SourceGroup& group, int i) {
    return group.coded ? std::fma(group.scale, static_cast<float>(group.codes[i]), group.minimum) : group.values[i];
}

int8_t rounded(float x, float low, float high) {
    const float nearest = std::nearbyint(x);
    return static_cast<int8_t>(nearest > low ? (nearest < high ? nearest : high) : low);
}

// Round to the nearest code of a scale that fits the group: symmetric, or from its smallest to its largest number
Group quantised(const SourceGroup& source, int kind) {
    Group out{};
    float low = value_of(source, 0), high = low;
    for (int i = 1; i < GROUP; i++) {
        const float value = value_of(source, i);
        low = value < low ? value : low;
        high = value > high ? value : high;
    }
    const float steps = bits(kind) == 4 ? 15.0f : 254.0f;
    const float extreme = -low > high ? low : high;  // q4 has one code more below zero: the extreme value takes it
    float first = 0.0f, zero = 0.0f;
    if (has_minimum(kind)) {
        out.scale = to_f16((high - low) / steps);
        zero = bits(kind) == 8 ? -127.0f : 0.0f;
        first = low;
        out.minimum = to_f16(std::fma(-zero, from_f16(out.scale), low));
        first = from_f16(out.minimum);
    } else {
        out.scale = to_f16(bits(kind) == 4 ? extreme / -8.0f : std::fabs(extreme) / 127.0f);
        zero = bits(kind) == 4 ? 8.0f : 0.0f;
    }
    const float scale = from_f16(out.scale), inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
    for (int i = 0; i < GROUP; i++) {
        const float code = (value_of(source, i) - first) * inverse + (has_minimum(kind) ? 0.0f : zero);
        out.codes[i] = bits(kind) == 4 ? rounded(code, 0.0f, 15.0f) : rounded(code, -127.0f, 127.0f);
    }
    return out;
}

// The codes of the source where the layout can hold them, so that nothing is rounded twice
Group encode(const SourceGroup& source, int type, int kind) {
    if (!source.coded || natural_kind(type) != kind) return quantised(source, kind);
    Group out{};
    out.scale = to_f16(source.scale);
    out.minimum = to_f16(source.minimum);
    for (int i = 0; i < GROUP; i++) out.codes[i] = static_cast<int8_t>(source.codes[i] + (kind == PS_Q4 ? 8 : 0));
    return out;
}

// Where input k of output n lies within a group of codes
int code_at(int kind, int n, int k) {
    if (bits(kind) == 8) return k / 4 * 64 + n * 4 + k % 4;
    return k % 16 / 4 * 64 + n * 4 + k % 4;  // inputs from 16 on in the high bits
}

void put_group(uint8_t* panel, int kind, int groups, int g, int n, const Group& group) {
    uint8_t* codes = panel + static_cast<int64_t>(g) * 64 * bits(kind);
    for (int k = 0; k < GROUP; k++) {
        if (bits(kind) == 8)
            codes[code_at(kind, n, k)] = static_cast<uint8_t>(group.codes[k]);
        else if (k < 16)
            codes[code_at(kind, n, k)] = static_cast<uint8_t>(group.codes[k] | group.codes[k + 16] << 4);
    }
    uint16_t* scales = reinterpret_cast<uint16_t*>(panel + static_cast<int64_t>(groups) * 64 * bits(kind));
    scales[g * LANES + n] = group.scale;
    if (has_minimum(kind)) scales[(groups + g) * LANES + n] = group.minimum;
}

// Whether blocks of a type hold codes, scale and minimum bit for bit as a layout does, four bytes of codes at a time
bool holds_blocks(int kind, int type) {
    return (kind == PS_Q4 && type == PS_TYPE_Q4_0) || (kind == PS_Q4M && type == PS_TYPE_Q4_1) ||
           (kind == PS_Q8 && type == PS_TYPE_Q8_0);
}

void copy_blocks(uint8_t* panel, int kind, int groups, int n, const uint8_t* block) {
    uint8_t* scales = panel + static_cast<int64_t>(groups) * 64 * bits(kind);
    for (int g = 0; g < groups; g++) {
        memcpy(scales + (g * LANES + n) * 2, block, 2);
        block += 2;
        if (has_minimum(kind)) {
            memcpy(scales + ((groups + g) * LANES + n) * 2, block, 2);
            block += 2;
        }
        for (int i = 0; i < bits(kind); i++, block += 4) memcpy(panel + (g * bits(kind) + i) * 64 + n * 4, block, 4);
    }
}

int64_t float_at(int n, int k) { return static_cast<int64_t>(k / 2) * 32 + n * 2 + k % 2; }

void put_float(uint8_t* panel, int kind, int n, int k, float value) {
    if (kind == PS_F32)
        reinterpret_cast<float*>(panel)[static_cast<int64_t>(k) * LANES + n] = value;
    else
        reinterpret_cast<uint16_t*>(panel)[float_at(n, k)] = kind == PS_F16 ? to_f16(value) : to_bf16(value);
}

void pack_row(const ps_matrix& matrix, uint8_t* data, int row, int type, const uint8_t* source) {
    const int padded = static_cast<int>(round_up(matrix.cols, GROUP)), groups = padded / GROUP, n = row % LANES;
    uint8_t* panel = data + row / LANES * panel_bytes(matrix.kind, padded);
    if (holds_blocks(matrix.kind, type)) return copy_blocks(panel, matrix.kind, groups, n, source);
    for (int g = 0; g < groups; g++) {
        const SourceGroup group = read_group(type, source, g, matrix.cols);
        if (matrix.kind <= PS_Q8M)
            put_group(panel, matrix.kind, groups, g, n, encode(group, type, matrix.kind));
        else
            for (int k = 0; k < GROUP; k++) put_float(panel, matrix.kind, n, g * GROUP + k, value_of(group, k));
    }
}

}  // namespace

void unpack_row(const ps_matrix& matrix, int row, float* out) {
    const int padded = static_cast<int>(round_up(matrix.cols, GROUP)), groups = padded / GROUP, n = row % LANES;
    const uint8_t* panel = static_cast<const uint8_t*>(matrix.data) + row / LANES * panel_bytes(matrix.kind, padded);
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(panel + static_cast<int64_t>(groups) * 64 * bits(matrix.kind));
    for (int k = 0; k < matrix.cols; k++) {
        if (matrix.kind > PS_Q8M) {
            if (matrix.kind == PS_F32) {
                out[k] = reinterpret_cast<const float*>(panel)[static_cast<int64_t>(k) * LANES + n];
            } else {
                const uint16_t half = reinterpret_cast<const uint16_t*>(panel)[float_at(n, k)];
                out[k] = matrix.kind == PS_F16 ? from_f16(half) : from_bf16(half);
            }
            continue;
        }
        const int g = k / GROUP, inside = k % GROUP;
        const uint8_t byte = panel[static_cast<int64_t>(g) * 64 * bits(matrix.kind) + code_at(matrix.kind, n, inside)];
        const int code = bits(matrix.kind) == 8 ? static_cast<int8_t>(byte)
                                                : (inside < 16 ? byte & 15 : byte >> 4) - (matrix.kind == PS_Q4 ? 8 : 0);
        const float minimum = has_minimum(matrix.kind) ? from_f16(scales[(groups + g) * LANES + n]) : 0.0f;
        out[k] = std::fma(from_f16(scales[g * LANES + n]), static_cast<float>(code), minimum);
    }
}

}  // namespace penstock

using namespace penstock;

size_t ps_packed_bytes(int kind, int rows, int cols) {
    if (rows < 1 || cols < 1) return 0;
    return static_cast<size_t>(round_up(rows, LANES) / LANES * panel_bytes(kind, round_up(cols, GROUP)));
}

int ps_natural_kind(int type) { return natural_kind(type); }

int ps_pack(ps_matrix matrix, void* data, int row, int count, int type, const void* source, const int32_t* order) {
    if (ps_packed_bytes(matrix.kind, matrix.rows, matrix.cols) == 0)
        return fail("No matrix has kind %d, %d rows and %d columns.", matrix.kind, matrix.rows, matrix.cols);
    if (row < 0 || count < 0 || row > matrix.rows - count)
        return fail("Rows %d to %d are not in a matrix of %d rows.", row, row + count, matrix.rows);
    const int bytes = row_bytes(type, matrix.cols);
    if (bytes == 0) return fail("A row of %d numbers of type %d cannot be read.", matrix.cols, type);
    for (int i = 0; i < count; i++) {
        const int64_t from = order ? order[i] : i;
        pack_row(matrix, static_cast<uint8_t*>(data), row + i, type, static_cast<const uint8_t*>(source) + from * bytes);
    }
    return 0;
}

int ps_unpack(ps_matrix matrix, int row, int count, float* out) {
    if (check_matrix(matrix)) return -1;
    if (row < 0 || count < 0 || row > matrix.rows - count)
        return fail("Rows %d to %d are not in a matrix of %d rows.", row, row + count, matrix.rows);
    for (int i = 0; i < count; i++) unpack_row(matrix, row + i, out + static_cast<int64_t>(i) * matrix.cols);
    return 0;
}
