// The path for processors with tiles: that of AVX-512, with tiles for many rows. A tile of integers sums a group's products,
// and the groups are added in the same order as everywhere. A tile of bf16 adds in the order that all paths have for floats.
#define PS_AVX512_VNNI
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

void configure(const TileConfig& config) {
    finish_stores();
    _tile_loadconfig(&config);
}

constexpr int UNPACKED = 32, MOST_ROWS = 64;  // groups of codes, and rows that use them while they are near

// ---- integers ----

// Tile 0: sums [rows, 16 outputs]; 1: inputs [rows, 32 codes and 32 fine codes]; 2: codes [16, 16 outputs, 4]: sixteen times those
// of a group, then as they are. For 8 bits, 3 and 4: codes and fine codes [rows, 32]; 5: codes [8, 16 outputs, 4]; 6: sums of
// fine codes. What a tile of 4-bit codes sums is in sixteenths of the inputs' scale.
void configure_for_integers(int rows) {
    TileConfig config = {};
    config.palette = 1;
    for (int i = 0; i < 7; i++) config.bytes_per_row[i] = 64, config.rows[i] = static_cast<uint8_t>(rows);
    config.bytes_per_row[3] = config.bytes_per_row[4] = 32;
    config.rows[2] = 16, config.rows[5] = 8;
    configure(config);
}

// Groups of 4-bit codes [256] -> [16][64]: sixteen times the codes of 32 inputs, then the codes
void unpack_for_tiles(const uint8_t* codes, int groups, uint8_t* out) {
    const __m512i low_bits = _mm512_set1_epi8(15), high_bits = _mm512_set1_epi8(static_cast<char>(0xf0));
    for (int g = 0; g < groups; g++, codes += 256, out += 1024)
        for (int j = 0; j < 4; j++) {
            const __m512i both = _mm512_loadu_si512(codes + j * 64);
            _mm512_store_si512(out + j * 64, _mm512_and_si512(_mm512_slli_epi16(both, 4), high_bits));
            _mm512_store_si512(out + 256 + j * 64, _mm512_and_si512(both, high_bits));
            _mm512_store_si512(out + 512 + j * 64, _mm512_and_si512(both, low_bits));
            _mm512_store_si512(out + 768 + j * 64, _mm512_and_si512(_mm512_srli_epi16(both, 4), low_bits));
        }
}

// Sums of a group of inputs, in sixteenths: dots [rows][16 outputs]. Those of 8-bit codes are in two parts.
template <int BITS>
inline void dot_group(const uint8_t* codes, const int8_t* q, int64_t stride, int32_t (*dots)[LANES * LANES]) {
    _tile_zero(0);
    if (BITS == 4) {
        _tile_loadd(1, q, stride);
        _tile_loadd(2, codes, 64);
        _tile_dpbsud(0, 1, 2);
    } else {
        _tile_zero(6);
        _tile_loadd(3, q, stride);
        _tile_loadd(4, q + GROUP, stride);
        _tile_loadd(5, codes, 64);
        _tile_dpbssd(0, 3, 5);
        _tile_dpbssd(6, 4, 5);
        _tile_stored(6, dots[1], 64);
    }
    _tile_stored(0, dots[0], 64);
}

// Add groups [from, to) of R rows times 16 outputs. A group's sums are on their way while those before it are added.
template <int R, bool MINIMUM, int BITS>
void multiply_tile(const Panel& w, int from, int to, const uint8_t* codes, const InputGroup* x, V* out) {
    constexpr int zero_point = BITS == 4 && !MINIMUM ? 8 : 0, bytes = BITS == 4 ? 1024 : 512;
    const int64_t groups = w.groups, stride = groups * static_cast<int64_t>(sizeof(InputGroup));
    alignas(64) int32_t dots[2][2][LANES * LANES];
    V sums[R];
    for (int r = 0; r < R; r++) sums[r] = out[r];
    finish_stores();
    dot_group<BITS>(codes, x[from].codes, stride, dots[from % 2]);
    for (int g = from; g < to; g++) {
        codes += bytes;
        if (g + 1 < to) dot_group<BITS>(codes, x[g + 1].codes, stride, dots[(g + 1) % 2]);
        const int32_t(*own)[LANES * LANES] = dots[g % 2];
        const V scale = mul(load_f16(w.scales + g * LANES), all(0.0625f));
        const V minimum = MINIMUM ? load_f16(w.minima + g * LANES) : scale;
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const InputGroup& row = x[r * groups + g];
            __m512i sum = _mm512_load_si512(own[0] + r * LANES);
            if (BITS == 8) sum = _mm512_add_epi32(_mm512_slli_epi32(sum, 4), _mm512_load_si512(own[1] + r * LANES));
            if (zero_point) sum = _mm512_add_epi32(sum, _mm512_set1_epi32(zero_point * (16 * row.minus_sum - row.fine_sum)));
            sums[r] = fma({_mm512_cvtepi32_ps(sum)}, mul(scale, all(row.scale)), sums[r]);
            if (MINIMUM) sums[r] = fma(minimum, all(row.sum), sums[r]);
        }
    }
    for (int r = 0; r < R; r++) out[r] = sums[r];
}

