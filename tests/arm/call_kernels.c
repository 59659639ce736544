/* A process that calls kernels for another one. It runs on an emulated processor, and its memory is that of its client: a
   page that a kernel touches is fetched from the same address there, and what a kernel has written is sent back. So the
   tests of the kernels run as they are. emulated_library.py is the client.

   call_kernels LIBRARY: requests on standard input, answers on standard output. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, MAX_PAGES = 16384, MAX_INTEGERS = 16, MAX_DOUBLES = 8 };
enum { FETCH = 'F', WRITE = 'W', RETURN = 'R' }; /* kinds of answers */

typedef struct {
    char name[32];
    int64_t integers[MAX_INTEGERS]; /* and pointers */
    double doubles[MAX_DOUBLES];
} Request;

typedef struct {
    int64_t kind, value; /* the address of a page, or what the function returned */
} Answer;

/* The calling convention of AArch64 passes integers and doubles in registers of their own, each in order, and further
   integers on the stack. So this type fits all kernels: a function does not look at arguments that it does not have. */
typedef int64_t (*Kernel)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                          int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, double, double, double, double, double,
                          double, double, double);

static char *addresses[MAX_PAGES];
static char originals[MAX_PAGES][PAGE]; /* as they were fetched */
static int n_pages;
static int is_fetching; /* by one thread at a time */

static void receive(void *to, size_t n) {
    for (size_t done = 0; done < n;) {
        ssize_t count = read(STDIN_FILENO, (char *)to + done, n - done);
        if (count <= 0) _exit(0); /* the client is gone */
        done += count;
    }
}

static void respond(const void *from, size_t n) {
    for (size_t done = 0; done < n;) {
        ssize_t count = write(STDOUT_FILENO, (const char *)from + done, n - done);
        if (count <= 0) _exit(0);
        done += count;
    }
}

static void fail(const char *message) {
    write(STDERR_FILENO, message, strlen(message));
    _exit(1);
}

/* Called when a kernel touches a page that is not there. */
static void fetch(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)context;
    char *page = (char *)((uintptr_t)info->si_addr & -PAGE);
    while (__atomic_exchange_n(&is_fetching, 1, __ATOMIC_ACQUIRE)) {}
    int is_new = 1;
    for (int i = 0; i < n_pages; i++) is_new &= addresses[i] != page; /* another thread may have been faster */
    if (is_new) {
        if (n_pages == MAX_PAGES) fail("a kernel touches too many pages\n");
        Answer answer = {FETCH, (int64_t)page};
        respond(&answer, sizeof answer);
        receive(originals[n_pages], PAGE);
        /* It appears with its contents, because other threads run. */
        void *filled = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        memcpy(filled, originals[n_pages], PAGE);
        if (mremap(filled, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, page) != page) fail("cannot map a page\n");
        addresses[n_pages++] = page;
    }
    __atomic_store_n(&is_fetching, 0, __ATOMIC_RELEASE);
}

int main(int n_arguments, char **arguments) {
    if (n_arguments != 2) fail("usage: call_kernels LIBRARY\n");
    void *library = dlopen(arguments[1], RTLD_NOW);
    if (!library) fail(dlerror());
    struct sigaction action = {.sa_sigaction = fetch, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, NULL);
    for (Request request;;) {
        receive(&request, sizeof request);
        Kernel kernel = (Kernel)dlsym(library, request.name);
        if (!kernel) fail(dlerror());
        const int64_t *i = request.integers;
        const double *d = request.doubles;
        int64_t result = kernel(i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], i[8], i[9], i[10], i[11], i[12], i[13],
                                i[14], i[15], d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7]);
        for (int page = 0; page < n_pages; page++) {
            if (memcmp(addresses[page], originals[page], PAGE)) {
                Answer answer = {WRITE, (int64_t)addresses[page]};
                respond(&answer, sizeof answer);
                respond(originals[page], PAGE);
                respond(addresses[page], PAGE);
            }
            munmap(addresses[page], PAGE);
        }
        n_pages = 0;
        Answer answer = {RETURN, result};
        respond(&answer, sizeof answer);
    }
}
