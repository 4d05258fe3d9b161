#include "context.h"

#include <cstring>

#include "paths.h"
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#endif

namespace penstock {
namespace {

bool always() { return true; }

#if defined(__aarch64__)

bool has_dot_products() {
#ifdef __linux__
    return getauxval(AT_HWCAP) & (1u << 20);  // HWCAP_ASIMDDP
#else
    return true;  // every Apple processor that runs Python 3.11 has them
#endif
}

const Path PATHS[] = {{&neon_kernels, has_dot_products}, {&portable_kernels, always}};

#elif defined(__x86_64__)

struct Cpu {
    uint32_t leaf1_c = 0, leaf7_b = 0, leaf7_c = 0, leaf7_d = 0, leaf7_1_a = 0;
    uint64_t saved = 0;  // registers that the system saves

    Cpu() {
        uint32_t a = 0, b = 0, c = 0, d = 0;
        if (__get_cpuid(1, &a, &b, &leaf1_c, &d) && leaf1_c >> 27 & 1) {
            asm volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
            saved = static_cast<uint64_t>(d) << 32 | a;
        }
        if (__get_cpuid_count(7, 0, &a, &leaf7_b, &leaf7_c, &leaf7_d) && a >= 1) __get_cpuid_count(7, 1, &leaf7_1_a, &b, &c, &d);
    }
};

const Cpu& cpu() {
    static const Cpu found;
    return found;
}

bool has_avx2() {
    const bool fma = cpu().leaf1_c >> 12 & 1, half = cpu().leaf1_c >> 29 & 1, avx2 = cpu().leaf7_b >> 5 & 1;
    return fma && half && avx2 && (cpu().saved & 0x6) == 0x6;
}

#ifdef PS_WITH_AVX_VNNI
bool has_avx_vnni() { return has_avx2() && (cpu().leaf7_1_a >> 4 & 1); }
#endif

bool has_avx512bw() {
    const uint32_t wanted = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
    return has_avx2() && (cpu().leaf7_b & wanted) == wanted && (cpu().saved & 0xe6) == 0xe6;
}

bool has_avx512() { return has_avx512bw() && (cpu().leaf7_c >> 11 & 1); }

#ifdef PS_WITH_AMX
bool has_amx() {
    const uint32_t wanted = 1u << 22 | 1u << 24;  // bf16, tiles
    if (!has_avx512() || (cpu().leaf7_d & wanted) != wanted || (cpu().saved & 0x60000) != 0x60000) return false;
#ifdef __linux__
    static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // the kernel hands out tiles on request
    return granted;
#else
    return false;
#endif
}
#endif

const Path PATHS[] = {
#ifdef PS_WITH_AMX
    {&amx_kernels, has_amx},
#endif
    {&avx512_kernels, has_avx512},     {&avx512bw_kernels, has_avx512bw},
#ifdef PS_WITH_AVX_VNNI
    {&avx_vnni_kernels, has_avx_vnni},
#endif
    {&avx2_kernels, has_avx2},         {&portable_kernels, always},
};

#else

const Path PATHS[] = {{&portable_kernels, always}};

#endif

constexpr int PATH_COUNT = sizeof PATHS / sizeof PATHS[0];

}  // namespace

void Activations::resize(int m, int columns) {
    cols = columns;
    padded = static_cast<int>(round_up(columns, GROUP));
    const int64_t numbers = round_up(m, LANES) * padded, tile = LANES * padded;
    x = x_memory.take<float>(numbers);
    halves = half_memory.take<uint16_t>(numbers + tile);
    groups = group_memory.take<InputGroup>(numbers / GROUP);
}

}  // namespace penstock

using namespace penstock;

void ps_context::product(const ps_matrix* parts, int count, int m, const Output& out) {
    Product list[3];
    Output own = out;
    for (int p = 0; p < count; p++) {
        list[p] = {parts + p, 0, m, own};
        own.y += parts[p].rows;
    }
    multiply(list, count);
}

void ps_context::multiply(const Product* list, int count) {
    constexpr int ROW_TILE = 64;  // whose codes stay in the second cache
    struct Piece {
        int32_t product, row, row_end, block, block_end;
    };
    const auto blocks_of = [](const Product& one) { return static_cast<int>(round_up(one.matrix->rows, LANES) / LANES); };
    int64_t blocks = 0, total = 0;
    for (int p = 0; p < count; p++) blocks += blocks_of(list[p]);
    const int parts = 6 * pool.threads(), step = static_cast<int>(pool.threads() == 1 ? blocks : round_up(blocks, parts) / parts);
    for (int p = 0; p < count; p++)
        total += (blocks_of(list[p]) + step - 1) / step * (round_up(list[p].count, ROW_TILE) / ROW_TILE);
    Piece* cut = pieces.take<Piece>(total);
    total = 0;
    for (int p = 0; p < count; p++) {
        const int end = blocks_of(list[p]), rows_end = list[p].count;
        for (int block = 0; block < end; block += step)
            for (int row = 0; row < rows_end; row += ROW_TILE)
                cut[total++] = {p, row, row + ROW_TILE < rows_end ? row + ROW_TILE : rows_end, block,
                                block + step < end ? block + step : end};
    }
    const auto weights = [&](const Piece& piece) {
        const ps_matrix& matrix = *list[piece.product].matrix;
        return static_cast<const char*>(matrix.data) + piece.block * panel_bytes(matrix.kind, input.padded);
    };
    pool.run(static_cast<int>(total), [&](int item) {
        const Piece& piece = cut[item];
        const Product& own = list[piece.product];
        Output out = own.out;
        if (item + pool.threads() < total) out.ahead = weights(cut[item + pool.threads()]);
        kernels->product(*own.matrix, input.rows(own.row), piece.row, piece.row_end, piece.block, piece.block_end, out);
    });
}

int ps_interface(void) { return PS_INTERFACE; }

const char* ps_path(int index) { return index >= 0 && index < PATH_COUNT ? PATHS[index].kernels->name : nullptr; }

int ps_path_usable(const char* path) {
    for (const Path& known : PATHS)
        if (strcmp(known.kernels->name, path) == 0) return known.usable() ? 1 : 0;
    return 0;
}

ps_context* ps_context_new(int threads, const char* path) {
    for (const Path& known : PATHS) {
        if (path && strcmp(known.kernels->name, path) != 0) continue;
        if (!known.usable()) continue;
        return new (std::nothrow) ps_context(threads, known.kernels);
    }
    fail("This processor cannot run the path '%s'.", path ? path : "");
    return nullptr;
}

void ps_context_free(ps_context* context) { delete context; }
const char* ps_context_path(const ps_context* context) { return context->kernels->name; }
int ps_context_threads(const ps_context* context) { return context->pool.threads(); }

int ps_parallel(ps_context* context, int items, void (*run)(void*, int), void* argument) {
    context->pool.run(items, run, argument);
    return 0;
}
