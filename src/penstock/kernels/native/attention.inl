// Attention over pages: a running softmax over blocks of keys, with keys in lanes for the scores and values in lanes for the
// sums. A query's blocks lie at fixed positions, so its result does not depend on the queries beside it. Over keys and values in
// bf16, queries and weights are rounded to bf16, and all sums have the order of tiles. Included after kernels.inl.

namespace penstock {
namespace {

inline int first_key(const Attention& task, int position) {
    return task.window > 0 && position >= task.window ? position - task.window + 1 : 0;
}

// Where the keys are that queries see in a chunk: those of positions [start, end)
struct KeysOfChunk {
    const Attention& task;
    int base, start, end;
    const char* slots[KEY_CHUNK];

    KeysOfChunk(const Attention& task, int chunk, int first, int last)
        : task(task),
          base(chunk * KEY_CHUNK),
          start(first > base ? first : base),
          end(last < base + KEY_CHUNK ? last : base + KEY_CHUNK) {
        const int32_t* entry = task.table + static_cast<int64_t>(start / task.block_size) * task.groups;
        for (int i = start, offset = start % task.block_size; i < end; entry += task.groups, offset = 0) {
            const char* at = task.kv + (static_cast<int64_t>(*entry) * task.block_size + offset) * task.slot_bytes;
            for (; offset < task.block_size && i < end; offset++, i++, at += task.slot_bytes) slots[i - base] = at;
        }
        fetch_ahead(first_block());
    }

    // A block begins at a multiple of 64; of its keys, those from from(block) to to(block) are seen.
    int first_block() const { return start / KEY_BLOCK * KEY_BLOCK; }
    int from(int block) const { return start > block ? start - block : 0; }
    int to(int block) const { return end - block < KEY_BLOCK ? end - block : KEY_BLOCK; }
    const char* const* of_block(int block) const { return slots + (block - base); }

    // Ask for a block before it is used: its keys lie too far apart for the processor to guess which comes next.
    void fetch_ahead(int block) const {
        const int bytes = task.head_dim * (task.type == PS_TYPE_F32 ? 4 : 2);
        for (int i = from(block); i < to(block); i++)
            for (int b = 0; b < bytes; b += 64) {
                __builtin_prefetch(of_block(block)[i] + b, 0, 2);
                __builtin_prefetch(of_block(block)[i] + task.value_offset + b, 0, 2);
            }
    }
};

// Keys of 16 positions -> [head_dim][16], as floats
inline void spread_keys(const Attention& task, const char* const* keys, float* out) {
    const int dim = task.head_dim;
    if (task.type == PS_TYPE_F32) return transpose(keys, dim, out);
    uint16_t pairs[MAX_HEAD_DIM * LANES];
    transpose(keys, dim / 2, pairs);
    for (int d = 0; d + 2 <= dim; d += 2) {
        V even, odd;
        if (task.type == PS_TYPE_BF16)
            load_pair_bf16(pairs + d * LANES, even, odd);
        else
            load_pair_f16(pairs + d * LANES, even, odd);
        save(out + d * LANES, even);
        save(out + (d + 1) * LANES, odd);
    }
    if (dim % 2)
        for (int i = 0; i < LANES; i++) out[(dim - 1) * LANES + i] = widen(task.type, keys[i], dim - 1);
}

// The keys at slots[from, to): keys [4][head_dim][16], values [64][padded], with zeros beside them up to a multiple of 16
void load_block(const Attention& task, const char* const* slots, int from, int to, float* keys, float* values) {
    static const float zeros[MAX_HEAD_DIM] = {};
    const int dim = task.head_dim, padded = static_cast<int>(round_up(dim, LANES));
    for (int group = from / LANES * LANES; group < to; group += LANES) {
        const char* own[LANES];
        for (int i = 0; i < LANES; i++) {
            const bool inside = group + i >= from && group + i < to;
            own[i] = inside ? slots[group + i] : reinterpret_cast<const char*>(zeros);
            float* value = values + (group + i) * padded;
            widen_row(task.type, inside ? own[i] + task.value_offset : own[i], dim, value);
            for (int d = dim; d < padded; d++) value[d] = 0.0f;
        }
        spread_keys(task, own, keys + group * dim);
    }
}

struct Query {
    const float* q;
    float* state;    // o [padded], then the largest score and the sum
    int start, end;  // keys that it sees
};

// Query `index` of the group's rows, with a state that has seen nothing
inline Query query_of(const Attention& task, int index, float* state) {
    const int dim = task.head_dim, padded = static_cast<int>(round_up(dim, LANES));
    const int row = index / task.group, head = index % task.group, position = task.start + row;
    for (int d = 0; d < padded; d++) state[d] = 0.0f;
    state[padded] = -INFINITY;
    state[padded + 1] = 0.0f;
    return {task.q + row * task.row_stride + head * dim, state, first_key(task, position), position + 1};
}

// To the 8 bits of bf16; what is not a number stays so
inline V to_8_bits(V x) {
    const V raised = mul(x, all(65537.0f));
    return sub(raised, sub(raised, x));
}

inline float to_8_bits(float x) {
    const float raised = x * 65537.0f;
    return raised - (raised - x);
}

// Add the products of numbers [from, to), at most 32: those of the even and of the odd apart, as a tile does.
template <int R, typename A, typename B>
inline void add_products(int from, int to, const A& number, const B& vector, V* sums) {
    V even[R], odd[R];
    for (int r = 0; r < R; r++) even[r] = odd[r] = all(0.0f);
    int i = from;
    for (; i + 2 <= to; i += 2) {
        const V first = vector(i);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) even[r] = fma(all(number(r, i)), first, even[r]);
        const V second = vector(i + 1);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) odd[r] = fma(all(number(r, i + 1)), second, odd[r]);
    }
    if (i < to)
        for (int r = 0; r < R; r++) even[r] = fma(all(number(r, i)), vector(i), even[r]);
    for (int r = 0; r < R; r++) sums[r] = add(sums[r], add(even[r], odd[r]));
}

