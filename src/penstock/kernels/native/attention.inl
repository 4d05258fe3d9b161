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
        for (int head = 0; head < task.heads; head++) fetch_ahead(first_block(), head);
    }

    // A block begins at a multiple of 64; of its keys, those from from(block) to to(block) are seen.
    int first_block() const { return start / KEY_BLOCK * KEY_BLOCK; }
    int from(int block) const { return start > block ? start - block : 0; }
    int to(int block) const { return end - block < KEY_BLOCK ? end - block : KEY_BLOCK; }
    const char* const* of_block(int block) const { return slots + (block - base); }

    // Ask for a block before it is used: its keys lie too far apart for the processor to guess which comes next. All heads of a
    // key lie side by side, so each of them asks for all of some keys.
    void fetch_ahead(int block, int head) const {
        const int count = to(block) - from(block);
        if (count <= 0) return;
        const int bytes = task.heads * task.head_dim * (task.type == PS_TYPE_F32 ? 4 : 2), first = from(block);
        for (int i = first + count * head / task.heads; i < first + count * (head + 1) / task.heads; i++)
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

// 64 keys and values as floats, for many queries: keys [4][head_dim][16], values [64][padded]
struct FloatBlock {
    float *keys, *values;
    int dim, padded;

    FloatBlock(float* memory, int dim) : keys(memory), dim(dim), padded(static_cast<int>(round_up(dim, LANES))) {
        values = keys + KEY_BLOCK * padded;
    }

    // Those at slots[from, to), from `offset` on, with zeros beside them up to a multiple of 16
    void load_slots(const Attention& task, const char* const* slots, int64_t offset, int from, int to) {
        static const float zeros[MAX_HEAD_DIM] = {};
        for (int group = from / LANES * LANES; group < to; group += LANES) {
            const char* own[LANES];
            for (int i = 0; i < LANES; i++) {
                const bool inside = group + i >= from && group + i < to;
                own[i] = inside ? slots[group + i] + offset : reinterpret_cast<const char*>(zeros);
                float* value = values + (group + i) * padded;
                widen_row(task.type, inside ? own[i] + task.value_offset : own[i], dim, value);
                for (int d = dim; d < padded; d++) value[d] = 0.0f;
            }
            spread_keys(task, own, keys + group * dim);
        }
    }

    // Number d + ODD of 16 keys, where d is even
    template <int ODD>
    V key(int group, int d, Number<ODD>) const {
        return load(keys + (group * dim + d + ODD) * LANES);
    }

    // Numbers d to d + 16 of a value
    V value(int key, int d) const { return load(values + key * padded + d); }
};

// The same of 16 bits, for a few queries: numbers become floats as they are multiplied. Heads are a multiple of 16.
template <int TYPE>
struct HalfBlock {
    uint16_t* pairs;  // [4][head_dim / 2][16 keys][2]
    int dim;
    const char* values[KEY_BLOCK];

    HalfBlock(float* memory, int dim) : pairs(reinterpret_cast<uint16_t*>(memory)), dim(dim) {}

    void load_slots(const Attention& task, const char* const* slots, int64_t offset, int from, int to) {
        static const uint16_t zeros[MAX_HEAD_DIM] = {};
        for (int group = from / LANES * LANES; group < to; group += LANES) {
            const char* own[LANES];
            for (int i = 0; i < LANES; i++) {
                const bool inside = group + i >= from && group + i < to;
                own[i] = inside ? slots[group + i] + offset : reinterpret_cast<const char*>(zeros);
                values[group + i] = inside ? own[i] + task.value_offset : own[i];
            }
            transpose(own, dim / 2, pairs + group * dim);
        }
    }

    template <int ODD>
    V key(int group, int d, Number<ODD>) const {
        const uint16_t* own = pairs + (group * dim + d) * LANES;
        V even, odd;
        if (TYPE == PS_TYPE_BF16)
            load_pair_bf16(own, even, odd);
        else
            load_pair_f16(own, even, odd);
        return ODD ? odd : even;
    }

    V value(int key, int d) const {
        const uint16_t* own = reinterpret_cast<const uint16_t*>(values[key]) + d;
        return TYPE == PS_TYPE_BF16 ? load_bf16(own) : load_f16(own);
    }
};

struct Query {
    const float* q;
    float* state;    // o [padded], then the largest score and the sum
    int start, end;  // keys that it sees
};

// Query `index` of the rows of a key-value head, with a state that has seen nothing
inline Query query_of(const Attention& task, int kv_head, int index, float* state) {
    const int dim = task.head_dim, padded = static_cast<int>(round_up(dim, LANES));
    const int row = index / task.group, head = kv_head * task.group + index % task.group, position = task.start + row;
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

// Add the products of numbers [from, to), at most 32, of R queries with N vectors: those of the even and of the odd apart, as a
// tile does. vector(n, i, Number<1>): number i + 1 of a vector
template <int R, int N, typename A, typename B>
inline void add_products(int from, int to, const A& number, const B& vector, V (*sums)[N]) {
    V even[R][N], odd[R][N];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int n = 0; n < N; n++) even[r][n] = odd[r][n] = all(0.0f);
    int i = from;
    for (; i + 2 <= to; i += 2)
#pragma GCC unroll 2
        for (int n = 0; n < N; n++) {
            const V first = vector(n, i, Number<0>());
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) even[r][n] = fma(all(number(r, i)), first, even[r][n]);
            const V second = vector(n, i, Number<1>());
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) odd[r][n] = fma(all(number(r, i + 1)), second, odd[r][n]);
        }
    if (i < to)
        for (int n = 0; n < N; n++) {
            const V last = vector(n, i, Number<0>());
            for (int r = 0; r < R; r++) even[r][n] = fma(all(number(r, i)), last, even[r][n]);
        }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int n = 0; n < N; n++) sums[r][n] = add(sums[r][n], add(even[r][n], odd[r][n]));
}

