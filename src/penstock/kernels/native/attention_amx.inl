// Attention of up to sixteen queries at a time, in tiles of bf16: the sums of attention.inl, bit for bit. Rows of a tile that no
// query needs are computed along, and left. Included by the path for processors with tiles.

namespace penstock {
namespace {

constexpr int TILES_AT_ONCE = 4;  // of queries, which are on their way together

// Pieces of attend_scratch(): all are multiples of 64 bytes
struct TileScratch {
    uint32_t* keys;     // [4 groups][dim / 2][16 keys]: pairs of numbers
    uint16_t* values;   // [32 pairs of keys][dim][2]
    uint16_t* queries;  // [QUERY_TILE][dim]
    float* scores;      // [TILES_AT_ONCE * 16][64]
    uint16_t* weights;  // [TILES_AT_ONCE * 16][64]
    float* states;      // [QUERY_TILE][state_size], of which only the sums of values are used

    TileScratch(float* memory, int dim) {
        keys = reinterpret_cast<uint32_t*>(memory);
        values = reinterpret_cast<uint16_t*>(memory + KEY_BLOCK / 2 * dim);
        queries = values + KEY_BLOCK * dim;
        scores = memory + KEY_BLOCK * dim + QUERY_TILE / 2 * dim;
        weights = reinterpret_cast<uint16_t*>(scores + TILES_AT_ONCE * LANES * KEY_BLOCK);
        states = scores + 3 * TILES_AT_ONCE * LANES * KEY_BLOCK / 2;
    }

    static constexpr int floats(int dim) {
        return (KEY_BLOCK + QUERY_TILE / 2) * dim + 3 * TILES_AT_ONCE * LANES * KEY_BLOCK / 2 + QUERY_TILE * state_size(dim);
    }
};
static_assert(TileScratch::floats(GROUP) <= attend_scratch(GROUP) &&
              TileScratch::floats(MAX_HEAD_DIM) <= attend_scratch(MAX_HEAD_DIM));

// Up to sixteen queries: a lane for each
struct TileOfQueries {
    int count;
    int32_t start[LANES], end[LANES];  // keys that they see
    V largest, sum;                    // of their scores, and of their weights

    // Keys [from, to) of the block that begins at `first` are seen by some.
    int from(int first) const { return start[0] > first ? start[0] - first : 0; }
    int to(int first) const { return end[count - 1] < first + KEY_BLOCK ? end[count - 1] - first : KEY_BLOCK; }
    bool all_see(int first) const { return start[count - 1] <= first && end[0] >= first + KEY_BLOCK; }
};

// The upper halves of 32 floats, whose lower ones are 0
inline __m512i upper_halves(V first, V second) {
    const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23, 21,
                                         19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return _mm512_permutex2var_epi16(_mm512_castps_si512(first.v), odd, _mm512_castps_si512(second.v));
}

// Where numbers of 64 positions lie: those at slots[from, to), `offset` bytes behind them, and zeros for the others
struct Numbers {
    const char* at[KEY_BLOCK];

