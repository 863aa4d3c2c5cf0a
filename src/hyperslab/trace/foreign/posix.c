/* Records opens, reads and closes of data files by the program that it is preloaded into.
 *
 * Each process writes a file of its own into HYPERSLAB_TRACE_FOLDER: a header, then slots of 40
 * bytes in a shared mapping, so that what a killed process did is in the file. posix_file.py reads
 * them. A slot counts once its type is written, which is done last; one that was never finished
 * stays 0. Slots are taken with one atomic addition, so signal handlers and threads need no lock.
 * Only new segments of the file and its beginning do; signals wait meanwhile.
 *
 * All state is in memory that the kernel wipes in forked children: a child begins anew, and finds
 * the names of descriptors that it got from its parent in /proc. Children of vfork write into the
 * file of their parent, whose memory they use. errno and results stay as the program's own calls
 * leave them.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

enum { HEADER = 65536, SLOT = 40, PER_SEGMENT = 8192, MOST_SEGMENTS = 16384 };
enum { NUM_DESCRIPTORS = 1 << 18, TEXT_IN_SLOT = SLOT - 2, PATH_NBYTES = 4096 };
/* Short calls that follow each other on the same file share a slot, up to a millisecond. */
enum { SHORT_NBYTES = 4096, SHARED_NS = 1000000 };

/* posix_file.py has the same numbers. */
enum { THREAD = 1, NAMED = 2, OPEN = 3, READ = 4, CLOSE = 5, MAP = 6, UNSEEN = 7, TEXT = 15 };
enum {
    op_none, op_open, op_openat, op_fopen, op_freopen, op_read, op_pread, op_readv, op_preadv,
    op_fread, op_fgets, op_getline, op_sendfile, op_copy_file_range, op_mmap, op_close, op_fclose
};

struct slot {
    _Atomic uint16_t type;
    uint16_t op;
    uint32_t thread;
    uint32_t file;
    uint32_t count; /* calls of a READ, bytes of text that follows the others */
    uint64_t start;
    _Atomic uint64_t duration;
    _Atomic uint64_t nbytes;
};

struct header {
    char magic[8];
    _Atomic uint64_t lost;
    char text[];
};

enum { NOT_BEGUN, RECORDS, CANNOT };
enum { UNKNOWN, NO_DATA, FIRST_FILE };

struct state {
    atomic_int phase;
    atomic_int locked;
    atomic_int top; /* the highest descriptor that was looked at */
    atomic_uint num_files;
    _Atomic uint64_t next;
    pid_t pid;
    struct header *header;
    char path[PATH_NBYTES];
    struct slot *_Atomic segments[MOST_SEGMENTS];
    atomic_uint files[NUM_DESCRIPTORS];
};

static struct state *state;
static char folder[PATH_NBYTES - 512];
static char library[PATH_NBYTES];
static int keeps_all;
static pid_t loaded; /* by this process, or one that forked it */
static uint64_t loaded_at;

static __thread struct {
    pid_t process; /* whose file has a THREAD slot of this thread */
    uint32_t tid;
    int inside;
    struct slot *last; /* a READ that short calls may share */
} self __attribute__((tls_model("initial-exec")));

/* The functions of the program's libc. */