// Rows [row, row_end), a multiple of R
template <int R, int KIND>
void tile_product(const ps_matrix& matrix, const Rows& rows, int row, int row_end, int block, int block_end, const Output& out) {
    constexpr bool minimum = KIND == PS_Q4M || KIND == PS_Q8M;
    constexpr int bits = KIND <= PS_Q4M ? 4 : 8;
    alignas(64) uint8_t unpacked[bits == 4 ? UNPACKED * 1024 : 64];
    V sums[MOST_ROWS];
    const int64_t padded = rows.padded_cols;
    const int groups = static_cast<int>(padded / GROUP);
    configure_for_integers(R);
    for (; block < block_end; block++) {
        const char* panel = static_cast<const char*>(matrix.data) + block * panel_bytes(KIND, padded);
        const Panel w = panel_at<KIND>(panel, panel, groups);
        for (int r = 0; r < row_end - row; r++) sums[r] = all(0.0f);
        for (int from = 0; from < groups; from += UNPACKED) {
            const int to = from + UNPACKED < groups ? from + UNPACKED : groups;
            const uint8_t* bytes = w.codes + static_cast<int64_t>(from) * 64 * bits;
            if (bits == 4) {
                unpack_for_tiles(bytes, to - from, unpacked);
                bytes = unpacked;
            }
            for (int r = row; r < row_end; r += R)
                multiply_tile<R, minimum, bits>(w, from, to, bytes, rows.groups + static_cast<int64_t>(r) * groups,
                                                sums + (r - row));
        }
        for (int r = row; r < row_end; r++) put_block(matrix, block, r, sums[r - row], out);
    }
    _tile_release();
}

// As many rows as fill tiles of R -> the first that is left
template <int R>
int integer_product(const ps_matrix& matrix, const Rows& rows, int row, int row_end, int block, int block_end, const Output& out) {
    while (row_end - row >= R) {
        const int left = (row_end - row) / R * R, end = row + (left < MOST_ROWS ? left : MOST_ROWS);
        switch (matrix.kind) {
            case PS_Q4:
                tile_product<R, PS_Q4>(matrix, rows, row, end, block, block_end, out);
                break;
            case PS_Q4M:
                tile_product<R, PS_Q4M>(matrix, rows, row, end, block, block_end, out);
                break;
            case PS_Q8:
                tile_product<R, PS_Q8>(matrix, rows, row, end, block, block_end, out);
                break;
            default:
                tile_product<R, PS_Q8M>(matrix, rows, row, end, block, block_end, out);
        }
        row = end;
    }
    return row;
}

// ---- bf16 ----

// Tiles 0 to 3: sums [16 rows, 16 outputs]; 4 and 5: inputs [16 rows, 32]; 6 and 7: weights [16 pairs of inputs, 16 outputs]
void configure_bf16_tiles() {
    TileConfig config = {};
    config.palette = 1;
    for (int i = 0; i < 8; i++) config.bytes_per_row[i] = 64, config.rows[i] = 16;
    configure(config);
}

// M times 16 rows, times N panels -> sums [M][N][16][16]
template <int M, int N>
void multiply_bf16(const char* panel, int64_t bytes, const uint16_t* x, int64_t padded, float (*sums)[LANES][LANES]) {
    finish_stores();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < padded; k += GROUP) {
        _tile_loadd(4, x + k, 2 * padded);
        _tile_loadd(6, panel + k * 32, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (N == 2) {
            _tile_loadd(7, panel + bytes + k * 32, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (M == 2) {
            _tile_loadd(5, x + LANES * padded + k, 2 * padded);
            _tile_dpbf16ps(2, 5, 6);
            if (N == 2) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], 64);
    if (N == 2) _tile_stored(1, sums[1], 64);
    if (M == 2) _tile_stored(2, sums[N], 64);
    if (M == 2 && N == 2) _tile_stored(3, sums[3], 64);
}

// The last rows may be fewer than a tile has: what follows them is multiplied along, and left.
template <int N>
void tile_product_bf16(const ps_matrix& matrix, const Rows& rows, int row, int row_end, int block, const Output& out) {
    alignas(64) float sums[2 * N][LANES][LANES];
    const int64_t padded = rows.padded_cols, bytes = panel_bytes(PS_BF16, padded);
    const char* panel = static_cast<const char*>(matrix.data) + block * bytes;
    while (row < row_end) {
        const int left = row_end - row, own = left < 2 * LANES ? left : 2 * LANES;
        if (own > LANES)
            multiply_bf16<2, N>(panel, bytes, rows.halves + row * padded, padded, sums);
        else
            multiply_bf16<1, N>(panel, bytes, rows.halves + row * padded, padded, sums);
        for (int r = 0; r < own; r++)
            for (int n = 0; n < N; n++)
                put_block(matrix, block + n, row + r, load(sums[r / LANES * N + n][r % LANES]), out);
        row += own;
    }
}

void product_bf16(const ps_matrix& matrix, const Rows& rows, int row, int row_end, int block, int block_end, const Output& out) {
    configure_bf16_tiles();
    for (; block + 2 <= block_end; block += 2) tile_product_bf16<2>(matrix, rows, row, row_end, block, out);
    if (block < block_end) tile_product_bf16<1>(matrix, rows, row, row_end, block, out);
    _tile_release();
}

// ---- all ----

void product_with_tiles(const ps_matrix& matrix, const Rows& rows, int row, int row_end, int block, int block_end,
                        const Output& out) {
    if (matrix.kind == PS_BF16) return product_bf16(matrix, rows, row, row_end, block, block_end, out);
    if (matrix.kind <= PS_Q8M) {
        row = integer_product<16>(matrix, rows, row, row_end, block, block_end, out);
        row = integer_product<8>(matrix, rows, row, row_end, block, block_end, out);
    }
    if (row < row_end) product(matrix, rows, row, row_end, block, block_end, out);
}

}  // namespace
}  // namespace penstock

#include "attention_amx.inl"

namespace penstock {

extern const Kernels amx_kernels = table_of("amx", product_with_tiles, attend_in_tiles);

}  // namespace penstock