    Numbers(const char* const* slots, int64_t offset, int from, int to) {
        static const uint16_t zeros[MAX_HEAD_DIM] = {};
        for (int i = 0; i < KEY_BLOCK; i++)
            at[i] = i >= from && i < to ? slots[i] + offset : reinterpret_cast<const char*>(zeros);
    }
};

// -> [32 pairs][dim][2]. Of each 32 numbers of a value, 0-3, 8-11, 16-19 and 24-27 come first.
inline void pair_values(const Numbers& values, int from, int to, int dim, uint16_t* out) {
    for (int i = from / GROUP * GROUP; i < round_up(to, GROUP); i += 2)
        for (int d = 0; d < dim; d += GROUP) {
            const __m512i even = _mm512_loadu_si512(values.at[i] + 2 * d), odd = _mm512_loadu_si512(values.at[i + 1] + 2 * d);
            uint16_t* pairs = out + i * dim + 2 * d;
            _mm512_storeu_si512(pairs, _mm512_unpacklo_epi16(even, odd));
            _mm512_storeu_si512(pairs + GROUP, _mm512_unpackhi_epi16(even, odd));
        }
}

// The keys and values at slots[from, to)
void load_pairs(const Attention& task, const char* const* slots, int from, int to, const TileScratch& own) {
    const int dim = task.head_dim;
    const Numbers keys(slots, 0, from, to);
    for (int group = from / LANES * LANES; group < to; group += LANES)
        transpose(keys.at + group, dim / 2, own.keys + group * dim / 2);
    pair_values(Numbers(slots, task.value_offset, from, to), from, to, dim, own.values);
}

// The sums of values of a state, in the order of their numbers
inline void put_in_order(const float* state, int dim, float* out) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for (int d = 0; d < dim; d += GROUP) {
        const __m512 low = load(state + d).v, high = load(state + d + LANES).v;
        save(out + d, {_mm512_permutex2var_ps(low, first, high)});
        save(out + d + LANES, {_mm512_permutex2var_ps(low, second, high)});
    }
}

// scores [M * 16][64] of M tiles of queries and of key groups [from, to), or a few more
template <int M>
void score_tiles(const uint16_t* queries, int dim, const uint32_t* keys, int from, int to, float* scores) {
    finish_stores();
    for (int group = from / 2 * 2; group < to; group += 2) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        const uint32_t *first = keys + group * dim / 2 * LANES, *second = first + dim / 2 * LANES;
        for (int d = 0; d < dim; d += GROUP) {
            _tile_loadd(4, queries + d, 2 * dim);
            _tile_loadd(6, first + d / 2 * LANES, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, second + d / 2 * LANES, 64);
            _tile_dpbf16ps(1, 4, 7);
            if (M == 1) continue;
            _tile_loadd(5, queries + LANES * dim + d, 2 * dim);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        float* out = scores + group * LANES;
        _tile_stored(0, out, KEY_BLOCK * 4);
        _tile_stored(1, out + LANES, KEY_BLOCK * 4);
        if (M == 1) continue;
        _tile_stored(2, out + LANES * KEY_BLOCK, KEY_BLOCK * 4);
        _tile_stored(3, out + LANES * KEY_BLOCK + LANES, KEY_BLOCK * 4);
    }
    finish_stores();
}

// Add the values of key halves [from, to), weighted, to the states of M tiles.
template <int M>
void add_values(const uint16_t* weights, const uint16_t* values, int dim, int from, int to, float* states) {
    const int64_t stride = state_size(dim);
    finish_stores();
    for (int d = 0; d < dim; d += GROUP) {
        float *first = states + d, *second = first + LANES * stride;
        _tile_loadd(0, first, stride * 4);
        _tile_loadd(1, first + LANES, stride * 4);
        if (M == 2) _tile_loadd(2, second, stride * 4);
        if (M == 2) _tile_loadd(3, second + LANES, stride * 4);
        for (int half = from; half < to; half++) {
            const uint16_t* own = values + half * GROUP * dim + 2 * d;
            _tile_loadd(4, weights + half * GROUP, KEY_BLOCK * 2);
            _tile_loadd(6, own, 4 * dim);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, own + GROUP, 4 * dim);
            _tile_dpbf16ps(1, 4, 7);
            if (M == 1) continue;
            _tile_loadd(5, weights + LANES * KEY_BLOCK + half * GROUP, KEY_BLOCK * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, first, stride * 4);
        _tile_stored(1, first + LANES, stride * 4);
        if (M == 2) _tile_stored(2, second, stride * 4);
        if (M == 2) _tile_stored(3, second + LANES, stride * 4);
    }
    finish_stores();
}

// Lane r of what this returns is that of all lanes of rows[r] together, in the order of sum_lanes.
template <typename F>
inline V together(const V (&rows)[LANES], const F& of) {
    V eights[8], fours[4], twos[2];  // lanes that are left of each row
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const __m512 a = rows[i / 2 + i % 2 * 8].v, b = rows[i / 2 + i % 2 * 8 + 4].v;
        eights[i] = of({_mm512_shuffle_f32x4(a, b, 0x44)}, {_mm512_shuffle_f32x4(a, b, 0xee)});
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512 a = eights[2 * i].v, b = eights[2 * i + 1].v;
        fours[i] = of({_mm512_shuffle_f32x4(a, b, 0x88)}, {_mm512_shuffle_f32x4(a, b, 0xdd)});
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        const __m512 a = fours[2 * i].v, b = fours[2 * i + 1].v;
        twos[i] = of({_mm512_shuffle_ps(a, b, 0x44)}, {_mm512_shuffle_ps(a, b, 0xee)});
    }
    return of({_mm512_shuffle_ps(twos[0].v, twos[1].v, 0x88)}, {_mm512_shuffle_ps(twos[0].v, twos[1].v, 0xdd)});
}