#define REAL(type, name, ...) static type (*real_##name)(__VA_ARGS__)
REAL(int, open, const char *, int, ...);
REAL(int, open64, const char *, int, ...);
REAL(int, openat, int, const char *, int, ...);
REAL(int, openat64, int, const char *, int, ...);
REAL(int, __open_2, const char *, int);
REAL(int, __open64_2, const char *, int);
REAL(int, __openat_2, int, const char *, int);
REAL(int, __openat64_2, int, const char *, int);
REAL(int, creat, const char *, mode_t);
REAL(int, creat64, const char *, mode_t);
REAL(FILE *, fopen, const char *, const char *);
REAL(FILE *, fopen64, const char *, const char *);
REAL(FILE *, freopen, const char *, const char *, FILE *);
REAL(FILE *, freopen64, const char *, const char *, FILE *);
REAL(ssize_t, read, int, void *, size_t);
REAL(ssize_t, __read_chk, int, void *, size_t, size_t);
REAL(ssize_t, pread, int, void *, size_t, off_t);
REAL(ssize_t, pread64, int, void *, size_t, off64_t);
REAL(ssize_t, __pread_chk, int, void *, size_t, off_t, size_t);
REAL(ssize_t, __pread64_chk, int, void *, size_t, off64_t, size_t);
REAL(ssize_t, readv, int, const struct iovec *, int);
REAL(ssize_t, preadv, int, const struct iovec *, int, off_t);
REAL(ssize_t, preadv64, int, const struct iovec *, int, off64_t);
REAL(ssize_t, preadv2, int, const struct iovec *, int, off_t, int);
REAL(ssize_t, preadv64v2, int, const struct iovec *, int, off64_t, int);
REAL(size_t, fread, void *, size_t, size_t, FILE *);
REAL(size_t, fread_unlocked, void *, size_t, size_t, FILE *);
REAL(size_t, __fread_chk, void *, size_t, size_t, size_t, FILE *);
REAL(size_t, __fread_unlocked_chk, void *, size_t, size_t, size_t, FILE *);
REAL(char *, fgets, char *, int, FILE *);
REAL(char *, fgets_unlocked, char *, int, FILE *);
REAL(char *, __fgets_chk, char *, size_t, int, FILE *);
REAL(ssize_t, getline, char **, size_t *, FILE *);
REAL(ssize_t, getdelim, char **, size_t *, int, FILE *);
REAL(ssize_t, __getdelim, char **, size_t *, int, FILE *);
REAL(ssize_t, sendfile, int, int, off_t *, size_t);
REAL(ssize_t, sendfile64, int, int, off64_t *, size_t);
REAL(ssize_t, copy_file_range, int, off64_t *, int, off64_t *, size_t, unsigned);
REAL(void *, mmap, void *, size_t, int, int, int, off_t);
REAL(void *, mmap64, void *, size_t, int, int, int, off64_t);
REAL(int, close, int);
REAL(int, fclose, FILE *);
REAL(int, fcloseall, void);
REAL(int, dup2, int, int);
REAL(int, dup3, int, int, int);
REAL(int, close_range, unsigned, unsigned, int);
REAL(void, closefrom, int);
REAL(int, execve, const char *, char *const[], char *const[]);
REAL(int, execv, const char *, char *const[]);
REAL(int, execvp, const char *, char *const[]);
REAL(int, execvpe, const char *, char *const[], char *const[]);
REAL(int, posix_spawn, pid_t *, const char *, const posix_spawn_file_actions_t *,
     const posix_spawnattr_t *, char *const[], char *const[]);
REAL(int, posix_spawnp, pid_t *, const char *, const posix_spawn_file_actions_t *,
     const posix_spawnattr_t *, char *const[], char *const[]);

static void find_real(void)
{
#define FIND(name) real_##name = (__typeof__(real_##name))dlsym(RTLD_NEXT, #name)
    FIND(open); FIND(open64); FIND(openat); FIND(openat64);
    FIND(__open_2); FIND(__open64_2); FIND(__openat_2); FIND(__openat64_2);
    FIND(creat); FIND(creat64);
    FIND(fopen); FIND(fopen64); FIND(freopen); FIND(freopen64);
    FIND(read); FIND(__read_chk); FIND(pread); FIND(pread64);
    FIND(__pread_chk); FIND(__pread64_chk);
    FIND(readv); FIND(preadv); FIND(preadv64); FIND(preadv2); FIND(preadv64v2);
    FIND(fread); FIND(fread_unlocked); FIND(__fread_chk); FIND(__fread_unlocked_chk);
    FIND(fgets); FIND(fgets_unlocked); FIND(__fgets_chk);
    FIND(getline); FIND(getdelim); FIND(__getdelim);
    FIND(sendfile); FIND(sendfile64); FIND(copy_file_range);
    FIND(mmap); FIND(mmap64);
    FIND(fclose); FIND(fcloseall); FIND(dup2); FIND(dup3); FIND(close_range); FIND(closefrom);
    FIND(execve); FIND(execv); FIND(execvp); FIND(execvpe); FIND(posix_spawn); FIND(posix_spawnp);
    FIND(close);
}

/* Other libraries may be set up, and read, before this one. */
static inline void be_ready(void)
{
    if (__builtin_expect(!real_close, 0)) {
        int error = errno;
        find_real();
        errno = error;
    }
}

static uint64_t nanoseconds(clockid_t clock)
{
    struct timespec time;
    clock_gettime(clock, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static uint64_t now(void) { return nanoseconds(CLOCK_MONOTONIC); }

/* The calls of this library itself must not come back to it. */
static int raw_open(const char *path, int flags)
{
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags | O_CLOEXEC, 0666);
}

static void raw_close(int descriptor) { syscall(SYS_close, descriptor); }

static ssize_t raw_read(int descriptor, void *buffer, size_t size)
{
    return (ssize_t)syscall(SYS_read, descriptor, buffer, size);
}

/* A range of the file on disk, so that no write into its mapping can fail later. */
static void *map_range(int descriptor, off_t offset, size_t size)
{
    if (posix_fallocate(descriptor, offset, (off_t)size))
        return NULL;
    long at = syscall(SYS_mmap, NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, offset);
    if (at == -1)
        return NULL;
    madvise((void *)at, size, MADV_DONTFORK);
    return (void *)at;
}

static void lock(sigset_t *before)
{
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, before);
    while (atomic_exchange(&state->locked, 1))
        sched_yield();
}

static void unlock(const sigset_t *before)
{
    atomic_store(&state->locked, 0);
    pthread_sigmask(SIG_SETMASK, before, NULL);
}

