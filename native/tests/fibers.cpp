// Fibers, barriers, exchanges between lanes: see fibers.h
#include "fibers.h"

#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include <ucontext.h>

namespace standin {

thread * now = nullptr;
bool backwards = false;
int n_launches = 0;

namespace {

enum class wait { nothing, block, warp, end };

struct fiber : thread {
    // only to begin with, once: it saves signals at every switch, jmp_buf does not
    ucontext_t context;
    jmp_buf at;
    std::unique_ptr<char[]> stack { new char[STACK] };
    bool begun = false; // stays: behind the end of one block a fiber waits for the next
    wait waits = wait::nothing;
    size_t n_given = 0; // bytes of the exchange it waits in
    int turn = 0;       // exchanges so far
    static constexpr size_t STACK = 256 * 1024;
};

struct warp {
    std::vector<char> given[2];
};

struct body_parts {
    const std::function<void()> * kernel;
    void (*at_begin)(), (*at_end)();
};

std::vector<std::unique_ptr<fiber>> fibers;
std::vector<warp> warps;
jmp_buf scheduler;
body_parts body;
alignas(256) char shared[MAX_SHARED];

fiber & self() { return *(fiber *) now; }

void suspend(wait reason) {
    self().waits = reason;
    if (_setjmp(self().at) == 0) _longjmp(scheduler, 1);
}

void enter() {
    for (;;) {
        if (body.at_begin) body.at_begin();
        (*body.kernel)();
        if (body.at_end) body.at_end();
        suspend(wait::end);
    }
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
    for (int i = first; i < first + n; ++i)
        if (fibers[i]->waits != reason || fibers[i]->n_given != fibers[first]->n_given)
            return false;
    for (int i = first; i < first + n; ++i) fibers[i]->waits = wait::nothing;
    return true;
}

bool step(int first, int n) { // false: nobody could go on
    bool moved = false;
    for (int i = 0; i < n; ++i) {
        fiber & f = *fibers[first + (backwards ? n - 1 - i : i)];
        if (f.waits == wait::nothing) {
            resume(f);
            moved = true;
        }
    }
    return moved;
}

void run_block(int n) {
    for (int i = 0; i < n; ++i) {
        fiber & f = *fibers[i];
        f.index = size3((unsigned) i, 0, 0);
        f.waits = wait::nothing;
        f.turn = 0;
        f.n_given = 0;
    }
    memset(shared, 0xff, sizeof(shared));
    for (;;) {
        bool moved = false, over = true;
        // a warp runs until it waits for the others: warps are as far apart as they can be
        for (int i = 0; i < n / 32; ++i) {
            const int first = 32 * (backwards ? n / 32 - 1 - i : i);
            while (step(first, 32)) {
                moved = true;
                if (!release(first, 32, wait::warp)) break;
            }
        }
        if (release(0, n, wait::block)) continue;
        for (int i = 0; i < n; ++i) over = over && fibers[i]->waits == wait::end;
        if (over) return;
        if (!moved) fail("some threads wait at a barrier or exchange that others do not reach");
    }
}

} // namespace

void fail(const char * what) {
    fprintf(stderr, "stand-in: block %u,%u thread %u: %s\n", group.x, group.y, now->index.x, what);
    abort();
}

void run(size3 grid, size3 size, const std::function<void()> & kernel, void (*at_begin)(),
    void (*at_end)()) {
    n_groups = grid;
    group_size = size;
    body = { &kernel, at_begin, at_end };
    if (size.x % 32 || size.y != 1 || size.z != 1 || grid.z != 1) {
        fprintf(stderr, "stand-in: no such block\n");
        abort();
    }
    while (fibers.size() < size.x) fibers.push_back(std::make_unique<fiber>());
    warps.resize(fibers.size() / 32);
    ++n_launches;
    for (group.y = 0; group.y < grid.y; ++group.y)
        for (group.x = 0; group.x < grid.x; ++group.x) run_block((int) size.x);
}

void block_barrier() {
    self().n_given = 0;
    suspend(wait::block);
}

const char * exchange(const void * bytes, size_t n) {
    fiber & f = self();
    auto & given = warps[f.index.x / 32].given[f.turn++ % 2];
    if (given.size() < 32 * n) given.resize(32 * 64);
    if (n > 64) fail("gives too much");
    if (n) memcpy(given.data() + f.index.x % 32 * n, bytes, n);
    f.n_given = n;
    suspend(wait::warp);
    return given.data();
}

char * dynamic_shared() { return shared; }

} // namespace standin