// Turn scores [16][64] into weights, 0 for keys that a query does not see; return the factors on what the queries had. This is
// soften() for sixteen at once: some of the keys that begin at `first` are not seen by all where it is MASKED.
template <bool MASKED>
V soften_tile(TileOfQueries& queries, int first, float scale, const float* scores, uint16_t* weights) {
    constexpr int VECTORS_OF_KEYS = KEY_BLOCK / LANES;
    const V none = all(-INFINITY);
    const auto seen = [&](int r) {
        const int low = queries.start[r] - first, high = queries.end[r] - first;
        if (low >= KEY_BLOCK || high <= 0 || low >= high) return uint64_t{0};
        return (high >= KEY_BLOCK ? ~uint64_t{0} : (uint64_t{1} << high) - 1) & ~uint64_t{0} << (low > 0 ? low : 0);
    };
    const auto score = [&](int r, int i) { return load(scores + r * KEY_BLOCK + i * LANES); };
    V found[LANES];
    for (int r = 0; r < LANES; r++) found[r] = none;
    for (int r = 0; r < queries.count; r++) {
        const uint64_t mask = MASKED ? seen(r) : 0;
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS_OF_KEYS; i++) {
            V own = score(r, i);
            if (MASKED) own = {_mm512_mask_mov_ps(none.v, static_cast<__mmask16>(mask >> (i * LANES)), own.v)};
            found[r] = max(found[r], own);
        }
    }
    const V block = mul(together(found, [](V a, V b) { return max(a, b); }), all(scale));
    const V before = queries.largest, now = max(before, block);
    const __mmask16 fresh = _mm512_cmp_ps_mask(before.v, none.v, _CMP_EQ_OQ);
    const V factors = {_mm512_mask_mov_ps(exponential(sub(before, now)).v, fresh, _mm512_setzero_ps())};
    alignas(64) float largest[LANES];
    save(largest, now);
    for (int r = 0; r < LANES; r++) found[r] = all(0.0f);
    for (int r = 0; r < queries.count; r++) {
        const uint64_t mask = MASKED ? seen(r) : 0;
        V own[VECTORS_OF_KEYS];
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS_OF_KEYS; i++) {
            own[i] = short_power_of_two(mul(sub(mul(score(r, i), all(scale)), all(largest[r])), all(LOG2_E)));
            if (MASKED) own[i] = {_mm512_maskz_mov_ps(static_cast<__mmask16>(mask >> (i * LANES)), own[i].v)};
        }
        found[r] = add(add(add(own[0], own[1]), own[2]), own[3]);
        _mm512_storeu_si512(weights + r * KEY_BLOCK, upper_halves(own[0], own[1]));
        _mm512_storeu_si512(weights + r * KEY_BLOCK + GROUP, upper_halves(own[2], own[3]));
    }
    queries.largest = now;
    queries.sum = fma(queries.sum, factors, together(found, [](V a, V b) { return add(a, b); }));
    return factors;
}

// Multiply the states of up to 16 queries by their factors, where these are neither 1 nor those of states that are still 0.
inline void scale_states(V factors, int count, int dim, float* states) {
    const __mmask16 other =
        _mm512_cmp_ps_mask(factors.v, all(1.0f).v, _CMP_NEQ_UQ) & _mm512_cmp_ps_mask(factors.v, all(0.0f).v, _CMP_NEQ_UQ);
    for (unsigned left = other & ((1u << count) - 1); left; left &= left - 1) {
        const int r = __builtin_ctz(left);
        alignas(64) float factor[LANES];
        save(factor, factors);
        float* own = states + r * state_size(dim);
        for (int d = 0; d < dim; d += LANES) save(own + d, mul(load(own + d), all(factor[r])));
    }
}