// scores [R][64] of key groups [from, to)
template <int R>
inline void score(const Query* queries, int dim, float scale, const float* keys, int from, int to, float* scores) {
    for (int group = from; group < to; group++) {
        V sums[R];
        for (int r = 0; r < R; r++) sums[r] = all(0.0f);
        const float* k = keys + group * LANES * dim;
        for (int d = 0; d < dim; d += GROUP)
            add_products<R>(
                d, d + GROUP < dim ? d + GROUP : dim, [&](int r, int i) { return queries[r].q[i]; },
                [&](int i) { return load(k + i * LANES); }, sums);
        for (int r = 0; r < R; r++) save(scores + r * KEY_BLOCK + group * LANES, mul(sums[r], all(scale)));
    }
}

// Turn the scores of a query's keys [start, end) of the block into weights, 0 for the others; return the factor on what it had.
inline float soften(float* scores, int start, int end, bool rounded, float* largest, float* sum) {
    if (start >= end) {
        for (int i = 0; i < KEY_BLOCK; i++) scores[i] = 0.0f;
        return 1.0f;
    }
    for (int i = 0; i < start; i++) scores[i] = -INFINITY;
    for (int i = end; i < KEY_BLOCK; i++) scores[i] = -INFINITY;
    V highest = load(scores);
    for (int i = LANES; i < KEY_BLOCK; i += LANES) highest = max(highest, load(scores + i));
    const float before = *largest, block = max_lanes(highest), now = before > block ? before : block;
    for (int i = 0; i < KEY_BLOCK; i += LANES) {
        const V weights = exponential(sub(load(scores + i), all(now)));
        save(scores + i, rounded ? to_8_bits(weights) : weights);
    }
    for (int i = 0; i < start; i++) scores[i] = 0.0f;
    for (int i = end; i < KEY_BLOCK; i++) scores[i] = 0.0f;
    V total = load(scores);
    for (int i = LANES; i < KEY_BLOCK; i += LANES) total = add(total, load(scores + i));
    const float factor = before == -INFINITY ? 0.0f : exponential(before - now);
    *largest = now;
    *sum = __builtin_fmaf(*sum, factor, sum_lanes(total));
    return factor;
}