/* The header: texts "name=value", each with its end. */

static char *add_text(char *at, const char *end, const char *name, const char *value, size_t size)
{
    size_t name_size = strlen(name);
    if (at + name_size + size + 2 > end)
        return at;
    memcpy(at, name, name_size);
    at[name_size] = '=';
    memcpy(at + name_size + 1, value, size);
    return at + name_size + size + 2;
}

static char *add_number(char *at, const char *end, const char *name, uint64_t number)
{
    char digits[24];
    int size = snprintf(digits, sizeof digits, "%llu", (unsigned long long)number);
    return add_text(at, end, name, digits, (size_t)size);
}

static char *add_file(char *at, const char *end, const char *name, const char *path)
{
    char text[4096];
    int descriptor = raw_open(path, O_RDONLY);
    ssize_t size = descriptor < 0 ? 0 : raw_read(descriptor, text, sizeof text);
    if (descriptor >= 0)
        raw_close(descriptor);
    for (ssize_t i = 0; i < size; i++) /* a command's words end with 0 */
        text[i] = text[i] ? text[i] : '\x1f';
    return size > 0 ? add_text(at, end, name, text, (size_t)size) : at;
}

static int tells_rank(const char *variable)
{
    static const char *const names[] = {
        "RANK=", "LOCAL_RANK=", "WORLD_SIZE=", "OMPI_COMM_WORLD_", "PMI_", "MPI_LOCAL",
        "SLURM_PROCID=", "SLURM_STEP_ID=", "SLURM_STEPID=", "SLURM_LOCALID=",
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strncmp(variable, names[i], strlen(names[i])))
            return 1;
    return 0;
}

static void write_header(struct header *header, const char *host)
{
    char *at = header->text, *end = (char *)header + HEADER - 1;
    uint64_t before = now(), unix_ns = nanoseconds(CLOCK_REALTIME), after = now();
    at = add_number(at, end, "pid", (uint64_t)state->pid);
    at = add_number(at, end, "parent", (uint64_t)getppid());
    at = add_number(at, end, "forked", state->pid != loaded);
    at = add_number(at, end, "begun", state->pid == loaded ? loaded_at : before);
    at = add_number(at, end, "monotonic", before + (after - before) / 2);
    at = add_number(at, end, "unix", unix_ns);
    at = add_text(at, end, "host", host, strlen(host));
    at = add_file(at, end, "boot", "/proc/sys/kernel/random/boot_id");
    at = add_file(at, end, "program", "/proc/self/cmdline");
    for (char **each = environ; each && *each; each++)
        if (tells_rank(*each))
            at = add_text(at, end, "environ", *each, strlen(*each));
    memcpy(header->magic, "hsposix1", sizeof header->magic);
}

static int begin_file(void)
{
    char host[256] = "host";
    gethostname(host, sizeof host - 1);
    for (int i = 0; i < 10000; i++) {
        int size = snprintf(state->path, sizeof state->path, "%s/%s-%d-%d.hstrace", folder, host,
                            (int)state->pid, i);
        if (size >= (int)sizeof state->path)
            return 0;
        int descriptor = raw_open(state->path, O_RDWR | O_CREAT | O_EXCL);
        if (descriptor >= 0) {
            state->header = map_range(descriptor, 0, HEADER);
            raw_close(descriptor);
            if (!state->header)
                return 0;
            write_header(state->header, host);
            return 1;
        }
        if (errno != EEXIST)
            return 0;
    }
    return 0;
}

static int begin(void)
{
    int phase = atomic_load_explicit(&state->phase, memory_order_acquire);
    if (__builtin_expect(phase == NOT_BEGUN, 0)) {
        sigset_t before;
        lock(&before);
        if ((phase = atomic_load(&state->phase)) == NOT_BEGUN) {
            state->pid = getpid();
            phase = begin_file() ? RECORDS : CANNOT;
            atomic_store(&state->phase, phase);
        }
        unlock(&before);
    }
    return phase == RECORDS;
}

static struct slot *begin_segment(uint64_t segment)
{
    sigset_t before;
    lock(&before);
    struct slot *at = atomic_load(&state->segments[segment]);
    int descriptor = at ? -1 : raw_open(state->path, O_RDWR);
    if (descriptor >= 0) {
        size_t size = (size_t)PER_SEGMENT * SLOT;
        at = map_range(descriptor, (off_t)(HEADER + segment * size), size);
        raw_close(descriptor);
        atomic_store(&state->segments[segment], at);
    }
    unlock(&before);
    return at;
}