// All queries over keys [first, first + 64). A tile takes long to be stored and read again, so others are looked at meanwhile.
void attend_block(const Attention& task, TileOfQueries* tiles, int count, int first, const TileScratch& own) {
    const int dim = task.head_dim, stride = LANES * state_size(dim);
    for (int start = 0; start < count; start += TILES_AT_ONCE) {
        const int end = start + TILES_AT_ONCE < count ? start + TILES_AT_ONCE : count;
        const auto scores = [&](int i) { return own.scores + (i - start) * LANES * KEY_BLOCK; };
        const auto weights = [&](int i) { return own.weights + (i - start) * LANES * KEY_BLOCK; };
        // Call body(how many, i, from, to) for tile i, or two of them, where these need keys [from, to) in units of so many.
        const auto each = [&](int unit, const auto& body) {
            const auto from = [&](int i) { return tiles[i].from(first) / unit; };
            const auto to = [&](int i) { return (tiles[i].to(first) + unit - 1) / unit; };
            for (int i = start; i < end; i++) {
                if (from(i) >= to(i)) continue;
                if (i + 1 < end && from(i) == from(i + 1) && to(i) == to(i + 1)) {
                    body(Number<2>(), i, from(i), to(i));
                    i++;
                } else {
                    body(Number<1>(), i, from(i), to(i));
                }
            }
        };
        each(LANES, [&](auto many, int i, int from, int to) {
            score_tiles<many.value>(own.queries + i * LANES * dim, dim, own.keys, from, to, scores(i));
        });
        for (int i = start; i < end; i++) {
            if (tiles[i].from(first) >= tiles[i].to(first)) continue;
            const auto soften = tiles[i].all_see(first) ? soften_tile<false> : soften_tile<true>;
            const V factors = soften(tiles[i], first, task.scale, scores(i), weights(i));
            scale_states(factors, tiles[i].count, dim, own.states + i * stride);
        }
        each(GROUP, [&](auto many, int i, int from, int to) {
            add_values<many.value>(weights(i), own.values, dim, from, to, own.states + i * stride);
        });
    }
}

// The queries [first, first + count) of a key-value head, rounded -> [count][dim]; their states have seen nothing.
TileOfQueries round_queries(const Attention& task, int head, int first, int count, uint16_t* rounded, float* states) {
    const int dim = task.head_dim;
    TileOfQueries tile;
    tile.count = count;
    tile.largest = all(-INFINITY);
    tile.sum = all(0.0f);
    for (int i = 0; i < count; i++) {
        const Query query = query_of(task, head, first + i, states + i * state_size(dim));
        tile.start[i] = query.start;
        tile.end[i] = query.end;
        for (int d = 0; d < dim; d += GROUP) {
            const V low = to_8_bits(load(query.q + d)), high = to_8_bits(load(query.q + d + LANES));
            _mm512_storeu_si512(rounded + i * dim + d, upper_halves(low, high));
        }
    }
    return tile;
}

// Put what tiles have seen into states, in the order that others expect. states may be `seen`.
void put_states(const TileOfQueries& tile, int dim, const float* seen, float* states) {
    float largest[LANES], sum[LANES];
    save(largest, tile.largest);
    save(sum, tile.sum);
    for (int r = 0; r < tile.count; r++, seen += state_size(dim), states += state_size(dim)) {
        put_in_order(seen, dim, states);
        states[dim] = largest[r];
        states[dim + 1] = sum[r];
    }
}

// ---- where one tile has all queries of a head ----

constexpr int HEADS_AT_ONCE = 3;  // whose tiles are on their way together

// Pieces of attend_scratch()
struct FewScratch {
    uint32_t* queries;  // [heads][dim / 2][width]: pairs of numbers
    uint16_t* values;   // [3][32 pairs of keys][dim][2]
    float* turned;      // [3][64 keys][width]
    float* scores;      // [3][16][64]
    uint16_t* weights;  // [3][16][64]