// scores [R][64] of N key groups from `group` on, not scaled yet
template <int R, int N, typename Block>
inline void score(const Query* queries, const Block& block, int group, float* scores) {
    V sums[R][N];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) sums[r][n] = all(0.0f);
    for (int d = 0; d < block.dim; d += GROUP)
        add_products<R, N>(
            d, d + GROUP < block.dim ? d + GROUP : block.dim, [&](int r, int i) { return queries[r].q[i]; },
            [&](int n, int i, auto odd) { return block.key(group + n, i, odd); }, sums);
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) save(scores + r * KEY_BLOCK + (group + n) * LANES, sums[r][n]);
}

// Numbers d to d + 16 N of the states of R queries: times their factors, with the values of keys [from, to) added
template <int R, int N, typename Block>
inline void add_values(const Query* queries, const float* factors, const float* weights, const Block& block, int from, int to,
                       int d) {
    V sums[R][N];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) sums[r][n] = mul(load(queries[r].state + d + n * LANES), all(factors[r]));
    for (int half = 0; half < KEY_BLOCK; half += GROUP) {
        const int low = from > half ? from / 2 * 2 : half, high = to < half + GROUP ? to : half + GROUP;
        if (low < high)
            add_products<R, N>(
                low, high, [&](int r, int key) { return weights[r * KEY_BLOCK + key]; },
                [&](int n, int key, auto odd) { return block.value(key + odd.value, d + n * LANES); }, sums);
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) save(queries[r].state + d + n * LANES, sums[r][n]);
}

constexpr float LOG2_E = 1.44269504f;

