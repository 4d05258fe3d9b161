// Many rows times weights that are floats, for AVX-512: the rows share one conversion of the weights, and up to three blocks of
// outputs share the inputs. Every sum has the order of multiply_floats. Included after kernels.inl.

namespace penstock {
namespace {

constexpr int WIDE_ROWS = 4, WIDE_BLOCKS = 3;           // whose even and odd sums are in registers
constexpr int WIDE_INPUTS = 3 * GROUP, MOST_ROWS = 64;  // weights that stay in the first cache, and rows that use them there

// Inputs [from, to) of N blocks -> out [inputs][N][16 outputs]
template <int N, int KIND>
inline void widen_weights(const char* panel, int64_t bytes, int from, int to, float* out) {
    for (int k = from; k < to; k += 2, out += 2 * N * LANES)
        for (int n = 0; n < N; n++) {
            V even, odd;
            load_pair<KIND>(panel + n * bytes, k, even, odd);
            save(out + n * LANES, even);
            save(out + (N + n) * LANES, odd);
        }
}

// Add `inputs` products to the sums of WIDE_ROWS rows times N blocks.
template <int N>
inline void add_wide(const float* weights, int inputs, const float* x, int64_t stride, V (*sums)[N]) {
    constexpr int R = WIDE_ROWS;
    for (int start = 0; start < inputs; start += GROUP) {
        V even[R][N], odd[R][N];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 3
            for (int n = 0; n < N; n++) even[r][n] = odd[r][n] = all(0.0f);
        for (int k = start; k < start + GROUP; k += 2, weights += 2 * N * LANES) {
            V w[N];
#pragma GCC unroll 3
            for (int n = 0; n < N; n++) w[n] = load(weights + n * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const V own = all(x[r * stride + k]);
#pragma GCC unroll 3
                for (int n = 0; n < N; n++) even[r][n] = fma(w[n], own, even[r][n]);
            }
#pragma GCC unroll 3
            for (int n = 0; n < N; n++) w[n] = load(weights + (N + n) * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const V own = all(x[r * stride + k + 1]);
#pragma GCC unroll 3
                for (int n = 0; n < N; n++) odd[r][n] = fma(w[n], own, odd[r][n]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 3
            for (int n = 0; n < N; n++) sums[r][n] = add(sums[r][n], add(even[r][n], odd[r][n]));
    }
}

// Rows [row, row_end), a multiple of WIDE_ROWS, times N blocks
template <int N, int KIND>
void multiply_wide(const ps_matrix& matrix, const Rows& rows, int row, int row_end, int block, const Output& out) {
    alignas(64) float weights[WIDE_INPUTS * N * LANES];
    V sums[MOST_ROWS][N];
    const int padded = rows.padded_cols;
    const int64_t bytes = panel_bytes(KIND, padded);
    const char* panel = static_cast<const char*>(matrix.data) + block * bytes;
    for (int r = 0; r < row_end - row; r++)
        for (int n = 0; n < N; n++) sums[r][n] = all(0.0f);
    for (int from = 0; from < padded; from += WIDE_INPUTS) {
        const int to = from + WIDE_INPUTS < padded ? from + WIDE_INPUTS : padded;
        widen_weights<N, KIND>(panel, bytes, from, to, weights);
        for (int r = row; r < row_end; r += WIDE_ROWS)
            add_wide<N>(weights, to - from, rows.x + static_cast<int64_t>(r) * padded + from, padded, sums + (r - row));
    }
    for (int r = row; r < row_end; r++)
        for (int n = 0; n < N; n++) put_block(matrix, block + n, r, sums[r - row][n], out);
}

template <int KIND>
void product_wide(const ps_matrix& matrix, const Rows& rows, int row, int row_end, int block, int block_end, const Output& out) {
    for (; block + WIDE_BLOCKS <= block_end; block += WIDE_BLOCKS)
        multiply_wide<WIDE_BLOCKS, KIND>(matrix, rows, row, row_end, block, out);
    if (block + 2 == block_end) multiply_wide<2, KIND>(matrix, rows, row, row_end, block, out);
    if (block + 1 == block_end) multiply_wide<1, KIND>(matrix, rows, row, row_end, block, out);
}

void product_of_rows(const ps_matrix& matrix, const Rows& rows, int row, int row_end, int block, int block_end,
                     const Output& out) {
    while (matrix.kind > PS_Q8M && row_end - row >= LANES) {
        const int left = (row_end - row) / WIDE_ROWS * WIDE_ROWS, end = row + (left < MOST_ROWS ? left : MOST_ROWS);
        if (matrix.kind == PS_BF16)
            product_wide<PS_BF16>(matrix, rows, row, end, block, block_end, out);
        else if (matrix.kind == PS_F16)
            product_wide<PS_F16>(matrix, rows, row, end, block, block_end, out);
        else
            product_wide<PS_F32>(matrix, rows, row, end, block, block_end, out);
        row = end;
    }
    if (row < row_end) product(matrix, rows, row, row_end, block, block_end, out);
}

}  // namespace
}  // namespace penstock
