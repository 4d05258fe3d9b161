// Tests the library on this machine, with nothing but a compiler: every path that the processor can run must compute the bits
// of the portable one, which is compared with sums in double precision. `driver single` uses no threads, for emulators; `driver
// bench` measures the paths instead. `driver PATH...`, also behind one of these words, leaves out all other paths.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "penstock.h"

namespace {

int failures = 0, checks = 0;

void expect(bool good, const std::string& what) {
    checks++;
    if (good) return;
    failures++;
    std::fprintf(stderr, "FAILED: %s (%s)\n", what.c_str(), ps_error());
}

std::mt19937 source(1);

std::vector<float> normal(size_t n, float scale = 1.0f) {
    std::normal_distribution<float> draw(0.0f, scale);
    std::vector<float> out(n);
    for (float& x : out) x = draw(source);
    return out;
}

struct Free {
    void operator()(void* p) const { std::free(p); }
};
using Memory = std::unique_ptr<void, Free>;

Memory aligned(size_t bytes) {
    Memory out(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
    std::memset(out.get(), 0, bytes);
    return out;
}

bool single = false;  // one thread for all

struct Context {
    ps_context* c;
    explicit Context(const char* path, int threads = 2) : c(ps_context_new(single ? 1 : threads, path)) {}
    ~Context() { ps_context_free(c); }
    Context(const Context&) = delete;
    Context& operator=(const Context&) = delete;
};

std::vector<std::string> chosen;  // paths; all of them where it is empty

std::vector<std::string> usable_paths() {
    std::vector<std::string> out;
    for (int i = 0; ps_path(i); i++) {
        const bool wanted = chosen.empty() || std::find(chosen.begin(), chosen.end(), ps_path(i)) != chosen.end();
        if (wanted && ps_path_usable(ps_path(i))) out.push_back(ps_path(i));
    }
    return out;
}

struct Weights {
    Memory data;
    std::vector<float> bias;
    ps_matrix matrix;

    Weights(int kind, int rows, int cols, bool biased = false) : data(aligned(ps_packed_bytes(kind, rows, cols))) {
        if (biased) bias = normal(static_cast<size_t>(rows));
        matrix = {kind, rows, cols, data.get(), biased ? bias.data() : nullptr};
        const std::vector<float> values = normal(static_cast<size_t>(rows) * cols, 1.0f / std::sqrt(static_cast<float>(cols)));
        expect(ps_pack(matrix, data.get(), 0, rows, PS_TYPE_F32, values.data(), nullptr) == 0, "packing");
    }
};

bool same(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

std::vector<float> multiply(ps_context* c, const Weights& w, int m, const float* x) {
    std::vector<float> y(static_cast<size_t>(m) * w.matrix.rows);
    expect(ps_product(c, w.matrix, m, x, y.data()) == 0, "product");
    return y;
}

double to_bf16(double x) {
    int exponent;
    const double mantissa = std::frexp(x, &exponent);
    return std::ldexp(std::nearbyint(std::ldexp(mantissa, 8)), exponent - 8);
}

// What the product of rounded rows should be, in double precision
std::vector<double> exact_product(const Weights& w, int m, const std::vector<float>& x) {
    const int rows = w.matrix.rows, cols = w.matrix.cols;
    std::vector<float> unpacked(static_cast<size_t>(rows) * cols);
    ps_unpack(w.matrix, 0, rows, unpacked.data());
    std::vector<double> out;
    for (int r = 0; r < m; r++) {
        std::vector<double> input(x.begin() + static_cast<long>(r) * cols, x.begin() + static_cast<long>(r + 1) * cols);
        if (w.matrix.kind == PS_BF16)
            for (double& number : input) number = to_bf16(number);
        double squares = 0;
        for (const double number : input) squares += number * number;
        const double loud = 6 * std::sqrt(squares / cols);
        for (int g = 0; w.matrix.kind <= PS_Q8M && g < cols; g += 32) {
            double largest = 0;
            for (int k = g; k < cols && k < g + 32; k++) largest = std::fmax(largest, std::fabs(input[k]));
            const double steps = largest > loud ? 127 * 16 : 127, scale = largest / steps;
            for (int k = g; k < cols && k < g + 32; k++) input[k] = scale > 0 ? std::nearbyint(input[k] / scale) * scale : 0;
        }
        for (int n = 0; n < rows; n++) {
            double sum = w.matrix.bias ? w.matrix.bias[n] : 0;
            for (int k = 0; k < cols; k++) sum += input[k] * unpacked[static_cast<size_t>(n) * cols + k];
            out.push_back(sum);
        }
    }
    return out;
}

double distance(const std::vector<float>& a, const std::vector<double>& b) {
    double error = 0, size = 1e-30;
    for (size_t i = 0; i < a.size(); i++) error += (a[i] - b[i]) * (a[i] - b[i]), size += b[i] * b[i];
    return std::sqrt(error / size);
}

void test_products() {
    const int shapes[][3] = {{1, 16, 32}, {3, 40, 64}, {5, 17, 100}, {16, 48, 576}, {33, 96, 288}, {70, 65, 1056}, {130, 33, 31}};
    for (const auto& shape : shapes)
        for (int kind = PS_Q4; kind <= PS_F32; kind++) {
            const int m = shape[0], rows = shape[1], cols = shape[2];
            const Weights w(kind, rows, cols, rows % 2);
            std::vector<float> x = normal(static_cast<size_t>(m) * cols);
            for (size_t i = 5; i < x.size(); i += 291) x[i] *= 50.0f;  // loud, in some rows
            const std::string what = "kind " + std::to_string(kind) + ", " + std::to_string(m) + " rows, " +
                                     std::to_string(rows) + " x " + std::to_string(cols);
            const Context portable("portable");
            const std::vector<float> wanted = multiply(portable.c, w, m, x.data());
            expect(distance(wanted, exact_product(w, m, x)) < 2e-3, "the portable product is right: " + what);
            for (const std::string& path : usable_paths()) {
                const Context context(path.c_str()), alone(path.c_str(), 1);
                expect(same(multiply(context.c, w, m, x.data()), wanted), path + " computes the portable bits: " + what);
                bool good = true;
                for (int r = 0; r < m; r += 1 + m / 8) {
                    const std::vector<float> row = multiply(alone.c, w, 1, x.data() + static_cast<size_t>(r) * cols);
                    good = good && std::memcmp(row.data(), wanted.data() + static_cast<size_t>(r) * rows,
                                               row.size() * sizeof(float)) == 0;
                }
                expect(good, path + " computes a row alone as among others: " + what);
            }
        }
}

void test_rows_that_are_not_finite_stay_so() {
    const Weights w(PS_Q4M, 32, 64);
    for (const std::string& path : usable_paths()) {
        const Context context(path.c_str());
        for (const float bad : {NAN, INFINITY}) {
            std::vector<float> x = normal(3 * 64);
            x[64 + 7] = bad;
            const std::vector<float> y = multiply(context.c, w, 3, x.data());
            bool good = true;
            for (int n = 0; n < 32; n++)
                good = good && std::isfinite(y[n]) && !std::isfinite(y[32 + n]) && std::isfinite(y[64 + n]);
            expect(good, path + " lets what is not finite be seen, in its own row alone");
        }
    }
}

// ---- a small model ----

struct Model {
    std::vector<Weights> weights;
    std::vector<std::vector<float>> norms;
    std::vector<Memory> kv;
    std::vector<float> cos, sin;
    std::vector<ps_layer> layers;
    std::vector<ps_mlp> mlps;
    ps_experts experts;
    ps_rope rope;
    ps_model model;

    Model(int kind, int kv_type, bool rich, int dim = 32, int kv_heads = 2) {
        const int hidden = 96, heads = 3 * kv_heads, inner = 160, positions = 1024, block_size = 16, blocks = 80;
        const int size = kv_type == PS_TYPE_F32 ? 4 : 2, width = rich ? 16 : dim;
        for (int p = 0; p < positions; p++)
            for (int i = 0; i < width / 2; i++) {
                const double angle = p * std::pow(10000.0, -2.0 * i / width);
                cos.push_back(static_cast<float>(std::cos(angle)));
                sin.push_back(static_cast<float>(std::sin(angle)));
            }
        rope = {cos.data(), sin.data(), width, positions};
        weights.reserve(64);
        const auto norm = [&](int n) {
            norms.push_back(normal(static_cast<size_t>(n), 0.1f));
            for (float& x : norms.back()) x += 1.0f;
            return norms.back().data();
        };
        const auto matrix = [&](int rows, int cols) { return weights.emplace_back(kind, rows, cols, rich).matrix; };
        for (int i = 0; i < 3; i++) {
            ps_layer layer{};
            layer.input_norm = norm(hidden);
            layer.mlp_norm = norm(hidden);
            if (rich) {
                layer.qk_norm = norm((heads + kv_heads) * dim);
                layer.post_attention_norm = norm(hidden);
                layer.post_mlp_norm = norm(hidden);
            }
            layer.qkv[0] = matrix(heads * dim, hidden);
            layer.qkv[1] = matrix(kv_heads * dim, hidden);
            layer.qkv[2] = matrix(kv_heads * dim, hidden);
            layer.output = matrix(hidden, heads * dim);
            layer.mlp.gate_up[0] = matrix(2 * inner, hidden);
            layer.mlp.down = matrix(hidden, inner);
            layer.window = i == 1 ? 40 : 0;
            if (rich && i == 1) {
                for (int e = 0; e < 5; e++) mlps.push_back({{matrix(56, hidden), matrix(56, hidden)}, matrix(hidden, 56)});
                experts = {5, 2, 56, 1, weights.emplace_back(PS_F32, 5, hidden).matrix, mlps.data()};
                layer.experts = &experts;
            }
            kv.push_back(aligned(static_cast<size_t>(blocks) * block_size * 2 * kv_heads * dim * size));
            layer.kv = kv.back().get();
            layers.push_back(layer);
        }
        model = {hidden, heads, kv_heads, dim,           inner, rich ? PS_GELU_TANH : PS_SILU, kv_type, block_size, blocks, 1,
                 3,      1,     1e-5f,    layers.data(), &rope};
    }
};

// Run tokens [0, n) of one text, cut into spans of the given sizes, beside another text in the same batches
std::vector<float> run_text(ps_context* c, Model& model, const std::vector<float>& text, int n, const std::vector<int>& cuts,
                            bool company) {
    const int hidden = model.model.hidden, blocks = 40;
    std::vector<int32_t> tables;
    for (int i = 0; i < 2 * blocks; i++) tables.push_back(i * 37 % 79 + 1);  // all different: 79 is a prime
    tables[2 * blocks - 1] = 0;
    const std::vector<float> other = normal(static_cast<size_t>(n) * hidden);
    std::vector<float> out;
    int at = 0;
    for (const int cut : cuts) {
        const int32_t table[] = {blocks, 0}, start[] = {at / 2, at}, count[] = {1, cut};
        const int skip = company ? 0 : 1;
        const ps_batch batch = {2 - skip,    static_cast<int32_t>(tables.size()), tables.data(), table + skip, start + skip,
                                count + skip};
        std::vector<float> rows;
        if (company) rows.assign(other.begin(), other.begin() + hidden);
        rows.insert(rows.end(), text.begin() + static_cast<long>(at) * hidden,
                    text.begin() + static_cast<long>(at + cut) * hidden);
        expect(ps_run_layers(c, &model.model, 0, 3, &batch, rows.data()) == 0, "running layers");
        out.insert(out.end(), rows.end() - static_cast<long>(cut) * hidden, rows.end());
        at += cut;
    }
    return out;
}

void test_layers() {
    const int n = 300;  // more than a chunk of keys
    struct Case {
        int kind, kv_type;
        bool rich;
    };
    for (const Case& own : {Case{PS_Q4M, PS_TYPE_F16, false}, Case{PS_Q8, PS_TYPE_BF16, true}, Case{PS_BF16, PS_TYPE_F32, true},
                            Case{PS_BF16, PS_TYPE_BF16, false}}) {
        Model model(own.kind, own.kv_type, own.rich, own.rich ? 24 : 32);
        const std::vector<float> text = normal(static_cast<size_t>(n) * model.model.hidden);
        const Context portable("portable", 1);
        const std::vector<float> wanted = run_text(portable.c, model, text, n, {n}, false);
        bool finite = true;
        for (const float x : wanted) finite = finite && std::isfinite(x);
        expect(finite, "layers give numbers");
        std::vector<int> tokens = {n - 20};
        tokens.insert(tokens.end(), 20, 1);
        for (const std::string& path : usable_paths()) {
            const Context context(path.c_str(), 2), alone(path.c_str(), 1);
            expect(same(run_text(alone.c, model, text, n, {n}, false), wanted), path + ": layers compute the portable bits");
            expect(same(run_text(context.c, model, text, n, {1, 16, 47, 2, 95, 5, 1, 1, 60, 72}, true), wanted),
                   path + ": cuts and neighbours change nothing");
            expect(same(run_text(context.c, model, text, n, tokens, false), wanted),
                   path + ": token by token, chunks of keys apart");
        }
    }
}

// Many short spans in one batch, so that a thread takes several heads of a text together
void test_crowd() {
    const int texts = 12, each = 6, hidden = 96;
    for (const int kv_type : {PS_TYPE_BF16, PS_TYPE_F16}) {
        Model model(PS_Q4, kv_type, false, 32, 5);
        const int32_t start[] = {0, 63, 64, 90, 17, 0, 80, 70, 33, 65, 91, 2}, n[] = {1, 1, 2, 5, 1, 3, 4, 1, 5, 1, 1, 2};
        std::vector<int32_t> tables, table;
        int rows = 0;
        for (int i = 0; i < texts; i++) {
            table.push_back(i * each);
            for (int j = 0; j < each; j++) tables.push_back((i * each + j) * 37 % 79);
            rows += n[i];
        }
        const auto size = static_cast<int32_t>(tables.size());
        for (const Memory& kv : model.kv) {  // as if earlier tokens had been there
            const std::vector<float> earlier = normal(80 * 16 * 2 * 5 * 32);
            for (size_t i = 0; i < earlier.size(); i++) {
                uint32_t bits;
                std::memcpy(&bits, &earlier[i], sizeof bits);
                static_cast<uint16_t*>(kv.get())[i] = static_cast<uint16_t>(bits >> 16);  // also as fp16 a number of that size
            }
        }
        const std::vector<float> now = normal(static_cast<size_t>(rows) * hidden);
        const auto run = [&](ps_context* c, int first, int count, int row) {
            std::vector<float> own(now.begin() + static_cast<long>(row) * hidden, now.end());
            const ps_batch batch = {count, size, tables.data(), &table[static_cast<size_t>(first)], start + first, n + first};
            expect(ps_run_layers(c, &model.model, 0, 3, &batch, own.data()) == 0, "running a crowd");
            return own;
        };
        const Context portable("portable", 1);
        std::vector<float> wanted;
        for (int i = 0, row = 0; i < texts; row += n[i], i++) {
            const std::vector<float> own = run(portable.c, i, 1, row);
            wanted.insert(wanted.end(), own.begin(), own.begin() + static_cast<long>(n[i]) * hidden);
        }
        for (const std::string& path : usable_paths()) {
            const Context context(path.c_str(), 2);
            expect(same(run(context.c, 0, texts, 0), wanted), path + ": a crowd computes the bits of each alone");
        }
    }
}

// Scores at which a difference of one unit in the last place would change a key's weight, and scores that are far too large: row
// i > 0 has score i for the first key and 0 for the others. Heads are four numbers wide, which makes the scale exact.
void test_sharp_scores() {
    constexpr int dim = 4, width = 3 * dim;
    const std::vector<float> scores = {0.0f,
                                       -0x1.333d8ap-3f,
                                       -0x1.55e104p-3f,
                                       -0x1.674f14p-3f,
                                       -0x1.9c0c3cp-3f,
                                       -0x1.d17976p-3f,
                                       -0x1.03cdbcp-2f,
                                       -0x1.28753p-2f,
                                       -0x1.73cb84p-2f,
                                       -0x1.c20282p-2f,
                                       -0x1.2941bp-1f,
                                       8e6f,
                                       5e9f,
                                       1e20f,
                                       -5e9f,
                                       -1e20f,
                                       1e30f};
    const int n = static_cast<int>(scores.size());
    std::vector<float> rows(static_cast<size_t>(n) * width);
    for (int i = 0; i < n; i++) {
        float left = scores[static_cast<size_t>(i)], *q = &rows[static_cast<size_t>(i) * width];
        for (int part = 0; part < 3; part++) {  // in bf16, which hold it together
            uint32_t bits;
            std::memcpy(&bits, &left, sizeof bits);
            bits &= 0xffff0000u;
            std::memcpy(&q[part], &bits, sizeof bits);
            left -= q[part];
            if (i == 0) q[dim + part] = 1.0f;
        }
        for (int d = 0; d < dim; d++) q[2 * dim + d] = static_cast<float>(i == d);
    }
    std::vector<uint16_t> kv(2 * 16 * 2 * dim);
    ps_layer layer = {};
    layer.kv = kv.data();
    ps_rope rope = {};
    rope.positions = n;
    ps_model model = {};
    model.heads = model.kv_heads = model.groups = model.layer_count = model.rope_count = 1;
    model.head_dim = dim;
    model.kv_type = PS_TYPE_BF16;
    model.block_size = 16;
    model.kv_blocks = 2;
    model.layers = &layer;
    model.ropes = &rope;
    const int32_t tables[] = {0, 1}, zero = 0;
    const ps_batch batch = {1, 2, tables, &zero, &zero, &n};
    const auto run = [&](const char* path) {
        const Context context(path, 1);
        std::vector<float> own = rows, out(static_cast<size_t>(n) * dim);
        expect(ps_attention(context.c, &model, 0, &batch, own.data(), out.data()) == 0, "attention");
        return out;
    };
    const std::vector<float> wanted = run("portable");
    bool finite = true;
    for (const float x : wanted) finite = finite && std::isfinite(x);
    expect(finite, "sharp scores give numbers");
    for (const std::string& path : usable_paths())
        expect(same(run(path.c_str()), wanted), path + ": sharp scores give the portable bits");
}

void test_refusals() {
    Model model(PS_F32, PS_TYPE_F32, false);
    const Context context(nullptr);
    std::vector<float> hidden = normal(4 * 96);
    const int32_t tables[] = {1, 200}, zero[] = {0}, four[] = {4}, far[] = {16}, past[] = {4000};
    const ps_batch outside = {1, 2, tables, zero, far, four}, late = {1, 2, tables, zero, past, four};
    expect(ps_run_layers(context.c, &model.model, 0, 3, &outside, hidden.data()) == -1 && std::strstr(ps_error(), "Block 200"),
           "a wrong block is refused");
    expect(ps_run_layers(context.c, &model.model, 0, 3, &late, hidden.data()) == -1 && std::strstr(ps_error(), "ends before"),
           "a short table is refused");
    expect(ps_run_layers(context.c, &model.model, 0, 4, &late, hidden.data()) == -1 && std::strstr(ps_error(), "Layers"),
           "a missing layer is refused");
    expect(ps_context_new(1, "none") == nullptr && std::strstr(ps_error(), "'none'"), "an unknown path is refused");
}

// ---- ends ----

void test_head_and_picks() {
    for (const int n : {5, 128, 1000, 9001}) {
        const int m = 7, cols = 96;
        const Weights w(PS_Q4M, n, cols);
        const std::vector<float> hidden = normal(m * cols, 3.0f);
        const std::vector<ps_choice> choices = {
            {0.3, 0.0f, 1.0f, 0.0f, 0}, {0.3, 0.8f, 1.0f, 0.0f, 0}, {0.6, 0.8f, 0.9f, 0.0f, 0},   {0.9, 1.0f, 1.0f, 0.0f, 3},
            {0.1, 1.0f, 0.7f, 0.0f, 4}, {0.5, 1.0f, 1.0f, 0.1f, 0}, {0.5, 30.0f, 0.99f, 0.01f, 2}};
        std::vector<float> wanted(static_cast<size_t>(m) * n);
        std::vector<int32_t> tokens(m);
        const Context portable("portable", 1);
        const int refined = n < 8 ? n : 8;
        expect(ps_head(portable.c, w.matrix, nullptr, 0, m, hidden.data(), refined, wanted.data()) == 0, "head");
        wanted[4] = -INFINITY;
        expect(ps_pick(portable.c, m, n, wanted.data(), choices.data(), tokens.data()) == 0, "picking");
        const auto best = std::max_element(wanted.begin(), wanted.begin() + n) - wanted.begin();
        expect(tokens[0] == best, "temperature 0 takes the best token of " + std::to_string(n));
        for (const int32_t token : tokens) expect(token >= -1 && token < n, "a token, or none");
        for (const std::string& path : usable_paths()) {
            const Context context(path.c_str());
            std::vector<float> logits(wanted.size());
            std::vector<int32_t> found(m);
            ps_head(context.c, w.matrix, nullptr, 0, m, hidden.data(), refined, logits.data());
            logits[4] = -INFINITY;
            ps_pick(context.c, m, n, logits.data(), choices.data(), found.data());
            expect(same(logits, wanted) && found == tokens, path + ": the same logits and tokens of " + std::to_string(n));
        }
    }
    const Context context(nullptr);
    const std::vector<float> odd(300, NAN);
    const ps_choice choice = {0.5, 1.0f, 0.9f, 0.0f, 0};
    int32_t token = 0;
    expect(ps_pick(context.c, 1, 300, odd.data(), &choice, &token) == 0 && token == -1, "no token of what is not a number");
}

// ---- threads ----

struct Count {
    std::atomic<int> calls{0};
    std::vector<std::atomic<int>> seen;
    explicit Count(size_t n) : seen(n) {}
    static void run(void* self, int item) {
        static_cast<Count*>(self)->calls++;
        static_cast<Count*>(self)->seen[static_cast<size_t>(item)]++;
    }
};

bool counts_right(ps_context* c, int items) {
    Count count(static_cast<size_t>(items));
    ps_parallel(c, items, Count::run, &count);
    bool good = count.calls == items;
    for (const auto& calls : count.seen) good = good && calls == 1;
    return good;
}

void test_threads() {
    for (const int threads : {1, 2, 4}) {
        const Context context(nullptr, threads);
        bool good = true;
        for (int round = 0; round < 300; round++) good = good && counts_right(context.c, round % 41);
        good = good && counts_right(context.c, 70000);
        std::this_thread::sleep_for(std::chrono::milliseconds(5));  // the workers sleep
        good = good && counts_right(context.c, 100);
        expect(good, std::to_string(threads) + " threads do each item once");
    }
    const Context shared(nullptr, 3);
    std::vector<std::thread> callers;
    std::atomic<bool> good{true};
    for (int i = 0; i < 4; i++)
        callers.emplace_back([&] {
            for (int round = 0; round < 50; round++)
                if (!counts_right(shared.c, 20)) good = false;
        });
    for (std::thread& caller : callers) caller.join();
    expect(good, "several callers do not disturb each other");
    for (int i = 0; i < 40; i++) {
        const Context brief(nullptr, 4);
        if (i % 2) expect(counts_right(brief.c, 10), "a pool that lives briefly");
    }
}

void test_fork() {
    const Context context(nullptr, 3);
    expect(counts_right(context.c, 50), "before a fork");
    const pid_t child = fork();
    if (child == 0) _exit(counts_right(context.c, 50) && counts_right(context.c, 50) ? 0 : 1);
    int status = -1;
    waitpid(child, &status, 0);
    expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a child has threads of its own");
    expect(counts_right(context.c, 50), "after a fork");
}

// ---- measuring ----

// The shortest of at least three calls within about a tenth of a second
template <typename F>
double best_seconds(const F& body) {
    const auto now = [] { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); };
    double best = 1e9;
    const double end = now() + 0.1;
    for (int round = 0; round < 3 || now() < end; round++) {
        const double start = now();
        body();
        best = std::fmin(best, now() - start);
    }
    return best;
}

void bench() {
    const int rows = 1536, cols = 1024;
    const size_t footprint = 96 << 20;  // more than the caches of a processor's share
    std::vector<char> from(footprint, 1), to(footprint, 2);
    const double copy = best_seconds([&] { std::memcpy(to.data(), from.data(), footprint); });
    std::printf("memcpy, one thread: %.1f GB/s read\n", static_cast<double>(footprint) / copy / 1e9);
    const std::vector<float> x = normal(512 * cols);
    std::vector<float> y(static_cast<size_t>(512) * rows);
    for (const int kind : {PS_Q4, PS_Q4M, PS_Q8, PS_BF16}) {
        const Weights first(kind, rows, cols);
        const size_t bytes = ps_packed_bytes(kind, rows, cols), count = footprint / bytes;
        const Memory copies = aligned(count * bytes);
        for (size_t i = 0; i < count; i++) std::memcpy(static_cast<char*>(copies.get()) + i * bytes, first.matrix.data, bytes);
        for (const std::string& path : usable_paths()) {
            const Context context(path.c_str(), 0);
            size_t next = 0;
            for (const int m : {1, 8, 16, 32, 64, 512}) {
                if (path == "portable" && m > 1) continue;
                const double time = best_seconds([&] {
                    ps_matrix matrix = first.matrix;
                    matrix.data = static_cast<char*>(copies.get()) + next++ % count * bytes;
                    ps_product(context.c, matrix, m, x.data(), y.data());
                });
                std::printf("%-9s kind %d, %3d rows, %d threads: %6.1f GB/s of weights, %7.1f Gop/s\n", path.c_str(), kind, m,
                            ps_context_threads(context.c), static_cast<double>(bytes) / time / 1e9,
                            2.0 * rows * cols * m / time / 1e9);
                std::fflush(stdout);
            }
        }
    }
}

}  // namespace

int main(int count, char** arguments) {
    const std::string word = count > 1 ? arguments[1] : "";
    single = word == "single";
    chosen.assign(arguments + std::min(count, single || word == "bench" ? 2 : 1), arguments + count);
    for (const std::string& path : chosen)
        if (!ps_path_usable(path.c_str())) {
            std::fprintf(stderr, "This processor cannot run the path '%s'.\n", path.c_str());
            return 2;
        }
    std::string paths;
    for (const std::string& path : usable_paths()) paths += " " + path;
    std::printf("paths:%s\n", paths.c_str());
    std::fflush(stdout);
    if (word == "bench") {
        bench();
        return 0;
    }
    test_products();
    test_rows_that_are_not_finite_stay_so();
    test_layers();
    test_crowd();
    test_sharp_scores();
    test_refusals();
    test_head_and_picks();
    if (!single) {
        test_threads();
        test_fork();
    }
    std::printf("%d passed, %d failed\n", checks - failures, failures);
    return failures ? 1 : 0;
}