/* ``num`` slots, the first of which is returned; NULL if there is no room. */
static struct slot *take(uint32_t num, uint64_t *number)
{
    uint64_t first = atomic_fetch_add_explicit(&state->next, num, memory_order_relaxed);
    struct slot *found = NULL;
    for (uint64_t at = first / PER_SEGMENT; at <= (first + num - 1) / PER_SEGMENT; at++) {
        struct slot *segment = at < MOST_SEGMENTS ? atomic_load(&state->segments[at]) : NULL;
        if (!segment && at < MOST_SEGMENTS)
            segment = begin_segment(at);
        if (!segment) {
            atomic_fetch_add(&state->header->lost, 1);
            return NULL;
        }
        if (at == first / PER_SEGMENT)
            found = segment + first % PER_SEGMENT;
    }
    *number = first;
    return found;
}

static void fill(struct slot *slot, int type, int op, uint32_t file, uint64_t start,
                 uint64_t duration, uint64_t nbytes)
{
    slot->op = (uint16_t)op;
    slot->thread = self.tid;
    slot->file = file;
    slot->start = start;
    atomic_store_explicit(&slot->duration, duration, memory_order_relaxed);
    atomic_store_explicit(&slot->nbytes, nbytes, memory_order_relaxed);
    atomic_store_explicit(&slot->type, (uint16_t)type, memory_order_release);
}

static void write_text(int type, int op, uint32_t file, uint64_t start, uint64_t duration,
                       const char *text)
{
    size_t size = strlen(text);
    uint32_t num = 1 + (uint32_t)((size + TEXT_IN_SLOT - 1) / TEXT_IN_SLOT);
    uint64_t number;
    struct slot *head = take(num, &number);
    if (!head)
        return;
    for (uint32_t i = 1; i < num; i++, text += TEXT_IN_SLOT) {
        uint64_t at = number + i;
        struct slot *slot = atomic_load(&state->segments[at / PER_SEGMENT]) + at % PER_SEGMENT;
        size_t left = size - (size_t)(i - 1) * TEXT_IN_SLOT;
        memcpy((char *)slot + 2, text, left < TEXT_IN_SLOT ? left : TEXT_IN_SLOT);
        atomic_store_explicit(&slot->type, TEXT, memory_order_release);
    }
    head->count = (uint32_t)size;
    fill(head, type, op, file, start, duration, 0);
}

static int begin_thread(void)
{
    if (!begin())
        return 0;
    if (__builtin_expect(self.process != state->pid, 0)) {
        char name[32] = "";
        self.process = state->pid;
        self.tid = (uint32_t)syscall(SYS_gettid);
        self.last = NULL;
        prctl(PR_GET_NAME, name, 0, 0, 0);
        write_text(THREAD, op_none, 0, now(), 0, name);
    }
    return 1;
}

static void write_call(int type, int op, uint32_t file, uint64_t start, uint64_t stop,
                       uint64_t nbytes)
{
    uint64_t number, duration = stop - start;
    if (!begin_thread())
        return;
    int inside = self.inside++;
    int is_short = type == READ && nbytes < SHORT_NBYTES && !inside;
    struct slot *last = self.last;
    if (is_short && last && last->file == file && last->op == op &&
        stop - last->start < SHARED_NS) {
        atomic_store_explicit(&last->duration, last->duration + duration, memory_order_relaxed);
        atomic_store_explicit(&last->nbytes, last->nbytes + nbytes, memory_order_relaxed);
        last->count++;
    } else {
        struct slot *slot = take(1, &number);
        if (slot) {
            slot->count = 1;
            fill(slot, type, op, file, start, duration, nbytes);
        }
        if (!inside)
            self.last = is_short ? slot : NULL;
    }
    self.inside--;
}

/* Which descriptors are data. docs/trace.md has the rule in words. */

static int begins(const char *path, const char *start)
{
    return !strncmp(path, start, strlen(start));
}

static int ends(const char *path, size_t size, const char *end)
{
    size_t end_size = strlen(end);
    return size >= end_size && !memcmp(path + size - end_size, end, end_size);
}

static int is_program(const char *path)
{
    static const char *const folders[] = {
        "/proc/", "/sys/", "/dev/", "/run/", "/etc/", "/usr/", "/bin/", "/sbin/",
        "/lib/", "/lib32/", "/lib64/",
    };
    static const char *const inside[] = {
        ".so.", "/site-packages/", "/dist-packages/", "/lib/python3", "/__pycache__/", "/.git/",
        "/pyvenv.cfg",
    };
    static const char *const endings[] = {".so", ".py", ".pyc", ".pyi"};
    size_t size = strlen(path);
    if (begins(path, "/dev/shm/"))
        return 0;
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++)
        if (begins(path, folders[i]))
            return 1;
    for (size_t i = 0; i < sizeof inside / sizeof *inside; i++)
        if (strstr(path, inside[i]))
            return 1;
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++)
        if (ends(path, size, endings[i]))
            return 1;
    return 0;
}

static int is_left_out(const char *path, mode_t mode)
{
    int is_ours = begins(path, folder) && path[strlen(folder)] == '/';
    int is_script = mode & S_IXUSR && strstr(path, "/bin/");
    return is_ours || (!keeps_all && (is_script || is_program(path)));
}

