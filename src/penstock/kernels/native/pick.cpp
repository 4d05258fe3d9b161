// Choosing tokens: the best one of a row of logits, or one drawn by its probability among those that top_k, top_p and min_p
// leave. The sampler in Python has the last word: its probabilities are rounded otherwise, so a row in which that could make a
// difference gets no token here.
#include <algorithm>
#include <cstring>
#include <functional>

#include "context.h"

using namespace penstock;

namespace {

constexpr int TILE = 128;
constexpr float SAME = 2e-6f;  // relative difference of two weights that may be equal elsewhere: several units in the last place
constexpr double EDGE = 2e-6;  // of the whole: how far the edge of a token may lie elsewhere
constexpr double NUCLEUS_EDGE = 3e-6;  // ... and that of a nucleus, which is compared with a sum in fp32
constexpr int MAX_CANDIDATES = 16384;
constexpr float NOTHING = 1e-37f;                    // what is masked has no larger weight, and is never drawn
constexpr int BIN_SHIFT = 18;                        // bits of a weight that do not tell bins apart: a bin spans 3 %
constexpr int BINS = (0x3f800000 >> BIN_SHIFT) + 1;  // weights are at most 1
constexpr int32_t UNCERTAIN = -1;

thread_local Buffer thread_row, thread_tiles, thread_candidates, thread_bins;

bool well_above(float weight, float other) { return weight * (1.0f - SAME) > other; }

double sum_of(const float* weights, int n) {
    double sums[8] = {};
    int i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) sums[j] += static_cast<double>(weights[i + j]);
    for (; i < n; i++) sums[0] += static_cast<double>(weights[i]);
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// The weights of a row, e^(logit / temperature) with a largest one of 1, and what is known of each tile of them.
struct Weights {
    int n, tiles;
    float* weights;  // [n]
    float* peaks;    // [tiles]: the largest of each
    double* sums;    // [tiles]
    double total;

    int tile_end(int tile) const { return (tile + 1) * TILE < n ? (tile + 1) * TILE : n; }
};

// What could be drawn, in the order of ids: all tokens whose weight is at least `bound`.
struct Candidates {
    int count = 0;
    int32_t* ids;
    float* weights;
    float* sorted;
    float bound;

    // False if there are too many
    bool gather(const Weights& row, float from) {
        bound = from;
        weights = thread_candidates.take<float>(3 * MAX_CANDIDATES);
        sorted = weights + MAX_CANDIDATES;
        ids = reinterpret_cast<int32_t*>(sorted + MAX_CANDIDATES);
        for (int tile = 0; tile < row.tiles; tile++) {
            if (row.peaks[tile] < bound) continue;
            if (count + TILE > MAX_CANDIDATES) return false;
            for (int i = tile * TILE, end = row.tile_end(tile); i < end; i++) {
                weights[count] = row.weights[i];
                ids[count] = i;
                count += row.weights[i] >= bound;
            }
        }
        return true;
    }

    // Sort the weights within [from, end), largest first.
    int sort(float from, float end) {
        int size = 0;
        for (int i = 0; i < count; i++) {
            sorted[size] = weights[i];
            size += weights[i] >= from && weights[i] < end;
        }
        std::sort(sorted, sorted + size, std::greater<float>());
        return size;
    }

    // Whether sorted weight i is well above all smaller ones, also those that are no candidates.
    bool stands_out(int i, int size) const {
        float next = bound;
        if (i + 1 < size)
            next = sorted[i + 1];
        else
            for (int c = 0; c < count; c++) next = weights[c] < sorted[i] && weights[c] > next ? weights[c] : next;
        return well_above(sorted[i], next);
    }
};

// Candidates by the size of their weights
struct Histogram {
    double* mass;    // [BINS]
    int32_t* count;  // [BINS]