template <int R>
inline void attend_tile(const Attention& task, const Query* queries, int first, int end, const float* keys, const float* values,
                        float* scores) {
    const int padded = static_cast<int>(round_up(task.head_dim, LANES));
    int from = KEY_BLOCK, to = 0;  // keys that any of them sees, counted from the block's first
    for (int r = 0; r < R; r++) {
        const int low = queries[r].start > first ? queries[r].start - first : 0;
        const int high = (queries[r].end < end ? queries[r].end : end) - first;
        if (low < high) {
            from = low < from ? low : from;
            to = high > to ? high : to;
        }
    }
    if (from >= to) return;
    score<R>(queries, task.head_dim, task.scale, keys, from / LANES, (to + LANES - 1) / LANES, scores);
    float factors[R];
    for (int r = 0; r < R; r++) {
        const int low = queries[r].start > first ? queries[r].start - first : 0;
        const int high = (queries[r].end < end ? queries[r].end : end) - first;
        float* state = queries[r].state + padded;
        factors[r] = soften(scores + r * KEY_BLOCK, low, high, task.type == PS_TYPE_BF16, state, state + 1);
    }
    for (int d = 0; d < padded; d += LANES) {
        V sums[R];
        for (int r = 0; r < R; r++) sums[r] = mul(load(queries[r].state + d), all(factors[r]));
        for (int half = 0; half < KEY_BLOCK; half += GROUP) {
            const int low = from > half ? from / 2 * 2 : half, high = to < half + GROUP ? to : half + GROUP;
            if (low < high)
                add_products<R>(
                    low, high, [&](int r, int key) { return scores[r * KEY_BLOCK + key]; },
                    [&](int key) { return load(values + key * padded + d); }, sums);
        }
        for (int r = 0; r < R; r++) save(queries[r].state + d, sums[r]);
    }
}

void attend(const Attention& task, int first, int count, int chunk, float* scratch, float* states) {
    const int dim = task.head_dim, padded = static_cast<int>(round_up(dim, LANES)), stride = state_size(dim);
    Query queries[QUERY_TILE];
    float* keys = scratch;
    float* values = keys + KEY_BLOCK * padded;
    float* scores = values + KEY_BLOCK * padded;
    float* rounded = scores + QUERY_TILE * KEY_BLOCK;
    for (int i = 0; i < count; i++, rounded += padded) {
        queries[i] = query_of(task, first + i, states + i * stride);
        if (task.type != PS_TYPE_BF16) continue;
        for (int d = 0; d < dim; d++) rounded[d] = to_8_bits(queries[i].q[d]);
        queries[i].q = rounded;
    }
    const KeysOfChunk own(task, chunk, queries[0].start, queries[count - 1].end);
    for (int block = own.first_block(); block < own.end; block += KEY_BLOCK) {
        const int block_end = block + own.to(block);
        own.fetch_ahead(block + KEY_BLOCK);
        load_block(task, own.of_block(block), own.from(block), own.to(block), keys, values);
        int i = 0;
        for (; i + TILE <= count; i += TILE) attend_tile<TILE>(task, queries + i, block, block_end, keys, values, scores);
        for (; i + 3 <= count; i += 3) attend_tile<3>(task, queries + i, block, block_end, keys, values, scores);
        for (; i < count; i++) attend_tile<1>(task, queries + i, block, block_end, keys, values, scores);
    }
}

void merge_states(float* total, const float* part, int dim) {
    const int padded = static_cast<int>(round_up(dim, LANES));
    const float before = total[padded], added = part[padded];
    if (part[padded + 1] == 0.0f) return;
    if (total[padded + 1] == 0.0f) {
        memcpy(total, part, static_cast<size_t>(padded + 2) * sizeof(float));
        return;
    }
    const float largest = before > added ? before : added;
    const float a = exponential(before - largest), b = exponential(added - largest);
    for (int d = 0; d < padded; d += LANES) save(total + d, fma(load(total + d), all(a), mul(load(part + d), all(b))));
    total[padded] = largest;
    total[padded + 1] = __builtin_fmaf(total[padded + 1], a, part[padded + 1] * b);
}

void finish_state(const float* state, int dim, float* out) {
    const float factor = 1.0f / state[round_up(dim, LANES) + 1];
    for (int d = 0; d < dim; d++) out[d] = state[d] * factor;
}

// ---- the table of a path ----

constexpr Kernels table_of(const char* name, decltype(Kernels::product) own_product = product,
                           decltype(Kernels::attend) own_attend = attend) {
    return {name,      quantise_row,   round_row,      own_product,  rms_norm_row, rotate_head,  gate_row,
            store_row, choose_experts, largest_of_row, weigh_logits, own_attend,   merge_states, finish_state};
}

}  // namespace
}  // namespace penstock