static int in_vfork_child(void)
{
    return atomic_load(&state->phase) != NOT_BEGUN && getpid() != state->pid;
}

static void set_file(int descriptor, uint32_t file)
{
    int top = atomic_load(&state->top);
    while (descriptor > top && !atomic_compare_exchange_weak(&state->top, &top, descriptor))
        ;
    atomic_store_explicit(&state->files[descriptor], file, memory_order_relaxed);
}

static const char *name_of(int descriptor, char *path)
{
    char link[32];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(link, path, PATH_NBYTES - 1);
    path[size > 0 ? size : 0] = 0;
    return path;
}

/* Looks a descriptor up, and writes its name where it is data. */
static uint32_t look(int descriptor, const char *path, int type, int op, uint64_t start,
                     uint64_t duration)
{
    struct stat status;
    char found[PATH_NBYTES];
    uint32_t file = NO_DATA;
    int flags = fcntl(descriptor, F_GETFL);
    if (flags == -1)
        return UNKNOWN; /* not open: the next look may find something else */
    if (!fstat(descriptor, &status) && S_ISREG(status.st_mode) &&
        (flags & O_ACCMODE) != O_WRONLY) {
        if (!path || *path != '/' || strlen(path) >= PATH_NBYTES)
            path = name_of(descriptor, found);
        if (*path && !is_left_out(path, status.st_mode) && begin_thread()) {
            file = FIRST_FILE + atomic_fetch_add(&state->num_files, 1);
            write_text(type, op, file, start, duration, path);
        }
    }
    set_file(descriptor, file);
    return file;
}

/* The number of a descriptor's file, or 0 if it is no data. */
static uint32_t file_of(int descriptor)
{
    if (!state || descriptor < 0 || descriptor >= NUM_DESCRIPTORS)
        return 0;
    uint32_t file = atomic_load_explicit(&state->files[descriptor], memory_order_relaxed);
    if (__builtin_expect(file == UNKNOWN, 0)) {
        int error = errno;
        file = look(descriptor, NULL, NAMED, op_none, now(), 0);
        errno = error;
    }
    return file >= FIRST_FILE ? file : 0;
}

static int descriptor_of(FILE *stream)
{
    int error = errno, descriptor = stream ? fileno(stream) : -1;
    errno = error;
    return descriptor;
}

/* What is made new has nothing to read; should that change, the first read finds its name. */
static void opened(int op, int descriptor, const char *path, int flags, uint64_t start)
{
    if (!state || descriptor < 0 || descriptor >= NUM_DESCRIPTORS)
        return;
    int error = errno;
    uint64_t stop = now();
    int is_new = flags & (O_TRUNC | O_EXCL);
    if (!in_vfork_child() && is_new)
        set_file(descriptor, UNKNOWN);
    else if (!in_vfork_child())
        look(descriptor, path, OPEN, op, start, stop - start);
    errno = error;
}

/* Before it is closed: a moment later another thread may have it. */
static uint32_t forget(int descriptor)
{
    if (!state || descriptor < 0 || descriptor >= NUM_DESCRIPTORS)
        return 0;
    uint32_t file = atomic_load_explicit(&state->files[descriptor], memory_order_relaxed);
    if (file == UNKNOWN || in_vfork_child())
        return 0;
    atomic_store_explicit(&state->files[descriptor], UNKNOWN, memory_order_relaxed);
    return file >= FIRST_FILE ? file : 0;
}

static void forget_range(unsigned first, unsigned last)
{
    if (!state || in_vfork_child())
        return;
    unsigned top = (unsigned)atomic_load(&state->top);
    for (unsigned each = first; each <= last && each <= top; each++)
        forget((int)each);
}

/* Programs that this one starts without the recorder. */

static int loads_libraries(const char *path)
{
    union { Elf64_Ehdr head; char bytes[4096]; } start;
    struct stat status;
    int descriptor = raw_open(path, O_RDONLY), found = 1;
    if (descriptor < 0)
        return 1;
    ssize_t size = raw_read(descriptor, &start, sizeof start);
    if (!fstat(descriptor, &status) && status.st_mode & (S_ISUID | S_ISGID))
        found = 0;
    raw_close(descriptor);
    if (size < (ssize_t)sizeof start.head || memcmp(start.bytes, ELFMAG, SELFMAG))
        return found; /* a script */
    int has_loader = start.head.e_ident[EI_CLASS] != ELFCLASS64;
    for (int i = 0; i < start.head.e_phnum; i++) {
        size_t at = start.head.e_phoff + (size_t)i * start.head.e_phentsize;
        if (at + sizeof(Elf64_Phdr) > (size_t)size)
            return found;
        has_loader |= ((Elf64_Phdr *)(start.bytes + at))->p_type == PT_INTERP;
    }
    return found && has_loader;
}