    explicit Histogram(const Candidates& all) {
        mass = thread_bins.take<double>(2 * BINS);
        count = reinterpret_cast<int32_t*>(mass + BINS);
        memset(mass, 0, BINS * sizeof(double));
        memset(count, 0, BINS * sizeof(int32_t));
        for (int i = 0; i < all.count; i++) {
            uint32_t bits;
            memcpy(&bits, all.weights + i, sizeof bits);
            mass[bits >> BIN_SHIFT] += static_cast<double>(all.weights[i]);
            count[bits >> BIN_SHIFT]++;
        }
    }

    // The smallest weight of a bin
    static float floor(int bin) {
        const uint32_t bits = static_cast<uint32_t>(bin) << BIN_SHIFT;
        float weight;
        memcpy(&weight, &bits, sizeof weight);
        return weight;
    }
};

// The smallest weight within top_k; false if it is not certain. There are at least as many candidates.
bool limit_count(Candidates& all, const Histogram& bins, int top_k, float* floor) {
    int bin = BINS - 1, above = 0;
    while (bin > 0 && above + bins.count[bin] < top_k) above += bins.count[bin--];
    const int size = all.sort(Histogram::floor(bin), Histogram::floor(bin + 1)), last = top_k - above - 1;
    if (last >= size) return false;
    *floor = all.sorted[last];
    return all.stands_out(last, size);
}

// The smallest weight of the nucleus that is a share of `whole`, if it is among weights of at least `least`. False if that is not
// certain.
bool limit_mass(Candidates& all, const Histogram& bins, float least, float share, double whole, float* floor) {
    const double limit = static_cast<double>(share) * whole, margin = NUCLEUS_EDGE * whole;
    double before = 0.0;
    int bin = BINS - 1;
    for (; bin > 0 && before + bins.mass[bin] < limit; bin--) before += bins.mass[bin];
    const float from = Histogram::floor(bin) > least ? Histogram::floor(bin) : least;
    const int size = all.sort(from, Histogram::floor(bin + 1));
    for (int i = 0; i < size; i++) {
        const double after = before + static_cast<double>(all.sorted[i]);
        if (after >= limit) {
            *floor = all.sorted[i];
            return before < limit - margin && after > limit + margin && all.stands_out(i, size);
        }
        before = after;
    }
    return before < limit - margin;  // it reaches below
}

// The k-th largest of the tiles' peaks: there are k weights of at least this. 0 where there are fewer tiles.
float peak_bound(const Weights& row, int k) {
    if (k > row.tiles) return 0.0f;
    float* copy = thread_candidates.take<float>(row.tiles);
    memcpy(copy, row.peaks, static_cast<size_t>(row.tiles) * sizeof(float));
    std::nth_element(copy, copy + k - 1, copy + row.tiles, std::greater<float>());
    return copy[k - 1];
}

int32_t draw_limited(const Weights& row, const ps_choice& choice) {
    const bool counted = choice.top_k > 0 && choice.top_k < row.n, nucleus = choice.top_p < 1.0f;
    float bound = std::max(choice.min_p, NOTHING);
    if (counted)
        bound = std::max(bound, peak_bound(row, choice.top_k));
    else if (nucleus)  // all smaller weights together are half of what a nucleus leaves out
        bound = std::max(bound, static_cast<float>((1.0 - static_cast<double>(choice.top_p)) * row.total / (2.0 * row.n)));
    Candidates all;
    if (!all.gather(row, bound * (1.0f - 4.0f * SAME)) || all.count == 0) return UNCERTAIN;
    float floor = 0.0f;
    if (counted || nucleus) {
        const Histogram bins(all);
        const bool cut = all.count < choice.top_k;  // min_p leaves fewer than top_k
        if (counted && !cut && !limit_count(all, bins, choice.top_k, &floor)) return UNCERTAIN;
        double whole = row.total;
        if (counted) {
            whole = 0.0;
            for (int i = 0; i < all.count; i++) whole += all.weights[i] >= floor ? static_cast<double>(all.weights[i]) : 0.0;
        }
        if (counted && nucleus && cut && choice.min_p > 0.0f) return UNCERTAIN;  // a share of what is not known
        if (nucleus && !limit_mass(all, bins, floor, choice.top_p, whole, &floor)) return UNCERTAIN;
    }
    if (!well_above(floor, choice.min_p) && choice.min_p > 0.0f) {
        floor = choice.min_p;
        for (int i = 0; i < all.count; i++)
            if (!well_above(all.weights[i], floor) && !well_above(floor, all.weights[i])) return UNCERTAIN;
    }
    double total = 0.0, before = 0.0;
    for (int i = 0; i < all.count; i++) {
        if (all.weights[i] < floor) all.weights[i] = 0.0f;
        total += static_cast<double>(all.weights[i]);
    }
    const double target = choice.noise * total, margin = EDGE * total;
    for (int i = 0; i < all.count; i++) {
        const double after = before + static_cast<double>(all.weights[i]);
        if (after > target) return target - before > margin && after - target > margin ? all.ids[i] : UNCERTAIN;
        before = after;
    }
    return UNCERTAIN;
}

// The token at which the sum of weights, in the order of ids, passes noise * total
int32_t draw(const Weights& row, double noise) {
    const double target = noise * row.total, margin = EDGE * row.total;
    double before = 0.0;
    int tile = 0;
    for (; tile + 1 < row.tiles && before + row.sums[tile] <= target; tile++) before += row.sums[tile];
    for (int i = tile * TILE, end = row.tile_end(tile); i < end; i++) {
        const double after = before + static_cast<double>(row.weights[i]);
        if (after > target) return target - before > margin && after - target > margin ? i : UNCERTAIN;
        before = after;
    }
    return UNCERTAIN;
}

int32_t pick_row(const Kernels& kernels, const float* logits, int n, const ps_choice& choice) {
    Weights row;
    row.n = n;
    row.tiles = (n + TILE - 1) / TILE;
    row.sums = thread_tiles.take<double>(2 * static_cast<int64_t>(row.tiles));
    row.peaks = reinterpret_cast<float*>(row.sums + row.tiles);
    int best = 0;
    for (int tile = 0; tile < row.tiles; tile++) {
        row.peaks[tile] = kernels.largest(logits + tile * TILE, row.tile_end(tile) - tile * TILE);
        if (row.peaks[tile] > row.peaks[best]) best = tile;
    }
    int32_t token = best * TILE;
    while (token < row.tile_end(best) && logits[token] != row.peaks[best]) token++;
    if (token == row.tile_end(best)) return UNCERTAIN;  // not a number
    if (choice.temperature == 0.0f) return token;
    row.weights = thread_row.take<float>(n);
    kernels.weigh(logits, n, choice.temperature, logits[token], row.weights);
    kernels.weigh(row.peaks, row.tiles, choice.temperature, logits[token], row.peaks);
    row.total = 0.0;
    for (int tile = 0; tile < row.tiles; tile++) {
        row.sums[tile] = sum_of(row.weights + tile * TILE, row.tile_end(tile) - tile * TILE);
        row.total += row.sums[tile];
    }
    if (!(row.total <= static_cast<double>(n)) || row.weights[token] != 1.0f) return UNCERTAIN;  // not a number
    const bool limited = choice.top_k > 0 || choice.top_p < 1.0f || choice.min_p > 0.0f;
    return limited ? draw_limited(row, choice) : draw(row, choice.noise);
}

}  // namespace

int ps_pick(ps_context* context, int m, int n, const float* logits, const ps_choice* choices, int32_t* tokens) {
    if (m < 0 || n < 1) return fail("There are no %d rows of %d logits.", m, n);
    for (int i = 0; i < m; i++)
        if (!(choices[i].temperature >= 0.0f)) return fail("Row %d has a temperature below 0.", i);
    context->for_rows(
        m, [&](int row) { tokens[row] = pick_row(*context->kernels, logits + static_cast<int64_t>(row) * n, n, choices[row]); });
    return 0;
}