    FewScratch(float* memory, int dim) {
        queries = reinterpret_cast<uint32_t*>(memory);
        values = reinterpret_cast<uint16_t*>(memory + 2 * FEW_QUERIES * dim);
        turned = memory + (2 * FEW_QUERIES + HEADS_AT_ONCE * KEY_BLOCK / 2) * dim;
        scores = turned + HEADS_AT_ONCE * LANES * KEY_BLOCK;
        weights = reinterpret_cast<uint16_t*>(scores + HEADS_AT_ONCE * LANES * KEY_BLOCK);
    }

    static constexpr int floats(int dim) {
        return (2 * FEW_QUERIES + HEADS_AT_ONCE * KEY_BLOCK / 2) * dim + 5 * HEADS_AT_ONCE * LANES * KEY_BLOCK / 2;
    }
};
static_assert(FewScratch::floats(GROUP) <= attend_scratch(GROUP) &&
              FewScratch::floats(MAX_HEAD_DIM) <= attend_scratch(MAX_HEAD_DIM));

// Tiles 0: scores [16 keys, W]; 4: keys or values [16, 32]; 5: states [count, 16]; 6: queries [16 pairs, W];
// 7: weights [count, 32]
void configure_for_few(int count, int width) {
    TileConfig config = {};
    config.palette = 1;
    for (int i = 0; i < 8; i++) config.bytes_per_row[i] = 64, config.rows[i] = 16;
    config.bytes_per_row[0] = config.bytes_per_row[6] = static_cast<uint16_t>(4 * width);
    config.rows[5] = config.rows[7] = static_cast<uint8_t>(count);
    configure(config);
}

// turned [64][width]. Keys lie at equal distances within a block of the KV memory, so tiles are loaded from there.
void score_keys(const Attention& task, const KeysOfChunk& keys, int block, int64_t offset, const uint32_t* queries, int width,
                float* turned) {
    finish_stores();
    const int from = keys.from(block), to = keys.to(block);
    for (int group = from / LANES * LANES; group < to; group += LANES) {
        const int known = group > from ? group : from;
        const char* first = keys.of_block(block)[known] - (known - group) * task.slot_bytes + offset;
        _tile_zero(0);
        for (int d = 0; d < task.head_dim; d += GROUP) {
            _tile_loadd(4, first + 2 * d, task.slot_bytes);
            _tile_loadd(6, queries + d / 2 * width, 4 * width);
            _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, turned + group * width, 4 * width);
    }
    finish_stores();
}

// turned [64][width] -> scores [count][64]
void turn_scores(const float* turned, int count, int width, float* scores) {
    const __m512i ramp = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i at = _mm512_mullo_epi32(ramp, _mm512_set1_epi32(width));
    for (int r = 0; r < count; r++)
        for (int i = 0; i < KEY_BLOCK; i += LANES)
            save(scores + r * KEY_BLOCK + i, {_mm512_i32gather_ps(at, turned + i * width + r, 4)});
}

void add_few_values(const uint16_t* weights, const uint16_t* values, int dim, int from, int to, float* states) {
    const int64_t stride = state_size(dim) * 4;
    finish_stores();
    for (int d = 0; d < dim; d += LANES) {
        _tile_loadd(5, states + d, stride);
        for (int half = from; half < to; half++) {
            _tile_loadd(7, weights + half * GROUP, KEY_BLOCK * 2);
            _tile_loadd(4, values + half * GROUP * dim + 2 * d, 4 * dim);
            _tile_dpbf16ps(5, 7, 4);
        }
        _tile_stored(5, states + d, stride);
    }
    finish_stores();
}