static void starts(const char *program, char *const variables[])
{
    if (!state || !program)
        return;
    int error = errno, preloads = 0;
    for (char *const *each = variables; each && *each; each++)
        preloads |= begins(*each, "LD_PRELOAD=") && strstr(*each, library) != NULL;
    int is_there = !strchr(program, '/') || !access(program, X_OK);
    if (is_there && (!preloads || (strchr(program, '/') && !loads_libraries(program))) &&
        begin_thread())
        write_text(UNSEEN, op_none, 0, now(), 0, program);
    errno = error;
}

static void wipe(void)
{
    madvise(state, sizeof *state, MADV_DONTNEED);
}

__attribute__((constructor(101))) static void set_up(void)
{
    be_ready();
    Dl_info info;
    int error = errno;
    const char *where = getenv("HYPERSLAB_TRACE_FOLDER"), *all = getenv("HYPERSLAB_TRACE_ALL");
    const char *seen = getenv("HYPERSLAB_TRACE_SEEN");
    if (seen) {
        int descriptor = raw_open(seen, O_WRONLY | O_CREAT);
        if (descriptor >= 0)
            raw_close(descriptor);
    }
    if (!state && where && *where == '/' && strlen(where) < sizeof folder) {
        strcpy(folder, where);
        keeps_all = all && *all == '1';
        loaded = getpid();
        loaded_at = now();
        if (dladdr((void *)set_up, &info) && strlen(info.dli_fname) < sizeof library)
            strcpy(library, info.dli_fname);
        long at = syscall(SYS_mmap, NULL, sizeof *state, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at != -1) {
            madvise((void *)at, sizeof *state, MADV_WIPEONFORK);
            state = (struct state *)at;
            pthread_atfork(NULL, NULL, wipe);
        }
    }
    errno = error;
}

/* The functions that programs call. */

#define MODE_OF(flags)                                                                             \
    mode_t mode = 0;                                                                               \
    if ((flags) & O_CREAT || ((flags) & O_TMPFILE) == O_TMPFILE) {                                 \
        va_list arguments;                                                                         \
        va_start(arguments, flags);                                                                \
        mode = (mode_t)va_arg(arguments, int);                                                     \
        va_end(arguments);                                                                         \
    }

#define OPEN_BY(op, path, flags, call)                                                             \
    be_ready();                                                                                    \
    uint64_t start = now();                                                                        \
    int descriptor = call;                                                                         \
    opened(op, descriptor, path, flags, start);                                                    \
    return descriptor

int open(const char *path, int flags, ...)
{
    MODE_OF(flags)
    OPEN_BY(op_open, path, flags, real_open(path, flags, mode));
}

int open64(const char *path, int flags, ...)
{
    MODE_OF(flags)
    OPEN_BY(op_open, path, flags, real_open64(path, flags, mode));
}

int openat(int folder_descriptor, const char *path, int flags, ...)
{
    MODE_OF(flags)
    OPEN_BY(op_openat, path, flags, real_openat(folder_descriptor, path, flags, mode));
}

int openat64(int folder_descriptor, const char *path, int flags, ...)
{
    MODE_OF(flags)
    OPEN_BY(op_openat, path, flags, real_openat64(folder_descriptor, path, flags, mode));
}

int __open_2(const char *path, int flags)
{
    OPEN_BY(op_open, path, flags, real___open_2(path, flags));
}

int __open64_2(const char *path, int flags)
{
    OPEN_BY(op_open, path, flags, real___open64_2(path, flags));
}

int __openat_2(int at, const char *path, int flags)
{
    OPEN_BY(op_openat, path, flags, real___openat_2(at, path, flags));
}

int __openat64_2(int at, const char *path, int flags)
{
    OPEN_BY(op_openat, path, flags, real___openat64_2(at, path, flags));
}

int creat(const char *path, mode_t mode)
{
    OPEN_BY(op_open, path, O_TRUNC, real_creat(path, mode));
}

int creat64(const char *path, mode_t mode)
{
    OPEN_BY(op_open, path, O_TRUNC, real_creat64(path, mode));
}

#define FOPEN_BY(op, path, call)                                                                   \
    be_ready();                                                                                    \
    uint64_t start = now();                                                                        \
    FILE *stream = call;                                                                           \
    if (stream)                                                                                    \
        opened(op, descriptor_of(stream), path, *mode == 'w' ? O_TRUNC : 0, start);                \
    return stream

FILE *fopen(const char *path, const char *mode)
{
    FOPEN_BY(op_fopen, path, real_fopen(path, mode));
}

FILE *fopen64(const char *path, const char *mode)
{
    FOPEN_BY(op_fopen, path, real_fopen64(path, mode));
}

/* What the stream had open is closed in it. */
FILE *freopen(const char *path, const char *mode, FILE *before)
{
    forget(descriptor_of(before));
    FOPEN_BY(op_freopen, path, real_freopen(path, mode, before));
}

FILE *freopen64(const char *path, const char *mode, FILE *before)
{
    forget(descriptor_of(before));
    FOPEN_BY(op_freopen, path, real_freopen64(path, mode, before));
}

