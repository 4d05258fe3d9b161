// The path for arm64 with dot products. Sixteen rows and more share one unpacking of 4-bit weights.
#include "simd_neon.h"

#include "kernels.inl"
#include "attention.inl"
#include "paths.h"

namespace penstock {
namespace {

constexpr int UNPACKED = 32, MOST_ROWS = 64;  // groups that stay in the first cache, and rows that use them there

struct alignas(64) UnpackedGroups {
    int8_t codes[UNPACKED][512];
    float scales[UNPACKED][LANES], minima[UNPACKED][LANES];
};

// Groups [from, to) of a panel: codes as signed bytes, less their zero point, and scales as floats
template <bool MINIMUM>
void unpack_groups(const Panel& w, int from, int to, UnpackedGroups& out) {
    const uint8x16_t low_bits = vdupq_n_u8(15);
    const int8x16_t zero = vdupq_n_s8(MINIMUM ? 0 : 8);
    for (int g = from; g < to; g++) {
        save(out.scales[g - from], load_f16(w.scales + g * LANES));
        if (MINIMUM) save(out.minima[g - from], load_f16(w.minima + g * LANES));
        int8_t* codes = out.codes[g - from];
        for (int i = 0; i < 256; i += 16) {
            const uint8x16_t both = vld1q_u8(w.codes + g * 256 + i);
            vst1q_s8(codes + i, vsubq_s8(vreinterpretq_s8_u8(vandq_u8(both, low_bits)), zero));
            vst1q_s8(codes + 256 + i, vsubq_s8(vreinterpretq_s8_u8(vshrq_n_u8(both, 4)), zero));
        }
    }
}

// Add `count` groups to the sums of R rows, for outputs [4 first, 4 (first + S))
template <int R, int S, bool MINIMUM>
void add_groups(const UnpackedGroups& w, int count, int first, const InputGroup* x, int64_t groups, V* out) {
    float32x4_t sums[R][S];
    for (int r = 0; r < R; r++)
        for (int s = 0; s < S; s++) sums[r][s] = out[r].part[first + s];
    const int64_t stride = groups * static_cast<int64_t>(sizeof(InputGroup));
    for (int g = 0; g < count; g++, x++) {
        const int8_t* codes = w.codes[g] + first * 16;
        const auto dot_group = [&](int32x4_t(*dots)[S], const int8_t* q) {
            for (int r = 0; r < R; r++)
                for (int s = 0; s < S; s++) dots[r][s] = vdupq_n_s32(MAGIC);
            add_inputs<R, S>(dots, q, stride, [&](int j, int s) { return vld1q_s8(codes + j * 64 + s * 16); });
            add_inputs<R, S>(dots, q + 16, stride, [&](int j, int s) { return vld1q_s8(codes + 256 + j * 64 + s * 16); });
        };
        int32x4_t dots[R][S];
        float32x4_t numbers[R][S];
        dot_group(dots, x->codes);
        const float unit = finish_dots<R, S>(dots, numbers, x, groups, [&](int32x4_t(*fine)[S]) { dot_group(fine, x->fine); });
#pragma GCC unroll 4
        for (int s = 0; s < S; s++) {
            const float32x4_t scale = vld1q_f32(w.scales[g] + 4 * (first + s));
            const float32x4_t minimum = vld1q_f32(w.minima[g] + 4 * (first + s));
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

template <int KIND>
void product_unpacked(const ps_matrix& matrix, const Rows& rows, int row, int row_end, int block, int block_end,
                      const Output& out) {
    constexpr bool minimum = KIND == PS_Q4M;
    constexpr int R = 4, S = 2;
    UnpackedGroups unpacked;
    V sums[MOST_ROWS];
    const int64_t padded = rows.padded_cols;
    const int groups = static_cast<int>(padded / GROUP);
    for (; block < block_end; block++) {
        const char* panel = static_cast<const char*>(matrix.data) + block * panel_bytes(KIND, padded);
        const Panel w = panel_at<KIND>(panel, panel, groups);
        for (int r = 0; r < row_end - row; r++) sums[r] = all(0.0f);
        for (int from = 0; from < groups; from += UNPACKED) {
            const int to = from + UNPACKED < groups ? from + UNPACKED : groups;
            unpack_groups<minimum>(w, from, to, unpacked);
            for (int first = 0; first < 4; first += S)
                for (int r = row; r < row_end; r += R)
                    add_groups<R, S, minimum>(unpacked, to - from, first, rows.groups + static_cast<int64_t>(r) * groups + from,
                                              groups, sums + (r - row));
        }
        for (int r = row; r < row_end; r++) put_block(matrix, block, r, sums[r - row], out);
    }
}

void product_of_rows(const ps_matrix& matrix, const Rows& rows, int row, int row_end, int block, int block_end,
                     const Output& out) {
    while (matrix.kind <= PS_Q4M && row_end - row >= LANES) {
        const int left = (row_end - row) / 4 * 4, end = row + (left < MOST_ROWS ? left : MOST_ROWS);
        if (matrix.kind == PS_Q4)
            product_unpacked<PS_Q4>(matrix, rows, row, end, block, block_end, out);
        else
            product_unpacked<PS_Q4M>(matrix, rows, row, end, block, block_end, out);
        row = end;
    }
    if (row < row_end) product(matrix, rows, row, row_end, block, block_end, out);
}

}  // namespace

extern const Kernels neon_kernels = table_of("neon", product_of_rows);

}  // namespace penstock