void attend_few(const Attention& task, int first, int count, int chunk, float* scratch, float* states) {
    const int dim = task.head_dim, stride = state_size(dim), width = count <= 4 ? 4 : count <= 8 ? 8 : 16;
    const FewScratch own(scratch, dim);
    TileOfQueries tiles[FEW_QUERIES];
    alignas(64) static const uint16_t zeros[MAX_HEAD_DIM] = {};
    for (int head = 0; head < task.heads; head++) {
        uint16_t* rounded = own.values;
        tiles[head] = round_queries(task, head, first, count, rounded, states + head * count * stride);
        uint32_t* to = own.queries + head * dim / 2 * width;
        for (int r = 0; r < width; r++) {
            const uint16_t* from = r < count ? rounded + r * dim : zeros;
            for (int d = 0; d < dim; d += 2) memcpy(to + d / 2 * width + r, from + d, 4);
        }
    }
    const TileOfQueries& any = tiles[0];  // all heads see the same keys
    const KeysOfChunk keys(task, chunk, any.start[0], any.end[count - 1]);
    configure_for_few(count, width);
    for (int block = keys.first_block(); block < keys.end; block += KEY_BLOCK)
        for (int head = 0; head < task.heads; head += HEADS_AT_ONCE) {
            const int beside = task.heads - head < HEADS_AT_ONCE ? task.heads - head : HEADS_AT_ONCE;
            const int from = any.from(block), to = any.to(block);
            if (from >= to) continue;
            for (int i = 0; i < beside; i++) {
                keys.fetch_ahead(block + KEY_BLOCK, head + i);
                score_keys(task, keys, block, 2 * dim * (head + i), own.queries + (head + i) * dim / 2 * width, width,
                           own.turned + i * LANES * KEY_BLOCK);
            }
            for (int i = 0; i < beside; i++)
                pair_values(
                    Numbers(keys.of_block(block), task.value_offset + 2 * dim * (head + i), keys.from(block), keys.to(block)),
                    from, to, dim, own.values + i * KEY_BLOCK * dim);
            for (int i = 0; i < beside; i++) {
                float* scores = own.scores + i * LANES * KEY_BLOCK;
                turn_scores(own.turned + i * LANES * KEY_BLOCK, count, width, scores);
                TileOfQueries& tile = tiles[head + i];
                const auto soften = tile.all_see(block) ? soften_tile<false> : soften_tile<true>;
                const V factors = soften(tile, block, task.scale, scores, own.weights + i * LANES * KEY_BLOCK);
                scale_states(factors, count, dim, states + (head + i) * count * stride);
            }
            for (int i = 0; i < beside; i++)
                add_few_values(own.weights + i * LANES * KEY_BLOCK, own.values + i * KEY_BLOCK * dim, dim, from / GROUP,
                               (to + GROUP - 1) / GROUP, states + (head + i) * count * stride);
        }
    _tile_release();
    for (int head = 0; head < task.heads; head++)
        put_states(tiles[head], dim, states + head * count * stride, states + head * count * stride);
}

// ---- all ----

void attend_in_tiles(const Attention& task, int first, int count, int chunk, float* scratch, float* states) {
    const int dim = task.head_dim, stride = state_size(dim);
    if (task.type != PS_TYPE_BF16 || dim % GROUP) return attend(task, first, count, chunk, scratch, states);
    if (count <= LANES && task.block_size % LANES == 0) return attend_few(task, first, count, chunk, scratch, states);
    if (task.heads > 1) {
        Attention one = task;
        for (one.heads = 1; one.kv < task.kv + 2 * task.heads * dim; one.q += task.group * dim, one.kv += 2 * dim) {
            attend_in_tiles(one, first, count, chunk, scratch, states);
            states += count * stride;
        }
        return;
    }
    const TileScratch own(scratch, dim);
    const int count_of_tiles = (count + LANES - 1) / LANES;
    TileOfQueries tiles[QUERY_TILE / LANES];
    for (int i = 0; i < count_of_tiles; i++) {
        const int at = i * LANES, some = count - at < LANES ? count - at : LANES;
        tiles[i] = round_queries(task, 0, first + at, some, own.queries + at * dim, own.states + at * stride);
    }
    const TileOfQueries& last = tiles[count_of_tiles - 1];
    const KeysOfChunk keys(task, chunk, tiles[0].start[0], last.end[last.count - 1]);
    configure_bf16_tiles();
    for (int block = keys.first_block(); block < keys.end; block += KEY_BLOCK) {
        keys.fetch_ahead(block + KEY_BLOCK, 0);
        load_pairs(task, keys.of_block(block), keys.from(block), keys.to(block), own);
        attend_block(task, tiles, count_of_tiles, block, own);
    }
    _tile_release();
    for (int i = 0; i < count_of_tiles; i++)
        put_states(tiles[i], dim, own.states + i * LANES * stride, states + i * LANES * stride);
}

}  // namespace
}  // namespace penstock
