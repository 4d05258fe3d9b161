// Attention of a batch of spans: which pieces there are, and who computes them.
#include <cmath>
#include <cstring>

#include "context.h"

namespace penstock {
namespace {

// Queries [first, first + count) of a span that each of some key-value heads answers
struct AttentionItem {
    int32_t span, row, kv_head, heads, first, count;
    int32_t chunks;  // of keys, up to its last query's
    int64_t state;   // where the states of its chunks begin, when they are computed apart
};

thread_local Buffer thread_scratch;

Attention task_of(const ps_model& model, const ps_layer& layer, const ps_batch& batch, const AttentionItem& item,
                  const float* qkv) {
    const int group = model.heads / model.kv_heads, dim = model.head_dim, size = model.kv_type == PS_TYPE_F32 ? 4 : 2;
    const int64_t width = static_cast<int64_t>(model.heads + 2 * model.kv_heads) * dim;
    Attention task;
    task.q = qkv + item.row * width + static_cast<int64_t>(item.kv_head) * group * dim;
    task.row_stride = width;
    task.heads = item.heads;
    task.group = group;
    task.rows = batch.n[item.span];
    task.start = batch.start[item.span];
    task.head_dim = dim;
    task.type = model.kv_type;
    task.window = layer.window;
    task.scale = 1.0f / std::sqrt(static_cast<float>(dim));
    task.kv = static_cast<const char*>(layer.kv) + static_cast<int64_t>(item.kv_head) * dim * size;
    task.slot_bytes = static_cast<int64_t>(2) * model.kv_heads * dim * size;
    task.value_offset = static_cast<int64_t>(model.kv_heads) * dim * size;
    task.table = batch.tables + batch.table[item.span] + layer.group;
    task.groups = model.groups;
    task.block_size = model.block_size;
    return task;
}

}  // namespace
}  // namespace penstock

using namespace penstock;

void ps_context::locate(const ps_batch& batch, int m) {
    row_span = positions.take<int32_t>(2 * static_cast<int64_t>(m));
    row_position = row_span + m;
    int row = 0;
    for (int i = 0; i < batch.spans; i++)
        for (int j = 0; j < batch.n[i]; j++, row++) row_span[row] = i, row_position[row] = batch.start[i] + j;
}

