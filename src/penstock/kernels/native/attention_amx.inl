// Attention of up to sixteen queries at a time, in tiles of bf16: the sums of attention.inl, bit for bit. Rows of a tile that no
// query needs are computed along, and left. Included by the path for processors with tiles.

namespace penstock {
namespace {

// Pieces of attend_scratch(): all are multiples of 64 bytes
struct TileScratch {
    uint32_t* keys;     // [4 groups][dim / 2][16 keys]: pairs of numbers
    uint16_t* values;   // [32 pairs of keys][dim][2]
    uint16_t* queries;  // [48][dim]
    float* scores;      // [16][64]
    uint16_t* weights;  // [16][64]
    float* states;      // [48][state_size]

    TileScratch(float* memory, int dim) {
        keys = reinterpret_cast<uint32_t*>(memory);
        values = reinterpret_cast<uint16_t*>(memory + KEY_BLOCK / 2 * dim);
        queries = values + KEY_BLOCK * dim;
        scores = memory + KEY_BLOCK * dim + QUERY_TILE / 2 * dim;
        weights = reinterpret_cast<uint16_t*>(scores + LANES * KEY_BLOCK);
        states = scores + 3 * LANES * KEY_BLOCK / 2;
    }
};

// x, of which only the upper halves are not 0, as bf16
inline void save_upper_halves(uint16_t* to, V x) {
    const __m256i halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(x.v), 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
}

// The keys at slots[0, 64), with zeros for those outside [from, to)
void load_pairs(const Attention& task, const char* const* slots, int from, int to, const TileScratch& own) {
    static const uint16_t zeros[MAX_HEAD_DIM] = {};
    const int dim = task.head_dim;
    const char *keys[KEY_BLOCK], *values[KEY_BLOCK];
    for (int i = 0; i < KEY_BLOCK; i++) {
        const bool inside = i >= from && i < to;
        keys[i] = inside ? slots[i] : reinterpret_cast<const char*>(zeros);
        values[i] = inside ? keys[i] + task.value_offset : keys[i];
    }
    for (int group = 0; group < KEY_BLOCK; group += LANES) transpose(keys + group, dim / 2, own.keys + group * dim / 2);
    for (int i = 0; i < KEY_BLOCK; i += 2)
        for (int d = 0; d < dim; d += LANES) {
            const __m512i even = _mm512_cvtepu16_epi32(load256(values[i] + 2 * d));
            const __m512i odd = _mm512_cvtepu16_epi32(load256(values[i + 1] + 2 * d));
            _mm512_storeu_si512(own.values + i * dim + 2 * d, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
        }
}

// scores [16][64] of key groups [from, to)
void score_tile(const uint16_t* queries, int dim, const uint32_t* keys, int from, int to, float* scores) {
    finish_stores();
    for (int group = from; group < to; group++) {
        _tile_zero(0);
        for (int d = 0; d < dim; d += GROUP) {
            _tile_loadd(4, queries + d, 2 * dim);
            _tile_loadd(6, keys + (group * dim + d) / 2 * LANES, 64);
            _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, scores + group * LANES, KEY_BLOCK * 4);
    }
}

// Add the values of key halves [from, to), weighted, to 16 states.
void add_values(const uint16_t* weights, const uint16_t* values, int dim, int from, int to, float* states, int64_t stride) {
    finish_stores();
    for (int d = 0; d < dim; d += LANES) {
        _tile_loadd(0, states + d, stride * 4);
        for (int half = from; half < to; half++) {
            _tile_loadd(4, weights + half * GROUP, KEY_BLOCK * 2);
            _tile_loadd(6, values + half * GROUP * dim + 2 * d, 4 * dim);
            _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, states + d, stride * 4);
    }
}

// Up to 16 queries over keys [first, first + 64)
void attend_tile(const Attention& task, const Query* queries, int count, int first, const uint16_t* q, const TileScratch& own) {
    const int dim = task.head_dim, stride = state_size(dim);
    const auto low_of = [&](int r) { return queries[r].start > first ? queries[r].start - first : 0; };
    const auto high_of = [&](int r) { return queries[r].end < first + KEY_BLOCK ? queries[r].end - first : KEY_BLOCK; };
    const int from = low_of(0), to = high_of(count - 1);
    if (from >= to) return;
    score_tile(q, dim, own.keys, from / LANES, (to + LANES - 1) / LANES, own.scores);
    for (int r = 0; r < count; r++) {
        float *scores = own.scores + r * KEY_BLOCK, *state = queries[r].state;
        for (int i = 0; i < KEY_BLOCK; i += LANES) save(scores + i, mul(load(scores + i), all(task.scale)));
        const V factor = all(soften(scores, low_of(r), high_of(r), true, state + dim, state + dim + 1));
        for (int i = 0; i < KEY_BLOCK; i += LANES) save_upper_halves(own.weights + r * KEY_BLOCK + i, load(scores + i));
        for (int d = 0; d < dim; d += LANES) save(state + d, mul(load(state + d), factor));
    }
    add_values(own.weights, own.values, dim, from / GROUP, (to + GROUP - 1) / GROUP, queries[0].state, stride);
}

void attend_in_tiles(const Attention& task, int first, int count, int chunk, float* scratch, float* states) {
    const int dim = task.head_dim, stride = state_size(dim);
    if (task.type != PS_TYPE_BF16 || dim % GROUP) return attend(task, first, count, chunk, scratch, states);
    if (task.heads > 1) {
        Attention one = task;
        for (one.heads = 1; one.kv < task.kv + 2 * task.heads * dim; one.q += task.group * dim, one.kv += 2 * dim) {
            attend_in_tiles(one, first, count, chunk, scratch, states);
            states += count * stride;
        }
        return;
    }
    const TileScratch own(scratch, dim);
    Query queries[QUERY_TILE];
    for (int i = 0; i < count; i++) {
        queries[i] = query_of(task, 0, first + i, own.states + i * stride);
        for (int d = 0; d < dim; d += LANES) save_upper_halves(own.queries + i * dim + d, to_8_bits(load(queries[i].q + d)));
    }
    const KeysOfChunk keys(task, chunk, queries[0].start, queries[count - 1].end);
    configure_bf16_tiles();
    for (int block = keys.first_block(); block < keys.end; block += KEY_BLOCK) {
        keys.fetch_ahead(block + KEY_BLOCK, 0);
        load_pairs(task, keys.of_block(block), keys.from(block), keys.to(block), own);
        for (int i = 0; i < count; i += LANES)
            attend_tile(task, queries + i, count - i < LANES ? count - i : LANES, block, own.queries + i * dim, own);
    }
    _tile_release();
    memcpy(states, own.states, static_cast<size_t>(count) * stride * sizeof(float));
}

}  // namespace
}  // namespace penstock
