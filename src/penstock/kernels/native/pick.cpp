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
constexpr double NUCLEUS_EDGE = 3e-6;                // ... and that of a nucleus, which is compared with a sum in fp32
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

// Which weights the limits leave. Between `low` and `high` that is in doubt: the sampler may keep some of these and drop others.
struct Edge {
    float low = 0.0f, high = 0.0f;

    bool keeps(float weight) const { return well_above(weight, high); }
    bool drops(float weight) const { return well_above(low, weight); }

    void raise(float least, float largest_below) {
        low = std::max(low, least);
        high = std::max(high, largest_below);
    }
};

// What could be drawn, in the order of ids: all tokens whose weight is at least `bound`.
struct Candidates {
    int count = 0;
    int32_t* ids;
    float* weights;
    float* sorted;
    float bound;

    Candidates(const Kernels& kernels, const Weights& row, float from) : bound(from) {
        const int64_t room = row.n + 16;
        weights = thread_candidates.take<float>(3 * room);
        sorted = weights + room;
        ids = reinterpret_cast<int32_t*>(sorted + room);
        for (int tile = 0; tile < row.tiles; tile++) {
            if (row.peaks[tile] < bound) continue;
            const int first = tile * TILE;
            count += kernels.select(row.weights + first, row.tile_end(tile) - first, bound, first, weights + count, ids + count);
        }
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

    // No weight that is smaller than this one is larger than the result.
    float below(float weight) const {
        float next = bound;
        for (int i = 0; i < count; i++) next = weights[i] < weight && weights[i] > next ? weights[i] : next;
        return next;
    }

    // The sums of what is kept, and of what is in doubt
    void sum(const Edge& edge, double* kept, double* doubtful) const {
        *kept = *doubtful = 0.0;
        for (int i = 0; i < count; i++) {
            const double weight = static_cast<double>(weights[i]);
            const bool keep = edge.keeps(weights[i]);
            *kept += keep ? weight : 0.0;
            *doubtful += keep || edge.drops(weights[i]) ? 0.0 : weight;
        }
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

// Leave top_k weights, of at least as many.
void limit_count(Candidates& all, const Histogram& bins, int top_k, Edge* edge) {
    int bin = BINS - 1, above = 0;
    while (bin > 0 && above + bins.count[bin] < top_k) above += bins.count[bin--];
    const int size = all.sort(Histogram::floor(bin), Histogram::floor(bin + 1)), last = top_k - above - 1;
    const float least = all.sorted[last];
    const float next = last + 1 < size ? all.sorted[last + 1] : all.below(least);
    edge->raise(least, well_above(least, next) ? next : least);
}

// Leave the nucleus, whose sum is somewhere within [least, most]. False if it reaches below what is known.
bool limit_mass(Candidates& all, const Histogram& bins, double least, double most, Edge* edge) {
    least = std::max(least, static_cast<double>(NOTHING));  // the likeliest token is always in it
    int bin = BINS - 1;
    double before = 0.0;
    for (; bin > 0 && before + bins.mass[bin] < least; bin--) before += bins.mass[bin];
    const float end = Histogram::floor(bin + 1);
    double upto = before + bins.mass[bin];
    while (upto <= most && bin > 0 && Histogram::floor(bin) > edge->low) upto += bins.mass[--bin];
    if (upto <= most && edge->low <= all.bound) return false;
    const int size = all.sort(Histogram::floor(bin), end);
    int i = 0;
    for (; i < size && before < least; i++) before += static_cast<double>(all.sorted[i]);
    if (before < least) return true;  // the other limits leave less
    const float largest_below = i < size ? all.sorted[i] : all.below(all.sorted[size - 1]);
    for (; i < size && before <= most; i++) before += static_cast<double>(all.sorted[i]);
    edge->raise(before > most ? all.sorted[i - 1] : 0.0f, largest_below);
    return true;
}

// The k-th largest of the tiles' peaks: there are k weights of at least this. 0 where there are fewer tiles.
float peak_bound(const Weights& row, int k) {
    if (k > row.tiles) return 0.0f;
    float* copy = thread_candidates.take<float>(row.tiles);
    memcpy(copy, row.peaks, static_cast<size_t>(row.tiles) * sizeof(float));
    std::nth_element(copy, copy + k - 1, copy + row.tiles, std::greater<float>());
    return copy[k - 1];
}

int32_t draw_limited(const Kernels& kernels, const Weights& row, const ps_choice& choice) {
    const bool counted = choice.top_k > 0 && choice.top_k < row.n, nucleus = choice.top_p < 1.0f;
    const double share = static_cast<double>(choice.top_p);
    const auto from = [&](float bound) { return std::max({bound, choice.min_p, NOTHING}) * (1.0f - 4.0f * SAME); };
    float bound = 0.0f;
    if (counted)
        bound = peak_bound(row, choice.top_k);
    else if (nucleus)  // all smaller weights together are half of what a nucleus leaves out
        bound = static_cast<float>((1.0 - share) * row.total / (2.0 * row.n));
    const bool guess = nucleus && !counted;  // few tokens with much of the whole, as models have them
    Candidates all(kernels, row, from(guess ? 16.0f * bound : bound));
    if (guess && sum_of(all.weights, all.count) <= (share + 2.0 * NUCLEUS_EDGE) * row.total) all = {kernels, row, from(bound)};
    Edge edge;
    if (choice.min_p > 0.0f) edge.raise(choice.min_p, choice.min_p);
    double total = row.total, doubtful = 0.0;
    if (counted || nucleus) {
        const Histogram bins(all);
        const bool cut = all.count < choice.top_k;  // min_p leaves fewer than top_k
        if (counted && nucleus && cut && choice.min_p > 0.0f) return UNCERTAIN;  // a share of what is not known
        if (counted && !cut) {
            Edge best;
            limit_count(all, bins, choice.top_k, &best);
            all.sum(best, &total, &doubtful);
            edge.raise(best.low, best.high);
        } else if (counted) {
            all.sum(edge, &total, &doubtful);
        }
        const double margin = NUCLEUS_EDGE * (total + doubtful);
        if (nucleus && !limit_mass(all, bins, share * total - margin, share * (total + doubtful) + margin, &edge)) return UNCERTAIN;
    }
    all.sum(edge, &total, &doubtful);
    const double target = choice.noise * total, margin = EDGE * (total + doubtful);
    double before = 0.0, doubtful_before = 0.0;
    for (int i = 0; i < all.count; i++) {
        const double weight = static_cast<double>(all.weights[i]);
        if (!edge.keeps(all.weights[i])) {
            doubtful_before += edge.drops(all.weights[i]) ? 0.0 : weight;
            continue;
        }
        const double after = before + weight;
        if (after > target) {  // whatever of the doubtful is kept, too, moves both sides by this much at most
            const double earlier = (1.0 - choice.noise) * doubtful_before, later = choice.noise * (doubtful - doubtful_before);
            return target - before > margin + earlier && after - target > margin + later ? all.ids[i] : UNCERTAIN;
        }
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
    return limited ? draw_limited(kernels, row, choice) : draw(row, choice.noise);
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