// Turn the scores of a query's keys [start, end) of the block into weights, 0 for the others; return the factor on what it had.
inline float soften(float* scores, int start, int end, float scale, bool rounded, float* largest, float* sum) {
    if (start >= end) {
        for (int i = 0; i < KEY_BLOCK; i++) scores[i] = 0.0f;
        return 1.0f;
    }
    for (int i = 0; i < start; i++) scores[i] = -INFINITY;
    for (int i = end; i < KEY_BLOCK; i++) scores[i] = -INFINITY;
    V highest = load(scores);
    for (int i = LANES; i < KEY_BLOCK; i += LANES) highest = max(highest, load(scores + i));
    const float before = *largest, block = max_lanes(highest) * scale, now = before > block ? before : block;
    for (int i = 0; i < KEY_BLOCK; i += LANES) {
        const V own = sub(mul(load(scores + i), all(scale)), all(now));  // at most 0, however large they are
        save(scores + i, rounded ? short_power_of_two(mul(own, all(LOG2_E))) : exponential(own));
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

// R queries over the keys of a block, which are those of positions [first, end)
template <int R, typename Block>
inline void attend_tile(const Attention& task, const Query* queries, int first, int end, const Block& block, float* scores) {
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
    const int groups = (to + LANES - 1) / LANES;
    int group = from / LANES;
    for (; group + VECTORS <= groups; group += VECTORS) score<R, VECTORS>(queries, block, group, scores);
    for (; group < groups; group++) score<R, 1>(queries, block, group, scores);
    float factors[R];
    for (int r = 0; r < R; r++) {
        const int low = queries[r].start > first ? queries[r].start - first : 0;
        const int high = (queries[r].end < end ? queries[r].end : end) - first;
        float* state = queries[r].state + padded;
        factors[r] = soften(scores + r * KEY_BLOCK, low, high, task.scale, task.type == PS_TYPE_BF16, state, state + 1);
    }
    int d = 0;
    for (; d + VECTORS * LANES <= padded; d += VECTORS * LANES)
        add_values<R, VECTORS>(queries, factors, scores, block, from, to, d);
    for (; d < padded; d += LANES) add_values<R, 1>(queries, factors, scores, block, from, to, d);
}

// All queries over the keys of a chunk, block after block
template <typename Block>
void attend_blocks(const Attention& task, const Query* queries, int count, const KeysOfChunk& keys, float* scratch,
                   float* scores) {
    const int64_t head_bytes = task.head_dim * (task.type == PS_TYPE_F32 ? 4 : 2);
    Block own(scratch, task.head_dim);
    for (int block = keys.first_block(); block < keys.end; block += KEY_BLOCK) {
        const int end = block + keys.to(block);
        for (int head = 0; head < task.heads; head++) {
            keys.fetch_ahead(block + KEY_BLOCK, head);
            own.load_slots(task, keys.of_block(block), head * head_bytes, keys.from(block), keys.to(block));
            const Query *next = queries + head * count, *last = next + count;
            while (last - next >= TILE && last - next != 6) {  // six are two times three
                attend_tile<TILE>(task, next, block, end, own, scores);
                next += TILE;
            }
            for (; last - next >= 3; next += 3) attend_tile<3>(task, next, block, end, own, scores);
            for (; next < last; next++) attend_tile<1>(task, next, block, end, own, scores);
        }
    }
}

void attend(const Attention& task, int first, int count, int chunk, float* scratch, float* states) {
    constexpr int FEW = VECTORS > 1 ? 8 : TILE;  // queries for which writing out a block first is not worth it
    const int dim = task.head_dim, padded = static_cast<int>(round_up(dim, LANES)), stride = state_size(dim);
    Query queries[QUERY_TILE];
    float* scores = scratch + 2 * KEY_BLOCK * padded;
    float* rounded = scores + TILE * KEY_BLOCK;
    for (int i = 0; i < task.heads * count; i++, rounded += padded) {
        queries[i] = query_of(task, i / count, first + i % count, states + i * stride);
        if (task.type != PS_TYPE_BF16) continue;
        for (int d = 0; d < dim; d++) rounded[d] = to_8_bits(queries[i].q[d]);
        queries[i].q = rounded;
    }
    const KeysOfChunk keys(task, chunk, queries[0].start, queries[count - 1].end);
    if (count > FEW || dim % LANES || task.type == PS_TYPE_F32)
        attend_blocks<FloatBlock>(task, queries, count, keys, scratch, scores);
    else if (task.type == PS_TYPE_BF16)
        attend_blocks<HalfBlock<PS_TYPE_BF16>>(task, queries, count, keys, scratch, scores);
    else
        attend_blocks<HalfBlock<PS_TYPE_F16>>(task, queries, count, keys, scratch, scores);
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
    return {name,           quantise_row,   round_row,    own_product,    rms_norm_row, rotate_head,  gate_row,    store_row,
            choose_experts, largest_of_row, weigh_logits, select_weights, own_attend,   merge_states, finish_state};
}

}  // namespace
}  // namespace penstock
