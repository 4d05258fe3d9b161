// The path for processors with int8 tiles: those of AVX-512, with tiles for sixteen rows and more.
// A tile sums a group's products in integers; the groups are added in the same order as everywhere.
#include "simd_avx512.h"

#include "kernels.inl"
#include "attention.inl"
#include "paths.h"

namespace penstock {
namespace {

struct alignas(64) TileConfig {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
};

// The compiler does not know that loading a tile or its configuration reads memory: stores before this line stay before it.
inline void finish_stores() { asm volatile("" ::: "memory"); }

// Tiles 0 and 1: sums [16 rows, 16 outputs]; 4 and 5: inputs [16 rows, 32]; 6 and 7: codes [8, 16 outputs, 4]
void configure_tiles() {
    TileConfig config = {};
    config.palette = 1;
    for (int i = 0; i < 2; i++) {
        config.bytes_per_row[i] = 64, config.rows[i] = 16;
        config.bytes_per_row[4 + i] = 32, config.rows[4 + i] = 16;
        config.bytes_per_row[6 + i] = 64, config.rows[6 + i] = 8;
    }
    finish_stores();
    _tile_loadconfig(&config);
}

constexpr int UNPACKED = 32, MOST_ROWS = 64;  // groups of codes, and rows that use them while they are near

// Groups of 4-bit codes [256] -> bytes [512]
void unpack_codes(const uint8_t* codes, int groups, uint8_t* out) {
    const __m512i low_bits = _mm512_set1_epi8(15);
    for (int g = 0; g < groups; g++)
        for (int j = 0; j < 4; j++) {
            const __m512i both = _mm512_loadu_si512(codes + g * 256 + j * 64);
            _mm512_store_si512(out + g * 512 + j * 64, _mm512_and_si512(both, low_bits));
            _mm512_store_si512(out + g * 512 + 256 + j * 64, _mm512_and_si512(_mm512_srli_epi16(both, 4), low_bits));
        }
}

template <bool MINIMUM, int BITS>
void fold(const Panel& w, int g, const int32_t* dots, const GroupInfo* info, V* sums) {
    const V scale = load_f16(w.scales + g * LANES), minimum = MINIMUM ? load_f16(w.minima + g * LANES) : all(0.0f);
    constexpr int zero_point = BITS == 4 && !MINIMUM ? 8 : 0;
#pragma GCC unroll 16
    for (int r = 0; r < LANES; r++) {
        const GroupInfo& row = info[static_cast<int64_t>(r) * w.groups + g];
        __m512i own = _mm512_load_si512(dots + r * LANES);
        if (zero_point) own = _mm512_sub_epi32(own, _mm512_set1_epi32(zero_point * row.code_sum));
        sums[r] = fma({_mm512_cvtepi32_ps(own)}, mul(scale, all(row.scale)), sums[r]);
        if (MINIMUM) sums[r] = fma(minimum, all(row.sum), sums[r]);
    }
}

// Add groups [from, to) of 16 rows times 16 outputs; codes [to - from][512]
template <bool MINIMUM, int BITS>
void multiply_tile(const Panel& w, int from, int to, const uint8_t* codes, const int8_t* q, int64_t stride, const GroupInfo* info,
                   V* sums) {
    alignas(64) int32_t first[256], second[256];
    finish_stores();
    for (int g = from; g < to; g += 2, codes += 1024) {
        const bool two = g + 1 < to;
        _tile_zero(0);
        _tile_loadd(4, q + g * GROUP, stride);
        _tile_loadd(6, codes, 64);
        if (BITS == 4)
            _tile_dpbsud(0, 4, 6);
        else
            _tile_dpbssd(0, 4, 6);
        if (two) {
            _tile_zero(1);
            _tile_loadd(5, q + g * GROUP + GROUP, stride);
            _tile_loadd(7, codes + 512, 64);
            if (BITS == 4)
                _tile_dpbsud(1, 5, 7);
            else
                _tile_dpbssd(1, 5, 7);
        }
        _tile_stored(0, first, 64);
        fold<MINIMUM, BITS>(w, g, first, info, sums);
        if (two) {
            _tile_stored(1, second, 64);
            fold<MINIMUM, BITS>(w, g + 1, second, info, sums);
        }
    }
}

template <int KIND>
void tile_product(const ps_matrix& matrix, const Rows& rows, int row, int row_end, int block, int block_end, const Output& out) {
    constexpr bool minimum = KIND == PS_Q4M || KIND == PS_Q8M;
    constexpr int bits = KIND <= PS_Q4M ? 4 : 8;
    alignas(64) uint8_t unpacked[bits == 4 ? UNPACKED * 512 : 64];
    V sums[MOST_ROWS];
    const int64_t padded = rows.padded_cols;
    const int groups = static_cast<int>(padded / GROUP);
    configure_tiles();
    for (; block < block_end; block++) {
        const Panel w = panel_at<KIND>(static_cast<const char*>(matrix.data) + block * panel_bytes(KIND, padded), groups);
        for (int r = 0; r < row_end - row; r++) sums[r] = all(0.0f);
        for (int from = 0; from < groups; from += UNPACKED) {
            const int to = from + UNPACKED < groups ? from + UNPACKED : groups;
            const uint8_t* bytes = w.codes + static_cast<int64_t>(from) * 64 * bits;
            if (bits == 4) {
                unpack_codes(bytes, to - from, unpacked);
                bytes = unpacked;
            }
            for (int r = row; r < row_end; r += LANES)
                multiply_tile<minimum, bits>(w, from, to, bytes, rows.q + r * padded, padded,
                                             rows.groups + static_cast<int64_t>(r) * groups, sums + (r - row));
        }
        for (int r = row; r < row_end; r++) put_block(matrix, block, r, sums[r - row], out);
    }
    _tile_release();
}

void product_with_tiles(const ps_matrix& matrix, const Rows& rows, int row, int row_end, int block, int block_end,
                        const Output& out) {
    while (matrix.kind <= PS_Q8M && row_end - row >= LANES) {
        const int left = (row_end - row) / LANES * LANES, end = row + (left < MOST_ROWS ? left : MOST_ROWS);
        switch (matrix.kind) {
            case PS_Q4:
                tile_product<PS_Q4>(matrix, rows, row, end, block, block_end, out);
                break;
            case PS_Q4M:
                tile_product<PS_Q4M>(matrix, rows, row, end, block, block_end, out);
                break;
            case PS_Q8:
                tile_product<PS_Q8>(matrix, rows, row, end, block, block_end, out);
                break;
            default:
                tile_product<PS_Q8M>(matrix, rows, row, end, block, block_end, out);
        }
        row = end;
    }
    if (row < row_end) product(matrix, rows, row, row_end, block, block_end, out);
}

}  // namespace

extern const Kernels amx_kernels = {"amx",    quantise_row, product_with_tiles, rms_norm_row,   rotate_head,
                                    gate_row, store_row,    choose_experts,     largest_of_row, weigh_logits,
                                    attend,   merge_states, finish_state};

}  // namespace penstock
