/*
 * What the programs of this directory share. Each is one of several processes, started as
 *     PROGRAM DIR RANK RANKS
 * with the same directory, which starts empty: addresses and keys are exchanged through files in it. The exit status is 1, and a line says
 * what was wrong, if anything was.
 */
#include <sched.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucs/type/status.h>
#include <unistd.h>

enum { MAX_RANKS = 16 };

static int rank, ranks;
static const char *dir;

/* The program's own: lets UCX work. */
static unsigned work(void);

static inline void fail(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "rank %d: ", rank);
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    _exit(1);
}

static inline void check(ucs_status_t status, const char *what)
{
    if (status != UCS_OK) fail("%s: %s", what, ucs_status_string(status));
}

static inline void *allocate(size_t bytes)
{
    void *memory = calloc(1, bytes);
    if (!memory) fail("no memory");
    return memory;
}

static inline void progress(void)
{
    if (!work()) sched_yield();
}

/* Leaves a file for the others. */
static inline void publish(const char *name, const void *data, size_t bytes)
{
    char path[512], complete[512];
    snprintf(path, sizeof path, "%s/new-%s.%d", dir, name, rank);
    snprintf(complete, sizeof complete, "%s/%s.%d", dir, name, rank);
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(data, 1, bytes, file) != bytes || fclose(file) || rename(path, complete)) fail("%s cannot be written", path);
}

/* What another one left, waited for. */
static inline size_t look_up(const char *name, int peer, void *data, size_t room)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s.%d", dir, name, peer);
    FILE *file;
    while (!(file = fopen(path, "rb"))) progress();
    size_t bytes = fread(data, 1, room, file);
    fclose(file);
    return bytes;
}

/* Takes the arguments. */
static inline void start(int argc, char **argv)
{
    if (argc != 4 || (ranks = atoi(argv[3])) < 1 || ranks > MAX_RANKS) {
        fprintf(stderr, "%s DIR RANK RANKS\n", argv[0]);
        exit(2);
    }
    dir = argv[1];
    rank = atoi(argv[2]);
}