void ps_context::attend(const ps_model& model, const ps_layer& layer, const ps_batch& batch, int m, float* qkv, float* out) {
    const int dim = model.head_dim, group = model.heads / model.kv_heads, rotated = model.heads + model.kv_heads;
    const int64_t width = static_cast<int64_t>(rotated + model.kv_heads) * dim;
    const int kv_width = 2 * model.kv_heads * dim, size = model.kv_type == PS_TYPE_F32 ? 4 : 2;
    const ps_rope& rope = model.ropes[layer.rope];
    for_rows(m, [&](int row) {
        float* own = qkv + row * width;
        const int at = row_position[row];
        const int64_t angles = static_cast<int64_t>(at) * (rope.width / 2);
        for (int head = 0; head < rotated; head++) {
            float* x = own + head * dim;
            if (layer.qk_norm) kernels->rms_norm(x, layer.qk_norm + head * dim, dim, model.norm_eps, x, false);
            kernels->rotate(x, rope.width, rope.cos + angles, rope.sin + angles);
        }
        const int32_t* table = batch.tables + batch.table[row_span[row]] + layer.group;
        const int64_t block = table[static_cast<int64_t>(at / model.block_size) * model.groups];
        const int64_t slot = block * model.block_size + at % model.block_size;
        kernels->store(model.kv_type, own + model.heads * dim, kv_width, static_cast<char*>(layer.kv) + slot * kv_width * size);
    });

    // The larger a tile, the fewer times keys are converted; but there has to be enough for every thread.
    int64_t tiles = 0, whole = 0, most_chunks = 0;
    int tile = QUERY_TILE;
    const auto count_tiles = [&] {
        tiles = 0;
        for (int i = 0; i < batch.spans; i++) tiles += round_up(static_cast<int64_t>(batch.n[i]) * group, tile) / tile;
        return tiles;
    };
    while (count_tiles() * model.kv_heads < 8 * pool.threads() && tile > FEW_QUERIES) tile /= 2;
    // Heads of a key lie side by side in memory, so one thread takes them all where there is enough for every thread.
    const int heads = tiles >= 4 * pool.threads() ? model.kv_heads : 1;
    AttentionItem* list = items.take<AttentionItem>(tiles * model.kv_heads);
    int64_t states_needed = 0;
    for (int i = 0, row = 0; i < batch.spans; row += batch.n[i], i++) {
        const int queries = batch.n[i] * group;
        for (int first = 0; first < queries; first += tile) {
            const int own = queries - first < tile ? queries - first : tile;
            const int chunks = (batch.start[i] + (first + own - 1) / group) / KEY_CHUNK + 1;
            const int several = FEW_QUERIES / own < heads ? FEW_QUERIES / own : heads, most = several > 1 ? several : 1;
            for (int head = 0; head < model.kv_heads; head += most) {
                const int beside = model.kv_heads - head < most ? model.kv_heads - head : most;
                list[whole++] = {i, row, head, beside, first, own, chunks, states_needed};
                states_needed += static_cast<int64_t>(chunks) * beside * own;
            }
            most_chunks = chunks > most_chunks ? chunks : most_chunks;
        }
    }
    const int stride = state_size(dim);
    float* results = out ? out : input.x;
    const int64_t out_stride = out ? static_cast<int64_t>(model.heads) * dim : input.padded;
    const auto put = [&](const AttentionItem& item, const float* total) {
        for (int q = 0; q < item.heads * item.count; q++) {
            const int query = item.first + q % item.count, head = item.kv_head + q / item.count;
            float* to = results + (item.row + query / group) * out_stride + (head * group + query % group) * dim;
            kernels->finish(total + q * stride, dim, to);
        }
    };
    // With few pieces and long texts, the chunks of a text are computed apart. The sums are the same either way.
    if (whole >= 4 * pool.threads() || most_chunks == 1 || pool.threads() == 1) {
        pool.run(static_cast<int>(whole), [&](int i) {
            const AttentionItem& item = list[i];
            const Attention task = task_of(model, layer, batch, item, qkv);
            float* scratch = thread_scratch.take<float>(attend_scratch(dim) + 2 * QUERY_TILE * stride);
            float *total = scratch + attend_scratch(dim), *part = total + QUERY_TILE * stride;
            const int position_of_first = task.start + item.first / group;
            const int first_key = task.window > 0 && position_of_first >= task.window ? position_of_first - task.window + 1 : 0;
            kernels->attend(task, item.first, item.count, first_key / KEY_CHUNK, scratch, total);
            for (int chunk = first_key / KEY_CHUNK + 1; chunk < item.chunks; chunk++) {
                kernels->attend(task, item.first, item.count, chunk, scratch, part);
                for (int q = 0; q < item.heads * item.count; q++) kernels->merge(total + q * stride, part + q * stride, dim);
            }
            put(item, total);
        });
        return;
    }
    float* all = states.take<float>(states_needed * stride);
    pool.run(static_cast<int>(whole * most_chunks), [&](int i) {
        const AttentionItem& item = list[i % whole];
        const int chunk = static_cast<int>(i / whole);
        if (chunk >= item.chunks) return;
        const Attention task = task_of(model, layer, batch, item, qkv);
        float* scratch = thread_scratch.take<float>(attend_scratch(dim));
        kernels->attend(task, item.first, item.count, chunk, scratch,
                        all + (item.state + static_cast<int64_t>(chunk) * item.heads * item.count) * stride);
    });
    for (int64_t i = 0; i < whole; i++) {
        float* total = all + list[i].state * stride;
        const int queries = list[i].heads * list[i].count;
        for (int chunk = 1; chunk < list[i].chunks; chunk++)
            for (int q = 0; q < queries; q++) kernels->merge(total + q * stride, total + (chunk * queries + q) * stride, dim);
        put(list[i], total);
    }
}