/* ``got`` is what the call returned, ``nbytes`` how many bytes that is. */
#define READ_BY(op, type, find, call, nbytes)                                                      \
    be_ready();                                                                                    \
    uint32_t file = find;                                                                          \
    if (!file)                                                                                     \
        return call;                                                                               \
    uint64_t start = now();                                                                        \
    type got = call;                                                                               \
    int error = errno;                                                                             \
    write_call(READ, op, file, start, now(), (uint64_t)(nbytes));                                  \
    errno = error;                                                                                 \
    return got

#define READ_DESCRIPTOR(op, descriptor, call)                                                      \
    READ_BY(op, ssize_t, file_of(descriptor), call, got > 0 ? got : 0)
#define READ_ITEMS(stream, call) READ_BY(op_fread, size_t, file_of(descriptor_of(stream)), call, got * size)
#define READ_TEXT(stream, call)                                                                    \
    READ_BY(op_fgets, char *, file_of(descriptor_of(stream)), call, got ? strlen(got) : 0)
#define READ_LINE(stream, call)                                                                    \
    READ_BY(op_getline, ssize_t, file_of(descriptor_of(stream)), call, got > 0 ? got : 0)

ssize_t read(int descriptor, void *buffer, size_t size)
{
    READ_DESCRIPTOR(op_read, descriptor, real_read(descriptor, buffer, size));
}

ssize_t __read_chk(int descriptor, void *buffer, size_t size, size_t room)
{
    READ_DESCRIPTOR(op_read, descriptor, real___read_chk(descriptor, buffer, size, room));
}

ssize_t pread(int descriptor, void *buffer, size_t size, off_t offset)
{
    READ_DESCRIPTOR(op_pread, descriptor, real_pread(descriptor, buffer, size, offset));
}

ssize_t pread64(int descriptor, void *buffer, size_t size, off64_t offset)
{
    READ_DESCRIPTOR(op_pread, descriptor, real_pread64(descriptor, buffer, size, offset));
}

ssize_t __pread_chk(int descriptor, void *buffer, size_t size, off_t offset, size_t room)
{
    READ_DESCRIPTOR(op_pread, descriptor,
                    real___pread_chk(descriptor, buffer, size, offset, room));
}

ssize_t __pread64_chk(int descriptor, void *buffer, size_t size, off64_t offset, size_t room)
{
    READ_DESCRIPTOR(op_pread, descriptor,
                    real___pread64_chk(descriptor, buffer, size, offset, room));
}

ssize_t readv(int descriptor, const struct iovec *parts, int num)
{
    READ_DESCRIPTOR(op_readv, descriptor, real_readv(descriptor, parts, num));
}

ssize_t preadv(int descriptor, const struct iovec *parts, int num, off_t offset)
{
    READ_DESCRIPTOR(op_preadv, descriptor, real_preadv(descriptor, parts, num, offset));
}

ssize_t preadv64(int descriptor, const struct iovec *parts, int num, off64_t offset)
{
    READ_DESCRIPTOR(op_preadv, descriptor, real_preadv64(descriptor, parts, num, offset));
}

ssize_t preadv2(int descriptor, const struct iovec *parts, int num, off_t offset, int flags)
{
    READ_DESCRIPTOR(op_preadv, descriptor, real_preadv2(descriptor, parts, num, offset, flags));
}

ssize_t preadv64v2(int descriptor, const struct iovec *parts, int num, off64_t offset, int flags)
{
    READ_DESCRIPTOR(op_preadv, descriptor, real_preadv64v2(descriptor, parts, num, offset, flags));
}

#undef fread_unlocked
size_t fread(void *buffer, size_t size, size_t num, FILE *stream)
{
    READ_ITEMS(stream, real_fread(buffer, size, num, stream));
}

size_t fread_unlocked(void *buffer, size_t size, size_t num, FILE *stream)
{
    READ_ITEMS(stream, real_fread_unlocked(buffer, size, num, stream));
}

size_t __fread_chk(void *buffer, size_t room, size_t size, size_t num, FILE *stream)
{
    READ_ITEMS(stream, real___fread_chk(buffer, room, size, num, stream));
}

size_t __fread_unlocked_chk(void *buffer, size_t room, size_t size, size_t num, FILE *stream)
{
    READ_ITEMS(stream, real___fread_unlocked_chk(buffer, room, size, num, stream));
}

char *fgets(char *text, int size, FILE *stream)
{
    READ_TEXT(stream, real_fgets(text, size, stream));
}

char *fgets_unlocked(char *text, int size, FILE *stream)
{
    READ_TEXT(stream, real_fgets_unlocked(text, size, stream));
}

char *__fgets_chk(char *text, size_t room, int size, FILE *stream)
{
    READ_TEXT(stream, real___fgets_chk(text, room, size, stream));
}

