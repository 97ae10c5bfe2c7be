// Fibers, barriers, exchanges between lanes, late copies: see cuda_runtime.h
#include "cuda_runtime.h"
#include "cuda_fp16.h"

#include <csetjmp>
#include <cstdio>
#include <deque>
#include <memory>
#include <vector>

#include <ucontext.h>

namespace standin {

thread * now = nullptr;
bool backwards = false;
int  n_launches = 0;

namespace {

enum class wait { nothing, block, warp, end };

struct late_copy { void * to; const void * from; };

struct fiber : thread {
    ucontext_t context;          // only to begin with: it saves signals at every switch, jmp_buf does not
    jmp_buf at;
    std::unique_ptr<char[]> stack { new char[STACK] };
    bool begun = false;
    wait waits = wait::nothing;
    size_t n_given = 0;          // bytes of the exchange it waits in
    int turn = 0;                // exchanges so far
    std::deque<std::vector<late_copy>> copies;
    static constexpr size_t STACK = 256*1024;
};

struct warp { std::vector<char> given[2]; };

std::vector<std::unique_ptr<fiber>> fibers;
std::vector<warp> warps;
jmp_buf scheduler;
const std::function<void()> * body;
alignas(256) char shared[MAX_SHARED];

[[noreturn]] void fail(const char * what) {
    fprintf(stderr, "stand-in: block %u,%u thread %u: %s\n", blockIdx.x, blockIdx.y, now->index.x, what);
    abort();
}

fiber & self() { return *(fiber *) now; }

void suspend(wait reason) {
    self().waits = reason;
    if (_setjmp(self().at) == 0) _longjmp(scheduler, 1);
}

void enter() {
    (*body)();
    if (!self().copies.empty() && !self().copies.front().empty()) fail("ends with copies under way");
    self().waits = wait::end;
    _longjmp(scheduler, 1);
}

void resume(fiber & f) {
    now = &f;
    if (_setjmp(scheduler)) return;
    if (f.begun) _longjmp(f.at, 1);
    f.begun = true;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = fiber::STACK;
    f.context.uc_link = nullptr;
    makecontext(&f.context, enter, 0);
    setcontext(&f.context);
}

// lets a group of threads go on if all of them wait for the same
bool release(int first, int n, wait reason) {
    for (int i = first; i < first + n; ++i) if (fibers[i]->waits != reason || fibers[i]->n_given != fibers[first]->n_given) return false;
    for (int i = first; i < first + n; ++i) fibers[i]->waits = wait::nothing;
    return true;
}

bool step(int first, int n) { // false: nobody could go on
    bool moved = false;
    for (int i = 0; i < n; ++i) {
        fiber & f = *fibers[first + (backwards ? n - 1 - i : i)];
        if (f.waits == wait::nothing) { resume(f); moved = true; }
    }
    return moved;
}

void run_block(int n) {
    for (int i = 0; i < n; ++i) {
        fiber & f = *fibers[i];
        f.index = dim3((unsigned) i, 0, 0);
        f.begun = false; f.waits = wait::nothing; f.turn = 0; f.n_given = 0;
        f.copies.assign(1, {});
    }
    memset(shared, 0xff, sizeof(shared));
    for (;;) {
        bool moved = false, over = true;
        for (int i = 0; i < n/32; ++i) { // a warp runs until it waits for the others: warps are as far apart as they can be
            const int first = 32*(backwards ? n/32 - 1 - i : i);
            while (step(first, 32)) { moved = true; if (!release(first, 32, wait::warp)) break; }
        }
        if (release(0, n, wait::block)) continue;
        for (int i = 0; i < n; ++i) over = over && fibers[i]->waits == wait::end;
        if (over) return;
        if (!moved) fail("some threads wait at a barrier or exchange that others do not reach");
    }
}

} // namespace

void run(dim3 grid, dim3 size, size_t, const std::function<void()> & kernel) {
    gridDim = grid; blockDim = size; body = &kernel;
    if (size.x % 32 || size.y != 1 || size.z != 1 || grid.z != 1) { fprintf(stderr, "stand-in: no such block\n"); abort(); }
    while (fibers.size() < size.x) fibers.push_back(std::make_unique<fiber>());
    warps.resize(fibers.size()/32);
    ++n_launches;
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) run_block((int) size.x);
}

void block_barrier() { self().n_given = 0; suspend(wait::block); }

const char * exchange(const void * bytes, size_t n) {
    fiber & f = self();
    auto & given = warps[f.index.x/32].given[f.turn++ % 2];
    if (given.size() < 32*n) given.resize(32*64);
    if (n > 64) fail("gives too much");
    if (n) memcpy(given.data() + f.index.x % 32*n, bytes, n);
    f.n_given = n;
    suspend(wait::warp);
    return given.data();
}

void mma(float (&c)[4], const uint4 & a, uint32_t b0, uint32_t b1) {
    const uint32_t mine[6] = { a.x, a.y, a.z, a.w, b0, b1 };
    const auto * all = (const uint32_t (*)[6]) exchange(mine, sizeof(mine));
    const int lane = (int) (now->index.x % 32), g = lane/4, t = lane % 4;
    auto value = [&](int l, int i, int high) { return half_to_float((uint16_t) (all[l][i] >> 16*high)); };
    float rows[2][16], columns[2][16];
    for (int k = 0; k < 16; ++k) {
        const int from = k % 8/2, high = k % 2, upper = k/8;
        for (int i = 0; i < 2; ++i) rows[i][k]    = value(4*g + from, 2*upper + i, high);
        for (int i = 0; i < 2; ++i) columns[i][k] = value(4*(2*t + i) + from, 4 + upper, high);
    }
    for (int x = 0; x < 4; ++x) for (int k = 0; k < 16; ++k) c[x] += rows[x/2][k]*columns[x % 2][k];
}

void copy16(void * to, const void * from) {
    if ((uintptr_t) to % 16 || (uintptr_t) from % 16) fail("copies from or to an address that is not aligned");
    memset(to, 0xff, 16);
    self().copies.back().push_back({ to, from });
}

void copy_commit() { self().copies.emplace_back(); }

void copy_wait_but(int n_groups) {
    auto & all = self().copies; // the last one is still open
    while ((int) all.size() > n_groups + 1) {
        for (const auto & c : all.front()) memcpy(c.to, c.from, 16);
        all.pop_front();
    }
}

char * dynamic_shared() { return shared; }

} // namespace standin
