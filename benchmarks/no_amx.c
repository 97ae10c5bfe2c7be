// A processor without AMX and FP16, for programs that ask CPUID: with LD_PRELOAD, on Linux where
// /proc/cpuinfo has cpuid_fault.
//     gcc -O1 -shared -fPIC -o no_amx.so benchmarks/no_amx.c
//     LD_PRELOAD=./no_amx.so edgekv-lab first-word ...
// CPUID then raises a signal, and the handler answers without the bits.
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { ARCH_SET_CPUID = 0x1012 };

static void allow(int yes) { syscall(SYS_arch_prctl, ARCH_SET_CPUID, yes); }

static void answer(int signal_number, siginfo_t * info, void * context) {
    greg_t * r = ((ucontext_t *) context)->uc_mcontext.gregs;
    const uint8_t * code = (const uint8_t *) r[REG_RIP];
    (void) info;
    if (code[0] != 0x0f || code[1] != 0xa2) { // no CPUID: a true fault, which comes again
        signal(signal_number, SIG_DFL);
        return;
    }
    const uint32_t leaf = (uint32_t) r[REG_RAX], part = (uint32_t) r[REG_RCX];
    uint32_t a, b, c, d;
    allow(1);
    __asm__ volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(leaf), "c"(part));
    allow(0);
    // AMX-BF16, AVX512-FP16, AMX-TILE, AMX-INT8; AMX-FP16
    if (leaf == 7 && part == 0) d &= ~(1u << 22 | 1u << 23 | 1u << 24 | 1u << 25);
    if (leaf == 7 && part == 1) a &= ~(1u << 21);
    r[REG_RAX] = a;
    r[REG_RBX] = b;
    r[REG_RCX] = c;
    r[REG_RDX] = d;
    r[REG_RIP] += 2;
}

__attribute__((constructor)) static void begin(void) {
    struct sigaction how = { .sa_sigaction = answer, .sa_flags = SA_SIGINFO | SA_NODEFER };
    sigaction(SIGSEGV, &how, 0);
    allow(0);
}
