// Preloaded into a training (LD_PRELOAD): counts its file operations or large allocations, lets one of them fail, and
// records what is written to files. Linux and glibc only. See faults.py.

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define MAX_FILES 65536

static char root[4096];          // only files below it count; "" before arming
static long fail_at, n_calls;    // the number of the call that fails, 0 for none; how many there were
static int fail_errno;
static size_t min_bytes;         // count allocations of at least this size instead of file operations, 0 for files
static int log_file = -1;        // where writes are recorded
static char *paths[MAX_FILES];   // of open files below root
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

// Start to count. All paths are absolute.
void fault_arm(const char *folder, long number, int error, size_t bytes, const char *log) {
    if (log[0]) log_file = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0600);
    fail_at = number, fail_errno = error, min_bytes = bytes, n_calls = 0;
    strcpy(root, folder);
}

// Stop to count; returns how many calls there were.
long fault_disarm(void) {
    root[0] = 0;
    return n_calls;
}

static int fails(void) {
    long number = __atomic_add_fetch(&n_calls, 1, __ATOMIC_SEQ_CST);
    if (number != fail_at) return 0;
    errno = fail_errno;
    return 1;
}

// The absolute path in `out`, and whether it lies below root.
static int is_below(int folder, const char *path, char *out) {
    if (!root[0] || min_bytes || !path) return 0;
    if (path[0] == '/') {
        snprintf(out, 4096, "%s", path);
    } else {
        char link[64], base[4096];
        snprintf(link, sizeof link, folder == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", folder);
        ssize_t n = syscall(SYS_readlinkat, AT_FDCWD, link, base, sizeof base - 1);
        if (n < 0) return 0;
        base[n] = 0;
        snprintf(out, 4096, "%.2000s/%.2000s", base, path);
    }
    size_t n = strlen(root);
    return !strncmp(out, root, n) && (out[n] == '/' || !out[n]);
}

static int is_open_below(int file) { return root[0] && !min_bytes && file >= 0 && file < MAX_FILES && paths[file]; }

static void record(const char *kind, const char *path, const char *other, long offset, const void *data, long size) {
    if (log_file < 0) return;
    char head[9000];
    int n = snprintf(head, sizeof head, "%s\t%s\t%s\t%ld\t%ld\n", kind, path, other, offset, size);
    struct iovec parts[2] = {{head, n}, {(void *)data, size}};
    pthread_mutex_lock(&mutex);
    syscall(SYS_writev, log_file, parts, 2);
    pthread_mutex_unlock(&mutex);
}

#define REAL(type, name, ...)                              \
    static type (*real)(__VA_ARGS__);                      \
    if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

static int open_at(int folder, const char *path, int flags, mode_t mode) {
    char full[4096];
    int below = is_below(folder, path, full);
    if (below && fails()) return -1;
    int existed = below && (flags & O_CREAT) && !syscall(SYS_faccessat, folder, path, F_OK);
    int file = syscall(SYS_openat, folder, path, flags, mode);
    if (file >= 0 && file < MAX_FILES) {
        free(paths[file]);
        paths[file] = below ? strdup(full) : NULL;
        if (below && (flags & O_CREAT) && !existed) record("create", full, "", 0, "", 0);
        if (below && (flags & O_TRUNC) && existed) record("truncate", full, "", 0, "", 0);
    }
    return file;
}

#define OPEN(name, folder, parameters)                                  \
    int name parameters {                                               \
        va_list list;                                                   \
        va_start(list, flags);                                          \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(list, mode_t) : 0; \
        va_end(list);                                                   \
        return open_at(folder, path, flags, mode);                      \
    }
OPEN(open, AT_FDCWD, (const char *path, int flags, ...))
OPEN(open64, AT_FDCWD, (const char *path, int flags, ...))
OPEN(openat, folder, (int folder, const char *path, int flags, ...))
OPEN(openat64, folder, (int folder, const char *path, int flags, ...))

int close(int file) {
    if (file >= 0 && file < MAX_FILES && paths[file]) {
        free(paths[file]);
        paths[file] = NULL;
    }
    return syscall(SYS_close, file);
}

ssize_t read(int file, void *data, size_t size) {
    if (is_open_below(file) && fails()) return -1;
    return syscall(SYS_read, file, data, size);
}

ssize_t pread64(int file, void *data, size_t size, off64_t offset) {
    if (is_open_below(file) && fails()) return -1;
    return syscall(SYS_pread64, file, data, size, offset);
}

ssize_t write(int file, const void *data, size_t size) {
    if (!is_open_below(file)) return syscall(SYS_write, file, data, size);
    if (fails()) return -1;
    ssize_t n = syscall(SYS_write, file, data, size);
    if (n >= 0) record("write", paths[file], "", syscall(SYS_lseek, file, 0, SEEK_CUR) - n, data, n);
    return n;
}

int ftruncate64(int file, off64_t size) {
    if (is_open_below(file)) {
        if (fails()) return -1;
        record("truncate", paths[file], "", size, "", 0);
    }
    return syscall(SYS_ftruncate, file, size);
}
int ftruncate(int file, off_t size) { return ftruncate64(file, size); }

#define SYNC(name, number)                                    \
    int name(int file) {                                      \
        int below = is_open_below(file);                      \
        if (below && fails()) return -1;                      \
        if (below) record("sync", paths[file], "", 0, "", 0); \
        return syscall(number, file);                         \
    }
SYNC(fsync, SYS_fsync)
SYNC(fdatasync, SYS_fdatasync)

int renameat(int folder, const char *path, int other_folder, const char *other) {
    char full[4096], other_full[4096];
    int below = is_below(folder, path, full) & is_below(other_folder, other, other_full);
    if (below && fails()) return -1;
    int result = syscall(SYS_renameat2, folder, path, other_folder, other, 0);
    if (below && !result) record("rename", full, other_full, 0, "", 0);
    return result;
}
int rename(const char *path, const char *other) { return renameat(AT_FDCWD, path, AT_FDCWD, other); }

int unlinkat(int folder, const char *path, int flags) {
    char full[4096];
    int below = is_below(folder, path, full);
    if (below && fails()) return -1;
    int result = syscall(SYS_unlinkat, folder, path, flags);
    if (below && !result) record("remove", full, "", 0, "", 0);
    return result;
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int folder, const char *path, mode_t mode) {
    char full[4096];
    int below = is_below(folder, path, full);
    if (below && fails()) return -1;
    int result = syscall(SYS_mkdirat, folder, path, mode);
    if (below && !result) record("mkdir", full, "", 0, "", 0);
    return result;
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int symlink(const char *target, const char *path) {
    char full[4096];
    int below = is_below(AT_FDCWD, path, full);
    if (below && fails()) return -1;
    int result = syscall(SYS_symlinkat, target, AT_FDCWD, path);
    if (below && !result) record("symlink", full, target, 0, "", 0);
    return result;
}

int fstatat64(int folder, const char *path, struct stat64 *out, int flags) {
    char full[4096];
    if (path[0] && is_below(folder, path, full) && fails()) return -1;
    return syscall(SYS_newfstatat, folder, path, out, flags);
}
int fstatat(int folder, const char *path, struct stat *out, int flags) {
    return fstatat64(folder, path, (struct stat64 *)out, flags);
}
int stat64(const char *path, struct stat64 *out) { return fstatat64(AT_FDCWD, path, out, 0); }
int stat(const char *path, struct stat *out) { return fstatat(AT_FDCWD, path, out, 0); }
int lstat64(const char *path, struct stat64 *out) { return fstatat64(AT_FDCWD, path, out, AT_SYMLINK_NOFOLLOW); }
int lstat(const char *path, struct stat *out) { return fstatat(AT_FDCWD, path, out, AT_SYMLINK_NOFOLLOW); }

DIR *opendir(const char *path) {
    char full[4096];
    if (is_below(AT_FDCWD, path, full) && fails()) return NULL;
    REAL(DIR *, "opendir", const char *);
    return real(path);
}

int flock(int file, int operation) {
    if (is_open_below(file) && fails()) return -1;
    return syscall(SYS_flock, file, operation);
}

// Memory.

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

static int is_refused(size_t size) { return root[0] && min_bytes && size >= min_bytes && fails(); }

void *malloc(size_t size) { return is_refused(size) ? NULL : __libc_malloc(size); }
void *calloc(size_t count, size_t size) { return is_refused(count * size) ? NULL : __libc_calloc(count, size); }
void *realloc(void *old, size_t size) { return is_refused(size) ? NULL : __libc_realloc(old, size); }
void *aligned_alloc(size_t alignment, size_t size) { return is_refused(size) ? NULL : __libc_memalign(alignment, size); }
void *memalign(size_t alignment, size_t size) { return is_refused(size) ? NULL : __libc_memalign(alignment, size); }
int posix_memalign(void **out, size_t alignment, size_t size) {
    if (is_refused(size)) return ENOMEM;
    return (*out = __libc_memalign(alignment, size)) ? 0 : ENOMEM;
}

void *mmap64(void *address, size_t size, int protection, int flags, int file, off64_t offset) {
    int refused = flags & MAP_ANONYMOUS ? is_refused(size) : is_open_below(file) && fails();
    return refused ? MAP_FAILED : (void *)syscall(SYS_mmap, address, size, protection, flags, file, offset);
}
void *mmap(void *address, size_t size, int protection, int flags, int file, off_t offset) {
    return mmap64(address, size, protection, flags, file, offset);
}
