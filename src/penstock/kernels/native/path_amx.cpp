// The path for processors with tiles: that of AVX-512, with tiles for bf16, which add in the order that all paths have for
// floats. Codes stay with VNNI. Tiles of integers gain nothing: each group has its own scale, so a tile is filled, stored and read
// again for 32 inputs (README.md has figures).
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

// Tiles 0 to 3: sums [16 rows, 16 outputs]; 4 and 5: inputs [16 rows, 32]; 6 and 7: weights [16 pairs of inputs, 16 outputs]
void configure_bf16_tiles() {
    TileConfig config = {};
    config.palette = 1;
    for (int i = 0; i < 8; i++) config.bytes_per_row[i] = 64, config.rows[i] = 16;
    configure(config);
}

// M times 16 rows, times N panels -> sums [M * 16][N * 16], whose rows are `stride` apart
template <int M, int N>
void multiply_bf16(const char* panel, const char* next, int64_t bytes, const uint16_t* x, int64_t padded, float* sums,
                   int64_t stride) {
    finish_stores();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < padded; k += GROUP) {
        if (next) {
            fetch_ahead<GROUP * LANES * 2>(next, k / GROUP);
            if (N == 2) fetch_ahead<GROUP * LANES * 2>(next + bytes, k / GROUP);
        }
        _tile_stream_loadd(4, x + k, 2 * padded);
        _tile_loadd(6, panel + k * 32, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (N == 2) {
            _tile_loadd(7, panel + bytes + k * 32, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (M == 2) {
            _tile_stream_loadd(5, x + LANES * padded + k, 2 * padded);
            _tile_dpbf16ps(2, 5, 6);
            if (N == 2) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, stride * 4);
    if (N == 2) _tile_stored(1, sums + LANES, stride * 4);
    if (M == 2) _tile_stored(2, sums + LANES * stride, stride * 4);
    if (M == 2 && N == 2) _tile_stored(3, sums + LANES * stride + LANES, stride * 4);
    finish_stores();
}

// The last rows may be fewer than a tile has: what follows them is multiplied along, and left.
template <int N>
void tile_product_bf16(const ps_matrix& matrix, const Rows& rows, int row, int row_end, int block, int block_end,
                       const Output& out) {
    alignas(64) float sums[2 * LANES * N * LANES];
    const int64_t padded = rows.padded_cols, bytes = panel_bytes(PS_BF16, padded);
    const char* panel = static_cast<const char*>(matrix.data) + block * bytes;
    const char* next = block + N < block_end ? panel + N * bytes : out.ahead;
    if (row_end - row <= LANES) next = nullptr;  // one tile of rows waits for memory anyway: the processor sees what it reads
    const bool as_they_are = !out.add && !matrix.bias && (block + N) * LANES <= matrix.rows;
    while (row < row_end) {
        const int left = row_end - row, own = left < 2 * LANES ? left : 2 * LANES;
        const bool in_place = as_they_are && own % LANES == 0;
        float* to = in_place ? out.y + row * out.stride + block * LANES : sums;
        const auto multiply = own > LANES ? multiply_bf16<2, N> : multiply_bf16<1, N>;
        multiply(panel, next, bytes, rows.halves + row * padded, padded, to, in_place ? out.stride : N * LANES);
        for (int r = 0; r < own && !in_place; r++)
            for (int n = 0; n < N; n++) put_block(matrix, block + n, row + r, load(sums + (r * N + n) * LANES), out);
        row += own;
        next = nullptr;
    }
}

void product_bf16(const ps_matrix& matrix, const Rows& rows, int row, int row_end, int block, int block_end, const Output& out) {
    configure_bf16_tiles();
    for (; block + 2 <= block_end; block += 2) tile_product_bf16<2>(matrix, rows, row, row_end, block, block_end, out);
    if (block < block_end) tile_product_bf16<1>(matrix, rows, row, row_end, block, block_end, out);
    _tile_release();
}

void product_with_tiles(const ps_matrix& matrix, const Rows& rows, int row, int row_end, int block, int block_end,
                        const Output& out) {
    if (matrix.kind == PS_BF16)
        product_bf16(matrix, rows, row, row_end, block, block_end, out);
    else
        product(matrix, rows, row, row_end, block, block_end, out);
}

}  // namespace
}  // namespace penstock

#include "attention_amx.inl"

namespace penstock {

extern const Kernels amx_kernels = table_of("amx", product_with_tiles, attend_in_tiles);

}  // namespace penstock
