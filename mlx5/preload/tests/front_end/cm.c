// Commands to /dev/infiniband/rdma_cm that librdmacm does not send, or sends only in threads that end. Prints "end" if all is as it should be.
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_user_cm.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "line %d: %s (errno %d)\n", __LINE__, #condition, errno); \
            exit(1); \
        } \
    } while (0)

// The system call of poll(2).
#ifdef SYS_poll
enum { POLL = SYS_poll };
#else
enum { POLL = SYS_ppoll };
#endif

static struct rdma_ucm_event_resp event;

// Writes a command, and returns 0 or the error.
static int command(int fd, unsigned number, const void *request, unsigned length, unsigned room) {
    unsigned char bytes[1024] = {0};
    const struct rdma_ucm_cmd_hdr header = {number, length, room};
    memcpy(bytes, &header, sizeof header);
    memcpy(bytes + sizeof header, request, length);
    const ssize_t written = write(fd, bytes, sizeof header + length);
    return written == (ssize_t)(sizeof header + length) ? 0 : errno;
}

static int get_event(int fd) {
    const struct rdma_ucm_get_event request = {(uintptr_t)&event};
    return command(fd, RDMA_USER_CM_CMD_GET_EVENT, &request, sizeof request, sizeof event);
}

// The thread that waits for an event; 0 until it starts.
static _Atomic int waiter;

static void *wait_for_event(void *fd) {
    waiter = (int)syscall(SYS_gettid);
    return (void *)(intptr_t)get_event((int)(intptr_t)fd);
}

static pthread_t start_to_wait(int fd) {
    pthread_t thread;
    waiter = 0;
    CHECK(pthread_create(&thread, NULL, wait_for_event, (void *)(intptr_t)fd) == 0);
    // Until it sleeps in poll(2), by which the library waits. Its number is not that of a system call while it runs.
    for (int number = -1; number != POLL; usleep(1000)) {
        char path[64];
        snprintf(path, sizeof path, "/proc/self/task/%d/syscall", waiter);
        FILE *file = waiter ? fopen(path, "r") : NULL;
        if (file && fscanf(file, "%d", &number) != 1) number = -1;
        if (file) fclose(file);
    }
    return thread;
}

static uint32_t create(int fd, uint64_t uid) {
    struct rdma_ucm_create_id_resp created;
    const struct rdma_ucm_create_id request = {.uid = uid, .response = (uintptr_t)&created, .ps = RDMA_PS_TCP};
    CHECK(command(fd, RDMA_USER_CM_CMD_CREATE_ID, &request, sizeof request, sizeof created) == 0);
    return created.id;
}

int main(void) {
    struct stat status;
    const int fd = open("/dev/infiniband/rdma_cm", O_RDWR | O_CLOEXEC);
    CHECK(fd >= 0 && fstat(fd, &status) == 0 && S_ISCHR(status.st_mode));

    // A thread that waits may be cancelled, and the file is as before.
    void *result;
    pthread_t thread = start_to_wait(fd);
    CHECK(pthread_cancel(thread) == 0 && pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED);

    // Without blocking there is no event, and poll says so.
    CHECK(fcntl(fd, F_SETFL, O_NONBLOCK) == 0 && get_event(fd) == EAGAIN && fcntl(fd, F_SETFL, 0) == 0);
    struct pollfd readable = {.fd = fd, .events = POLLIN};
    CHECK(poll(&readable, 1, 0) == 0);

    // An address without a device is an event, and it wakes the thread that waits.
    const uint32_t id = create(fd, 77);
    thread = start_to_wait(fd);
    struct rdma_ucm_resolve_ip resolve = {.id = id};
    ((struct sockaddr *)&resolve.dst_addr)->sa_family = AF_INET;
    memcpy((char *)&resolve.dst_addr + 4, (unsigned char[]){192, 0, 2, 1}, 4);
    CHECK(command(fd, RDMA_USER_CM_CMD_RESOLVE_IP, &resolve, sizeof resolve, 0) == 0);
    CHECK(pthread_join(thread, &result) == 0 && result == 0);
    CHECK(event.uid == 77 && event.id == id && event.event == 1 && (int)event.status == -ENODEV);

    // Wrong commands.
    const struct rdma_ucm_get_event nowhere = {8};
    CHECK(command(fd, RDMA_USER_CM_CMD_RESOLVE_IP, &resolve, sizeof resolve, 0) == 0 && poll(&readable, 1, 0) == 1);
    CHECK(command(fd, RDMA_USER_CM_CMD_GET_EVENT, &nowhere, sizeof nowhere, sizeof event) == EFAULT);
    CHECK(get_event(fd) == 0 && event.id == id);
    const struct rdma_ucm_listen unknown = {.id = 12345};
    CHECK(command(fd, RDMA_USER_CM_CMD_LISTEN, &unknown, sizeof unknown, 0) == ENOENT);
    CHECK(command(fd, RDMA_USER_CM_CMD_LISTEN, &unknown, 2, 0) == EINVAL && write(fd, "abc", 3) == -1 && errno == EINVAL);
    CHECK(command(fd, RDMA_USER_CM_CMD_JOIN_MCAST, &unknown, sizeof unknown, 0) == EOPNOTSUPP);
    CHECK(command(fd, 99, &unknown, sizeof unknown, 0) == EOPNOTSUPP);
    const struct rdma_ucm_accept early = {.id = id};
    CHECK(command(fd, RDMA_USER_CM_CMD_ACCEPT, &early, sizeof early, 0) == EINVAL);
    char *volatile unmapped = (char *)8;
    CHECK(write(fd, unmapped, 64) == -1 && errno == EFAULT);

    // The numbers of ids are used again, because librdmacm has a table of them.
    struct rdma_ucm_destroy_id_resp destroyed;
    for (int n = 0; n < 1000; n++) {
        const uint32_t other = create(fd, 1);
        CHECK(other < 64);
        const struct rdma_ucm_destroy_id destroy = {.response = (uintptr_t)&destroyed, .id = other};
        CHECK(command(fd, RDMA_USER_CM_CMD_DESTROY_ID, &destroy, sizeof destroy, sizeof destroyed) == 0 && destroyed.events_reported == 0);
    }
    const struct rdma_ucm_destroy_id destroy = {.response = (uintptr_t)&destroyed, .id = id};
    CHECK(command(fd, RDMA_USER_CM_CMD_DESTROY_ID, &destroy, sizeof destroy, sizeof destroyed) == 0 && destroyed.events_reported == 2);

    // A thread goes on waiting when another one closes the file.
    thread = start_to_wait(fd);
    CHECK(close(fd) == 0);
    usleep(20000);
    CHECK(pthread_kill(thread, 0) == 0 && pthread_cancel(thread) == 0 && pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED);
    puts("end");
}