ssize_t getline(char **text, size_t *size, FILE *stream)
{
    READ_LINE(stream, real_getline(text, size, stream));
}

ssize_t getdelim(char **text, size_t *size, int end, FILE *stream)
{
    READ_LINE(stream, real_getdelim(text, size, end, stream));
}

ssize_t __getdelim(char **text, size_t *size, int end, FILE *stream)
{
    READ_LINE(stream, real___getdelim(text, size, end, stream));
}

ssize_t sendfile(int to, int from, off_t *offset, size_t size)
{
    READ_DESCRIPTOR(op_sendfile, from, real_sendfile(to, from, offset, size));
}

ssize_t sendfile64(int to, int from, off64_t *offset, size_t size)
{
    READ_DESCRIPTOR(op_sendfile, from, real_sendfile64(to, from, offset, size));
}

ssize_t copy_file_range(int from, off64_t *from_offset, int to, off64_t *to_offset, size_t size,
                        unsigned flags)
{
    READ_DESCRIPTOR(op_copy_file_range, from,
                    real_copy_file_range(from, from_offset, to, to_offset, size, flags));
}

/* Reading happens later, when pages are touched, which nobody is told of. What is shared and
 * writable is memory that processes share. */
#define MAP_BY(call)                                                                               \
    be_ready();                                                                                    \
    int is_shared_memory = flags & MAP_SHARED && protection & PROT_WRITE;                          \
    int is_data = !(flags & MAP_ANONYMOUS) && protection & PROT_READ && !is_shared_memory;         \
    uint32_t file = is_data ? file_of(descriptor) : 0;                                             \
    if (!file)                                                                                     \
        return call;                                                                               \
    uint64_t start = now();                                                                        \
    void *got = call;                                                                              \
    int error = errno;                                                                             \
    if (got != MAP_FAILED)                                                                         \
        write_call(MAP, op_mmap, file, start, now(), size);                                        \
    errno = error;                                                                                 \
    return got

void *mmap(void *at, size_t size, int protection, int flags, int descriptor, off_t offset)
{
    MAP_BY(real_mmap(at, size, protection, flags, descriptor, offset));
}

void *mmap64(void *at, size_t size, int protection, int flags, int descriptor, off64_t offset)
{
    MAP_BY(real_mmap64(at, size, protection, flags, descriptor, offset));
}

#define CLOSE_BY(op, find, call)                                                                   \
    be_ready();                                                                                    \
    uint32_t file = forget(find);                                                                  \
    if (!file)                                                                                     \
        return call;                                                                               \
    uint64_t start = now();                                                                        \
    int result = call;                                                                             \
    int error = errno;                                                                             \
    write_call(CLOSE, op, file, start, now(), 0);                                                  \
    errno = error;                                                                                 \
    return result

int close(int descriptor) { CLOSE_BY(op_close, descriptor, real_close(descriptor)); }

int fclose(FILE *stream) { CLOSE_BY(op_fclose, descriptor_of(stream), real_fclose(stream)); }

int fcloseall(void)
{
    be_ready();
    forget_range(0, NUM_DESCRIPTORS - 1);
    return real_fcloseall();
}

int dup2(int from, int to)
{
    be_ready();
    if (from != to)
        forget(to);
    return real_dup2(from, to);
}

int dup3(int from, int to, int flags)
{
    be_ready();
    if (from != to)
        forget(to);
    return real_dup3(from, to, flags);
}

int close_range(unsigned first, unsigned last, int flags)
{
    be_ready();
    forget_range(first, last);
    return real_close_range(first, last, flags);
}

void closefrom(int first)
{
    be_ready();
    forget_range(first < 0 ? 0 : (unsigned)first, NUM_DESCRIPTORS - 1);
    real_closefrom(first);
}

int execve(const char *program, char *const words[], char *const variables[])
{
    be_ready();
    starts(program, variables);
    return real_execve(program, words, variables);
}

int execv(const char *program, char *const words[])
{
    be_ready();
    starts(program, environ);
    return real_execv(program, words);
}

int execvp(const char *program, char *const words[])
{
    be_ready();
    starts(program, environ);
    return real_execvp(program, words);
}

int execvpe(const char *program, char *const words[], char *const variables[])
{
    be_ready();
    starts(program, variables);
    return real_execvpe(program, words, variables);
}

int posix_spawn(pid_t *pid, const char *program, const posix_spawn_file_actions_t *actions,
                const posix_spawnattr_t *attributes, char *const words[], char *const variables[])
{
    be_ready();
    starts(program, variables);
    return real_posix_spawn(pid, program, actions, attributes, words, variables);
}

int posix_spawnp(pid_t *pid, const char *program, const posix_spawn_file_actions_t *actions,
                 const posix_spawnattr_t *attributes, char *const words[], char *const variables[])
{
    be_ready();
    starts(program, variables);
    return real_posix_spawnp(pid, program, actions, attributes, words, variables);
}
